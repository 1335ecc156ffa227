"""PostgreSQL that fails over, is restored, or whose commit is only half done: noticed, and never repeated."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import fenced
from fenced.drills.relay import Proxy
from fenced.errors import Indeterminate, Misconfigured, ReusedToken, StaleToken, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced.stores.postgresql.authority.settings import Settings
from fenced.testing.kit import asking, granted
from fenced.values.model import Kept, Released
from fenced_testkit.servers import PostgresqlServer

pytestmark = pytest.mark.xdist_group("postgresql")
RUNTIME = BlockingRuntime()


def opened(server: PostgresqlServer, database: str = "postgres") -> PostgresqlAuthority:
    authority = PostgresqlAuthority(server.url(database), RUNTIME)
    step(authority.open())
    return authority


def token_of(authority: PostgresqlAuthority, name: str = "orders") -> int:
    ask = asking(RUNTIME, name)
    token = step(granted(authority, ask)).token
    assert step(authority.release(ask.secret)) == Released()
    return token


# proves authority postgresql: synced-grants
def test_a_grant_is_flushed_even_where_the_server_is_lazy() -> None:
    """`synchronous_commit = off` loses commits at a SIGKILL; a grant is flushed all the same."""
    with PostgresqlServer({"synchronous_commit": "off", "wal_writer_delay": "10s"}) as server:
        authority = opened(server)
        server.execute("CREATE TABLE lazy (id int)")
        server.execute("CHECKPOINT")
        tokens = [token_of(authority) for _ in range(3)]
        held = asking(RUNTIME, "held", ttl=600)
        tokens.append(step(granted(authority, held)).token)
        with psycopg.connect(server.url(), autocommit=True) as other:
            other.execute("INSERT INTO lazy VALUES (1)")
            server.kill()
        server.start()
        assert server.execute("SELECT * FROM lazy") == [], "the fault was strong enough to lose a commit"
        after = opened(server)
        assert step(after.renew([held.secret])) == [Kept(600.0)], "the grant is there"
        tokens.append(token_of(after))
        assert tokens == sorted(set(tokens))


@pytest.fixture(scope="module")
def replicated() -> Iterator[tuple[PostgresqlServer, Proxy]]:
    """A primary with a synchronous standby, and what stands between them."""
    with (
        PostgresqlServer() as primary,
        Proxy(primary.host, primary.port) as wire,
        primary.standby(synchronous=True, through=wire),
    ):
        yield primary, wire


# proves authority postgresql: commit-warnings
@pytest.mark.parametrize("setting", ["on", "off", "local"])
def test_a_cancelled_wait_for_the_standby_makes_the_grant_unknown(
    setting: str, replicated: tuple[PostgresqlServer, Proxy]
) -> None:
    """The server says success and warns; the standby that may be promoted has never heard of the grant."""
    primary, wire = replicated
    database = primary.create_database()
    primary.execute(f"ALTER DATABASE {database} SET synchronous_commit = '{setting}'")
    authority = opened(primary, database)
    before = token_of(authority)
    wire.black_hole()
    ask = asking(RUNTIME, "orders", ttl=600)
    for _ in range(2):  # the second one finds the grant made, and is told no more than the first
        cancel = threading.Thread(target=_cancel_the_commit, args=(primary,))
        cancel.start()
        with pytest.raises(Indeterminate, match="synchronous replication"):
            step(authority.ask(ask))
        cancel.join()
    wire.heal()
    token = step(granted(authority, ask)).token
    assert token > before and step(authority.release(ask.secret)) == Released()
    step(authority.close())


def _cancel_the_commit(primary: PostgresqlServer) -> None:
    waiting = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    until = time.monotonic() + 60
    while not primary.execute(waiting) and time.monotonic() < until:
        time.sleep(0.02)


# proves authority postgresql: history-noticed
def test_a_promoted_standby_grants_nothing_until_raised() -> None:
    """Grants that never reached the standby are lost with the primary. Nothing is granted below them."""
    with PostgresqlServer() as primary, Proxy(primary.host, primary.port) as wire:
        authority = opened(primary)
        held = asking(RUNTIME, "held", ttl=60)
        step(granted(authority, held))
        with primary.standby(through=wire) as standby:
            standby.caught_up_with(primary)
            with pytest.raises(Unavailable, match="standby"):
                opened(standby)
            session = opened_on_standby(standby)
            wire.black_hole()
            lost = max(token_of(authority) for _ in range(40))  # a sequence runs up to 32 ahead of its log
            standby.promote()
            promoted = opened(standby)
            for client in (promoted, session):
                with pytest.raises(Misconfigured, match="authority raise"):
                    step(client.ask(asking(RUNTIME, "orders")))
            assert step(promoted.renew([held.secret])) == [Kept(60.0)], "who holds may go on"
            step(promoted.raise_floor(lost))
            assert token_of(promoted) > lost
            assert token_of(session) > lost


def opened_on_standby(standby: PostgresqlServer) -> PostgresqlAuthority:
    """A client whose connection is older than the promotion, as one behind a pooler may be."""
    authority = PostgresqlAuthority(standby.url(), RUNTIME)
    with pytest.MonkeyPatch.context() as unchecked:
        unchecked.setattr(Settings, "check", lambda *_: None)
        with pytest.raises(Unavailable, match="read only"):
            step(authority.open())
        authority._namespace = b"1"
        with pytest.raises(Unavailable, match="read only"):
            step(authority.ask(asking(RUNTIME, "orders")))
    return authority


def test_a_restored_dump_is_noticed(tmp_path: Path) -> None:
    """Into another database of the same server, or over the old one: both are another history."""
    with PostgresqlServer() as server:
        authority = opened(server)
        token_of(authority)
        dump = tmp_path / "dump.sql"
        with dump.open("wb") as out:
            subprocess.run(["pg_dump", "--clean", "--if-exists", server.url()], stdout=out, check=True)
        last = max(token_of(authority) for _ in range(3))
        step(authority.close())
        other = server.create_database()
        for database in (other, "postgres"):
            subprocess.run(
                ["psql", "-qX", "-v", "ON_ERROR_STOP=1", "-f", dump, server.url(database)],
                check=True,
                capture_output=True,
            )
            restored = opened(server, database)
            with pytest.raises(Misconfigured, match="authority raise"):
                step(restored.ask(asking(RUNTIME, "orders")))
            step(restored.raise_floor(last))
            assert token_of(restored) > last


# proves authority postgresql: copy-unnoticed
def test_restored_files_repeat_tokens_until_raised_and_guards_notice(tmp_path: Path) -> None:
    """Without `raise` the guard refuses whoever carries a token of the other history; with it all is well."""
    guard = fenced.Values(f"sqlite:///{tmp_path / 'guarded.db'}")
    with PostgresqlServer() as server:
        with fenced.Client(server.url()) as client:
            client.acquire("warm-up").release()
            server.backup(tmp_path / "backup")
            for _ in range(40):
                with client.hold("orders") as lease:
                    guard.write(lease, "orders", b"of the lost history")
            highest = lease.token
        server.stop()
        with PostgresqlServer.restored(tmp_path / "backup") as restored:
            with fenced.Client(restored.url()) as client:
                refused = 0
                while (lease := client.acquire("orders")).token <= highest:
                    with pytest.raises((StaleToken, ReusedToken)):
                        guard.write(lease, "orders", b"of the wrong history")
                    refused += 1
                    lease.release()
                lease.release()
                assert refused, "the copy cannot be told from the original"
            authority = opened(restored)
            step(authority.raise_floor(highest + 1000))
            with fenced.Client(restored.url()) as client, client.hold("orders") as lease:
                assert lease.token > highest + 1000
                guard.write(lease, "orders", b"after the floor was raised")


# proves authority postgresql: reset-unnoticed
def test_a_reset_log_repeats_tokens_until_raised() -> None:
    """What came after the last checkpoint is thrown away: same realm, same history, and tokens from before it."""
    with PostgresqlServer() as server:
        authority = opened(server)
        token_of(authority)
        server.execute("CHECKPOINT")
        highest = max(token_of(authority) for _ in range(40))  # a sequence runs up to 32 ahead of its log
        realm = step(authority.open()).realm
        step(authority.close())
        server.kill()
        server.reset_log()
        server.start()
        reset = opened(server)
        assert step(reset.open()).realm == realm
        assert token_of(reset) <= highest, "nothing tells it from a restart"
        step(reset.raise_floor(highest))
        assert token_of(reset) > highest


def test_weak_settings_are_told() -> None:
    """Strict refuses a server whose settings may lose tokens, and says which."""
    with PostgresqlServer({"fsync": "off", "full_page_writes": "off"}) as server:
        strict = fenced.Client(server.url())
        with strict, pytest.raises(Misconfigured, match=r"fsync is off.*full_page_writes"):
            strict.acquire("orders")
        with fenced.Client(server.url(), guarantee="best-effort") as client:
            client.acquire("orders").release()
