"""The demo of a service: every ten seconds a real process is stopped past its lease, writes late and is refused."""

from __future__ import annotations

import sys
import time

import click

from fenced.drills import pause
from fenced.drills.processes import CouldNotRun
from fenced.drills.stage import DrillRun, Plan
from fenced.drills.story import Log
from fenced.drills.terminal import Quiet
from fenced.drills.worker import die_with_parent
from fenced.errors import FencedError
from fenced.runtime.clocks import now

EVERY_SECONDS = 10.0
NAME = "demo/stock"


def play_once(url: str) -> str:
    """Run the story at a service; returns what happened, in one line."""
    plan = Plan("pause", url, url, pause.TTL, None, 2, 1, 0, NAME)
    try:
        with DrillRun(plan) as stage:
            log = Log(now())
            pause.run(stage, log, Quiet())
    except (CouldNotRun, FencedError) as error:
        return f"could not run: {error}"
    first, second = log.history.grants[-2:]
    late = [each for each in log.history.operations if each.kind == "write" and each.token == first.token]
    outcome = f"its late write was {late[-1].decision}" + (f" ({late[-1].why})" if late[-1].why else "")
    return (
        f"{NAME}: A was stopped with token {first.token}, its lease expired, B took over with token {second.token} and "
        f"wrote; A woke up, and {outcome}"
    )


def main() -> None:
    parent, url = sys.argv[1:]
    die_with_parent(int(parent))
    while True:
        began = now()
        click.echo(f"fenced: demo: {play_once(url)}", err=True)
        time.sleep(max(0.0, began + EVERY_SECONDS - now()))


if __name__ == "__main__":
    main()
