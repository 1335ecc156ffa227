"""Three seats for eight processes, one of which is killed in its seat. Then a writer that was paused, and is refused.

python examples/permits.py
"""

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection

import fenced
from fenced.recipes.permits import ReadWrite, Semaphore

SEATS = 3


def work(url: str, number: int, says: Connection) -> None:
    with fenced.Client(url) as client, Semaphore(client, "seats", SEATS, ttl=2).hold() as seat:
        says.send(("takes", seat.name, number))
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # its seat is free again after the ttl
        seat.wait_lost(0.1)
        says.send(("leaves", seat.name, number))


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        url = f"sqlite:///{folder}/leases.db"
        messages, says = multiprocessing.Pipe(duplex=False)
        workers = [multiprocessing.Process(target=work, args=(url, number, says)) for number in range(8)]
        for worker in workers:
            worker.start()
        taken: dict[str, int] = {}
        most = served = 0
        while served < 7:
            what, seat, number = messages.recv()
            if what == "takes":
                taken[seat] = number  # of the killed one, too: another one gets its seat only after the ttl
                most = max(most, len(taken))
            else:
                del taken[seat]
                served += 1
        for worker in workers:
            worker.join()
        print(f"at most {most} of {SEATS} seats were taken, and all but the killed one were served")

        with fenced.Client(url) as client, fenced.Values(f"sqlite:///{folder}/config.db") as values:
            shared = ReadWrite(client, "config", values=values, readers=4)
            with shared.write() as writer:
                shared.store(writer, b"version 1")
                late = writer.next_stamp()  # what the writer would still send after a pause
            with shared.read() as reader:
                print("a reader reads", shared.load(reader))
                try:
                    values.write_many(late, dict.fromkeys(late.names, b"late"))
                except fenced.StaleToken:
                    print("the late writer was refused")


if __name__ == "__main__":
    main()
