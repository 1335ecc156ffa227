"""Tokens that somebody invented: proofs, the look-up beside the authority, the limit on jumps, and the way out."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ed25519
from psycopg import IsolationLevel

import fenced
from fenced.cli.guard_keys import key as key_command
from fenced.errors import Contended, DuplicateStamp, ForgedStamp, Misconfigured, StaleToken
from fenced.proofs import Ed25519Key, Ed25519Public, HmacKey, Proof, verify
from fenced.runtime.blocking import step
from fenced.stores.postgresql.guard.operator import PostgresqlOperator
from fenced.stores.postgresql.guard.sessions import PsycopgSession
from fenced.testing.kit import REALM, stamp
from fenced.values.decision import Rule
from fenced.values.model import TOKEN_MAX, Stamp
from fenced_testkit.servers import PostgresqlServer
from tests.conftest import NewDatabase
from tests.postgresql.planted_guard_sql import changed, functions

HMAC = HmacKey("shop-1", bytes(range(32)))
SIGNER = Ed25519Key("partner-1", bytes(range(32, 64)))
NAME = "orders/1"
HUGE = stamp(TOKEN_MAX, 1, NAME)
WRITE = "UPDATE orders SET qty = qty + 1 WHERE grp = 1"  # ten rows of one name
LAST = "fenced_guard.mark WHERE name = 'orders/1'"

Connection = psycopg.Connection[Any]


def prepare(connection: Connection, rule: Rule = "retry", epoch: str | None = None) -> None:
    """A guarded table with ten rows under NAME, and one under each of three others."""
    connection.execute("CREATE TABLE orders (id int PRIMARY KEY, grp int, qty int DEFAULT 0)")
    connection.execute("INSERT INTO orders SELECT n, 1 FROM generate_series(1, 10) AS n")
    connection.execute("INSERT INTO orders VALUES (12, 2), (13, 3), (14, 4)")
    fenced.sql.Guard(table="orders", name="orders/{grp}", rule=rule, epoch=epoch).install(
        connection, mode="require"
    )


class Shop:
    """A prepared database, and those who write to it."""

    def __init__(self, url: str, rule: Rule = "retry", epoch: str | None = None) -> None:
        self.url = url
        self.guard = fenced.sql.Guard(table="orders", name="orders/{grp}", rule=rule, epoch=epoch)
        self.connection = self.connect()

    def connect(self) -> Connection:
        return psycopg.connect(self.url, autocommit=True)

    @property
    def keys(self) -> PostgresqlOperator:
        return PostgresqlOperator(PsycopgSession(self.connection))

    def require(self, *keys: HmacKey | Ed25519Public) -> None:
        for key in keys:
            step(self.keys.add_key(key))
        step(self.keys.require_proofs(True))

    def write(self, fence: Stamp | Proof | fenced.Lease, statement: str = WRITE) -> None:
        with self.guard.transaction(self.connection, fence) as tx:
            tx.execute(statement)

    def value(self, sql: str) -> Any:
        row = self.connection.execute(sql).fetchone()
        return row and row[0]

    def total(self) -> int:
        return int(self.value("SELECT sum(qty) FROM orders"))

    def history(self) -> list[tuple[str, dict[str, Any]]]:
        return self.connection.execute("SELECT what, detail FROM fenced_guard.history ORDER BY id").fetchall()


@pytest.fixture
def shop(new_database: NewDatabase) -> Iterator[Shop]:
    made = Shop(new_database(prepare))
    yield made
    made.connection.close()


@pytest.mark.parametrize("key", [HMAC, SIGNER], ids=["hmac", "ed25519"])
def test_an_invented_token_is_refused_and_the_holder_goes_on(shop: Shop, key: HmacKey | Ed25519Key) -> None:
    shop.require(HMAC, SIGNER.public())
    honest = key.sign(stamp(5, 1, NAME))
    shop.write(honest)
    strangers: list[HmacKey | Ed25519Key] = [
        HmacKey(HMAC.id, b"x" * 32),
        Ed25519Key(SIGNER.id, b"x" * 32),
        HmacKey("nobody", b"x" * 32),
    ]
    inventions: list[Stamp | Proof] = [HUGE, Proof(HUGE, honest.text), *(one.sign(HUGE) for one in strangers)]
    for forged in inventions:
        with pytest.raises(ForgedStamp) as told:
            shop.write(forged)
        assert (told.value.mark, told.value.name) == (5, NAME)
        with pytest.raises(ForgedStamp):
            shop.guard.announce(shop.connection, forged)
    shop.write(honest.stamp)  # its second transaction needs no proof: the mark is its own
    shop.write(key.sign(stamp(6, 1, NAME)))
    with pytest.raises(StaleToken):
        shop.write(honest)
    assert shop.total() == 30


def test_a_proof_is_good_for_its_own_lease_alone(shop: Shop) -> None:
    shop.require(HMAC)
    text = HMAC.sign(stamp(5, 1, NAME)).text
    for other in (
        stamp(5, 1, NAME, realm="f" * 16),  # first: no realm is trusted yet, and this must not make it so
        stamp(6, 1, NAME),
        stamp(5, 1, NAME, grant="f" * 32),
        stamp(5, 1, "orders/2"),
        stamp(5, 1, NAME, "orders/2"),
    ):
        with pytest.raises(ForgedStamp):
            shop.write(Proof(other, text))
    assert shop.value("SELECT realm FROM fenced_guard.trust") is None
    both: list[Proof | Stamp] = [HMAC.sign(stamp(5, 1, NAME)), stamp(6, 1, "orders/2")]
    with pytest.raises(ForgedStamp), shop.guard.transaction(shop.connection, both):
        pass
    both = [stamp(6, 1, "orders/2"), HMAC.sign(stamp(6, 1, "orders/2"))]
    with pytest.raises(ForgedStamp), shop.guard.transaction(shop.connection, both[:1]):
        pass
    several = [HMAC.sign(stamp(6, 1, "orders/2")), HMAC.sign(stamp(5, 1, NAME))]
    for _ in range(2):  # the second time no mark rises
        with shop.guard.transaction(shop.connection, several) as tx:
            tx.execute("UPDATE orders SET qty = qty + 1 WHERE grp < 3")
    assert shop.total() == 22


def test_every_mutation_of_a_proof_is_refused(shop: Shop) -> None:
    """By the database and by Python alike."""
    shop.require(HMAC, SIGNER.public())
    rng = random.Random(4711)
    call = "SELECT fenced_guard.announce_alone(%s, 'public.orders', p_proofs => %s)"
    for key, count in ((HMAC, 240), (SIGNER, 60)):
        right = key.sign(stamp(5, 1, NAME)).text
        for _ in range(count):
            wrong = _mutated(rng, right)
            if wrong == right:
                continue
            with pytest.raises(psycopg.Error) as told:
                shop.connection.execute(call, (str(stamp(5, 1, NAME)), wrong))
            assert told.value.sqlstate == "ZF009", wrong
            try:
                proof = Proof(stamp(5, 1, NAME), wrong)
            except fenced.InvalidStamp:
                continue
            assert not verify(proof, [HMAC, SIGNER.public()]), wrong
    assert shop.value(f"SELECT count(*) FROM {LAST}") == 0
    shop.connection.execute(call, (str(stamp(5, 1, NAME)), right))
    assert shop.value(f"SELECT token FROM {LAST}") == 5


def _mutated(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text))
    digit = rng.choice("0123456789abcdef")
    return rng.choice(
        [
            text[:place] + digit + text[place + 1 :],
            text[:place] + digit + text[place + 1 :],
            text[:place] + rng.choice(string.printable.replace(" ", "")) + text[place + 1 :],
            text[:place] + text[place + 1 :],
            text[:place] + digit + text[place:],
            text[:place],
            text[:place] + text[place:].upper(),
            text + rng.choice(["\n", ":", "00", text]),
            rng.choice(["-", "0", HMAC.id, SIGNER.id]) + ":" + text.partition(":")[2][::-1],
        ]
    )


def _by_hand(connection: Connection, *lines: str) -> None:
    """Write the setting as anybody can; # stands for the transaction's id."""
    xid = connection.execute("SELECT pg_current_xact_id()::text").fetchone()[0]  # type: ignore[index]
    text = "".join(f"{line.replace('#', xid)}\n" for line in ("", *lines))
    connection.execute("SELECT set_config('fenced.stamp', %s, true)", (text,))


