"""The ledger: power cuts, interrupts at every line, damage at every byte, and a restart after a million names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evidence.power_cut import MEGABYTES, mounted
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.clocks import now_ns
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.ledger.authority.journal import FileJournal
from fenced.stores.ledger.authority.ledger import BATCH_TOKENS_MAX, Ledger
from fenced.values.model import Ask, Holder, Release
from tests.ledger.test_damage import damaged
from tests.ledger.test_interrupts import interrupted_ledgers

CUTS = 20
NAMES = 1_000_000
TOGETHER = 1000

HOLDER = """
import os, sys, threading, fenced
from fenced.stores.ledger.authority.ledger import Ledger
Ledger.snapshot_changes = 500
if sys.argv[2] == "unsynced":  # the control: what would be lost if batches were not synced
    os.fdatasync = os.fsync = lambda file: None
client = fenced.Client(f"ledger:///{sys.argv[1]}/leases.db")
def work(thread):
    while True:
        with client.hold(f"name/{thread}", ttl=3600) as lease:
            os.write(1, b"%d %d\\n" % (lease.token, thread))
            with client.hold(f"other/{thread}", ttl=3600):
                pass
            os.write(1, b"0 %d\\n" % thread)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def cut(folder: Path, seconds: float, how: str) -> dict[str, int]:
    """Let eight holders run, cut the power, and compare what they were told with what the disk has."""
    image = folder / "disk"
    with image.open("wb") as file:
        file.truncate(MEGABYTES * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    log = folder / "acknowledged"
    with mounted(image, folder / "before") as point, log.open("wb") as acknowledged:
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(point), how], stdout=acknowledged)
        while log.stat().st_size == 0 and holder.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(holder.pid, signal.SIGKILL)
        shutil.copyfile(image, folder / "after.disk")
        holder.wait()
    held: dict[int, int] = {}
    tokens: list[int] = []
    for line in log.read_text().rpartition("\n")[0].splitlines():
        token, thread = map(int, line.split())
        held[thread] = token
        tokens.append(token)
    with mounted(folder / "after.disk", folder / "after") as point:
        ledger = LedgerAuthority(point / "leases.db", BlockingRuntime())
        last = step(ledger.open()).last_token
        if last >= BATCH_TOKENS_MAX:  # else the disk has no journal at all, and nothing was skipped
            last -= BATCH_TOKENS_MAX
        leases = {thread: token for thread, token in held.items() if token}
        lost = 0
        for thread, token in leases.items():
            # Released and granted again, or being released, since the last line that was written: not lost.
            view = step(ledger.observe(f"name/{thread}"))
            lost += view.held_by is not None and view.held_by.token < token
            lost += view.held_by is None and last < token
        ledger.abandon()
    return {
        "grants": sum(token > 0 for token in tokens),
        "twice": sum(token > 0 for token in tokens) - len({token for token in tokens if token}),
        "acknowledged": max(tokens),
        "survived": last,
        "lost_tokens": max(0, max(tokens) - last),
        "leases": len(leases),
        "lost_leases": lost,
    }


def cuts(how: str, count: int) -> list[dict[str, int]]:
    figures = []
    for number in range(count):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            figures.append(cut(Path(folder), 0.2 + 0.05 * number, how))
    return figures


def restart(*, counted: bool) -> dict[str, float]:
    """Use a million names once, then start again. `counted`: the holder says which attempts are settled."""
    runtime = BlockingRuntime()
    holder, series = Holder(runtime.secret(), "evidence", "host", 1), runtime.secret() if counted else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "leases.db"
        ledger = LedgerAuthority(path, runtime)
        step(ledger.open())
        began = time.perf_counter()
        for first in range(1, NAMES + 1, TOGETHER):
            numbers = range(first, first + TOGETHER)
            asks = [
                Ask(
                    runtime.secret(),
                    (f"orders/{number}",),
                    30.0,
                    holder,
                    series=series,
                    number=number,
                    settled=first - 1,
                )
                for number in numbers
            ]
            step(ledger.many(asks))
            step(ledger.many([Release(ask.secret) for ask in asks]))
        used = time.perf_counter() - began
        ledger.abandon()
        began = time.perf_counter()
        again = Ledger(path, FileJournal(path), now_ns)
        again.open(create=False)
        seconds = time.perf_counter() - began
        remembered = sum(map(len, again._namespaces))
        again.close()
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {
        "names": NAMES,
        "remembered": remembered,
        "pairs_a_second": round(NAMES / used),
        "restart_seconds": round(seconds, 2),
        "megabytes": round(size / 2**20),
    }


def interrupts() -> dict[str, int]:
    """A program is interrupted at each line of the ledger's code in turn, and opens its files again."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return {"lines": interrupted_ledgers(Path(folder), every=1)}


def damages() -> dict[str, int]:
    """Each byte of the newest segment is damaged in turn. None of those that are opened repeats a token."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        refused, dropped = damaged(Path(folder), every=1)
    return {"refused": refused, "without_their_last_batch": dropped}


def run() -> dict[str, Any]:
    synced, unsynced = cuts("synced", CUTS), cuts("unsynced", 3)
    return {
        "synced": synced,
        "lost": sum(figure["lost_tokens"] + figure["lost_leases"] + figure["twice"] for figure in synced),
        "control_unsynced": unsynced,
        "control_lost": sum(figure["lost_tokens"] for figure in unsynced),
        "interrupts": interrupts(),
        "damages": damages(),
        "restart_settled": restart(counted=True),
        "restart_unsettled": restart(counted=False),
    }
