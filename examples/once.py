"""Eight processes start at once. One of them migrates; the others wait, and then skip."""

import multiprocessing
import tempfile

import fenced


def start(url: str, number: int) -> None:
    """What every machine does when it starts: migrate if nobody has, then go on."""
    with fenced.Client(url) as client, client.once("schema", version=7) as turn:
        if turn:
            print(f"machine {number} migrates under token {turn.token}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(
        dir="/var/tmp"
    ) as folder:  # not in memory: leases must survive a power cut
        url = f"sqlite:///{folder}/leases.db"
        machines = [multiprocessing.Process(target=start, args=(url, number)) for number in range(8)]
        for machine in machines:
            machine.start()
        for machine in machines:
            machine.join()


if __name__ == "__main__":
    main()
