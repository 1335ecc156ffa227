"""An application under `uvicorn --workers 4`: one worker of four leads. It is killed again and again, and replaced.

The followers are those of the other elections, and so is what is looked for. Besides, the application is asked by HTTP
who leads, by its own clock: never two of the workers that live.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evidence.elections import GIVE_UP_SECONDS, TTL, Followers, NobodyLeads, broken_promises
from fenced.drills.processes import descendants
from fenced.drills.relay.ports import free_port
from fenced.runtime.clocks import now

ROOT = Path(__file__).parents[2]
WORKERS = 4
KILLS = 10
ASKED = 40
"""How often the application is asked who leads, in each term: each request goes to one of the workers."""


@contextlib.contextmanager
def _uvicorn(url: str, followers: Followers, port: int, ttl: float, log: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "uvicorn", "evidence.elections.application:app"]
    command += ["--workers", str(WORKERS), "--port", str(port), "--log-level", "warning"]
    told = {
        "ELECTION_AUTHORITY": url,
        "ELECTION_FOLLOWERS": ",".join(map(str, followers.ports)),
        "ELECTION_TTL": str(ttl),
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env={**os.environ, **told}, cwd=ROOT, stdout=sink, stderr=sink, process_group=0
        )
    try:
        yield
    finally:
        below = descendants(process.pid)
        for pid in [process.pid, *below]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _leaders(port: int) -> set[str]:
    """Who says of itself that it leads."""
    found = set[str]()
    for _ in range(ASKED):
        with contextlib.suppress(OSError):  # the worker that was killed had accepted it
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/leads", timeout=10) as answer:
                told = json.load(answer)
            if told["leads"]:
                found.add(told["who"])
    return found


def run(kills: int = KILLS, ttl: float = TTL) -> dict[str, Any]:
    seconds: list[float] = []
    stuck: list[str] = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        followers, port = Followers(Path(name)), free_port()
        try:
            with _uvicorn(f"sqlite:///{name}/leases.db", followers, port, ttl, Path(name) / "log"):
                term, who = 0, ""
                for killed in range(kills + 1):
                    began = now()
                    if killed:
                        os.kill(int(who.split()[1]), signal.SIGKILL)
                    found = followers.leader_after(term, GIVE_UP_SECONDS)
                    if found is None:
                        raise NobodyLeads(f"nobody leads {GIVE_UP_SECONDS:g} s after {who} with term {term}")
                    term, who, when = found
                    if killed:
                        seconds.append(when - began)
                    _until_full(followers, killed)
                    if len(leaders := _leaders(port)) > 1:
                        stuck.append(f"these lead at the same time: {', '.join(sorted(leaders))}")
        except NobodyLeads as error:
            stuck.append(f"{error}; {(Path(name) / 'log').read_text()[-1000:]}")
        finally:
            followers.close()
    return {
        "workers": WORKERS,
        "ttl": ttl,
        "killed": len(seconds),
        "terms": len({term for _, term, _, _ in followers.obeyed}),
        "workers_that_led": len({who for _, _, who, _ in followers.obeyed}),
        "commands_obeyed": len(followers.obeyed),
        "seconds_to_a_new_leader": {
            "median": round(statistics.median(seconds), 2) if seconds else None,
            "longest": round(max(seconds, default=0.0), 2),
            "bound": ttl + 1,
            "over": sum(each > ttl + 1 for each in seconds),
        },
        "broken": stuck + broken_promises(followers.obeyed),
    }


def _until_full(followers: Followers, killed: int) -> None:
    """Until uvicorn has replaced who was killed: each candidate is new to the followers once."""
    with followers.changed:
        if not followers.changed.wait_for(lambda: len(followers.known) >= WORKERS + killed, GIVE_UP_SECONDS):
            raise NobodyLeads(f"{len(followers.known)} workers have started, after {killed} were killed")
