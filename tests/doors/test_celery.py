"""Celery with a real RabbitMQ: a task runs once for each id, and a worker that was stopped in the middle is refused."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, signals
from celery.exceptions import Ignore

import fenced
from fenced.celery import once_per_task
from fenced.drills.relay import Proxy
from fenced.errors import Misuse, StaleToken
from fenced_testkit.servers import RabbitmqServer

WAIT_SECONDS = 100.0


class Shop:
    """A folder with the database, the leases and the log of its workers, and a queue."""

    def __init__(self, folder: Path, broker: str) -> None:
        self.folder = folder
        self.broker = broker
        self.queue = uuid.uuid4().hex
        self._app = Celery(broker=broker)
        self._db = sqlite3.connect(folder / "shop.db", isolation_level=None)
        self._db.execute(
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, charged TEXT DEFAULT '', shipped TEXT DEFAULT '')"
        )
        fenced.sql.Guard(table="orders", name="orders/{id}").install(self._db, mode="observe")
        self._db.execute("INSERT INTO orders (id) VALUES (42)")
        fenced.sql.Guard(table="orders", name="orders/{id}").set_mode(self._db, "require")

    def close(self) -> None:
        self._db.close()
        self._app.close()

    def send(self, task: str, *args: object, **options: Any) -> None:
        self._app.send_task(f"tests.doors.celery_app.{task}", args, queue=self.queue, **options)

    def said(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def order(self) -> tuple[str, str]:
        charged, shipped = self._db.execute("SELECT charged, shipped FROM orders").fetchone()
        return charged, shipped

    @contextmanager
    def worker(self, name: str, broker: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """A worker with one process in its pool; its own output is in the folder."""
        quiet = ("--without-gossip", "--without-mingle", "--loglevel=INFO", "--concurrency=1")
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "tests.doors.celery_app",
            "worker",
            *quiet,
            "-n",
            name,
        ]
        told = {
            "DOOR_FOLDER": str(self.folder),
            "DOOR_WORKER": name,
            "DOOR_BROKER": broker or self.broker,
            "DOOR_QUEUE": self.queue,
        }
        with (
            (self.folder / f"{name}.log").open("wb") as output,
            subprocess.Popen(
                command, env={**os.environ, **told}, stdout=output, stderr=output, start_new_session=True
            ) as process,
        ):
            try:
                yield process
            finally:
                os.killpg(process.pid, signal.SIGCONT)
                process.terminate()
                try:
                    process.wait(60)
                finally:
                    with_children(process, signal.SIGKILL)


def with_children(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def until(shop: Shop, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        logs = [path.read_text()[-4000:] for path in shop.folder.glob("*.log")]
        assert time.monotonic() < deadline, "\n".join([*shop.said(), *logs])
        time.sleep(0.02)


@pytest.fixture
def shop(rabbitmq_server: RabbitmqServer, tmp_path: Path) -> Iterator[Shop]:
    found = Shop(tmp_path, rabbitmq_server.url())
    yield found
    found.close()


@pytest.mark.xdist_group("rabbitmq")
def test_a_worker_stopped_in_the_middle_is_refused_and_nothing_runs_twice(
    shop: Shop, rabbitmq_server: RabbitmqServer
) -> None:
    """Its connection is cut, and the broker delivers its task to another worker."""
    with Proxy(rabbitmq_server.host, rabbitmq_server.port) as proxy:
        through = f"amqp://guest:guest@{proxy.host}:{proxy.port}/"
        with shop.worker("first", through) as first:
            shop.send("charge", 42)
            until(shop, (shop.folder / "charge began").exists)
            with_children(first, signal.SIGSTOP)
            proxy.cut()
            with shop.worker("second"):
                until(shop, lambda: "shipped for second" in shop.said())
                (shop.folder / "go on").touch()
                with_children(first, signal.SIGCONT)
                until(shop, lambda: "shipping for first" in shop.said())
                shop.send("unstamped", 42)
                for _ in range(2):
                    shop.send("plain", task_id="one")  # the control: the broker has delivered it twice
                    shop.send("works", 0.0, task_id="two")
                until(shop, lambda: shop.said().count("plain") == 2 and "worked 0" in shop.said())
    said = shop.said()
    tokens = [int(line.split()[2]) for line in said if line.startswith("began")]
    assert tokens == sorted(set(tokens)) and len(tokens) == 2, said
    assert shop.order() == ("second", "second")
    for line, count in ONCE_EACH.items():
        assert said.count(line) == count, (line, said)
    logs = "".join(path.read_text() for path in shop.folder.glob("*.log"))
    assert "Retry in" not in logs


ONCE_EACH = {
    "charged second": 1,
    "refused first": 1,
    "charged first": 0,
    "shipped for second": 1,
    "shipping for first": 1,  # a subtask of the overtaken one: its stamp is refused, and it is not tried again
    "shipped for first": 0,
    "unstamped": 1,
    "plain": 2,
    "worked 0": 1,
}


class Door:
    """A task that runs in this process."""

    def __init__(self, folder: Path) -> None:
        self.client = fenced.Client(f"sqlite:///{folder}/leases.db")
        self.app = Celery(broker="memory://", backend="cache+memory://")
        self.calls: list[Any] = []

    def task(self, body: Callable[..., Any], **options: Any) -> Any:
        def run(task: Task, turn: fenced.Lease, order: int) -> Any:
            self.calls.append((turn.names, order))
            return body(task)

        decorated = once_per_task(lambda: self.client, ttl=1, **options)(run)
        return self.app.task(bind=True, name="run", autoretry_for=(Exception,), max_retries=3)(decorated)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    found = Door(tmp_path)
    with found.client:
        yield found
    found.app.close()


def test_the_second_delivery_of_a_task_is_ignored(door: Door) -> None:
    task = door.task(lambda _: "done", covers="orders/{order}")
    results = [task.apply((42,), task_id="one") for _ in range(2)]
    assert [result.state for result in results] == ["SUCCESS", "IGNORED"]
    ((names, order),) = door.calls
    assert ("orders/42" in names, order) == (True, 42)


def test_a_delivery_that_finds_the_task_running_comes_back(door: Door, tmp_path: Path) -> None:
    """Although its retries are used up: nothing has run."""
    task = door.task(lambda _: "done", wait=0, keep=60)
    task.push_request(id="one", called_directly=False, is_eager=False, retries=3, args=[42])
    sent: list[dict[str, Any]] = []
    signals.before_task_publish.connect(keep := lambda headers, **_: sent.append(headers))
    with (
        fenced.Client(f"sqlite:///{tmp_path}/leases.db") as other,
        other.once("celery/one", 1, keep=60),
        pytest.raises(Ignore),
    ):
        task.run(42)
    signals.before_task_publish.disconnect(keep)
    assert door.calls == []
    assert [(again["id"], again["retries"], again["eta"] is not None) for again in sent] == [("one", 3, True)]


def test_a_failure_leaves_no_mark_and_celery_retries_it(door: Door) -> None:
    def fails(task: Task) -> str:
        if task.request.retries < 2:
            raise RuntimeError("not yet")
        return "done"

    assert door.task(fails).apply((42,), task_id="one").result == "done"
    assert len(door.calls) == 3


@pytest.mark.parametrize(
    "error", [StaleToken("late"), fenced.LeaseLost("late", reason="expired"), fenced.MissingStamp("a bug")]
)
def test_a_refusal_is_never_retried(door: Door, error: fenced.FencedError) -> None:
    def refused(_task: Task) -> None:
        raise error

    assert door.task(refused).apply((42,), task_id="one").state == "IGNORED"
    assert len(door.calls) == 1
    stored = door.app.AsyncResult("one").state
    assert stored == ("FAILURE" if isinstance(error, fenced.MissingStamp) else "PENDING")


def test_a_wrong_declaration_is_misuse(door: Door) -> None:
    task = door.task(lambda _: "done")
    with pytest.raises(Misuse, match="bind=True"):
        task(42)
    with pytest.raises(TypeError):
        task.delay(42, 43)  # Celery knows the arguments of the call
    with pytest.raises(Misuse, match="no such parameter"):
        door.task(lambda _: "done", covers="orders/{missing}")
