"""Consumers that are stopped at random: every message is applied once, whatever the broker delivers how often.

Several processes consume one queue of a RabbitMQ, of which one is active. At random points a consumer stops itself
(SIGSTOP) and its connection is cut, as the broker does with a consumer whose heartbeats are missing. Another one gets
the message that was not acknowledged. When that one has settled it, the first one wakes up and continues.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import pika
import psycopg
from pika.exceptions import AMQPError

import fenced
from fenced import messages, sql
from fenced.drills.relay import Proxy
from fenced.values.model import Stamp
from fenced_testkit.servers import PostgresqlServer, RabbitmqServer

CONSUMERS = 3
ORDERS = 10
PER_LEASE = 10
"""How many messages a producer sends under one lease."""
WAIT_SECONDS = 200.0

Point = Literal["before", "inside", "after"]
"""Where a consumer stops: before its transaction, before its COMMIT, or between COMMIT and acknowledgement."""


class Storm(NamedTuple):
    """One storm. `guarded` False is the control: the same consumers without the guard."""

    rabbitmq: RabbitmqServer
    database: str
    seed: int
    points: tuple[Point, ...] = ("before", "inside", "after")
    guarded: bool = True
    stop_share: float = 0.1
    """At how many deliveries a consumer stops."""

    @property
    def queue(self) -> str:
        return f"storm-{self.seed}-{self.guarded}"

    @property
    def guard(self) -> sql.Guard:
        return sql.Guard(table="orders", name="orders/{id}", rule="sequenced")

    def prepare(self, count: int) -> None:
        """Install the guard, and publish the messages, under several leases for each order."""
        with psycopg.connect(self.database, autocommit=True) as db:
            db.execute("CREATE TABLE orders (id int PRIMARY KEY, applied int NOT NULL)")
            db.execute("INSERT INTO orders SELECT id, 0 FROM generate_series(0, %s) AS id", (ORDERS - 1,))
            db.execute("CREATE TABLE ledger (position serial PRIMARY KEY, message int, consumer int)")
            self.guard.install(db, "require" if self.guarded else "observe")
        with (
            pika.BlockingConnection(pika.URLParameters(self.rabbitmq.url())) as connection,
            fenced.Client("memory:") as client,
        ):
            channel = connection.channel()
            channel.queue_declare(f"{self.queue}-dead")
            dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{self.queue}-dead"}
            channel.queue_declare(self.queue, arguments={"x-single-active-consumer": True, **dead})
            for first in range(0, count, PER_LEASE):
                with client.hold(f"orders/{first // PER_LEASE % ORDERS}") as lease:
                    for number in range(first, min(first + PER_LEASE, count)):
                        properties = pika.BasicProperties(headers=messages.headers(lease))
                        channel.basic_publish("", self.queue, str(number).encode(), properties)

    def consume(self, consumer: int, port: int, events: int) -> None:
        """The life of one consumer. It writes to `events` what it has settled, and what happened after a stop."""
        dice = random.Random(self.seed * 1000 + consumer)

        def say(what: str) -> None:
            os.write(events, f"{consumer} {what}\n".encode())

        def observed(*delivery: Any) -> None:
            on_message(*delivery)
            say("settled")

        while True:
            # A consumer whose connection was cut, or whose transaction was ended, starts again.
            with contextlib.suppress(AMQPError, psycopg.Error, fenced.FencedError):
                connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
                channel = connection.channel()
                channel.basic_qos(prefetch_count=1)
                with psycopg.connect(self.database, autocommit=True) as db:
                    on_message = messages.on_pika(self._applying(db, consumer, dice, say), delay=0.1)
                    channel.basic_consume(self.queue, observed)
                    channel.start_consuming()

    def _applying(
        self, db: psycopg.Connection, consumer: int, dice: random.Random, say: Callable[[str], None]
    ) -> Callable[..., None]:
        def apply(fence: Stamp, method: Any, properties: Any, body: bytes) -> None:
            chosen = dice.choice(self.points) if dice.random() < self.stop_share else None
            outcome, stopped = "committed", False

            def stop_if(point: Point) -> None:
                nonlocal stopped
                if point == chosen:
                    stopped = True
                    os.kill(os.getpid(), signal.SIGSTOP)

            try:
                stop_if("before")
                with self.guard.transaction(db, fence) if self.guarded else db.transaction():
                    order = int(body) // PER_LEASE % ORDERS
                    db.execute("UPDATE orders SET applied = applied + 1 WHERE id = %s", (order,))
                    db.execute(
                        "INSERT INTO ledger (message, consumer) VALUES (%s, %s)", (int(body), consumer)
                    )
                    stop_if("inside")
                stop_if("after")
            except Exception as error:
                outcome = type(error).__name__
                raise
            finally:
                if stopped:
                    say(f"{chosen}: {outcome}")

        return apply

    def run(self, count: int) -> dict[str, Any]:
        """Publish that many messages, and return what was found when all are applied."""
        self.prepare(count)
        woken: Counter[str] = Counter()
        with contextlib.ExitStack() as stack:
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            stack.callback(os.close, writer)
            os.set_blocking(reader, False)
            consumers: dict[int, Proxy] = {}
            pids: list[int] = []
            for number in range(CONSUMERS):
                proxy = stack.enter_context(Proxy(self.rabbitmq.host, self.rabbitmq.port))
                pids.append(stack.enter_context(_forked(self.consume, number, proxy.port, writer)))
                consumers[pids[-1]] = proxy
            stopped: list[int] = []
            stops = 0
            until = time.monotonic() + WAIT_SECONDS + count
            with psycopg.connect(self.database, autocommit=True) as db:
                while not (done := self._all_applied(db, count)) or woken.total() < stops:
                    if time.monotonic() > until:
                        raise TimeoutError(f"after {count + WAIT_SECONDS} s: {self._found(count, woken)}")
                    time.sleep(0.02)
                    overtaken = False
                    for number, what in _events(reader):
                        overtaken |= what == "settled" and pids[number] not in stopped
                        if what != "settled":
                            woken[what] += 1
                    if stopped and (overtaken or done or len(stopped) == CONSUMERS):
                        os.kill(stopped.pop(0), signal.SIGCONT)
                    for pid in consumers.keys() - {*stopped}:
                        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
                        if found:
                            assert os.WIFSTOPPED(status), "a consumer has ended; its error is above"
                            stopped.append(pid)
                            stops += 1
                            consumers[pid].cut()  # as the broker does after a while without heartbeats
        return self._found(count, woken)

    def _all_applied(self, db: psycopg.Connection, count: int) -> bool:
        return db.execute("SELECT count(DISTINCT message) FROM ledger").fetchone() == (count,)

    def _found(self, count: int, woken: Counter[str]) -> dict[str, Any]:
        with psycopg.connect(self.database) as db:
            applied = [number for (number,) in db.execute("SELECT message FROM ledger ORDER BY position")]
        with pika.BlockingConnection(pika.URLParameters(self.rabbitmq.url())) as connection:
            dead = connection.channel().queue_declare(f"{self.queue}-dead", passive=True).method.message_count
        return {
            "messages": count,
            "applied_once": sum(times == 1 for times in Counter(applied).values()),
            "applied_twice": sum(times > 1 for times in Counter(applied).values()),
            "in_order": list(dict.fromkeys(applied)) == list(range(count)),
            "dead_letters": dead,
            "stops": woken.total(),
            "stopped_consumers_found": dict(sorted(woken.items())),
            "seed": self.seed,
        }


@contextlib.contextmanager
def _forked(work: Callable[..., None], *arguments: Any) -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
        except BaseException:  # noqa: BLE001 - shown, and then the child ends
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _events(reader: int) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(BlockingIOError):
        for line in os.read(reader, 1 << 16).decode().splitlines():  # a pipe does not split short writes
            number, _, what = line.partition(" ")
            yield int(number), what


def run(count: int = 1000, seed: int = 1) -> dict[str, Any]:
    """The storm, and the control without the guard. There nobody ends the transaction of a stopped consumer, so none
    stops inside one."""
    with RabbitmqServer() as rabbitmq, PostgresqlServer() as postgresql:
        guarded = Storm(rabbitmq, postgresql.url(postgresql.create_database()), seed)
        control = guarded._replace(
            database=postgresql.url(postgresql.create_database()), points=("before", "after"), guarded=False
        )
        return {"guarded": guarded.run(count), "none": control.run(count)}
