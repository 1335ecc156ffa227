"""Celery on Redis with a visibility timeout of two seconds, and a task that takes longer: the broker delivers it again.

Three tasks for as long: plain, with a lease of the task's id alone, and once for each task id. The judge counts how
often each ran. Two workers of two processes; Redis looks for unacknowledged tasks at every tenth call of a timer, so
a redelivery takes a while.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery import Celery

from fenced_testkit.servers import RedisServer

SECONDS = 150.0
BEGINNINGS = {"plain": "slowly", "leased": "leased", "once": "works under"}
TASKS = {"plain": "slow", "leased": "leased", "once": "works"}


@contextlib.contextmanager
def _worker(folder: Path, name: str, broker: str, queue: str) -> Iterator[None]:
    command = [sys.executable, "-m", "celery", "-A", "tests.doors.celery_app", "worker", "--concurrency=3"]
    told = {"DOOR_FOLDER": str(folder), "DOOR_WORKER": name, "DOOR_BROKER": broker, "DOOR_QUEUE": queue}
    with (
        (folder / f"{name}.log").open("wb") as output,
        subprocess.Popen(
            [*command, "--loglevel=INFO", "-n", name],
            env={**os.environ, **told},
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run(seconds: float = SECONDS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, RedisServer() as server:
        folder, queue = Path(name), uuid.uuid4().hex
        app = Celery(broker=server.url())
        log = folder / "log"
        log.touch()
        with _worker(folder, "one", server.url(), queue), _worker(folder, "two", server.url(), queue):
            for which, task in TASKS.items():
                app.send_task(f"tests.doors.celery_app.{task}", [seconds], queue=queue, task_id=which)
            # Long enough for what came back to run again, too.
            time.sleep(3 * seconds + 30)
        lines = log.read_text().splitlines()
        app.close()
        told = "".join((folder / f"{each}.log").read_text() for each in ("one", "two"))
    deliveries = Counter(
        which for which, task in TASKS.items() for _ in range(told.count(f"{task}[{which}] received"))
    )
    return {
        "seconds of each task": seconds,
        "visibility timeout": 2,
        "deliveries": dict(deliveries),
        "runs": {which: sum(line.startswith(begun) for line in lines) for which, begun in BEGINNINGS.items()},
    }
