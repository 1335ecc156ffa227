"""What an operator sees and does with the guards of a MariaDB database, and what the traits promise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest

import fenced
from fenced.client import registry
from fenced.errors import (
    Contended,
    ForeignRealm,
    ForgedStamp,
    LeaseLost,
    Misconfigured,
    Misuse,
    StaleToken,
    Unsupported,
)
from fenced.proofs import Ed25519Public, HmacKey
from fenced.runtime.blocking import step
from fenced.sql import Guard
from fenced.testing.kit import REALM, stamp
from fenced.values.contracts import Operator
from fenced.values.model import Credential
from fenced.values.rollout import DatabaseStatus, GuardStatus
from fenced_testkit.servers import MariadbServer

ORDERS = Guard(table="orders", name="orders/{id}")
ED25519 = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
UPDATE = "UPDATE orders SET qty = qty + 1 WHERE id = 42"


def connected(server: MariadbServer, database: str, **options: Any) -> Any:
    where: dict[str, Any] = {"host": server.host, "port": server.port, "user": "root", "autocommit": True}
    return pymysql.connect(**{**where, **options}, database=database)


def run(db: Any, *statements: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    with db.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
            rows = list(cursor.fetchall())
    return rows


@pytest.fixture
def database(mariadb_server: MariadbServer) -> str:
    return mariadb_server.create_database()


@pytest.fixture
def db(mariadb_server: MariadbServer, database: str) -> Iterator[Any]:
    with connected(mariadb_server, database) as connection:
        run(connection, "CREATE TABLE orders (id int PRIMARY KEY, qty int) ENGINE = InnoDB")
        run(connection, "INSERT INTO orders VALUES (42, 0), (43, 0)")
        ORDERS.install(connection)
        yield connection


@pytest.fixture
def operator(mariadb_server: MariadbServer, database: str, db: Any) -> Iterator[Operator]:
    url = mariadb_server.url(database, scheme="mysql")
    engine = registry.engine(url)
    connection = engine.connect(url)
    yield engine.operator(connection)
    connection.close()


def write(db: Any, token: int, *, seq: int = 1) -> None:
    with ORDERS.transaction(db, stamp(token, seq)):
        run(db, UPDATE)


def status(operator: Operator) -> GuardStatus:
    found: DatabaseStatus = step(operator.status("orders", 0.0))
    (guard,) = found.guards
    return guard


def test_status_says_who_writes_without_a_stamp(db: Any, operator: Operator) -> None:
    run(db, UPDATE)
    write(db, 5)
    guard = status(operator)
    assert (guard.guard, guard.template, guard.rule, guard.mandatory) == (
        "orders",
        "orders/{id}",
        "retry",
        True,
    )
    assert (guard.marks, guard.highest, guard.wrong) == (1, 5, ())
    (count,) = guard.counts
    assert (count.verdict, count.ruling, count.mode, count.count) == ("missing", "count", "observe", 1)
    assert (count.who, count.pid, count.pattern) == ("root", db.thread_id(), "*")
    assert count.address == "127.0.0.1"
    (record,) = step(operator.records("orders"))
    assert (record.name, record.verdict.value, record.who) == ("orders/42", "missing", "root")
    database: DatabaseStatus = step(operator.status())
    assert (database.realm, database.doubts) == (REALM, ())


def test_unstamped_writes_are_counted_in_groups(db: Any, operator: Operator) -> None:
    """One record for each connection and second, so that the audit does not grow as fast as the table."""
    for _ in range(200):
        run(db, UPDATE)
    seconds = time.time()
    while int(time.time()) == int(seconds):
        pass
    run(db, UPDATE)
    rows = run(db, "SELECT COUNT(*) FROM fenced_guard.record WHERE scope = DATABASE()")
    assert rows[0][0] < 20
    assert sum(count.count for count in status(operator).counts) == 201


# proves guard mariadb: shell-unrecorded
def test_a_refusal_is_recorded_by_the_wrapper_alone(db: Any, operator: Operator) -> None:
    write(db, 5)
    step(operator.set_mode("orders", "require"))
    with pytest.raises(StaleToken):
        write(db, 4)
    with pytest.raises(pymysql.InternalError):
        run(db, UPDATE)  # as in a shell: the server undoes what the trigger has written
    (record,) = step(operator.records("orders"))
    assert (record.verdict.value, record.ruling.value, record.token, record.mark) == ("stale", "refuse", 4, 5)
    assert status(operator).refused is None, "nobody claims to know how many there were"


def test_the_stages_as_commands(db: Any, operator: Operator) -> None:
    for mode in ("shadow", "canary(5%)", "enforce", "require"):
        step(operator.set_mode("orders", mode))
    step(operator.set_mode("orders", "observe", "orders/4*"))
    assert step(operator.modes("orders")) == {"*": "require", "orders/4*": "observe"}
    run(db, UPDATE)
    assert step(operator.unset_mode("orders", "orders/4*"))
    assert not step(operator.unset_mode("orders", "orders/4*"))
    with pytest.raises(pymysql.InternalError):
        run(db, UPDATE)
    with pytest.raises(Misuse):
        step(operator.unset_mode("orders", "*"))
    with pytest.raises(Misconfigured, match="no guard is installed"):
        step(operator.set_mode("other", "observe"))
    changes = step(operator.history("orders"))
    assert [change.what for change in changes] == ["install", *["mode"] * 6]
    assert changes[-1].detail == {"detail": "orders/4*: none"} and changes[0].who.startswith("root@")


def test_an_override_lets_writes_through_and_ends(db: Any, operator: Operator) -> None:
    write(db, 5)
    step(operator.set_mode("orders", "require"))
    made = step(operator.override("orders", "orders/4*", 900.0, "migration 42"))
    assert made.who.startswith("root@") and made.why == "migration 42"
    run(db, UPDATE)
    write(db, 4)
    assert [override.why for override in status(operator).overrides] == ["migration 42"]
    modes = [(count.verdict, count.mode) for count in status(operator).counts]
    assert sorted(modes) == [("missing", "override"), ("stale", "override")]
    assert step(operator.end_overrides("orders", None)) == 1
    with pytest.raises(StaleToken):
        write(db, 4)
    step(operator.override("orders", "*", 1.0, "a second"))
    write(db, 4)
    time.sleep(1.1)
    with pytest.raises(StaleToken):
        write(db, 4)
    assert step(operator.end_overrides("orders", None)) == 0


def test_resetting_and_dropping_marks(db: Any, operator: Operator) -> None:
    write(db, 5)
    step(operator.set_mode("orders", "enforce"))
    assert step(operator.reset("orders/42", "a test")) == 5
    assert step(operator.reset("orders/42", "a test")) is None
    write(db, 4)
    with pytest.raises(Misconfigured, match="do not trust"):
        step(operator.drop_marks("00000000000000bb", 5))
    assert step(operator.drop_marks(REALM, 5)) == 1
    with pytest.raises(StaleToken):
        write(db, 4)
    write(db, 5)
    assert step(operator.extent()) == (1, 5)


def test_adopting_another_authority(db: Any, operator: Operator) -> None:
    step(operator.set_mode("orders", "enforce"))
    write(db, 5)
    step(operator.adopt("00000000000000bb"))
    with pytest.raises(ForeignRealm, match="00000000000000bb"):
        write(db, 5, seq=2)


def test_tidying(db: Any, operator: Operator) -> None:
    write(db, 5)
    for _ in range(5):
        write(db, 4)
    assert step(operator.tidy(2))["summed"] == 3
    assert step(operator.tidy(2))["summed"] == 0
    assert sum(count.count for count in status(operator).counts) == 5
    assert len(step(operator.records("orders"))) == 2


def test_a_wrong_installation_is_reported(db: Any, operator: Operator, database: str) -> None:
    run(db, "DROP TRIGGER fenced_orders_update")
    assert status(operator).wrong == ("trigger fenced_orders_update is missing: install the guard again",)
    ORDERS.install(db)
    assert status(operator).wrong == ()
    run(db, "CREATE TABLE parent (id int PRIMARY KEY) ENGINE = InnoDB", "DELETE FROM orders")
    run(
        db, "ALTER TABLE orders ADD CONSTRAINT late FOREIGN KEY (id) REFERENCES parent (id) ON DELETE CASCADE"
    )
    assert status(operator).wrong == ("foreign key late (ON DELETE CASCADE, of parent)",)
    run(db, "RENAME TABLE orders TO gone")
    assert "the table was dropped or renamed" in status(operator).wrong


# proves guard mariadb: privileged-bypass
def test_roles_that_can_bypass_the_guard_are_reported(
    db: Any, operator: Operator, database: str, mariadb_server: MariadbServer
) -> None:
    user = f"all_{database[-8:]}"
    run(db, f"CREATE USER {user}@'%'", f"GRANT ALL ON `{database}`.* TO {user}@'%'")
    run(db, f"GRANT EXECUTE ON fenced_guard.* TO {user}@'%'")
    step(operator.set_mode("orders", "require"))
    (found,) = (who for who in status(operator).bypass if user in who)
    assert found == f"'{user}'@'%' (may rename the table, may truncate the table, may drop the triggers)"
    with connected(mariadb_server, database, user=user) as writer:
        with pytest.raises(pymysql.InternalError):
            run(writer, "DELETE FROM orders WHERE id = 43")
        write(writer, 7)
        # Variables that are set by hand: only as long as the mark stands.
        lines = f"'\\n{database}/orders/42\\tA\\t7\\t{7:032x}\\t0\\t-\\n'"
        run(writer, f"SET @fenced_lines = {lines}", UPDATE)
        write(db, 8)
        with pytest.raises(pymysql.InternalError, match="is stale"):
            run(writer, f"SET @fenced_lines = {lines}", UPDATE)
        run(writer, "SET @fenced_lines = NULL", "TRUNCATE TABLE orders")
    assert run(db, "SELECT COUNT(*) FROM orders") == [(0,)]


# proves guard mariadb: durable-marks
def test_marks_and_rows_are_one_transaction(db: Any, operator: Operator, database: str) -> None:
    """In one engine that logs both, and syncs its log before COMMIT is answered."""
    engines = run(
        db, "SELECT DISTINCT ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = 'fenced_guard'"
    )
    assert engines == [("InnoDB",)]
    assert run(db, "SELECT @@innodb_flush_log_at_trx_commit") == [(1,)]
    try:
        run(db, "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        found: DatabaseStatus = step(operator.status())
        assert found.doubts == (
            "a crash loses the last marks and writes (my.cnf: innodb_flush_log_at_trx_commit = 1)",
        )
    finally:
        run(db, "SET GLOBAL innodb_flush_log_at_trx_commit = 1")


# proves guard mariadb: mandatory
def test_a_plain_program_goes_on_in_the_first_four_stages(db: Any, operator: Operator) -> None:
    for mode in ("observe", "shadow", "canary(50%)", "enforce"):
        step(operator.set_mode("orders", mode))
        run(db, UPDATE)
    step(operator.set_mode("orders", "require"))
    with pytest.raises(pymysql.InternalError, match="carries no stamp"):
        run(db, UPDATE)
    assert run(db, "SELECT qty FROM orders WHERE id = 42") == [(4,)]


# proves guard mariadb: modes-wait
@pytest.mark.parametrize("stamped", [True, False])
def test_a_mode_waits_for_open_transactions(
    stamped: bool, db: Any, operator: Operator, database: str, mariadb_server: MariadbServer
) -> None:
    """The change is made after them, and never beside them."""
    with connected(mariadb_server, database) as other:
        if stamped:
            run(other, "START TRANSACTION")
            ORDERS.announce_within(other, stamp(5))
        else:
            run(other, "START TRANSACTION", UPDATE)
        with pytest.raises(Contended, match="nothing was changed"):
            step(operator.set_mode("orders", "require", wait=0.0))
        assert step(operator.modes("orders")) == {"*": "observe"}
        waiting = threading.Thread(target=lambda: step(operator.set_mode("orders", "require", wait=30.0)))
        waiting.start()
        if stamped:
            run(other, UPDATE)
        run(other, "COMMIT")
        waiting.join()
    with pytest.raises(pymysql.InternalError, match="carries no stamp"):
        run(db, UPDATE)
    assert run(db, "SELECT qty FROM orders WHERE id = 42") == [(1,)]


# proves guard mariadb: waits-for-older
def test_a_holder_that_stops_inside_its_transaction_is_ended(
    db: Any, operator: Operator, database: str, mariadb_server: MariadbServer
) -> None:
    """By the server, when its lease is over; its successor waits until then."""
    step(operator.set_mode("orders", "require"))
    older: Credential = Credential((stamp(5),), left=1.0, lost=lambda: LeaseLost("over", reason="expired"))
    with connected(mariadb_server, database) as other:
        table = ORDERS._on(other)
        step(table.enter(older))
        run(other, UPDATE)
        began = time.monotonic()
        write(db, 6)
        assert time.monotonic() - began > 0.5
        with pytest.raises(pymysql.Error) as error:
            run(other, UPDATE)
        with pytest.raises(LeaseLost, match="nothing of the transaction was committed"):
            step(table.leave(error.value))
    assert run(db, "SELECT qty FROM orders WHERE id = 42") == [(1,)]
    before = run(db, "SELECT @@GLOBAL.wait_timeout")
    write(db, 7)
    assert run(db, "SELECT @@SESSION.wait_timeout") == before


def test_observing_never_waits_for_a_mark(
    db: Any, operator: Operator, database: str, mariadb_server: MariadbServer
) -> None:
    """Nor for a longer time than MySQL's shortest timeout. What it could not judge is let through."""
    with connected(mariadb_server, database) as other:
        run(other, "START TRANSACTION")
        ORDERS.announce_within(other, stamp(5))
        write(db, 6)
        run(db, UPDATE.replace("42", "43"))
        run(other, "COMMIT")
    found = ORDERS.peek(db, "orders/42")
    assert found is not None and found.token == 5, "the other one had the mark"


