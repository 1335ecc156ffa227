"""Ten thousand fresh worlds of every authority and of the proxy, on all cores.

A part of them: `make evidence ARGS="worlds --world etcd --count 2500"`. It is added to what the file has of the same
code; what other code has shown is replaced.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from fenced_testkit.simulation import BACKENDS, fresh_seeds, simulate, site_of
from fenced_testkit.worlds.judge import PromiseBroken

WORLDS = 10_000
CHUNK = 50
PROXY = "proxy"
KINDS = (*BACKENDS, PROXY)
LOADED = """
import sys
from evidence import worlds
worlds.play(sys.argv[1], range(3))
rooms = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("fenced")}
print(*(rooms[name] for name in sorted(rooms) if rooms[name]), sep="\\n")
"""


def code_of(kind: str) -> str:
    """A digest of the modules of package and laboratory that worlds of this kind load, without what they only say."""
    # In a process of its own: this one may have loaded more.
    done = subprocess.run(
        [sys.executable, "-c", LOADED, kind],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    found = hashlib.sha256()
    for file in done.stdout.split():
        found.update(_statements(ast.parse(Path(file).read_bytes())).encode())
    return found.hexdigest()[:16]


def _statements(module: ast.Module) -> str:
    """What it does: no comments and no docstrings."""
    for node in ast.walk(module):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [each for each in body if not _only_says(each)]
    return ast.dump(module)


def _only_says(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def run(kind: str, worlds: int) -> dict[str, Any]:
    """Which seeds, what happened in their worlds, and the seeds whose promises were broken."""
    code, seeds, began = code_of(kind), fresh_seeds(worlds), time.monotonic()
    counts: Counter[str] = Counter()
    broken: dict[str, str] = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        chunks = [seeds[at : at + CHUNK] for at in range(0, worlds, CHUNK)]
        for happened, failed in pool.map(play, [kind] * len(chunks), chunks):
            counts.update(happened)
            broken |= failed
    return {
        "worlds": worlds,
        "code": code,
        "seeds": f"{seeds[0]}-{seeds[-1]}",
        "seconds": round(time.monotonic() - began),
        "broken": broken,
        "counts": dict(counts.most_common()),
    }


def together(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same code have shown; of other code, only what the later one has."""
    if before is None or before.get("code") != now["code"]:
        return now
    return {
        "worlds": before["worlds"] + now["worlds"],
        "code": now["code"],
        "seeds": f"{before['seeds']}, {now['seeds']}",
        "seconds": before["seconds"] + now["seconds"],
        "broken": before["broken"] | now["broken"],
        "counts": dict((Counter(before["counts"]) + Counter(now["counts"])).most_common()),
    }


def play(kind: str, seeds: Sequence[int]) -> tuple[Counter[str], dict[str, str]]:
    """What happened in these worlds, and by seed which promise was broken."""
    return _play_proxies(seeds) if kind == PROXY else _play_leases(kind, seeds)


def _play_leases(authority: str, seeds: Sequence[int]) -> tuple[Counter[str], dict[str, str]]:
    site_type = site_of(authority)
    counts: Counter[str] = Counter()
    broken: dict[str, str] = {}
    for seed in seeds:
        try:
            counts.update(simulate(seed, site_type).counts)
        except PromiseBroken as error:
            broken[str(seed)] = str(error)
    return counts, broken


def _play_proxies(seeds: Sequence[int]) -> tuple[Counter[str], dict[str, str]]:
    """Every second one has a proxy that is alone before its store."""
    # Imported here: no other world loads the proxy.
    from fenced_testkit.worlds.proxy import ProxyWorld

    logging.disable(logging.CRITICAL)  # every world loses its store and its upstream
    counts: Counter[str] = Counter()
    broken: dict[str, str] = {}
    try:
        for seed in seeds:
            found = ProxyWorld(seed, alone=seed % 2 == 1).run()
            counts.update({"arrived": found.arrived, "answered": found.answered})
            if found.broken or not found.final:
                broken[str(seed)] = "; ".join(found.broken) or "the last holder did not get through"
    finally:
        logging.disable(logging.NOTSET)
    return counts, broken
