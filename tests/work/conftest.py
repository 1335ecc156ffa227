"""The places where claims are tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from fenced_testkit.servers import PostgresqlServer
from tests.conftest import NewMariadb
from tests.work.places import EMPTY, Place, place_at, prepare

PLACES = ("postgresql", "elsewhere", "sqlite", "mariadb")


@pytest.fixture(scope="session")
def claimed_databases(postgresql_server: PostgresqlServer) -> dict[str, str]:
    """One database with claims for each kind of authority. Tests empty it for the next one."""
    made = {}
    for kind in ("postgresql", "elsewhere"):
        url = postgresql_server.url(postgresql_server.create_database())
        with psycopg.connect(url, autocommit=True) as db:
            prepare(db, url, beside=kind == "postgresql")
        made[kind] = url
    return made


@pytest.fixture(params=PLACES)
def place(
    request: pytest.FixtureRequest, claimed_databases: dict[str, str], tmp_path: Path
) -> Iterator[Place]:
    """PostgreSQL that mints the tokens; PostgreSQL and SQLite with an authority elsewhere; MariaDB with its own, whose
    tokens the workers declare."""
    leases = f"sqlite:///{tmp_path}/leases.db"
    if request.param == "sqlite":
        where = ("sqlite", f"{tmp_path}/data.db", leases)
    elif request.param == "mariadb":
        new_mariadb: NewMariadb = request.getfixturevalue("new_mariadb")
        url = new_mariadb()
        where = ("mariadb", url, url)
    else:
        url = claimed_databases[request.param]
        where = ("postgresql", url, url if request.param == "postgresql" else leases)
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(EMPTY)
    with place_at(*where) as found:
        yield found
