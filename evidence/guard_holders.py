"""Eight holders of different tokens on one name of a guard: do the admitted tokens ever fall?

Each process draws the next token, announces it while it reads the value, and writes the value again. Meanwhile the
others draw higher tokens, so many are overtaken between their read and their write. The guard gives each admitted write
a version, so the versions say in which order the tokens were admitted.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

from fenced.client.registry import guard
from fenced.errors import Conflict, Contended, Indeterminate, StaleToken, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing.kit import NAME, by

HOLDERS = 8
SECONDS = 60.0
CONTROL_SECONDS = 10.0
# Not "fork": obstore does not work in a child of a process that has used it.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])
_shared: dict[str, Any] = {}
"""In each process: what all of them share."""


class Admitted(NamedTuple):
    """A write that the guard admitted."""

    version: int
    token: int


def run(guards: Mapping[str, Callable[[str], str]]) -> dict[str, Any]:
    """Each guard for a minute, and the control: the same guard in observe, which refuses nothing."""
    found: dict[str, Any] = {}
    for kind, address in guards.items():
        found[kind] = _hold(address("holders"), "enforce", SECONDS)
        found[kind]["observed"] = _hold(address("holders-observed"), "observe", CONTROL_SECONDS)
    return {**found, "holders": HOLDERS}


def _hold(url: str, mode: str, seconds: float) -> dict[str, Any]:
    opened = guard(url, BlockingRuntime())
    step(opened.open())
    step(opened.set_mode(mode))
    # The barrier makes them begin together, so that each process is one holder.
    shared = (_processes.Value("q", 0), _processes.Barrier(HOLDERS, timeout=300))
    with ProcessPoolExecutor(HOLDERS, _processes, _share, shared) as crew:
        results = list(crew.map(_holder, [url] * HOLDERS, [seconds] * HOLDERS))
    admitted = [each for theirs, _ in results for each in theirs]
    outcomes = sum((others for _, others in results), Counter[str]())
    last = step(opened.peek(NAME)).version
    step(opened.close())
    return {"seconds": seconds, "admitted": len(admitted), **outcomes, **judge(admitted, last)}


def _share(tokens: Synchronized[int], together: Barrier) -> None:
    """Called in each process when it starts: a lock can be inherited, and not sent."""
    _shared.update(tokens=tokens, together=together)


def _holder(url: str, seconds: float) -> tuple[list[Admitted], Counter[str]]:
    tokens: Synchronized[int] = _shared["tokens"]
    admitted: list[Admitted] = []
    outcomes: Counter[str] = Counter()
    opened = guard(url, BlockingRuntime())
    step(opened.open())
    _shared["together"].wait()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with tokens.get_lock():  # held for one addition: no two holders draw the same token
            tokens.value += 1
            token = tokens.value
        try:
            found = step(opened.read(by(token, 0), NAME))
            version = step(opened.write(by(token, 1), NAME, b"%d" % token, expect=found.version))
            admitted.append(Admitted(version, token))
        except StaleToken:
            outcomes["refused"] += 1
        except (Conflict, Contended, Unavailable, Indeterminate) as error:
            outcomes[type(error).__name__.lower()] += 1
    step(opened.close())
    return admitted, outcomes


def judge(admitted: Iterable[Admitted], last: int) -> dict[str, int]:
    """How often a token was admitted after a higher one, and how many acknowledged writes share a version or are beyond
    the last one."""
    ordered = sorted(admitted)
    pairs = list(itertools.pairwise(ordered))
    fell = sum(later.token < earlier.token for earlier, later in pairs)
    twice = sum(later.version == earlier.version for earlier, later in pairs)
    return {"tokens_fell": fell, "lost": twice + sum(each.version > last for each in ordered)}
