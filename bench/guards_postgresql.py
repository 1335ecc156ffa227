"""A guarded write in PostgreSQL against the same write without a guard, each on a table of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import psycopg

import fenced
from bench import guard_costs
from bench.figures import Figure, ratio
from bench.interleaved import Action, Effort, async_medians, medians
from fenced import sql
from fenced_testkit.servers import PostgresqlServer
from fenced_testkit.servers.base import find_program

SETTINGS = {"shared_buffers": "128MB"}
ROWS = 10_000
ROUNDS = 1500
BULK_ROUNDS = 25
WARM_UP = 300
BULK_WARM_UP = 8
NAMES_MAX = 64
"""How many names one lease covers."""
CONNECTIONS = 8
CONTENDED_SECONDS = 2.0
CONTENDED_ROUNDS = 4
TABLES = ("plain", "guarded", "clause", "constant", "template", "own", "sampled", "observed")
BY_HAND_TABLES = ("by_hand_rows", "by_hand_each")

Connection = psycopg.Connection[tuple[object, ...]]


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with PostgresqlServer(SETTINGS) as server, tempfile.TemporaryDirectory() as folder:
        url = server.url(server.create_database("guarded"))
        with (
            fenced.Client(f"sqlite:///{folder}/leases.db") as client,
            psycopg.connect(url, autocommit=True) as connection,
        ):
            for table in (*TABLES, *BY_HAND_TABLES):
                _make(connection, table, effort.size(ROWS))
            yield from _one_row(url, connection, client, effort)
            yield from _audit(connection, client, effort)
            yield from _many_rows(connection, client, effort)
            yield _many_names(connection, client, effort)
            yield from _one_holder(server, url, client, effort)
            yield from guard_costs.run(url, client, effort)


def _make(connection: Connection, table: str, rows: int) -> None:
    connection.execute(
        f"CREATE TABLE {table} (id integer PRIMARY KEY, shop integer, qty integer, epoch bigint);"
        f"INSERT INTO {table} SELECT id, 7, 0, 0 FROM generate_series(1, {rows}) AS id; ANALYZE {table}".encode()
    )


def _one(table: str) -> bytes:
    return f"UPDATE {table} SET qty = qty + 1 WHERE id = %s".encode()


def plain(connection: Connection, statement: bytes, parameters: list[int] | None = None) -> Action:
    """BEGIN, the statement, COMMIT; a connection that begins by itself is not told to."""

    def write() -> None:
        if connection.autocommit:
            connection.execute(b"BEGIN")
        connection.execute(statement, parameters)
        connection.execute(b"COMMIT")

    return write


def guarded(
    guard: sql.Guard,
    connection: Connection,
    fence: fenced.Lease | list[fenced.Lease],
    statement: bytes,
    parameters: list[int] | None = None,
) -> Action:
    def write() -> None:
        with guard.transaction(connection, fence) as tx:
            tx.execute(statement, parameters)

    return write


def _by_clause(guard: sql.Guard, connection: Connection, lease: fenced.Lease) -> Action:
    def write() -> None:
        clause = guard.clause(connection, lease)
        connection.execute(b"BEGIN")
        statement = f"UPDATE clause SET qty = qty + 1, {clause.assign} WHERE id = %s AND {clause.where}"
        done = connection.execute(statement.encode(), [42])
        clause.admitted(done.rowcount, "id = %s", (42,))
        connection.execute(b"COMMIT")

    return write


def _one_row(url: str, connection: Connection, client: fenced.Client, effort: Effort) -> Iterator[Figure]:
    guard = sql.Guard(table="guarded", name="orders/{id}")
    guard.install(connection, mode="enforce")
    clause = sql.Guard(table="clause", name="orders/{id}", mandatory=False)
    against = "BEGIN, UPDATE, COMMIT without a guard"
    with client.hold("orders/42") as lease, psycopg.connect(url) as beginning:
        theirs, ours, cooperative = medians(
            plain(connection, _one("plain"), [42]),
            guarded(guard, connection, lease, _one("guarded"), [42]),
            _by_clause(clause, connection, lease),
            rounds=effort.of(ROUNDS),
            warm_up=effort.size(WARM_UP),
        )
        yield ratio("one", "UPDATE of one row, where we begin", ours, theirs, target=1.5, against=against)
        yield ratio("clause", "the same by clause()", cooperative, theirs, target=1.1, against=against)
        yield from _least(connection, effort)
        unguarded = plain(beginning, _one("plain"), [42])
        announced = guarded(guard, beginning, lease, _one("guarded"), [42])
        theirs, ours = medians(unguarded, announced, rounds=effort.of(ROUNDS), warm_up=effort.size(WARM_UP))
        what = "UPDATE of one row, on a connection that begins by itself"
        yield ratio("begins", what, ours, theirs, target=1.9, against=against)
        trips, more = _round_trips(beginning, unguarded), _round_trips(beginning, announced)
        what = "round trips more, on a connection that begins by itself"
        yield Figure("round_trips", what, more - trips, "", 1, f"{more} against {trips}")
        yield asyncio.run(_one_row_asyncpg(url, lease, effort))


BY_HAND = b"""
CREATE TABLE by_hand (name text PRIMARY KEY, token bigint NOT NULL, holder text NOT NULL) WITH (fillfactor = 50);
INSERT INTO by_hand VALUES ('orders/42', 1, '');
CREATE TABLE by_hand_record (id bigserial PRIMARY KEY, name text, verdict text, at timestamptz DEFAULT now());
CREATE FUNCTION judges_nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER at_the_end AFTER UPDATE ON by_hand_rows REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
  FOR EACH STATEMENT EXECUTE FUNCTION judges_nothing();
