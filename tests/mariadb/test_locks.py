"""What is locked before the clock is read and before a number is drawn, and the bugs that would be there without."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pymysql
import pytest

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.leases.rows import NS
from fenced.leases.rules import holder_text
from fenced.net.pool import ConnectionBroken
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.mariadb.authority.authority import MariadbAuthority
from fenced.stores.mariadb.authority.rows import SQL, MariadbRows
from fenced.stores.mariadb.authority.session import LeaseSession, LeaseTransaction
from fenced.stores.mariadb.wire.failures import ServerRefusal
from fenced.testing import AUTHORITY_CHECKS, CheckFailed, run
from fenced.testing.kit import asking, granted
from fenced.values.model import Ended, Granted, Kept, Released
from fenced_testkit.servers import MariadbServer
from tests.conformance.authorities.test_mariadb import Harness

RUNTIME = BlockingRuntime()


class Scene:
    """A database, an authority on it, and transactions of somebody else."""

    def __init__(self, server: MariadbServer, database: str) -> None:
        self._server = server
        self._database = database
        self._made: list[MariadbAuthority] = []

    def authority(self) -> MariadbAuthority:
        self._made.append(MariadbAuthority(self._server.url(self._database), RUNTIME))
        step(self._made[-1].open())
        return self._made[-1]

    @contextlib.contextmanager
    def transaction(self, statement: str) -> Iterator[Any]:
        place: dict[str, Any] = {"host": self._server.host, "port": self._server.port, "user": "root"}
        with pymysql.connect(**place, database=self._database) as other, other.cursor() as cursor:
            cursor.execute(statement)
            yield other

    @contextlib.contextmanager
    def locked_for(self, seconds: float) -> Iterator[None]:
        """Somebody has all names locked, and then lets them go."""
        with self.transaction("SELECT * FROM fenced_name FOR UPDATE") as other:
            timer = threading.Timer(seconds, other.rollback)
            timer.start()
            try:
                yield
            finally:
                timer.join()

    def rows(self) -> list[tuple[Any, ...]]:
        return self._server.execute(
            "SELECT state, names, ttl, lock_delay, ticket, token, expires, forget, holder FROM fenced_attempt",
            self._database,
        )

    def close(self) -> None:
        for authority in self._made:
            step(authority.close())


@pytest.fixture(scope="module")
def database(mariadb_server: MariadbServer) -> str:
    return mariadb_server.create_database()


@pytest.fixture
def scene(mariadb_server: MariadbServer) -> Iterator[Scene]:
    scene = Scene(mariadb_server, mariadb_server.create_database())
    yield scene
    scene.close()


def a_renewal_that_waited_revives_nothing(scene: Scene) -> None:
    """Somebody has the name locked past the lease's ttl."""
    authority = scene.authority()
    ask = asking(RUNTIME, "orders", ttl=0.6)
    step(granted(authority, ask))
    with scene.locked_for(0.9):
        assert step(authority.renew([ask.secret])) == [Ended("expired")]


def a_release_that_waited_is_too_late(scene: Scene) -> None:
    """The lease expired meanwhile, and its lock_delay counts."""
    authority = scene.authority()
    ask = asking(RUNTIME, "orders", ttl=0.6, lock_delay=30.0)
    step(granted(authority, ask))
    with scene.locked_for(0.9):
        assert step(authority.release(ask.secret)) == Ended("expired")
    assert not isinstance(step(authority.ask(asking(RUNTIME, "orders"))), Granted)


def a_grant_that_waited_lasts_for_all_of_its_ttl(scene: Scene) -> None:
    """Its time begins when it has the name, and not when it began to wait."""
    authority = scene.authority()
    step(authority.release(_held(authority, "orders")))
    with scene.locked_for(0.9):
        ask = asking(RUNTIME, "orders", ttl=0.8)
        assert isinstance(step(authority.ask(ask)), Granted)
        assert step(authority.renew([ask.secret])) == [Kept(0.8)]


def no_grant_is_counted_from_a_floor_that_is_being_raised(scene: Scene) -> None:
    authority = scene.authority()
    step(authority.release(_held(authority, "orders")))
    with scene.transaction("UPDATE fenced_namespace SET floor = floor + 1000000") as other:
        early = asking(RUNTIME, "orders")
        with pytest.raises((Indeterminate, Unavailable)):
            step(authority.ask(early, RUNTIME.now() + 0.3))
        other.commit()
    assert step(authority.withdraw(early.secret)) == Released()
    assert step(granted(authority, asking(RUNTIME, "another"))).token > 1_000_000


def rows_are_what_the_algorithm_leaves(scene: Scene) -> None:
    """When it expires, and until when it is remembered, to a few seconds."""
    authority, ask = scene.authority(), asking(RUNTIME, "it's", ttl=900.0, lock_delay=7.0)
    began, token = time.time(), step(granted(authority, ask)).token
    fixed = (b'["it\'s"]', 900 * NS, 7 * NS, 0, token, holder_text(ask.holder).encode())

    def left(state: bytes, expires: float, forget: float) -> None:
        ((found, *values, expires_at, forget_at, holder),) = scene.rows()
        assert (found, (*values, holder)) == (state, fixed)
        assert abs(expires_at / NS - began - expires) < 10
        assert abs(forget_at / NS - began - forget) < 10

    left(b"granted", 900, 900 + 7 + 4 * 900)
    assert step(authority.release(ask.secret)) == Released()
    left(b"released", 900, 4 * 900)