def test_a_setting_written_by_hand_is_not_believed(shop: Shop) -> None:
    shop.require(HMAC)
    shop.write(HMAC.sign(stamp(5, 1, NAME)))
    forgeries = {
        "an open name": ("#/orders/1",),
        "a name let through": ("#|public.orders/orders/1",),
        "a table let through": ("#*public.orders",),
        "an invented token": ("#/orders/1", f"#@{TOKEN_MAX}", f"# {HUGE}"),
        "an old token": ("#/orders/1", "#@4", f"# {stamp(4, 1, NAME)}"),
        "another grant": ("#/orders/1", "#@5", f"# {stamp(5, 1, NAME, grant='f' * 32)}"),
        "another realm": ("#/orders/1", "#@5", f"# {stamp(5, 1, NAME, realm='f' * 16)}"),
        "all at once": ("#|public.orders/orders/1", "#/orders/1", "#*public.orders", f"# {HUGE}", "# ?"),
    }
    for what, lines in forgeries.items():
        for statement in (WRITE, "UPDATE orders SET qty = 1 WHERE id = 1", "TRUNCATE orders"):
            with pytest.raises(psycopg.Error) as told, shop.connection.transaction():
                _by_hand(shop.connection, *lines)
                shop.connection.execute(statement)
            assert (told.value.sqlstate or "")[:2] == "ZF", what
    assert (shop.total(), shop.value(f"SELECT token FROM {LAST}")) == (10, 5)
    shop.write(stamp(5, 2, NAME))
    # Where callers are trusted, the setting is: the test above can fail.
    step(shop.keys.require_proofs(False))
    with shop.connection.transaction():
        _by_hand(shop.connection, "#/orders/1")
        shop.connection.execute(WRITE)
    assert shop.total() == 30


