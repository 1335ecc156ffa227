"""The lock is kazoo's, and the table refuses its stopped holder all the same: by the czxid of the lock's node.

ZOOKEEPER=zookeeper://host:port python examples/other_locks.py
"""

import os
import signal
import sqlite3
import subprocess
import sys

from kazoo.client import KazooClient  # type: ignore[import-untyped]

import fenced

HOSTS = os.environ["ZOOKEEPER"].removeprefix("zookeeper://")
PATH = "/examples/orders-42"


def locked() -> tuple[KazooClient, fenced.Stamp]:
    """kazoo's own lock, and the stamp of this grant of it."""
    zk = KazooClient(HOSTS, timeout=2.0)
    zk.start(timeout=60)
    lock = zk.Lock(PATH, "me")
    lock.acquire()
    node = f"{PATH}/{lock.node}"
    grant = f"{zk.client_id[0]:x}:{node}"  # what differs between any two grants
    return zk, fenced.Stamp.foreign("zookeeper-czxid", "main", "orders/42", zk.exists(node).czxid, grant)


def main() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
    orders = fenced.sql.Guard(table="orders", name="orders/{id}")
    orders.install(db, mode="require")

    holder = subprocess.Popen([sys.executable, __file__, "holds"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    old = fenced.Stamp.parse(holder.stdout.readline().strip())
    with orders.transaction(db, old) as tx:
        tx.execute("INSERT INTO orders VALUES (42, 10)")
    holder.send_signal(signal.SIGSTOP)  # its session ends, and the lock goes on
    zk, new = locked()
    with orders.transaction(db, new) as tx:
        tx.execute("UPDATE orders SET qty = 9")
    try:
        with orders.transaction(db, old) as tx:  # what the stopped holder would send when it goes on
            tx.execute("UPDATE orders SET qty = 0")
    except fenced.StaleToken:
        print("the stopped holder was refused; left:", db.execute("SELECT qty FROM orders").fetchone()[0])
    holder.kill()
    holder.communicate()
    zk.stop()
    zk.close()
    db.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["holds"]:
        _, stamp = locked()
        print(stamp, flush=True)
        signal.pause()
    else:
        main()
