"""APScheduler in three processes, as in three web workers. Each tick of its job runs in one of them."""

import multiprocessing
import tempfile
import time
from pathlib import Path

from apscheduler.schedulers.background import BackgroundScheduler

import fenced

PERIOD, TICKS = 1, 3


def run(folder: str) -> None:
    """One process: its scheduler, until enough ticks have run."""
    log = Path(folder) / "log"
    with fenced.Client(f"sqlite:///{folder}/leases.db") as client:

        def report() -> None:
            tick = int(time.time() // PERIOD * PERIOD)  # of a grid that all processes share
            with client.once("report", tick, ttl=5) as turn:
                if turn:
                    with log.open("a") as file:
                        file.write(f"{tick}\n")

        scheduler = BackgroundScheduler()
        scheduler.add_job(report, "interval", seconds=PERIOD)
        scheduler.start()
        while len(log.read_text().splitlines()) < TICKS:
            time.sleep(0.1)
        scheduler.shutdown()  # waits for a job that runs


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        log = Path(folder) / "log"
        log.touch()
        processes = [multiprocessing.Process(target=run, args=(folder,)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        ticks = log.read_text().splitlines()
        print("each tick ran once:", len(ticks) >= TICKS and len(set(ticks)) == len(ticks))


if __name__ == "__main__":
    main()