def test_lines_of_a_state_that_is_undone_are_not_believed(shop: Shop) -> None:
    """What `announce` itself wrote, put back after ROLLBACK TO SAVEPOINT, or in another transaction."""
    shop.require(HMAC)
    shop.write(HMAC.sign(stamp(5, 1, NAME)))
    proof = HMAC.sign(stamp(6, 1, NAME))
    call = "SELECT fenced_guard.announce(%s, NULL, 'public.orders', p_proofs => %s)"
    connection = shop.connection
    with pytest.raises(psycopg.Error) as told, connection.transaction():
        connection.execute("SAVEPOINT before")
        connection.execute(call, (str(proof.stamp), proof.text))
        lines = shop.value("SELECT current_setting('fenced.stamp')")
        connection.execute(WRITE)
        connection.execute("ROLLBACK TO SAVEPOINT before")
        connection.execute("SELECT set_config('fenced.stamp', %s, true)", (lines,))
        connection.execute(WRITE)
    assert told.value.sqlstate == "ZF009"
    with pytest.raises(psycopg.Error) as told, connection.transaction():
        connection.execute("SELECT set_config('fenced.stamp', %s, true)", (lines,))
        connection.execute(WRITE)
    assert told.value.sqlstate == "ZF007"
    shop.write(stamp(5, 2, NAME))
    assert shop.total() == 20


def test_the_holders_own_stamp_by_hand_is_fenced_like_an_announced_one(shop: Shop) -> None:
    """Whoever knows it may announce it, too. Either way a successor waits until what was written is committed."""
    shop.require(HMAC)
    shop.write(HMAC.sign(stamp(5, 1, NAME)))
    with shop.connect() as other:
        other.execute("SET lock_timeout = '50ms'")
        with shop.connection.transaction():
            _by_hand(shop.connection, "#/orders/1", f"# {stamp(5, 2, NAME)}")
            shop.connection.execute(WRITE)
            with pytest.raises(Contended):
                shop.guard.transaction(other, HMAC.sign(stamp(6, 1, NAME))).__enter__()
        with shop.guard.transaction(other, HMAC.sign(stamp(6, 1, NAME))) as tx:
            tx.execute(WRITE)
    assert shop.total() == 30


