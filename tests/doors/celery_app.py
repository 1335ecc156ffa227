"""The program of a Celery worker for the tests and for `make evidence`. It logs what it does to a file."""

from __future__ import annotations

import functools
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from celery import Celery

import fenced
from fenced import messages
from fenced.celery import once_per_task

FOLDER = Path(os.environ["DOOR_FOLDER"])
WHO = os.environ.get("DOOR_WORKER", "")
ORDERS = fenced.sql.Guard(table="orders", name="orders/{id}")
TTL = 2.0

app = Celery("celery_app", broker=os.environ["DOOR_BROKER"])
app.conf.update(
    task_default_queue=os.environ.get("DOOR_QUEUE", "door"),
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 2}
    if os.environ["DOOR_BROKER"].startswith("redis")
    else {},
)


@functools.cache
def leases() -> fenced.Client:
    return fenced.Client(f"sqlite:///{FOLDER}/leases.db", label=WHO)


def database() -> sqlite3.Connection:
    return sqlite3.connect(FOLDER / "shop.db", isolation_level=None, timeout=60)


def log(*words: object) -> None:
    with (FOLDER / "log").open("ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\n").encode())


def stall(task: str) -> None:
    """The worker `first` stops here, until the test lets it go on."""
    if WHO == "first":
        (FOLDER / f"{task} began").touch()
        while not (FOLDER / "go on").exists():
            time.sleep(0.01)


@app.task
def plain() -> None:
    log("plain")


@app.task(bind=True, autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0)
@once_per_task(leases, covers="orders/{order}", ttl=TTL)
def charge(self: Any, turn: fenced.Lease, order: int) -> None:
    log("began", WHO, turn.token)
    stall("charge")
    ship.apply_async([order, WHO], headers=messages.headers(turn))  # the stamp goes with the subtask
    try:
        with ORDERS.transaction(database(), turn) as tx:
            tx.execute("UPDATE orders SET charged = charged || ? WHERE id = ?", (WHO, order))
    except fenced.StaleToken:
        log("refused", WHO)
        raise
    log("charged", WHO)


@app.task(bind=True, autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0)
@once_per_task(leases, ttl=TTL)
def ship(self: Any, _turn: fenced.Lease, order: int, parent: str) -> None:
    """Writes under the stamp of its parent: a guard refuses it if the parent was overtaken."""
    fence = messages.fence_of(self.request.headers)
    assert fence is not None
    log("shipping for", parent)
    with ORDERS.transaction(database(), fence) as tx:
        tx.execute("UPDATE orders SET shipped = shipped || ? WHERE id = ?", (parent, order))
    log("shipped for", parent)


@app.task(bind=True)
@once_per_task(leases, ttl=TTL)
def works(_self: Any, turn: fenced.Lease, seconds: float) -> None:
    """Longer than the visibility timeout of the broker."""
    log("works under", turn.token)
    time.sleep(seconds)
    log(f"worked {seconds:g}")


@app.task
def slow(seconds: float) -> None:
    log("slowly")
    time.sleep(seconds)


@app.task(bind=True, max_retries=None)
def leased(self: Any, seconds: float) -> None:
    """The control: a lease of the task's id, and no mark."""
    try:
        with leases().hold(f"leased/{self.request.id}", ttl=TTL, wait=0) as lease:
            log("leased", lease.token)
            time.sleep(seconds)
    except fenced.NotGranted as busy:
        raise self.retry(exc=busy, countdown=2) from busy


@app.task(bind=True, autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0)
@once_per_task(leases, ttl=TTL)
def unstamped(_self: Any, _turn: fenced.Lease, order: int) -> None:
    """A bug: it writes without the stamp of its turn."""
    log("unstamped")
    try:
        database().execute("UPDATE orders SET charged = 'unstamped' WHERE id = ?", (order,))
    except sqlite3.Error as error:
        raise fenced.sql.refusal(error) or error from error
