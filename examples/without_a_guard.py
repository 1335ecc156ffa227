"""A pager that cannot refuse. Three weak ways to keep late holders off: compare, ask, and wait.

python examples/without_a_guard.py
"""

import tempfile

import fenced
from fenced.recipes.election import Follower


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        url = f"sqlite:///{folder}/leases.db"
        with fenced.Client(url, label="node-a") as node_a, fenced.Client(url, label="node-b") as node_b:
            with node_a.hold("pager") as lease:
                late = str(lease.bare_stamp())
            with node_b.hold("pager") as lease:
                print(f"waited for {lease.wait_out(pause=0.2, delivery=0.1):.1f} s, if the bounds hold")
                found = node_a.holder("pager")
                print("held by", found.holder.label if found else "nobody")
                receiver = Follower("pager")
                receiver.accept(lease.bare_stamp())
                for check in (receiver.accept, node_a.verify):
                    try:
                        check(late)
                    except fenced.StaleToken as error:
                        print(error)


if __name__ == "__main__":
    main()
