"""Decisions of a process that was killed: others have seen them, and go on seeing them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fenced.client.reaching import operate
from tests.metrics.servers import until

REFUSED = 20
LATE = f"""
import sys
import fenced
from fenced.testing.kit import stamp
values = fenced.Values(sys.argv[1])
values.set_mode("enforce")
values.write(stamp(2), "orders/42", b"new")
for _ in range({REFUSED}):
    try:
        values.write(stamp(1), "orders/42", b"late")
    except fenced.StaleToken:
        pass
print("refused", flush=True)
sys.stdin.readline()
"""


def counted(url: str) -> int:
    status = operate(url, lambda operator: operator.figures())
    return sum(count.count for guard in status.guards for count in guard.counts if count.verdict == "stale")


def test_refusals_outlive_a_killed_process(tmp_path: Path) -> None:
    """It never closes its guard. Within a second after the last one all are in the store, without another refusal."""
    url = f"file://{tmp_path}"
    command = [sys.executable, "-c", LATE, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "refused\n"
        until(lambda: counted(url) == REFUSED)
        process.kill()
    assert counted(url) == REFUSED
    records = operate(url, lambda operator: operator.records())
    assert [(each.name, each.token, each.mark) for each in records] == [("orders/42", 1, 2)] * REFUSED