CREATE TRIGGER each_row BEFORE UPDATE ON by_hand_each
  FOR EACH ROW WHEN (NEW.epoch < 0) EXECUTE FUNCTION judges_nothing();
"""
LOCKED = "SELECT FROM by_hand WHERE name = 'orders/42' FOR SHARE"
RECORDED = "INSERT INTO by_hand_record (name, verdict) VALUES ('orders/42', 'stale')"


def _least(connection: Connection, effort: Effort) -> Iterator[Figure]:
    """What a guard with triggers cannot be cheaper than: by hand, and nothing is decided."""
    connection.execute(BY_HAND)
    tokens = itertools.count(2)

    def by_hand(*first: str) -> Action:
        def write() -> None:
            connection.execute("; ".join(("BEGIN", *first)).encode(), prepare=False)
            connection.execute(_one("by_hand_rows"), [43])
            connection.execute(b"COMMIT")

        return write

    def upsert() -> None:
        token = next(tokens)
        by_hand(
            f"INSERT INTO by_hand AS mark VALUES ('orders/42', {token}, '{token:032x}') ON CONFLICT (name) \
            DO UPDATE SET token = excluded.token, holder = excluded.holder WHERE mark.token < excluded.token"
        )()

    theirs, shared, raised, recorded = medians(
        plain(connection, _one("plain"), [42]),
        by_hand(LOCKED),
        upsert,
        by_hand(LOCKED, RECORDED),
        rounds=effort.of(ROUNDS),
        warm_up=effort.size(WARM_UP),
    )
    against = "BEGIN, UPDATE, COMMIT without a guard"
    what = "by hand, with a trigger that decides nothing"
    yield ratio("least_shared", f"{what}: a lock of one row", shared, theirs, against=against)
    yield ratio("least_raised", f"{what}: an upsert of one row", raised, theirs, against=against)
    yield ratio("least_recorded", f"{what}: a lock, and a record", recorded, theirs, against=against)
    theirs, ours = medians(
        plain(connection, b"UPDATE plain SET qty = qty + 1"),
        plain(connection, b"UPDATE by_hand_each SET qty = qty + 1"),
        rounds=effort.of(BULK_ROUNDS),
        warm_up=effort.size(BULK_WARM_UP),
        before=_vacuum(connection, "plain", "by_hand_each"),
    )
    rows = effort.size(ROWS)
    what = f"{rows:,} rows, by hand: a trigger before each row that is never called"
    yield ratio("least_each_row", what, ours, theirs, against=f"{rows:,} rows without a guard")


def _round_trips(connection: Connection, action: Action) -> int:
    """How often the server said that it is ready for the next request."""
    read, write = os.pipe()
    connection.pgconn.trace(write)
    action()
    connection.pgconn.untrace()
    os.close(write)
    with os.fdopen(read) as trace:
        return trace.read().count("ReadyForQuery")


async def _one_row_asyncpg(url: str, lease: fenced.Lease, effort: Effort) -> Figure:
    connection = await asyncpg.connect(url)
    guard = sql.AsyncGuard(table="guarded", name="orders/{id}")

    async def unguarded() -> None:
        await connection.execute("BEGIN")
        await connection.execute("UPDATE plain SET qty = qty + 1 WHERE id = $1", 42)
        await connection.execute("COMMIT")

    async def announced() -> None:
        async with guard.transaction(connection, lease) as tx:
            await tx.execute("UPDATE guarded SET qty = qty + 1 WHERE id = $1", 42)

    theirs, ours = await async_medians(
        unguarded, announced, rounds=effort.of(ROUNDS), warm_up=effort.size(WARM_UP)
    )
    await connection.close()
    against = "BEGIN, UPDATE, COMMIT without a guard"
    return ratio(
        "one_asyncpg", "UPDATE of one row, where we begin, asyncpg", ours, theirs, target=1.5, against=against
    )


def _audit(connection: Connection, client: fenced.Client, effort: Effort) -> Iterator[Figure]:
    """What the audit costs: nothing is written for what is admitted, unless it is sampled."""
    names = {"guarded": "orders", "sampled": "orders", "observed": "orders"}
    guards = {table: sql.Guard(table=table, name=f"{name}/{{id}}") for table, name in names.items()}
    for table in ("sampled", "observed"):
        guards[table].install(connection, mode="enforce" if table == "sampled" else "observe")

    def sampled(share: float) -> Action:
        write = guarded(guards["sampled"], connection, lease, _one("sampled"), [42])

        def many() -> None:
            connection.execute(f"UPDATE fenced_guard.trust SET sample = {share}".encode())
            for _ in range(100):
                write()

        return many

    with client.hold("orders/42") as lease:
        without, with_samples = medians(
            sampled(0), sampled(0.01), rounds=effort.of(40), warm_up=effort.size(2)
        )
        against = "100 transactions each, without samples"
        what = "1 in 100 admitted transactions recorded"
        yield ratio("audit", what, with_samples, without, target=1.05, against=against)
        connection.execute(b"UPDATE fenced_guard.trust SET sample = 0")
        theirs, unstamped = medians(
            plain(connection, _one("plain"), [42]),
            plain(connection, _one("observed"), [42]),
            rounds=effort.of(ROUNDS),
            warm_up=effort.size(WARM_UP),
        )
    against = "without a guard"
    yield ratio("unstamped", "unstamped UPDATE of one row, in observe", unstamped, theirs, against=against)


def _many_rows(connection: Connection, client: fenced.Client, effort: Effort) -> Iterator[Figure]:
    rows = effort.size(ROWS)
    constant = sql.Guard(table="constant", name="constant")
    template = sql.Guard(table="template", name="shops/{shop}")
    for guard in (constant, template):
        guard.install(connection, mode="enforce")
    with client.hold("constant") as whole, client.hold("shops/7") as shop:
        theirs, one, other = medians(
            plain(connection, b"UPDATE plain SET qty = qty + 1"),
            guarded(constant, connection, whole, b"UPDATE constant SET qty = qty + 1"),
            guarded(template, connection, shop, b"UPDATE template SET qty = qty + 1"),
            rounds=effort.of(BULK_ROUNDS),
            warm_up=effort.size(BULK_WARM_UP),
            before=_vacuum(connection, "plain", "constant", "template"),
        )
    against = f"{rows:,} rows without a guard"
    what = f"{rows:,} rows under one constant name"
    yield ratio("bulk_constant", what, one, theirs, target=1.3, against=against)
    what = f"{rows:,} rows of one name, by template"
    yield ratio("bulk_template", what, other, theirs, target=1.3, against=against)


def _vacuum(connection: Connection, *tables: str) -> Action:
    """Clears old rows away, on both sides: room in the page is not what is measured."""
    return lambda: connection.execute(f"VACUUM {', '.join(tables)}, fenced_guard.mark".encode())


def _many_names(connection: Connection, client: fenced.Client, effort: Effort) -> Figure:
    rows = effort.size(ROWS)
    guard = sql.Guard(table="own", name="own/{id}", epoch="epoch")
    guard.install(connection, mode="enforce")
    names = [f"own/{number}" for number in range(1, rows + 1)]
    with contextlib.ExitStack() as held:
        leases = [
            held.enter_context(client.hold_all(names[first : first + NAMES_MAX], ttl=600))
            for first in range(0, rows, NAMES_MAX)
        ]
        theirs, ours = medians(
            plain(connection, b"UPDATE plain SET qty = qty + 1"),
            guarded(guard, connection, leases, b"UPDATE own SET qty = qty + 1"),
            rounds=effort.of(BULK_ROUNDS),
            warm_up=effort.size(BULK_WARM_UP),
            before=_vacuum(connection, "plain", "own"),
        )
    what = f"{rows:,} rows each under its own name, with the epoch column"
    return ratio("bulk_own", what, ours, theirs, target=2.0, against=f"{rows:,} rows without a guard")


def _one_holder(
    server: PostgresqlServer, url: str, client: fenced.Client, effort: Effort
) -> Iterator[Figure]:
    """Eight connections write under one lease, each its own row: they share the fence.

    By pgbench, which leaves the cores to the server; and by our own wrapper, in threads of one interpreter.
    """
    guard = sql.Guard(table="constant", name="constant")
    with client.hold("constant") as lease, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(psycopg.connect(url, autocommit=True)) for _ in range(CONNECTIONS)]
        unguarded = [plain(each, _one("plain"), [row]) for row, each in enumerate(connections, 1)]
        announced = [
            guarded(guard, each, lease, _one("constant"), [row]) for row, each in enumerate(connections, 1)
        ]
        announced[0]()
        call = f"SELECT fenced_guard.announce('{lease.bare_stamp()}', NULL, 'public.constant')"
        rates: list[list[float]] = [[], [], [], [], []]
        seconds = effort.seconds(CONTENDED_SECONDS)
        for _ in range(effort.of(CONTENDED_ROUNDS)):
            rates[0].append(_by_pgbench(server, seconds, "BEGIN", "plain"))
            rates[1].append(_by_pgbench(server, seconds, f"BEGIN\\; {call}", "constant"))
            rates[2].append(_by_pgbench(server, seconds, f"BEGIN\\; {LOCKED}", "by_hand_rows"))
            rates[3].append(_throughput(unguarded, seconds))
            rates[4].append(_throughput(announced, seconds))
    bare, fenced_, by_hand, theirs, ours = (sorted(each)[len(each) // 2] for each in rates)
    what = f"{CONNECTIONS} connections of one holder, throughput"
    yield _rate("one_holder", f"{what}, by pgbench", fenced_, bare, target=0.75)
    least = f"{CONNECTIONS} connections lock one row by hand, with a trigger that decides nothing, by pgbench"
    yield _rate("one_holder_least", least, by_hand, bare)
    yield _rate("one_holder_threads", f"{what}, threads of one program", ours, theirs)


def _rate(key: str, what: str, ours: float, theirs: float, target: float | None = None) -> Figure:
    detail = f"{ours:,.0f} against {theirs:,.0f} transactions a second without a guard"
    return Figure(key, what, ours / theirs, "x", target, detail, "at least")


def _by_pgbench(server: PostgresqlServer, seconds: float, begin: str, table: str) -> float:
    """Transactions a second."""
    script = f"{begin};\nUPDATE {table} SET qty = qty + 1 WHERE id = :client_id + 1;\nCOMMIT;\n"
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        where = ["-h", server.host, "-p", str(server.port), "-U", "postgres", "guarded"]
        load = ["-n", "-c", str(CONNECTIONS), "-T", str(max(1, round(seconds))), "-f", file.name]
        done = subprocess.run(
            [find_program("pgbench", "postgresql"), *load, *where], capture_output=True, text=True, check=True
        )
    return float(done.stdout.partition("tps = ")[2].split()[0])


def _throughput(writes: list[Action], seconds: float) -> float:
    end = time.perf_counter() + seconds
    counts: list[int] = []

    def work(write: Callable[[], object]) -> None:
        count = 0
        while not count or time.perf_counter() < end:
            write()
            count += 1
        counts.append(count)

    threads = [threading.Thread(target=work, args=(write,)) for write in writes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds
