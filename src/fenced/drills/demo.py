"""The demo of a service: every ten seconds a real process is stopped past its lease, writes late and is refused."""

from __future__ import annotations

import sys
import time

import click

from fenced.drills.bound import die_with_parent
from fenced.drills.pauses import SIGSTOP
from fenced.drills.processes import CouldNotRun
from fenced.drills.runner import run_drill
from fenced.drills.stage import Plan
from fenced.drills.terminal import Quiet
from fenced.errors import FencedError
from fenced.runtime.clocks import now

EVERY_SECONDS = 10.0
NAME = "demo/stock"


def play_once(url: str) -> str:
    """Run the story at a service; returns what happened, in one line."""
    plan = Plan(SIGSTOP, url, url, SIGSTOP.ttl, name=NAME)
    try:
        outcome = run_drill(plan, Quiet())
    except (CouldNotRun, FencedError) as error:
        return f"could not run: {error}"
    if outcome.verdict == "inconclusive":
        return outcome.sentence
    first, second = outcome.history.grants[-2:]
    late = [each for each in outcome.history.operations if each.kind == "write" and each.token == first.token]
    answer = f"its late write was {late[-1].decision}" + (f" ({late[-1].why})" if late[-1].why else "")
    return (
        f"{NAME}: A was stopped with token {first.token}, its lease expired, B took over with token {second.token} and "
        f"wrote; A woke up, and {answer}"
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