def test_lines_do_not_make_an_operation_new(postgresql_url: str) -> None:
    """Rule once: that this transaction has made the operation is looked up, not read from the setting."""
    shop = Shop(postgresql_url, rule="once")
    prepare(shop.connection, rule="once")
    shop.require(HMAC)
    shop.write(HMAC.sign(stamp(5, 1, NAME)))
    with pytest.raises(DuplicateStamp):
        shop.write(stamp(5, 2, NAME))
    with pytest.raises(psycopg.Error) as told, shop.connection.transaction():
        _by_hand(shop.connection, "#|public.orders/orders/1", "#/orders/1", f"# {stamp(5, 2, NAME)}")
        shop.connection.execute(WRITE)
    assert told.value.sqlstate == "ZF002"
    assert shop.total() == 10
    shop.connection.close()


@pytest.mark.parametrize("isolation", list(IsolationLevel)[1:], ids=lambda level: level.name)
def test_proofs_at_every_isolation_level(postgresql_url: str, isolation: IsolationLevel) -> None:
    shop = Shop(postgresql_url, epoch="epoch")
    prepare(shop.connection, epoch="epoch")
    shop.require(HMAC)
    shop.connection.isolation_level = isolation
    for token in (5, 6):
        shop.write(HMAC.sign(stamp(token, 1, NAME)))
        shop.write(stamp(token, 2, NAME))
    with pytest.raises(ForgedStamp):
        shop.write(HUGE)
    assert (shop.total(), shop.value("SELECT min(epoch) FROM orders WHERE grp = 1")) == (40, 6)
    shop.connection.close()


def test_a_lease_goes_on_without_proofs_once_it_is_announced(shop: Shop) -> None:
    """And writes nothing but the rows: its mark is only locked."""
    shop.require(HMAC)
    with fenced.Client("memory:") as client, client.hold(NAME) as lease:
        shop.guard.announce(shop.connection, HMAC.sign(lease.announcement()))
        before = shop.value(f"SELECT xmin::text FROM {LAST}")
        shop.write(lease)
        assert shop.value(f"SELECT xmin::text FROM {LAST}") == before

        async def suspending() -> None:
            connection = await asyncpg.connect(shop.url)
            guard = fenced.sql.AsyncGuard(table="orders", name="orders/{grp}")
            async with guard.transaction(connection, HMAC.sign(stamp(5, 1, "orders/2", realm=lease.realm))):
                await connection.execute("UPDATE orders SET qty = qty + 1 WHERE grp = 2")
            await connection.close()

        asyncio.run(suspending())
    assert shop.total() == 11


def test_a_write_that_is_let_through_is_recorded_once(shop: Shop) -> None:
    """Proofs do not make the gentle modes refuse, nor ten rows ten records."""
    shop.require(HMAC)
    for mode, statement, verdict in (
        ("shadow", None, "missing"),
        ("shadow", HUGE, "forged"),
        ("enforce", None, "missing"),
    ):
        shop.guard.set_mode(shop.connection, mode)
        before = shop.value("SELECT count(*) FROM fenced_guard.record")
        if statement is None:
            shop.connection.execute(WRITE)
        else:
            shop.write(statement)
        rows = shop.connection.execute("SELECT verdict FROM fenced_guard.record ORDER BY id").fetchall()
        assert rows[before:] == [(verdict,)], mode
    assert (shop.total(), shop.value(f"SELECT count(*) FROM {LAST}")) == (30, 0)


def _believing(shop: Shop) -> int:
    """How many triggers let rows pass by what the setting says."""
    looks = "pg_get_triggerdef(t.oid) LIKE '%current_setting%' OR p.prosrc LIKE '%current_setting%'"
    return int(
        shop.value(f"SELECT count(*) FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid WHERE {looks}")
    )


