"""An order in a database and in an index, which share no transaction. A writer is killed between the two; the next one
builds on what it intended, and a reader never gets halves that do not belong together.

python examples/convergent.py
"""

import multiprocessing
import os
import signal
import tempfile

import fenced
from fenced.recipes.convergent import Convergent


class Killed(fenced.Values):
    """A store whose writer is killed before it writes the order there."""

    def write(self, lease: object, name: str, *args: object, **options: object) -> object:  # type: ignore[override]
        if name == "orders/42":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(lease, name, *args, **options)  # type: ignore[arg-type]


def killed_writer(folder: str) -> None:
    stores = [fenced.Values(f"sqlite:///{folder}/database.db"), Killed(f"sqlite:///{folder}/index.db")]
    order = Convergent("orders/42", stores)
    with (
        fenced.Client(f"sqlite:///{folder}/leases.db") as client,
        client.hold_all(order.names, ttl=1) as lease,
    ):
        order.write(lease, lambda old: [b"2 apples", b"apples"])


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        stores = [fenced.Values(f"sqlite:///{folder}/{name}.db") for name in ("database", "index")]
        order = Convergent("orders/42", stores)
        with fenced.Client(f"sqlite:///{folder}/leases.db") as client:
            with client.hold_all(order.names) as lease:
                order.write(lease, lambda old: [b"1 apple", b"apples"])
            print("read:", order.read())
            writer = multiprocessing.Process(target=killed_writer, args=(folder,))
            writer.start()
            writer.join()
            try:
                order.read()
            except fenced.Contended:
                print("between the stores: read again later")
            with client.hold_all(order.names) as lease:
                order.write(lease, lambda old: [(old[0] or b"") + b", 3 pears", (old[1] or b"") + b", pears"])
            print("read:", order.read())
        for store in stores:
            store.close()


if __name__ == "__main__":
    main()
