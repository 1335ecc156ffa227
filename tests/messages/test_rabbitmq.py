"""Consumers on a real RabbitMQ: what is applied, what is acknowledged, what becomes a dead letter."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aio_pika
import pika
import psycopg
import pytest

import fenced
from evidence.message_storm import Storm
from fenced import messages, sql
from fenced.drills.relay import Proxy
from fenced.errors import Contended, FencedError, LeaseLost, StaleToken
from fenced.messages import consumers
from fenced.messages.outcomes import Settlement
from fenced.runtime.blocking import step
from fenced.values.model import Stamp
from fenced_testkit.servers import RabbitmqServer

pytestmark = pytest.mark.xdist_group("rabbitmq")

NAME = "orders/42"
WAIT_SECONDS = 120.0
DELIVERIES_MAX = 3
"""A message that comes back more often goes in circles."""


def stamp(token: int, seq: int) -> Stamp:
    return Stamp("00000000000000aa", (NAME,), token, seq, f"{token:032x}")


class Shop(NamedTuple):
    """A queue with its dead letters, and a table behind a guard. The body of a message is its number."""

    url: str
    queue: str
    channel: Any
    db: sqlite3.Connection
    guard: sql.Guard

    def publish(self, body: str, headers: dict[str, Any]) -> None:
        self.channel.basic_publish("", self.queue, body.encode(), pika.BasicProperties(headers=headers))

    def apply(self, fence: object, body: str) -> None:
        with self.guard.transaction(self.db, fence) as tx:  # type: ignore[arg-type]
            tx.execute("UPDATE orders SET applied = applied || ? WHERE id = 42", (body,))

    def applied(self) -> str:
        return str(self.db.execute("SELECT applied FROM orders").fetchone()[0])

    def dead(self) -> str:
        found = ""
        while True:
            method, _, body = self.channel.basic_get(f"{self.queue}-dead", auto_ack=True)
            if method is None:
                return found
            found += body.decode()


Play = Callable[[Shop, Callable[[object, str], None]], None]
"""Consume, with this function as `apply`, until the message `.` is settled."""


@pytest.fixture
def shop(rabbitmq_server: RabbitmqServer, tmp_path: Path) -> Iterator[Shop]:
    db = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, applied TEXT)")
    db.execute("INSERT INTO orders VALUES (42, '')")
    guard = sql.Guard(table="orders", name="orders/{id}", rule="sequenced")
    guard.install(db, "require")
    with pika.BlockingConnection(pika.URLParameters(rabbitmq_server.url())) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        queue = declare(channel, tmp_path.name)
        yield Shop(rabbitmq_server.url(), queue, channel, db, guard)
        for name in (queue, f"{queue}-dead"):
            channel.queue_delete(name)
    db.close()


def declare(channel: Any, queue: str) -> str:
    arguments = {
        "x-single-active-consumer": True,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": f"{queue}-dead",
    }
    channel.queue_declare(f"{queue}-dead")
    channel.queue_declare(queue, arguments=arguments)
    return queue


def by_pika(shop: Shop, apply: Callable[[object, str], None]) -> None:
    settled = []

    def on_message(fence: object, method: Any, properties: Any, body: bytes) -> None:
        try:
            apply(fence, body.decode())
        finally:
            if body == b".":
                settled.append(body)

    with pika.BlockingConnection(pika.URLParameters(shop.url)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume(shop.queue, messages.on_pika(on_message, delay=0.05))
        while not settled:
            connection.process_data_events(time_limit=1)


def by_aio_pika(shop: Shop, apply: Callable[[object, str], None]) -> None:
    async def on_message(fence: object, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        apply(fence, message.body.decode())

    async def main() -> None:
        connection = await aio_pika.connect(shop.url)
        async with connection, asyncio.timeout(WAIT_SECONDS):
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=1)
            queue = await channel.get_queue(shop.queue)
            handle = messages.on_aio_pika(on_message, delay=0.05)
            async with queue.iterator() as deliveries:
                async for message in deliveries:
                    await handle(message)
                    if message.body == b".":
                        return

    asyncio.run(main())


def check_every_outcome(shop: Shop, play: Play) -> None:
    """One message of each kind, through the broker."""
    wire = {number: {"fenced-stamp": str(stamp(*at))} for number, at in {"a": (5, 1), "b": (6, 1)}.items()}
    shop.publish("a", wire["a"])
    shop.publish("a", wire["a"])  # redelivered: already applied
    shop.publish("b", wire["b"])
    for seq in range(2, 12):
        shop.publish("s", {"fenced-stamp": str(stamp(5, seq))})  # by a producer that was overtaken
    shop.publish("m", {})
    shop.publish("i", {"fenced-stamp": "5"})
    shop.publish("i", {"fenced-stamp": str(stamp(6, 2)), "Fenced-Stamp": str(stamp(7, 1))})
    shop.publish("c", {"fenced-stamp": str(stamp(6, 2)).encode()})  # the database is busy at first
    shop.publish("o", {"fenced-stamp": str(stamp(6, 1)), "second": "out of order"})
    shop.publish(".", {"fenced-stamp": str(stamp(6, 3))})
    deliveries: Counter[tuple[str, str]] = Counter()

    def apply(fence: object, body: str) -> None:
        deliveries[body, str(fence)] += 1
        assert deliveries[body, str(fence)] <= DELIVERIES_MAX, "it goes in circles"
        if body == "c" and deliveries[body, str(fence)] == 1:
            raise Contended("busy")
        shop.apply(fence, body)

    play(shop, apply)
    assert shop.applied() == "abc."
    assert shop.dead() == "s" * 10 + "miio"
    assert deliveries["c", str(stamp(6, 2))] == 2
    assert shop.channel.queue_declare(shop.queue, passive=True).method.message_count == 0


@pytest.mark.parametrize("play", [by_pika, by_aio_pika])
def test_every_outcome(shop: Shop, play: Play) -> None:
    check_every_outcome(shop, play)


@pytest.mark.parametrize("play", [by_pika, by_aio_pika])
def test_a_bug_of_the_program_loses_no_message(shop: Shop, play: Play) -> None:
    """It is raised, so that the program stops, and the next consumer gets the message."""
    shop.publish(".", messages.headers(stamp(5, 1)))

    def broken(fence: object, body: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(shop, broken)
    play(shop, shop.apply)
    assert (shop.applied(), shop.dead()) == (".", "")


def _another_table(shop: Shop) -> Callable[[object, str], None]:
    shop.db.execute("CREATE TABLE audit (id INTEGER PRIMARY KEY)")
    sql.Guard(table="audit", name="audit/{id}").install(shop.db, "require")

    def apply(fence: object, body: str) -> None:
        with shop.guard.transaction(shop.db, fence) as tx:  # type: ignore[arg-type]
            tx.execute("INSERT INTO audit VALUES (NULL)")

    return apply


def _another_realm(shop: Shop) -> Callable[[object, str], None]:
    shop.guard.adopt(shop.db, "00000000000000bb")
    return shop.apply


@pytest.mark.parametrize("play", [by_pika, by_aio_pika])
@pytest.mark.parametrize("wrong", [_another_table, _another_realm])
def test_a_refusal_that_is_not_about_the_message(
    shop: Shop,
    play: Play,
    wrong: Callable[[Shop], Callable[[object, str], None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The messages stay in the queue, and the program stops and says why. They are applied once that is corrected."""
    for seq, body in enumerate("12.", 1):
        shop.publish(body, messages.headers(stamp(5, seq)))
    with pytest.raises((fenced.Uncovered, fenced.ForeignRealm)):
        play(shop, wrong(shop))
    (told,) = caplog.messages
    assert "goes back to its queue, and the consumer stops" in told
    shop.guard.adopt(shop.db, "00000000000000aa")
    play(shop, shop.apply)
    assert (shop.applied(), shop.dead()) == ("12.", "")