def nothing_is_granted_in_another_history(scene: Scene) -> None:
    authority = scene.authority()
    step(authority.release(_held(authority, "orders")))
    with scene.transaction("UPDATE fenced_namespace SET lineage = 'another'") as other:
        other.commit()
    with pytest.raises(Misconfigured, match="authority raise"):
        step(authority.ask(asking(RUNTIME, "orders")))
    assert step(authority.raise_floor(1000)) >= 1000
    assert step(granted(authority, asking(RUNTIME, "orders"))).token > 1000


def _held(authority: MariadbAuthority, name: str) -> str:
    ask = asking(RUNTIME, name)
    step(granted(authority, ask))
    return ask.secret


STORIES = [
    a_renewal_that_waited_revives_nothing,
    a_release_that_waited_is_too_late,
    a_grant_that_waited_lasts_for_all_of_its_ttl,
    no_grant_is_counted_from_a_floor_that_is_being_raised,
    nothing_is_granted_in_another_history,
    rows_are_what_the_algorithm_leaves,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
@pytest.mark.parametrize("shortens", [True, False])
def test_locks(
    story: Callable[[Scene], None], shortens: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MariadbAuthority, "shortens", shortens)
    story(scene)


# Planted: a statement that lacks a part, and who finds out.


class Bug(NamedTuple):
    what: str
    found_by: str
    """A story, or a check of the kit."""
    statement: str
    right: str
    wrong: str = ""
    shortens: bool = True


NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) * 1000"
LINEAGE = "s.lineage = {lineage}"
BUGS = [
    Bug("no name is locked", STORIES[0].__name__, "lock", SQL["lock"], "DO 0"),
    Bug(
        "a grant overtakes the queue",
        "first_come_first_served",
        "take_free",
        "NOT EXISTS (SELECT 1",
        "TRUE OR EXISTS (SELECT 1",
    ),
    Bug("a grant takes what is held", "one_holder_at_a_time", "take_free", "AND NOT n.held"),
    Bug("a name is taken without a grant", "one_holder_at_a_time", "taken", "AND ROW_COUNT() = 1"),
    Bug("a grant counts from an old floor", STORIES[3].__name__, "take_free", "LOCK IN SHARE MODE"),
    Bug("so does the algorithm", STORIES[3].__name__, "floor", "LOCK IN SHARE MODE", shortens=False),
    Bug("a grant is made in any history", STORIES[4].__name__, "take_free", LINEAGE, "TRUE"),
    Bug("what has expired is released", STORIES[1].__name__, "end_held", f"AND expires > {NOW}"),
    Bug("a name is freed without a release", STORIES[1].__name__, "given", "AND ROW_COUNT() = 1"),
    Bug(
        "a release is forgotten at once",
        STORIES[5].__name__,
        "end_held",
        "GREATEST({remember}, 4 * ttl)",
        "0 * {remember}",
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what.replace(" ", "_"))
def test_planted_bugs_are_caught(
    bug: Bug, scene: Scene, mariadb_server: MariadbServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SQL[bug.statement].count(bug.right) == 1
    monkeypatch.setitem(SQL, bug.statement, SQL[bug.statement].replace(bug.right, bug.wrong))
    monkeypatch.setattr(MariadbAuthority, "shortens", bug.shortens)
    stories = [story for story in STORIES if story.__name__ == bug.found_by]
    checks = [check for check in AUTHORITY_CHECKS if check.name == bug.found_by]
    assert len(stories) + len(checks) == 1
    with pytest.raises((AssertionError, CheckFailed, FencedError, pytest.fail.Exception)):
        for story in stories:
            story(scene)
        for check in checks:
            run(check, lambda runtime: Harness(runtime, mariadb_server, database), "blocking")


def test_a_grant_that_is_told_again_without_a_commit_is_caught(
    scene: Scene, mariadb_server: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_authority.py` counts the commits; here none is made."""
    authority, ask = scene.authority(), asking(RUNTIME, "orders")
    step(granted(authority, ask))
    monkeypatch.setattr(MariadbRows, "settle", lambda rows, answer: None)
    (before,) = mariadb_server.execute("SHOW GLOBAL STATUS LIKE 'Com_commit'")
    step(granted(authority, ask))
    assert mariadb_server.execute("SHOW GLOBAL STATUS LIKE 'Com_commit'") == [before]


@pytest.mark.parametrize(("commits", "error"), [(True, Indeterminate), (False, Unavailable)])
def test_an_earlier_try_leaves_its_doubt(
    commits: bool, error: type[Exception], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try breaks while it commits, or before. Then a copy is in the way, and the connection breaks again."""
    authority = scene.authority()
    broken = ConnectionBroken("cut")
    endings: list[tuple[bool, Exception]] = [
        (commits, broken),
        (False, ServerRefusal(1062, "x", 1)),
        (False, broken),
    ]

    async def fail(session: LeaseSession, work: object, todo: LeaseTransaction, until: float) -> None:
        todo.committing, ending = endings.pop(0)
        raise ending

    monkeypatch.setattr(MariadbAuthority, "shortens", False)
    monkeypatch.setattr(LeaseSession, "_try", fail)
    with pytest.raises(error):
        step(authority.ask(asking(RUNTIME, "orders")))
    assert endings == []