def test_keys_come_and_go(shop: Shop) -> None:
    new = HmacKey("shop-2", b"n" * 32)
    with pytest.raises(Misconfigured, match="no key"):
        step(shop.keys.require_proofs(True))
    before = _believing(shop)
    shop.require(HMAC)
    assert before == 3 and _believing(shop) == 0
    with pytest.raises(Misconfigured, match="last key"):
        step(shop.keys.revoke_key(HMAC.id))
    step(shop.keys.add_key(new))
    shop.write(HMAC.sign(stamp(5, 1, NAME)))
    shop.write(new.sign(stamp(6, 1, NAME)))
    step(shop.keys.revoke_key(HMAC.id))
    with pytest.raises(ForgedStamp):
        shop.write(HMAC.sign(stamp(7, 1, NAME)))
    shop.write(new.sign(stamp(7, 1, NAME)))
    for wrong in (HMAC, new):
        with pytest.raises(Misconfigured, match="take another id"):
            step(shop.keys.add_key(wrong))
    with pytest.raises(Misconfigured, match="no live key"):
        step(shop.keys.revoke_key(HMAC.id))
    off_curve = next(y for y in range(2, 100) if not _is_point(shop, y.to_bytes(32, "little")))
    with pytest.raises(Misconfigured, match="valid public key"):
        step(shop.keys.add_key(Ed25519Public("k", off_curve.to_bytes(32, "little"))))
    step(shop.keys.require_proofs(False))
    assert _believing(shop) == before
    told = [line for line in shop.history() if line[0] in ("key added", "key revoked", "proofs")]
    assert told == [
        ("key added", {"key": "shop-1", "kind": "hmac"}),
        ("proofs", {"before": False, "after": True}),
        ("key added", {"key": "shop-2", "kind": "hmac"}),
        ("key revoked", {"key": "shop-1"}),
        ("proofs", {"before": True, "after": False}),
    ]
    assert [(one.id, one.kind, one.revoked is None) for one in step(shop.keys.keys())] == [
        ("shop-1", "hmac", False),
        ("shop-2", "hmac", True),
    ]


def _is_point(shop: Shop, point: bytes) -> bool:
    return shop.connection.execute("SELECT fenced_guard.ed25519_x(%s)", (point,)).fetchone() != (None,)


def test_requiring_proofs_does_not_keep_writers_waiting(shop: Shop) -> None:
    """All tables or none: one that is busy for too long, and nothing has changed."""
    step(shop.keys.add_key(HMAC))
    shop.connection.execute("CREATE TABLE busy (id int)")
    fenced.sql.Guard(table="busy", name="busy").install(shop.connection)
    with shop.connect() as writer, writer.transaction():
        writer.execute("LOCK TABLE orders IN ROW EXCLUSIVE MODE")  # as a long transaction that writes
        with pytest.raises(Contended):
            step(shop.keys.require_proofs(True))
    assert _believing(shop) == 6 and shop.value("SELECT NOT proof FROM fenced_guard.trust")