def test_a_message_published_by_a_late_relay_is_harmless(shop: Shop, tmp_path: Path) -> None:
    """Two relays publish the same messages; the one that was overtaken publishes the last ones after the other."""
    sales = sqlite3.connect(tmp_path / "sales.db", isolation_level=None)
    outbox = messages.Outbox()
    outbox.install(sales)

    def publish(message: messages.OutboxMessage) -> None:
        shop.publish(message.body.decode(), dict(message.headers))

    def overtaken_after_one(message: messages.OutboxMessage) -> None:
        publish(message)
        if message.body == b"1":
            step(client._authority.force_release(outbox.name, late.token))
            with fenced.Client("memory:").hold(outbox.name) as newer:
                assert outbox.relay(sales, newer, publish) == 3

    with fenced.Client("memory:") as client, client.hold(NAME) as lease:
        for body in (b"1", b"2", b"3"):
            outbox.put(sales, lease, shop.queue, body)
        late = client.acquire(outbox.name)
        with pytest.raises((StaleToken, LeaseLost)):
            outbox.relay(sales, late, overtaken_after_one)
        shop.publish(".", messages.headers(lease))
    sales.close()
    by_pika(shop, shop.apply)
    assert shop.applied() == "123."
    assert set(shop.dead()) <= {"1", "2", "3"}


