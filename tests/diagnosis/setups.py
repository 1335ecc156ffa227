"""Set-ups of an authority and a guard, on real servers, each broken in one way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
from click.testing import CliRunner

import fenced
from fenced.cli import app
from fenced.client import registry
from fenced.proofs import HmacKey
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.sql import Guard
from fenced.testing.kit import stamp
from fenced.values.model import Standing
from fenced_testkit.servers import PostgresqlServer, RedisServer

ORDERS = Guard(table="orders", name="orders/{id}")
READER = "doctor"
"""The role that doctor uses: it may read what operators read, and every transaction of it is read-only."""
_numbers = itertools.count(1)


@dataclass
class Servers:
    """What the set-ups run on."""

    postgresql: PostgresqlServer
    redis: RedisServer
    folder: Path
    new_database: Callable[..., str]
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @cached_property
    def authority(self) -> str:
        """The address of one database with leases, as the reader."""
        name = self.postgresql.create_database()
        self.undo.callback(self.postgresql.discard_database, name)
        opened(self.postgresql.url(name))
        self.postgresql.execute(f"GRANT USAGE ON SCHEMA fenced TO {READER}", name)
        return self.postgresql.url(name, READER)

    def owner(self, url: str) -> str:
        return url.replace(f"//{READER}@", "//postgres@")

    def role(self, options: str = "") -> str:
        name = f"app_{next(_numbers)}_{os.getpid()}"
        self.postgresql.execute(f"CREATE ROLE {name} LOGIN {options}")
        # It may own a table.
        self.undo.callback(self.postgresql.execute, f"ALTER ROLE {name} NOSUPERUSER NOLOGIN")
        return name


@dataclass
class Setup:
    """What doctor is asked about, and what it should say."""

    servers: Servers
    authorities: list[str] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    namespace: str = field(default_factory=lambda: f"shop-{next(_numbers)}")

    # Making one that is sound.

    def leases(self) -> Setup:
        opened(self.servers.owner(self.servers.authority), self.namespace)
        self.authorities.append(self.servers.authority)
        return self

    def table(self, mode: str = "require") -> Setup:
        """A guarded table that has been written to, if there is an authority by now."""
        url = self.servers.new_database(_table)
        with psycopg.connect(url, autocommit=True) as db:
            ORDERS.set_mode(db, mode)
        self.guards.append(url.replace("//postgres@", f"//{READER}@"))
        if self.authorities:
            self.write()
        return self

    def file(self, folder: Path | None = None) -> Setup:
        """Leases in a file of SQLite."""
        path = (folder or self.servers.folder) / f"leases-{next(_numbers)}.db"
        self.authorities.append(f"sqlite:///{path}")
        opened(self.authorities[-1], self.namespace)
        return self

    def rows(self, folder: Path | None = None) -> Setup:
        """A guarded table of SQLite."""
        path = (folder or self.servers.folder) / f"shop-{next(_numbers)}.db"
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
            ORDERS.install(db, mode="require")
            with (
                self.client() as client,
                client.hold("orders/1") as lease,
                ORDERS.transaction(db, lease) as tx,
            ):
                tx.execute("INSERT INTO orders VALUES (1, 10)")
        self.guards.append(f"sqlite:///{path}")
        return self

    def values(self, url: str) -> Setup:
        """Small values behind a cooperative guard."""
        guard = registry.guard(url, BlockingRuntime())
        step(guard.open())
        with fenced.Values(url) as values, self.client() as client, client.hold("orders/1") as lease:
            values.write(lease, "orders/1", b"10")
        step(guard.close())
        self.guards.append(url)
        return self

    # What happens to it.

    def client(self) -> fenced.Client:
        url = self.servers.owner(self.authorities[0])
        return fenced.Client(url, namespace=self.namespace, guarantee="best-effort")

    @property
    def guard(self) -> str:
        """The address of the guard, as the owner."""
        return self.servers.owner(self.guards[0])

    def write(self) -> None:
        with (
            self.client() as client,
            self.db() as db,
            client.hold("orders/1") as lease,
            ORDERS.transaction(db, lease) as tx,
        ):
            tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 1")

    @contextlib.contextmanager
    def db(self, application: str = "shop") -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.guard, autocommit=True, application_name=application) as db:
            yield db

    def sql(self, *statements: str) -> Setup:
        with self.db() as db:
            for statement in statements:
                db.execute(statement)
        return self

    def fenced(self, *words: str) -> Setup:
        ended = CliRunner().invoke(app, list(words))
        assert ended.exit_code == 0, ended.output
        return self

    def doctor(self, *options: str) -> tuple[int, str]:
        """Its exit status and what it printed."""
        words = ["doctor", *self.authorities, "--namespace", self.namespace, *self.options, *options]
        for guard in self.guards:
            words += ["--guard", guard]
        ended = CliRunner().invoke(app, words, standalone_mode=False)
        assert ended.exception is None, ended.exc_info
        assert isinstance(ended.return_value, int)
        return ended.return_value, ended.output

    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.doctor("--json")[1]))


def opened(url: str, namespace: str = "default") -> Standing:
    authority = registry.authority(url, BlockingRuntime(), namespace)
    try:
        return step(authority.open())
    finally:
        step(authority.close())


def _table(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE orders (id integer PRIMARY KEY, qty integer NOT NULL)")
    db.execute("INSERT INTO orders SELECT i, 10 FROM generate_series(1, 9) AS i")
    ORDERS.install(db, mode="require")
    db.execute(f"SELECT fenced_guard.grant_monitor('{READER}')")


def _partitions(db: psycopg.Connection[Any]) -> None:
    db.execute("CREATE TABLE orders (id integer PRIMARY KEY, qty integer NOT NULL) PARTITION BY RANGE (id)")
    db.execute("CREATE TABLE orders_low PARTITION OF orders FOR VALUES FROM (0) TO (100)")
    db.execute("INSERT INTO orders VALUES (1, 10)")
    ORDERS.install(db, mode="require")
    db.execute(f"SELECT fenced_guard.grant_monitor('{READER}')")


# Sound ones.

Make = Callable[[Servers], Setup]
SOUND: dict[str, Make] = {}
BROKEN: dict[str, tuple[str, str, Make]] = {}
"""By what is broken: the finding, the letter, and how it is made."""


def sound(make: Make) -> Make:
    SOUND[make.__name__] = make
    return make


def broken(check: str, letter: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        BROKEN[make.__name__] = check, letter, make
        return make

    return register


@sound
def table_and_leases_in_postgresql(s: Servers) -> Setup:
    return Setup(s).leases().table()


@sound
def two_guarded_databases(s: Servers) -> Setup:
    setup = Setup(s).leases().table().table()
    setup.write()
    return setup


@sound
def writer_without_rights(s: Servers) -> Setup:
    return Setup(s, options=["--writer", s.role()]).leases().table()


@sound
def partitions(s: Servers) -> Setup:
    setup = Setup(s).leases()
    setup.guards.append(s.new_database(_partitions).replace("//postgres@", f"//{READER}@"))
    setup.write()
    return setup


@sound
def files_of_sqlite(s: Servers) -> Setup:
    return Setup(s).file().rows()


@sound
def ledger_and_table(s: Servers) -> Setup:
    setup = Setup(s, [f"ledger:///{s.folder}/ledger-{next(_numbers)}"])
    opened(setup.authorities[0], setup.namespace)
    return setup.table()


@sound
def leases_in_redis(s: Servers) -> Setup:
    setup = Setup(s, [s.redis.url()])
    opened(setup.authorities[0], setup.namespace)
    return setup.table()


@sound
def signed_stamps(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    with setup.db() as db:
        step(_operator(db).add_key(HmacKey("shop-1", b"k" * 32)))
        step(_operator(db).require_proofs(True))
    return setup


@sound
def a_guard_that_nobody_has_used(s: Servers) -> Setup:
    setup = Setup(s).table()
    return setup.leases()


# Broken ones that operators have seen.


@broken("bypass", "C")
def programs_write_as_superuser(s: Servers) -> Setup:
    return Setup(s, options=["--writer", s.role("SUPERUSER")]).leases().table()


@broken("bypass", "A")
def a_writer_that_is_mistyped(s: Servers) -> Setup:
    return Setup(s, options=["--writer", "ap"]).leases().table()


@broken("bypass", "C")
def programs_own_the_table(s: Servers) -> Setup:
    role = s.role()
    setup = Setup(s, options=["--writer", role]).leases().table()
    return setup.sql(f"ALTER TABLE orders OWNER TO {role}")


@broken("bypass", "C")
def programs_may_add_triggers(s: Servers) -> Setup:
    role = s.role()
    return Setup(s, options=["--writer", role]).leases().table().sql(f"GRANT TRIGGER ON orders TO {role}")


@broken("guard-wrong", "D")
def trigger_disabled(s: Servers) -> Setup:
    return Setup(s).leases().table().sql("ALTER TABLE orders DISABLE TRIGGER fenced_update")


@broken("guard-wrong", "D")
def partition_made_later(s: Servers) -> Setup:
    return partitions(s).sql("CREATE TABLE orders_high PARTITION OF orders FOR VALUES FROM (100) TO (200)")


@broken("stage", "D")
def only_observed(s: Servers) -> Setup:
    return Setup(s).leases().table("observe")


@broken("unstamped-writer", "B")
def a_writer_without_stamp(s: Servers) -> Setup:
    return Setup(s).leases().table("enforce").sql("UPDATE orders SET qty = 1 WHERE id = 3")


@broken("realm", "D")
def guard_of_another_authority(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    other = Setup(s).leases()
    setup.namespace = other.namespace
    return setup


@broken("mark-above-counter", "D")
def dump_of_the_authority_restored(s: Servers) -> Setup:
    name = s.postgresql.create_database()
    setup = Setup(s, [s.postgresql.url(name)])
    opened(setup.authorities[0], setup.namespace)
    copy = s.postgresql.create_database(template=name)
    setup.table()
    setup.authorities = [s.postgresql.url(copy)]
    for database in (name, copy):
        s.undo.callback(s.postgresql.discard_database, database)
    return setup


@broken("override", "D")
def override_left_on(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    words = ["--table", "orders", "--names", "orders/4*", "--for", "15m", "--why", "migration"]
    return setup.fenced("guard", "override", setup.guard, *words)


@broken("tokens-could-repeat", "C")
def leases_in_memory(s: Servers) -> Setup:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    s.undo.callback(shutil.rmtree, folder)
    return Setup(s).file(folder).table()


@broken("tokens-could-repeat", "C")
def redis_syncs_every_second(s: Servers) -> Setup:
    setup = leases_in_redis(s)
    s.redis.execute("CONFIG", "SET", "appendfsync", "everysec")
    s.undo.callback(s.redis.execute, "CONFIG", "SET", "appendfsync", "always")
    return setup


# Broken ones that are on nobody's list.


@broken("authority-stopped", "D")
def file_of_leases_restored(s: Servers) -> Setup:
    setup = Setup(s).file()
    path = Path(setup.authorities[0].removeprefix("sqlite:///"))
    copy = path.with_suffix(".copy")
    with contextlib.closing(sqlite3.connect(path)) as db, contextlib.closing(sqlite3.connect(copy)) as to:
        db.backup(to)
    setup.table()
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    copy.replace(path)
    return setup


@broken("guard-wrong", "D")
def trigger_of_sqlite_dropped(s: Servers) -> Setup:
    setup = Setup(s).file().rows()
    with contextlib.closing(sqlite3.connect(setup.guards[0].removeprefix("sqlite:///"))) as db:
        ((name,), *_) = db.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = 'orders'"
        )
        db.execute(f'DROP TRIGGER "{name}"')
    return setup


@broken("guard-wrong", "D")
def table_that_inherits(s: Servers) -> Setup:
    return Setup(s).leases().table().sql("CREATE TABLE old_orders () INHERITS (orders)")


@broken("guard-wrong", "D")
def table_renamed(s: Servers) -> Setup:
    return Setup(s).leases().table().sql("ALTER TABLE orders RENAME TO sales")


@broken("proofs-without-key", "D")
def the_last_key_revoked(s: Servers) -> Setup:
    setup = signed_stamps(s)
    with setup.db() as db:
        db.execute("UPDATE fenced_guard.key SET revoked = clock_timestamp()")
    return setup


@broken("reused-token", "D")
def one_token_granted_twice(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    with setup.db() as db:
        ORDERS.adopt(db, "00000000000000aa")
        for grant in ("a" * 32, "b" * 32):
            with (
                contextlib.suppress(fenced.Refused),
                ORDERS.transaction(db, stamp(1, 1, "orders/2", grant=grant)) as tx,
            ):
                tx.execute("UPDATE orders SET qty = 1 WHERE id = 2")
        ORDERS.adopt(db, opened(s.owner(s.authority), setup.namespace).realm)
    return setup


@broken("refusal-retried", "A")
def a_refusal_is_tried_again(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    with setup.client() as client, setup.db() as db:
        with client.hold("orders/2") as lease:
            late = lease.next_stamp()
        with client.hold("orders/2") as lease:
            ORDERS.announce(db, lease)
        for _ in range(3):
            with contextlib.suppress(fenced.StaleToken), ORDERS.transaction(db, late):
                raise AssertionError("it is announced first")
    return setup


@broken("marks-could-be-lost", "C")
def marks_in_memory(s: Servers) -> Setup:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    s.undo.callback(shutil.rmtree, folder)
    return Setup(s).leases().rows(folder)


@broken("marks-could-be-lost", "C")
def commits_are_not_awaited(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    return setup.sql(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', "
        "current_database()); END $$"
    )


@broken("marks-could-be-lost", "C")
def a_writer_does_not_await_its_commits(s: Servers) -> Setup:
    role = s.role()
    s.postgresql.execute(f"ALTER ROLE {role} SET synchronous_commit = off")
    s.undo.callback(s.postgresql.execute, f"ALTER ROLE {role} RESET synchronous_commit")
    return Setup(s).leases().table()


@broken("marks-could-be-lost", "C")
def unlogged_marks(s: Servers) -> Setup:
    return Setup(s).leases().table().sql("ALTER TABLE fenced_guard.mark SET UNLOGGED")


@broken("guard-wrong", "D")
def no_trigger_fires_in_this_database(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    return setup.sql(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET session_replication_role = replica', "
        "current_database()); END $$"
    )


@broken("guard-wrong", "D")
def no_trigger_fires_for_a_role(s: Servers) -> Setup:
    role = s.role()
    s.postgresql.execute(f"ALTER ROLE {role} SET session_replication_role = replica")
    s.undo.callback(s.postgresql.execute, f"ALTER ROLE {role} RESET session_replication_role")
    return Setup(s).leases().table().sql(f"GRANT UPDATE ON orders TO {role}")


@broken("same-realm", "C")
def a_copy_of_the_authority(s: Servers) -> Setup:
    setup = Setup(s).file()
    path = Path(setup.authorities[0].removeprefix("sqlite:///"))
    copy = path.with_name(f"copy-{path.name}")
    with contextlib.closing(sqlite3.connect(path)) as db, contextlib.closing(sqlite3.connect(copy)) as to:
        db.backup(to)
    setup.authorities.append(f"sqlite:///{copy}")
    return setup.table()


@broken("not-guarded", "D")
def no_guard_there(s: Servers) -> Setup:
    setup = Setup(s).leases()
    setup.guards.append(s.new_database())
    return setup


@broken("no-guard", "D")
def no_guard_named(s: Servers) -> Setup:
    return Setup(s).leases()


@broken("stage", "D")
def some_names_in_shadow(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    return setup.fenced("guard", "mode", setup.guard, "--table", "orders", "--names", "orders/9*", "shadow")


@broken("jump", "A")
def next_token_is_too_far(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    with setup.client() as client:
        for _ in range(3):
            client.acquire("orders/5").release()
    return setup.fenced("guard", "trust", setup.guard, "--max-jump", "1")


@broken("pending", "A")
def a_transaction_older_than_the_mode(s: Servers) -> Setup:
    setup = Setup(s).leases().table("enforce")
    old = psycopg.connect(setup.guard)
    s.undo.callback(old.close)
    old.execute("UPDATE orders SET qty = 2 WHERE id = 7")
    return setup.fenced("guard", "mode", setup.guard, "--table", "orders", "require", "--wait", "0s")


@broken("guard-reachable", "?")
def no_server_there(s: Servers) -> Setup:
    setup = Setup(s).leases()
    setup.guards.append("postgresql://doctor@127.0.0.1:1/shop")
    return setup


@broken("guard-reachable", "?")
def a_role_without_rights(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    setup.guards = [setup.guard.replace("//postgres@", f"//{s.role()}@")]
    return setup


@broken("authority-reachable", "?")
def no_such_namespace(s: Servers) -> Setup:
    setup = Setup(s).leases().table()
    setup.namespace = "mistyped"
    return setup


@broken("guard-wrong", "D")
def value_in_redis_by_hand(s: Servers) -> Setup:
    tag = f"t{next(_numbers)}"
    setup = Setup(s).leases().values(f"{s.redis.url()}?tag={tag}&mode=require")
    s.redis.execute("SET", f"fenced:{{{tag}}}:value:orders/1", "by hand")
    return setup


@broken("guard-wrong", "D")
def mark_in_redis_deleted(s: Servers) -> Setup:
    tag = f"t{next(_numbers)}"
    setup = Setup(s).leases().values(f"{s.redis.url()}?tag={tag}&mode=require")
    s.redis.execute("DEL", f"fenced:{{{tag}}}:mark:orders/1")
    return setup


@broken("marks-could-be-lost", "C")
def redis_evicts_marks(s: Servers) -> Setup:
    """What could be mended comes before what the guard is by its nature."""
    setup = Setup(s).leases().values(f"{s.redis.url()}?tag=t{next(_numbers)}&mode=require")
    s.redis.execute("CONFIG", "SET", "maxmemory", "1gb")
    s.redis.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    s.undo.callback(s.redis.execute, "CONFIG", "SET", "maxmemory", "0")
    s.undo.callback(s.redis.execute, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    return setup


@broken("cooperative", "C")
def a_cooperative_guard(s: Servers) -> Setup:
    return Setup(s).leases().values(f"{s.redis.url()}?tag=t{next(_numbers)}&mode=require")


def _operator(db: psycopg.Connection[Any]) -> Any:
    return registry.engine("postgresql://").operator(db)
