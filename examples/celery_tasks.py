"""A broker delivers a task of Celery three times. It is charged once, and the row refuses who was overtaken.

It needs RabbitMQ at AMQP_URL.
"""

import functools
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from celery import Celery, Task

import fenced
from fenced.celery import once_per_task

FOLDER = os.environ.get("EXAMPLE_FOLDER", "")
orders = fenced.sql.Guard(table="orders", name="orders/{id}")
app = Celery("celery_tasks", broker=os.environ.get("AMQP_URL", "amqp://localhost"))
app.conf.update(task_default_queue=f"charges-{Path(FOLDER).name}", broker_connection_retry_on_startup=True)


@functools.cache
def leases() -> fenced.Client:  # made in the process of the pool, not in that which forks it
    return fenced.Client(f"sqlite:///{FOLDER}/leases.db")


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
@once_per_task(leases, covers="orders/{order}")
def charge(_task: Task, turn: fenced.Lease, order: int) -> None:
    db = sqlite3.connect(f"{FOLDER}/shop.db", isolation_level=None)
    with orders.transaction(db, turn) as tx:
        tx.execute("UPDATE orders SET charged = charged + 1 WHERE id = ?", (order,))


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.environ["EXAMPLE_FOLDER"] = folder  # for the worker
        app.conf.task_default_queue = f"charges-{Path(folder).name}"
        db = sqlite3.connect(f"{folder}/shop.db", isolation_level=None)
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, charged INTEGER NOT NULL DEFAULT 0)")
        db.execute("INSERT INTO orders (id) VALUES (1), (2)")
        orders.install(db, mode="require")
        for _ in range(3):
            charge.apply_async([1], task_id="charge order 1")  # as a broker does that lost an acknowledgement
        charge.delay(2)
        command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "worker", "-c", "1", "-l", "ERROR"]
        worker = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
        while db.execute("SELECT charged FROM orders WHERE id = 2").fetchone() == (0,):
            time.sleep(0.1)
        worker.terminate()
        worker.wait()
        print("charged:", db.execute("SELECT charged FROM orders").fetchall())


if __name__ == "__main__":
    main()
