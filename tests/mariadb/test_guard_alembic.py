"""Guards of MariaDB in Alembic's migrations, on a database whose DDL commits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, text
from sqlalchemy.exc import InternalError

import fenced.alembic  # noqa: F401 - registers the operations
from fenced.sql import Guard
from fenced.work import Claims
from fenced_testkit.servers import MariadbServer
from tests.migrations.test_alembic import Project


def test_a_migration_installs_and_removes_a_guard(mariadb_server: MariadbServer) -> None:
    database = mariadb_server.create_database()
    engine = create_engine(f"mysql+pymysql://root@{mariadb_server.host}:{mariadb_server.port}/{database}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        operations: Any = Operations(context)
        with context.begin_transaction():
            operations.execute("CREATE TABLE orders (id int PRIMARY KEY, qty int) ENGINE = InnoDB")
            operations.execute("INSERT INTO orders VALUES (42, 0)")
            operations.install_guard("orders", name="orders/{id}", mode="require")
    with engine.connect() as connection, pytest.raises(InternalError, match="carries no stamp"):
        connection.execute(text("UPDATE orders SET qty = 1"))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        operations = Operations(context)
        with context.begin_transaction():
            operations.execute("ALTER TABLE orders ADD COLUMN note text")
            operations.uninstall_guard("orders")
    with engine.begin() as connection:
        connection.execute(text("UPDATE orders SET qty = 1"))
    engine.dispose()


@pytest.fixture
def project(mariadb_url: str, tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path / "migrations", mariadb_url.replace("mariadb:", "mysql+pymysql:"))
    yield made
    made.engine.dispose()


def test_a_models_guard_and_claims_follow_it_through_its_migrations(project: Project) -> None:
    """Each migration ends with the new version: the next one begins there."""
    project.model(Guard(table="orders", name="orders/{id}"))
    assert "op.install_guard('orders', name='orders/{id}')" in project.revise("first")
    runs: dict[str, Any] = {"table": "orders", "name": "orders/{id}", "ready": "shop = 1", "order": "id"}
    project.model(Claims(**runs))
    assert "op.install_claims('orders', name='orders/{id}', ready='shop = 1'" in project.revise("claims")
    assert project.guards() == [("orders/{id}", "retry", None, True)]
    project.model(None)
    assert "op.uninstall_guard('" in project.revise("none")
    assert project.guards() == []
    command.downgrade(project.config, "-1")
    assert project.guards() == [("orders/{id}", "retry", None, True)]
    command.downgrade(project.config, "base")
    assert project.guards() == []
