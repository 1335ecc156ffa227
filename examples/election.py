"""Three processes, one leader: it is killed, another one leads, and a message of the dead leader's term is refused.

python examples/election.py
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection

import fenced
from fenced.recipes.election import Election, Follower, Term


def candidate(url: str, name: str, to_follower: Connection) -> None:
    """Leads when it can, and tells the follower under which term."""

    def lead(term: Term) -> None:
        while True:
            term.check()
            to_follower.send((name, str(term.stamp())))
            term.lease.wait_lost(0.1)

    with fenced.Client(url, label=name) as client:
        Election(client, "scheduler", candidate=name, ttl=1.5).run(lead)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/leases.db"
        context = multiprocessing.get_context("spawn")
        messages, to_follower = context.Pipe(duplex=False)
        processes = {
            name: context.Process(target=candidate, args=(url, name, to_follower), daemon=True)
            for name in ("node-a", "node-b", "node-c")
        }
        for process in processes.values():
            process.start()
        follower = Follower("scheduler")
        leaders: list[str] = []
        stale = ""
        while len(leaders) < 3:
            name, stamp = messages.recv()
            follower.accept(stamp)
            if leaders[-1:] == [name]:
                continue
            leaders.append(name)
            if stale:
                try:
                    follower.accept(stale)
                except fenced.StaleToken:
                    print("the message of an earlier term was refused")
            stale, pid = stamp, processes[name].pid
            if len(leaders) < 3 and pid is not None:
                os.kill(pid, signal.SIGKILL)
        for process in processes.values():
            process.kill()
            process.join()
        print(f"{len(set(leaders))} processes have led, one after the other")


if __name__ == "__main__":
    main()
