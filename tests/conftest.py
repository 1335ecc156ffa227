"""Real servers that the tests of one worker share; started by the first test that asks for them.

A test that stops, breaks or reconfigures a server starts one of its own, from `fenced_testkit.servers`, and
carries `@pytest.mark.xdist_group(...)` with the server's name: one worker runs all of that group, so that a server of a
module is started once, and no group is so long that the other workers end up waiting for it.

Every worker imports every module of tests. A library that few tests use, and that takes long to import, is imported
inside them.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from fenced.runtime.machine import IN_MEMORY, mount_of
from fenced.testing import COLOURS
from fenced.values.contracts import Colour
from fenced_testkit.servers import (
    DynamoServer,
    EtcdServer,
    MariadbServer,
    NatsServer,
    Pgbouncer,
    PostgresqlServer,
    RabbitmqServer,
    RedisServer,
    SeaweedServer,
    ZooKeeperServer,
    mariadb_or_mysql,
)
from fenced_testkit.servers.dynamodb import KEYS
from tests.colours import play
from tests.walk.traveller import Traveller

Prepare = Callable[[psycopg.Connection[Any]], None]


class NewMariadb(Protocol):
    def __call__(self) -> str:
        """The address of a new database in MariaDB."""


class NewDatabase(Protocol):
    def __call__(self, prepare: Prepare | None = None) -> str:
        """The address of a new database, as `prepare` leaves it. That is called once; then its result is copied."""


# Each worker imports all tests, and the collector would look at them again and again and find nothing: a second in
# each. `pytest_collection_finish` takes everything that exists by then away from it.
gc.disable()

# Hypothesis fails a test if an example takes longer than 200 ms, or is drawn slowly. On a busy machine that is no bug.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


# A file of leases in memory is best-effort, and most tests are about strict ones.
if mount_of(Path(tempfile.gettempdir()))[1] in IN_MEMORY:
    tempfile.tempdir = os.environ["TMPDIR"] = "/var/tmp"


def pytest_configure() -> None:
    # A shell starts what it puts into the background with Ctrl-C ignored, and all its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run groups that would be torn apart: each worker would start all of their servers.

    pytest-xdist appends a group's name to the ids of its tests, and pytest 9.2 reads those from elsewhere.
    """
    gc.freeze()
    gc.enable()
    grouped = getattr(session.config.option, "loadgroup", False)  # set by pytest-xdist in its workers
    for item in session.items if grouped else ():
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(f"pytest-xdist does not know that {item.nodeid} belongs to a group")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop, or, if it asks for a `runtime`, in each colour."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given: dict[str, Any] = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    if "runtime" in given:
        play(lambda runtime: pyfuncitem.obj(**given | {"runtime": runtime}), given["runtime"])
    else:
        with asyncio.Runner(loop_factory=given.get("loop")) as runner:
            runner.run(pyfuncitem.obj(**given))
    return True


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> Colour:
    found: Colour = request.param
    return found


@pytest.fixture
def runtime(colour: Colour) -> Colour:
    """The colour of the runtime that a coroutine gets instead, which is made where it runs."""
    return colour


@pytest.fixture(scope="session")
def shared_dynamo_server() -> Iterator[DynamoServer]:
    with DynamoServer() as server:
        yield server


@pytest.fixture
def dynamo_server(shared_dynamo_server: DynamoServer, monkeypatch: pytest.MonkeyPatch) -> DynamoServer:
    """With the keys in the environment."""
    for variable, value in KEYS.items():
        monkeypatch.setenv(variable, value)
    return shared_dynamo_server


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariadbServer]:
    """MariaDB; `make evidence` runs the same tests on MySQL."""
    with mariadb_or_mysql() as server:
        yield server


@pytest.fixture
def new_mariadb(mariadb_server: MariadbServer) -> NewMariadb:
    """They are removed with their server: a drop would wait for whoever has left a transaction open."""
    return lambda: mariadb_server.url(mariadb_server.create_database())


@pytest.fixture
def mariadb_url(new_mariadb: NewMariadb) -> str:
    """A new database."""
    return new_mariadb()


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgresqlServer]:
    with PostgresqlServer() as server:
        yield server


@pytest.fixture(scope="session")
def pgbouncer(postgresql_server: PostgresqlServer) -> Iterator[Pgbouncer]:
    """In front of `postgresql_server`, one transaction at a time."""
    with Pgbouncer(postgresql_server) as bouncer:
        yield bouncer


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitmqServer]:
    """Starting it takes four seconds of CPU: only tests of the group "rabbitmq" use it."""
    with RabbitmqServer() as server:
        yield server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[SeaweedServer]:
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper_server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def zookeeper_url(zookeeper_server: ZooKeeperServer) -> str:
    """The shared server: a test keeps to a namespace of its own."""
    return zookeeper_server.url()


@pytest.fixture
def dynamodb_endpoint(shared_dynamo_server: DynamoServer) -> str:
    return shared_dynamo_server.endpoint()


@pytest.fixture
def etcd_url(etcd_server: EtcdServer) -> str:
    """The shared server: a test keeps to a namespace of its own."""
    return etcd_server.url()


@pytest.fixture(scope="session")
def prepared_databases() -> dict[Prepare, str]:
    """The databases that `new_database` copies."""
    return {}


@pytest.fixture
def new_database(
    postgresql_server: PostgresqlServer, prepared_databases: dict[Prepare, str]
) -> Iterator[NewDatabase]:
    made = []

    def make(prepare: Prepare | None = None) -> str:
        if prepare is not None and prepare not in prepared_databases:
            name = postgresql_server.create_database()
            with psycopg.connect(postgresql_server.url(name), autocommit=True) as connection:
                prepare(connection)
            prepared_databases[prepare] = name
        template = prepared_databases[prepare] if prepare else None
        made.append(postgresql_server.create_database(template=template))
        return postgresql_server.url(made[-1])

    yield make
    for database in made:
        postgresql_server.discard_database(database)


@pytest.fixture
def postgresql_url(new_database: NewDatabase) -> str:
    """A new database. A module whose tests prepare theirs alike has a fixture of this name, with prepared ones."""
    return new_database()


@pytest.fixture
def rabbitmq_url(rabbitmq_server: RabbitmqServer) -> str:
    """The shared server: a test keeps to queues of its own."""
    return rabbitmq_server.url()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The shared server: a test keeps to a namespace of its own."""
    return redis_server.url()


@pytest.fixture(scope="session")
def traveller() -> Iterator[Traveller]:
    """A user who has nothing but a clone; its environments are made by the first test that asks for them."""
    with tempfile.TemporaryDirectory(prefix="walk-") as home:  # on a disk: pages have leases in SQLite there
        yield Traveller(Path(home))