def test_keys_by_command(shop: Shop, tmp_path: Path) -> None:
    secret, public = tmp_path / "secret", tmp_path / "public"
    secret.write_text(HMAC.secret.hex())
    public.write_text(SIGNER.public().public.hex())

    def run(*words: str) -> str:
        done = CliRunner().invoke(key_command, [words[0], shop.url, *words[1:]], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    run("add", "shop-1", "--hmac-file", str(secret))
    run("add", "partner-1", "--ed25519-public-file", str(public))
    run("require", "on")
    shop.write(SIGNER.sign(stamp(5, 1, NAME)))
    run("revoke", "shop-1")
    listed = run("list", "--json")
    assert [(one["id"], one["revoked"] is None) for one in json.loads(listed)] == [
        ("shop-1", False),
        ("partner-1", True),
    ]
    assert "partner-1" in run("list")
    assert HMAC.secret.hex() not in listed + run("list") + json.dumps(shop.history())
    with pytest.raises(ForgedStamp):
        shop.write(HMAC.sign(stamp(6, 1, NAME)))
    run("require", "off")
    shop.write(stamp(6, 1, NAME))


def test_jumps_are_measured_from_the_highest_mark(shop: Shop) -> None:
    """Tokens are one stream for all names: one that was idle jumps far, and is no forgery."""
    step(PostgresqlOperator(PsycopgSession(shop.connection)).trust({"max_jump": 1000}))
    shop.write(stamp(80_000, 1, NAME))  # the first mark of all: there is nothing to compare with
    for token, name in ((80_500, "orders/2"), (81_500, "orders/3"), (82_400, NAME), (81_900, "orders/2")):
        shop.write(stamp(token, 1, name), f"UPDATE orders SET qty = 1 WHERE grp = {name[-1]}")
    for token in (83_401, TOKEN_MAX):
        with pytest.raises(
            ForgedStamp, match=rf"token {token} is more than max_jump \(1000\) above .* 82400; .*trust"
        ):
            shop.write(stamp(token, 1, "orders/4"))
    shop.connection.execute("SELECT fenced_guard.reset('orders/1', 'a test')")
    with pytest.raises(ForgedStamp):  # 81,900 is the highest now
        shop.write(stamp(83_000, 1, "orders/4"))
    shop.write(stamp(82_900, 1, "orders/4"), "UPDATE orders SET qty = 1 WHERE grp = 4")


def test_beside_its_authority_a_guard_looks_the_last_token_up(shop: Shop) -> None:
    with fenced.Client(shop.url) as client:
        with client.hold(NAME) as lease:
            for above in (lease.token + 1, TOKEN_MAX):
                with pytest.raises(ForgedStamp, match=f"has minted, {lease.token}$"):
                    shop.write(stamp(above, 1, NAME, realm=lease.realm))
            shop.write(lease)
        shop.connection.execute("SELECT fenced.raise_floor(id, 5000) FROM fenced.namespace")
        with client.hold(NAME) as lease:
            assert lease.token > 5000
            # A snapshot from before the floor rose would take it for a forgery; it is announced on its own first.
            shop.connection.isolation_level = IsolationLevel.REPEATABLE_READ
            shop.write(lease)
    with fenced.Client(shop.url, namespace="other") as client, client.hold("orders/2") as lease:
        shop.guard.adopt(shop.connection, lease.realm)
        shop.write(lease, "UPDATE orders SET qty = 1 WHERE grp = 2")
    # Of no authority in this database: nothing is known about its tokens.
    shop.guard.adopt(shop.connection, REALM)
    shop.write(stamp(TOKEN_MAX - 1, 1, "orders/3"), "UPDATE orders SET qty = 1 WHERE grp = 3")


def test_a_schema_of_somebody_else_is_not_looked_at(shop: Shop, postgresql_server: PostgresqlServer) -> None:
    """Whoever may create a schema must not have code run with the guard's rights."""
    role = f"mallory_{postgresql_server.create_database()}"
    database = role.removeprefix("mallory_")
    postgresql_server.drop_database(database)
    shop.connection.execute(
        f"CREATE ROLE {role}; GRANT CREATE ON DATABASE {shop.connection.info.dbname} TO {role}"
    )
    try:
        shop.connection.execute(
            f"SET ROLE {role}; CREATE SCHEMA fenced; CREATE SEQUENCE fenced.token;"
            "CREATE FUNCTION fenced.trap() RETURNS text LANGUAGE plpgsql AS "
            "$$BEGIN RAISE EXCEPTION 'run as %', current_user; END$$;"
            "CREATE VIEW fenced.namespace AS SELECT fenced.trap() AS realm, 0::bigint AS floor; RESET ROLE"
        )
        shop.write(stamp(5, 1, NAME))
        with (
            pytest.raises(Misconfigured, match="same owner"),
            shop.guard.transaction(shop.connection, stamp(5, 2, NAME), still_held=True),
        ):
            pass
    finally:
        shop.connection.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")
    assert shop.total() == 10


@pytest.fixture
def stranger(shop: Shop, postgresql_server: PostgresqlServer) -> Iterator[Connection]:
    """A role that may connect, and no more."""
    role = f"stranger_{secrets.token_hex(4)}"
    postgresql_server.execute(f"CREATE ROLE {role} LOGIN")
    with psycopg.connect(shop.url.replace("postgres@", f"{role}@"), autocommit=True) as connection:
        yield connection
    shop.connection.execute(f"DROP OWNED BY {role} CASCADE".encode())
    postgresql_server.execute(f"DROP ROLE {role}")


def test_a_role_that_may_only_connect_keeps_nobody_out(shop: Shop, stranger: Connection) -> None:
    """It knows the holder's stamp, which is no secret. It gets no lock of a mark, in whatever way it asks."""
    shop.require(HMAC)
    shop.write(HMAC.sign(stamp(5, 1, NAME)))
    lines = (
        f"\\n' || pg_current_xact_id() || '/{NAME}\\n' || pg_current_xact_id() || ' {stamp(5, 1, NAME)}\\n"
    )
    attempts = [
        f"SELECT fenced_guard.announce('{stamp(5, 2, NAME)}')",
        f"SELECT fenced_guard.announce('{stamp(5, 2, NAME)}', p_guard => 'public.orders', p_exclusive => true)",
        f"SELECT fenced_guard.announce('{stamp(5, 2, NAME)}', p_names => '{NAME}')",
        f"SELECT fenced_guard.announce('{stamp(6, 2, NAME)}', p_proofs => '{HMAC.sign(stamp(5, 2, NAME)).text}')",
        f"SELECT fenced_guard.announce_alone('{stamp(5, 2, NAME)}')",
        f"SELECT set_config('fenced.stamp', E'{lines}', true), fenced_guard.decide('public.orders', '{NAME}')",
        f"SELECT fenced_guard.peek('{NAME}')",
    ]
    with stranger.transaction():
        for attempt in attempts:
            with pytest.raises(psycopg.errors.InsufficientPrivilege), stranger.transaction():
                stranger.execute(attempt.encode())
        for ask in ("in_the_way(%s, NULL, 9000)", "make_way(%s, NULL, 9000, NULL)"):
            found = stranger.execute(f"SELECT * FROM fenced_guard.{ask}".encode(), [str(HUGE)]).fetchall()
            assert found in ([], [("",)])
        shop.connection.execute("SET lock_timeout = '2s'")
        shop.write(HMAC.sign(stamp(6, 1, NAME)))  # while the stranger's transaction is still open
    assert shop.total() == 20


def test_a_role_that_may_only_connect_leaves_no_record(shop: Shop, stranger: Connection) -> None:
    """Nor does it learn the realm or the holder from what it is told, also where no proofs are required."""
    shop.guard.set_mode(shop.connection, "shadow")
    shop.write(stamp(5, 1, NAME))
    shop.guard.set_mode(shop.connection, "require")
    told = []
    for stamped in (stamp(4, 1, NAME), stamp(5, 1, NAME, realm="f" * 16)):
        with pytest.raises(psycopg.DatabaseError) as caught:
            stranger.execute("SELECT fenced_guard.announce(%s, p_guard => 'public.orders')", [str(stamped)])
        told.append(f"{caught.value} {caught.value.diag.message_detail}")
    assert stamp(5).grant not in told[0] and REALM not in told[1]
    shop.require(HMAC)
    before = shop.value("SELECT last_value FROM fenced_guard.record_id")
    for call in (
        f"announce('{stamp(4, 1, NAME)}')",
        "announce('no stamp')",
        f"decide('public.orders', '{NAME}')",
        f"announce('{stamp(5, 1, NAME, realm='f' * 16)}')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stranger.execute(f"SELECT fenced_guard.{call}".encode())
    assert shop.value("SELECT last_value FROM fenced_guard.record_id") == before


def test_a_planted_bug_takes_everybody_for_a_writer(shop: Shop, stranger: Connection) -> None:
    wrong = (("RETURN has_function_privilege", "RETURN true OR has_function_privilege"),)
    shop.connection.execute(changed(functions()["may_write"], wrong, "everybody").encode())
    with pytest.raises(pytest.fail.Exception):
        test_a_role_that_may_only_connect_keeps_nobody_out(shop, stranger)


def test_roles_with_a_way_to_write_count_as_writers(shop: Shop, stranger: Connection) -> None:
    """Whoever may write the table or a column of it, a member of such a role, or one that the operator names."""
    role, guard = stranger.info.user, fenced.sql.Guard(table="orders", name="orders/{grp}")
    shop.require(HMAC)
    shop.write(HMAC.sign(stamp(5, 1, NAME)))
    refused = pytest.raises(Misconfigured, match="may write no guarded table")

    def announces() -> None:
        with guard.transaction(stranger, stamp(5, 2, NAME)):
            pass

    for grant in (
        "UPDATE (qty) ON orders",
        "DELETE ON orders",
        "EXECUTE ON FUNCTION fenced_guard.writer()",
    ):
        with refused:
            announces()
        shop.connection.execute(f"GRANT {grant} TO {role}".encode())
        announces()
        shop.connection.execute(f"REVOKE {grant} FROM {role}".encode())
    with guard.transaction(stranger, HMAC.sign(stamp(6, 1, NAME))):  # proven
        pass
    shop.connection.execute(f"GRANT SELECT ON orders TO {role}".encode())
    with refused:
        announces()
    mark = guard.peek(stranger, NAME)
    assert mark is not None and mark.token == 6


def test_reset_frees_a_name_that_was_poisoned(shop: Shop) -> None:
    """Without any protection an invented token wedges its name, and this is the way out."""
    shop.write(stamp(5, 1, NAME))
    shop.write(HUGE)
    with pytest.raises(StaleToken):
        shop.write(stamp(6, 1, NAME))
    operator = PostgresqlOperator(PsycopgSession(shop.connection))
    assert step(operator.reset(NAME, "an invented token")) == TOKEN_MAX
    shop.write(stamp(6, 1, NAME))
    what, detail = shop.history()[-1]
    assert (what, detail["token"], detail["why"]) == ("reset", TOKEN_MAX, "an invented token")
    assert shop.total() == 30


# RFC 8032, section 7.1, tests 1 to 3: public key, message, signature in two halves
VECTORS = """
d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a -
e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155
5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b
3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c 72
92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da
085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00
fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025 af82
6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac
18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a
""".split()
ORDER = 2**252 + 27742317777372353535851937790883648493
SMALL = [0, 1, 2**255 - 20, 2707385501144840649318225287225658788936804267575313519463743609750303402022]


class Checker:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def __call__(self, public: bytes, message: bytes, signature: bytes) -> bool:
        call = "SELECT fenced_guard.ed25519_verifies(%s, %s, %s)"
        row = self.connection.execute(call, (public, message, signature)).fetchone()
        assert row is not None
        return bool(row[0])


def test_ed25519_in_sql_agrees_with_the_rfc_and_the_library(shop: Shop) -> None:
    verifies, rng = Checker(shop.connection), random.Random(8032)
    for at in range(0, len(VECTORS), 4):
        public, message, *signature = VECTORS[at : at + 4]
        assert verifies(
            bytes.fromhex(public), bytes.fromhex(message.strip("-")), bytes.fromhex("".join(signature))
        )
    for _ in range(25):
        private = ed25519.Ed25519PrivateKey.from_private_bytes(rng.randbytes(32))
        public_bytes, message_bytes = (
            private.public_key().public_bytes_raw(),
            rng.randbytes(rng.randrange(200)),
        )
        signed = private.sign(message_bytes)
        assert verifies(public_bytes, message_bytes, signed)
        for part, bits in ((public_bytes, 1), (message_bytes, 1), (signed, 2)):
            for _ in range(bits if part else 0):
                bit = rng.randrange(8 * len(part))
                wrong = bytearray(part)
                wrong[bit // 8] ^= 1 << bit % 8
                told = tuple(
                    bytes(wrong) if one is part else one for one in (public_bytes, message_bytes, signed)
                )
                assert not verifies(*told)


def test_ed25519_in_sql_is_strict(shop: Shop) -> None:
    """Other ways to write the same signature, and keys for which anybody could sign."""
    verifies = Checker(shop.connection)
    private = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    public, message = private.public_key().public_bytes_raw(), b"message"
    signature = private.sign(message)
    s = int.from_bytes(signature[32:], "little")
    for times in range(1, 9):
        assert not verifies(public, message, signature[:32] + (s + times * ORDER).to_bytes(32, "little"))
    assert not verifies(
        ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw(), message, signature
    )
    for wrong in (b"", signature[:32], signature[:63], signature + b"\0"):
        assert not verifies(public, message, wrong)
    # With the neutral point as key, R = S * B for every message: here S = 0, and S of the signature above.
    for y in SMALL:
        for sign in (0, 1):
            for written in (y, y + 2**255 - 19):
                if written < 2**255:
                    point = (written | sign << 255).to_bytes(32, "little")
                    assert not verifies(point, message, (1).to_bytes(32, "little") + bytes(32))
                    assert not verifies(point, message, signature)
                    assert not verifies(public, message, point + signature[32:])


def test_hmac_in_sql_is_hmac(shop: Shop) -> None:
    """RFC 4231, cases 1, 2 and 6: a short key, a shorter one, one longer than a block."""
    for key, message, mac in (
        (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        (
            b"Jefe",
            b"what do ya want for nothing?",
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
        ),
        (
            b"\xaa" * 131,
            b"Test Using Larger Than Block-Size Key - Hash Key First",
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
        ),
    ):
        row = shop.connection.execute("SELECT fenced_guard.hmac_sha256(%s, %s)", (key, message)).fetchone()
        assert row == (bytes.fromhex(mac),)
