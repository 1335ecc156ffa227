"""A real Alembic environment on both engines: operations, autogenerate, downgrade, offline scripts."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

import fenced
import fenced.alembic
from fenced.guards.spec import Spec
from fenced.runtime.blocking import step
from fenced.sql import AsyncGuard, Guard
from fenced.sql.engines import on
from fenced.work import Claims

ENV = """
import asyncio

import fenced.alembic
from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine

made = context.config.attributes


def run(connection):
    context.configure(connection=connection, target_metadata=made["metadata"])
    with context.begin_transaction():
        context.run_migrations()


async def run_async():
    engine = create_async_engine(made["url"])
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()


if context.is_offline_mode():
    context.configure(url=made["engine"].url, target_metadata=made["metadata"], literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
elif "url" in made:
    asyncio.run(run_async())
else:
    with made["engine"].connect() as connection:
        run(connection)
"""


class Project:
    """A program's models and its migrations."""

    def __init__(self, folder: Path, url: str) -> None:
        self.output = io.StringIO()
        self.config = Config(str(folder.parent / "alembic.ini"), output_buffer=self.output)
        command.init(self.config, str(folder))
        (folder / "env.py").write_text(ENV)
        self.versions = folder / "versions"
        self.engine = sa.create_engine(url)
        self.config.attributes.update(engine=self.engine)
        self.model(None)

    def model(self, guard: Guard | AsyncGuard | Claims | None, *, table: str = "orders") -> None:
        """The models, with this guard in the info of the table."""
        self.metadata = sa.MetaData()
        columns = [sa.Column("id", sa.Integer, primary_key=True), sa.Column("shop", sa.Integer)]
        sa.Table(table, self.metadata, *columns, info={"fenced": guard} if guard else {})
        self.config.attributes["metadata"] = self.metadata

    def revise(self, message: str) -> str:
        """`alembic revision --autogenerate`, `alembic upgrade head` and `alembic check`; returns the upgrade."""
        made = command.revision(self.config, message, autogenerate=True)
        assert made is not None and not isinstance(made, list)
        command.upgrade(self.config, "head")
        command.check(self.config)
        return Path(made.path).read_text().partition("def upgrade()")[2].partition("def downgrade()")[0]

    def guards(self) -> list[tuple[str, str, str | None, bool]]:
        with self.engine.connect() as connection:
            found = step(on(connection, "blocking").table(Spec("any", "any"), True).registered())
        return [(guard.spec.name, guard.spec.installs, guard.spec.epoch, guard.mandatory) for guard in found]


@pytest.fixture(params=["postgresql", "sqlite"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    url = f"sqlite:///{tmp_path}/shop.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgresql_url").replace("postgresql:", "postgresql+psycopg:")
    made = Project(tmp_path / "migrations", url)
    yield made
    made.engine.dispose()


def test_a_models_guard_follows_it_through_its_migrations(project: Project) -> None:
    project.model(Guard(table="orders", name="orders/{id}"))
    made = project.revise("first")
    assert made.index("op.create_table('orders'") < made.index(
        "op.install_guard('orders', name='orders/{id}')"
    )
    assert project.guards() == [("orders/{id}", "retry", None, True)]
    project.model(AsyncGuard(table="orders", name="orders/{shop}", rule="once"))
    assert "op.install_guard('orders', name='orders/{shop}', rule='once', replace=True)" in project.revise(
        "other"
    )
    assert project.guards() == [("orders/{shop}", "once", None, True)]
    project.model(None)
    assert "op.uninstall_guard('" in project.revise("none")
    assert project.guards() == []
    for expected in ("orders/{shop}", "orders/{id}"):
        command.downgrade(project.config, "-1")
        assert [name for name, *_ in project.guards()] == [expected]
    project.model(None, table="parcels")
    command.upgrade(project.config, "head")
    command.downgrade(project.config, "base")
    assert project.guards() == [] and not sa.inspect(project.engine).has_table("orders")


def test_a_models_claims_follow_it_through_its_migrations(project: Project) -> None:
    runs: dict[str, Any] = {
        "table": "orders",
        "name": "orders/{id}",
        "ready": "shop = 1",
        "back": {"shop": 1},
        "order": "id",
    }
    project.model(Claims(**runs))
    made = project.revise("first")  # the columns and indexes that it adds are no difference
    call = "op.install_claims('orders', name='orders/{id}', ready='shop = 1', order='id', key='id', back={'shop': 1}"
    assert call in made
    assert project.guards() == [("orders/{id}", "retry", None, True)]
    project.model(Claims(**{**runs, "max_attempts": 9}))
    assert "max_attempts=9, replace=True)" in project.revise("other")
    project.model(None)
    assert "op.uninstall_guard('" in project.revise("none")
    command.downgrade(project.config, "base")
    assert project.guards() == []


@pytest.mark.filterwarnings("ignore:Did not recognize type:sqlalchemy.exc.SAWarning")  # xid8
def test_autogenerate_leaves_what_fenced_made(project: Project) -> None:
    """Its tables, in whatever schema, and the epoch column of a model that does not declare it."""
    on_server = project.engine.dialect.name == "postgresql"
    project.model(Guard(table="orders", name="orders/{id}", epoch="epoch" if on_server else None))
    project.revise("first")
    with project.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_schemas": True})
        assert compare_metadata(context, project.metadata) == []
        connection.rollback()
        with pytest.raises(fenced.Misuse, match="is its fenced"):
            project.model(Guard(table="others", name="others"))
            compare_metadata(context, project.metadata)
        project.model(None)  # the guard's removal drops the epoch column
        assert [diff[0] for diff in compare_metadata(context, project.metadata)] == ["remove_guard"]
        project.model(None, table="parcels")
        kinds = [diff[0] for diff in compare_metadata(context, project.metadata)]
        assert (
            kinds == ["remove_guard", "add_table", "remove_table"]
            if on_server
            else kinds[0] == "remove_guard"
        )


def test_a_database_of_another_engine_is_ignored_unless_it_should_have_a_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unsupported(*_: object) -> None:
        raise fenced.Unsupported("another engine")

    monkeypatch.setattr(fenced.alembic, "on", unsupported)
    metadata = sa.MetaData()
    table = sa.Table("orders", metadata, sa.Column("id", sa.Integer))
    with sa.create_engine("sqlite://").connect() as connection:
        context = MigrationContext.configure(connection)
        assert [diff[0] for diff in compare_metadata(context, metadata)] == ["add_table"]
        table.info["fenced"] = Guard(table="orders", name="orders/{id}")
        with pytest.raises(fenced.Unsupported):
            compare_metadata(context, metadata)


def test_a_failed_migration_leaves_no_guard(project: Project) -> None:
    project.model(Guard(table="orders", name="orders/{id}"))
    made = command.revision(project.config, "first", autogenerate=True)
    assert made is not None and not isinstance(made, list)
    path = Path(made.path)
    path.write_text(
        path.read_text().replace("\n\n\ndef downgrade", "\n    op.execute('nonsense')\n\n\ndef downgrade")
    )
    with pytest.raises(sa.exc.DBAPIError):
        command.upgrade(project.config, "head")
    assert project.guards() == []


def test_a_script_written_offline_stops_where_the_guard_is_missing(project: Project) -> None:
    """The guard depends on the table, which offline mode cannot read. What it prints must not pass for the whole."""
    project.model(Guard(table="orders", name="orders/{id}"))
    command.revision(project.config, "first", autogenerate=True)
    with project.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE alembic_version"))
    command.upgrade(project.config, "head", sql=True)
    script = project.output.getvalue()
    typed = "fenced guard install --table orders --name 'orders/{id}' --rule retry --print --no-transaction"
    assert f"-- Replace the next statement by the output of: {typed}" in script
    url = project.engine.url
    with pytest.raises((psycopg.Error, sqlite3.Error), match="fenced_guard_is_missing_here"):
        if url.get_backend_name() == "postgresql":
            with psycopg.connect(url.set(drivername="postgresql").render_as_string(False)) as db:
                db.execute(script.encode())
        else:
            with closing(sqlite3.connect(str(url.database))) as lite:
                lite.executescript(script)


def test_in_an_asynchronous_environment(project: Project) -> None:
    driver = {"postgresql": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}[project.engine.dialect.name]
    project.config.attributes["url"] = project.engine.url.set(drivername=driver)
    project.model(Guard(table="orders", name="orders/{id}"))
    project.revise("first")
    assert project.guards() == [("orders/{id}", "retry", None, True)]
    command.downgrade(project.config, "base")
    assert project.guards() == []