def _requeue(monkeypatch: pytest.MonkeyPatch, shop: Shop) -> None:
    """A refusal is answered by nack(requeue=True)."""
    judged = messages.settlement

    def settlement(error: Exception | None, fence: Any) -> Settlement:
        answer = judged(error, fence)
        return Settlement.RETRY if answer is Settlement.REJECT else answer

    monkeypatch.setattr(consumers, "settlement", settlement)
    monkeypatch.setattr(consumers, "stops_the_consumer", lambda error: not isinstance(error, FencedError))


def _commit_without_the_guard(monkeypatch: pytest.MonkeyPatch, shop: Shop) -> None:
    def apply(shop: Shop, fence: object, body: str) -> None:
        shop.db.execute("UPDATE orders SET applied = applied || ? WHERE id = 42", (body,))

    shop.guard.set_mode(shop.db, "observe")
    monkeypatch.setattr(Shop, "apply", apply)


@pytest.mark.parametrize("plant", [_requeue, _commit_without_the_guard])
def test_the_check_can_fail(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch, Shop], None]
) -> None:
    plant(monkeypatch, shop)
    with pytest.raises(AssertionError):
        check_every_outcome(shop, by_pika)


def test_a_consumer_that_was_stopped_commits_nothing(
    rabbitmq_server: RabbitmqServer, postgresql_url: str, tmp_path: Path
) -> None:
    """Stopped past its lease with a message that it has not acknowledged: another consumer gets it and applies it. Then
    the first one wakes up and commits."""
    guard = sql.Guard(table="orders", name="orders/{id}", rule="sequenced")
    with psycopg.connect(postgresql_url, autocommit=True) as db:
        db.execute("CREATE TABLE orders (id int PRIMARY KEY, applied text)")
        db.execute("INSERT INTO orders VALUES (42, '')")
        guard.install(db, "require")
    leases = f"sqlite:///{tmp_path}/leases.db"

    def consume(port: int, ttl: float, stops: bool) -> None:
        """Apply one message, under the message's stamp and a lease of the consumer itself."""

        def apply(fence: Stamp, method: Any, properties: Any, body: bytes) -> None:
            if stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            with guard.transaction(db, [fence, lease]) as tx:
                tx.execute("UPDATE orders SET applied = applied || %s WHERE id = 42", (body.decode(),))
            applied.append(body)

        applied: list[bytes] = []
        at = pika.ConnectionParameters("127.0.0.1", port)
        with (
            fenced.Client(leases) as client,
            client.hold("consumers/orders", ttl=ttl, wait=WAIT_SECONDS) as lease,
            psycopg.connect(postgresql_url) as db,
            pika.BlockingConnection(at) as connection,
        ):
            channel = connection.channel()
            channel.basic_consume(queue, messages.on_pika(apply))
            try:
                while not applied:
                    connection.process_data_events(time_limit=1)
            except StaleToken as error:  # here, because pika fails to close a connection that was cut
                os._exit(42 if stops and error.name == "consumers/orders" else 43)

    with (
        Proxy(rabbitmq_server.host, rabbitmq_server.port) as proxy,
        pika.BlockingConnection(pika.URLParameters(rabbitmq_server.url())) as connection,
        fenced.Client(leases) as client,
    ):
        channel = connection.channel()
        queue = declare(channel, tmp_path.name)
        with client.hold(NAME) as producer:
            headers = messages.headers(producer)
            channel.basic_publish("", queue, b"x", pika.BasicProperties(headers=headers))
        first = os.fork()
        if first == 0:
            try:
                consume(proxy.port, 1.0, True)
            except BaseException:  # noqa: BLE001 - shown, and then the child ends
                traceback.print_exc()
            finally:
                os._exit(1)
        assert os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1])
        proxy.cut()  # as the broker does after a while without heartbeats
        consume(rabbitmq_server.port, 60.0, False)
        os.kill(first, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 42
        assert channel.queue_declare(queue, passive=True).method.message_count == 0
    with psycopg.connect(postgresql_url) as db:
        assert db.execute("SELECT applied FROM orders").fetchall() == [("x",)]


def test_a_short_storm(rabbitmq_server: RabbitmqServer, postgresql_url: str) -> None:
    """The long one is in docs/evidence."""
    storm = Storm(rabbitmq_server, postgresql_url, seed=1, points=("before", "after"), stop_share=0.3)
    found = storm.run(30)
    assert (found["applied_once"], found["applied_twice"], found["dead_letters"]) == (30, 0, 0)
    assert found["in_order"] and found["stops"]


def test_a_short_storm_without_the_guard(rabbitmq_server: RabbitmqServer, postgresql_url: str) -> None:
    storm = Storm(rabbitmq_server, postgresql_url, 1, points=("after",), stop_share=0.5, guarded=False)
    assert storm.run(10)["applied_twice"]
