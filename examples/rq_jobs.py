"""A job of RQ is queued three times, and two workers take it. It runs once. It needs Redis at REDIS_URL."""

import multiprocessing
import os
import tempfile

import redis
import rq

import fenced

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost")


def charge(folder: str, order: int) -> None:
    job = rq.get_current_job()
    assert job is not None
    with (
        fenced.Client(f"sqlite:///{folder}/leases.db") as client,
        client.once(f"rq/{job.id}", 1, keep=86_400) as turn,
    ):
        if turn:  # None: another delivery has done it
            with open(f"{folder}/charged", "a") as file:
                file.write(f"order {order} is charged\n")


def work(queue: str) -> None:
    connection = redis.Redis.from_url(REDIS_URL)
    rq.Worker([rq.Queue(queue, connection)], connection=connection).work(burst=True, logging_level="ERROR")


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        queue = rq.Queue(f"charges-{os.path.basename(folder)}", redis.Redis.from_url(REDIS_URL))
        job = queue.enqueue("rq_jobs.charge", folder, 42)
        for _ in range(2):
            queue.enqueue_job(job)
        workers = [multiprocessing.Process(target=work, args=(queue.name,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        with open(f"{folder}/charged") as file:
            print(file.read(), end="")


if __name__ == "__main__":
    main()
