"""A process of contenders for the permits of one semaphore, each a thread. It says who came in, and when."""

from __future__ import annotations

import json
import sys
import threading
import time

import fenced
from fenced.events import Event, LeaseGranted
from fenced.recipes.permits import Semaphore
from fenced.runtime.clocks import now

POOL = "pool"
INSIDE_SECONDS = 0.02

_turns = threading.local()
"""Of each thread: the token of its turn at the gate."""
_lines = threading.Lock()


def say(what: str, permit: str, token: int, turn: int) -> None:
    with _lines:  # two threads that print at once mix their lines
        print(json.dumps([what, permit, token, turn, now()]), flush=True)


def listen(event: Event) -> None:
    """Called in the thread that was granted the lease."""
    if isinstance(event, LeaseGranted) and event.names == (POOL,):
        _turns.token = event.token
    elif isinstance(event, LeaseGranted):
        say("granted", event.names[0], event.token, _turns.token)


def contend(client: fenced.Client, limit: int, ttl: float) -> None:
    while True:
        with Semaphore(client, POOL, limit, ttl=ttl).hold() as permit:
            say("in", permit.name, permit.token, _turns.token)
            time.sleep(INSIDE_SECONDS)
            say("out", permit.name, permit.token, _turns.token)


def main(url: str, limit: str, ttl: str, threads: str) -> None:
    with fenced.Client(url, on_event=listen, guarantee="best-effort") as client:
        contenders = [
            threading.Thread(target=contend, args=(client, int(limit), float(ttl)))
            for _ in range(int(threads))
        ]
        for each in contenders:
            each.start()
        for each in contenders:
            each.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
