"""Guards of MariaDB in Alembic's migrations, on a database whose DDL commits."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, text
from sqlalchemy.exc import InternalError

import fenced.alembic  # noqa: F401 - registers the operations
from fenced_testkit.servers import MariadbServer


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
