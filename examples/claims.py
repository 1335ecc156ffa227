"""Four processes work on one table of jobs. One of them stalls, is overtaken, and what it writes later is refused."""

import multiprocessing
import sqlite3
import tempfile
from multiprocessing.synchronize import Event

import fenced
from fenced.work import Claims

JOBS = 20
runs = Claims(
    table="runs",
    name="runs/{id}",
    ready="status = 'pending'",
    taken={"status": "running"},
    back={"status": "pending"},
    dead={"status": "failed"},
    backoff=(0.1, 1),
    error="problem",
)


def connect(folder: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{folder}/jobs.db", isolation_level=None, timeout=60)


def stalls(folder: str, claimed: Event, go_on: Event) -> None:
    """A worker that is renewed no longer, like a process that was stopped; then it wakes up and finishes its row."""
    db = connect(folder)
    with fenced.Client(f"sqlite:///{folder}/leases.db") as client:
        worker = runs.worker(client, ttl=1, max_hold=1).__enter__()
        (run,) = worker.claim_many(db, 1)
        claimed.set()
        go_on.wait()
        try:
            run.finish(db, status="done", square=-1)
        except fenced.StaleToken:
            print("the late worker was refused", flush=True)


def works(folder: str) -> None:
    db = connect(folder)
    with fenced.Client(f"sqlite:///{folder}/leases.db") as client, runs.worker(client, ttl=1) as worker:
        for run in worker.take(db, limit=3, poll=0.1):
            with run.within(db):  # an exception gives the row back, with a pause and the reason
                run.finish(db, status="done", square=run["number"] ** 2)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(
        dir="/var/tmp"
    ) as folder:  # not in memory: leases must survive a power cut
        db = connect(folder)
        db.execute(
            "CREATE TABLE runs (id INTEGER PRIMARY KEY, status TEXT NOT NULL DEFAULT 'pending', "
            "number INTEGER NOT NULL, square INTEGER, problem TEXT)"
        )
        runs.install(db, mode="require")
        db.executemany("INSERT INTO runs (number) VALUES (?)", [(number,) for number in range(JOBS)])
        claimed, go_on = context.Event(), context.Event()
        late = context.Process(target=stalls, args=(folder, claimed, go_on))
        late.start()
        claimed.wait()
        workers = [context.Process(target=works, args=(folder,)) for _ in range(3)]
        for worker in workers:
            worker.start()
        while db.execute("SELECT 1 FROM runs WHERE status <> 'done'").fetchone() is not None:
            late.join(0.1)
        go_on.set()
        late.join()
        for worker in workers:
            worker.terminate()
            worker.join()
        right = db.execute("SELECT count(*) FROM runs WHERE square = number * number").fetchone()
        print(f"{right[0]} of {JOBS} rows are right")


if __name__ == "__main__":
    main()