def test_a_lease_that_is_over_is_refused_by_the_authority_beside_the_guard(
    db: Any, operator: Operator, database: str, mariadb_server: MariadbServer
) -> None:
    """The authority is asked in the same transaction, if it is in the same database."""
    with (
        pytest.raises(Misconfigured, match="same database"),
        ORDERS.transaction(db, stamp(5), still_held=True),
    ):
        raise AssertionError("the block must not run")
    step(operator.set_mode("orders", "require"))
    with fenced.Client(mariadb_server.url(database)) as client:
        lease = client.acquire("orders/42", ttl=60)
        with ORDERS.transaction(db, lease, still_held=True):
            run(db, UPDATE)
        run(db, "START TRANSACTION")
        with ORDERS.announce_within(db, lease, still_held=True):
            run(db, UPDATE)
        run(db, "COMMIT")
        late = lease.next_stamp()
        lease.release()
        with pytest.raises(LeaseLost), ORDERS.transaction(db, late, still_held=True):
            raise AssertionError("the block must not run")
        with ORDERS.transaction(db, late):  # nobody has overtaken it
            run(db, UPDATE)
    assert run(db, "SELECT qty FROM orders WHERE id = 42") == [(3,)]


def test_keys_are_listed_and_revoked(db: Any, operator: Operator) -> None:
    key, longer = HmacKey("shop-1", b"k" * 32), HmacKey("shop-2", b"o" * 100)
    with pytest.raises(Misuse, match="add one first"):
        step(operator.require_proofs(True))
    for each in (key, longer):
        step(operator.add_key(each))
    with pytest.raises(Misuse, match="already"):
        step(operator.add_key(key))
    with pytest.raises(Unsupported, match="Ed25519"):
        step(operator.add_key(Ed25519Public("shop-3", bytes.fromhex(ED25519))))
    step(operator.set_mode("orders", "require"))
    step(operator.require_proofs(True))
    for token, signer in ((5, key), (6, longer)):
        with ORDERS.transaction(db, signer.sign(stamp(token))):
            run(db, UPDATE)
    for wrong in (
        stamp(7),
        HmacKey("shop-1", b"x" * 32).sign(stamp(7)),
        HmacKey("shop-9", b"k" * 32).sign(stamp(7)),
    ):
        with pytest.raises(ForgedStamp), ORDERS.transaction(db, wrong):
            raise AssertionError("the block must not run")
    step(operator.revoke_key("shop-1"))
    with pytest.raises(ForgedStamp), ORDERS.transaction(db, key.sign(stamp(7))):
        raise AssertionError("the block must not run")
    with pytest.raises(Misuse, match="no key shop-1"):
        step(operator.revoke_key("shop-1"))
    assert [(view.id, view.kind, view.revoked is None) for view in step(operator.keys())] == [
        ("shop-1", "hmac", False),
        ("shop-2", "hmac", True),
    ]
    found: DatabaseStatus = step(operator.status())
    assert found.proof
    step(operator.require_proofs(False))
    write(db, 7)


def test_a_missing_ability_is_unsupported(db: Any, operator: Operator) -> None:
    for call in (operator.trust({"max_jump": 5.0}), operator.grant_monitor("x")):
        with pytest.raises(Unsupported, match="a MariaDB guard has no"):
            step(call)
