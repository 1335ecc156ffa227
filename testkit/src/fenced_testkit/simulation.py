"""Run seeded worlds: the client code that ships, under every fault at once.

Messages are lost, late, doubled and reordered; processes pause, crash and drift; servers restart, freeze and fail
over. Each world comes from one seed, and a judge that sees everything checks the promises:

    python -m fenced_testkit.simulation 0-999                    # many worlds of the memory authority
    python -m fenced_testkit.simulation 0-99 --authority redis   # the shipped Redis client, over simulated streams
    python -m fenced_testkit.simulation fresh --count 500        # seeds that nobody has run before; they are printed
    python -m fenced_testkit.simulation 4711 --log               # one world, event by event
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import secrets
import sys
from collections.abc import Iterable, Sequence

from fenced_testkit.worlds.judge import Judge, PromiseBroken
from fenced_testkit.worlds.site import Site

BACKENDS = {
    "memory": "fenced_testkit.worlds.memory:MemoryBackend",
    "ledger": "fenced_testkit.worlds.ledger:LedgerBackend",
    "redis": "fenced_testkit.worlds.redis:RedisBackend",
    "zookeeper": "fenced_testkit.worlds.zookeeper:ZooKeeperBackend",
    "etcd": "fenced_testkit.worlds.etcd:EtcdBackend",
    "service": "fenced_testkit.worlds.service:ServiceBackend",
    "redis-cluster": "fenced_testkit.worlds.redis_cluster:RedisClusterBackend",
}
"""Which backend serves which authority in the worlds."""


def site_of(authority: str) -> type[Site]:
    """A site with that authority."""
    module, _, name = BACKENDS[authority].partition(":")
    backend = getattr(importlib.import_module(module), name)
    return type(f"{authority.title()}Site", (Site,), {"backend_type": backend})


def simulate(seed: int | str, site_type: type[Site] = Site, *, keep_log: bool = False) -> Judge:
    """Run one world; raises PromiseBroken when a promise was not kept."""
    site = site_type(seed, keep_log=keep_log)
    # The collector would end coroutines of crashed clients at moments that depend on what ran before this world.
    gc.disable()
    logger = logging.getLogger("fenced")
    logged, logger.disabled = logger.disabled, True  # every world loses leases
    try:
        return site.run()
    except PromiseBroken as error:
        error.add_note(f"replay: make simulate SEEDS={seed} AUTHORITY={site.backend.name}")
        if keep_log:
            error.add_note("\n".join(site.judge.log[-200:]))
        raise
    finally:
        logger.disabled = logged
        gc.enable()


def run_worlds(
    authority: str, seeds: Iterable[int], *, keep_log: bool = False
) -> tuple[dict[str, int], list[str]]:
    """Run the worlds of these seeds. Returns what happened in them and how often, and the events if they are kept."""
    site_type = site_of(authority)
    counts: dict[str, int] = {}
    log: list[str] = []
    for seed in seeds:
        judge = simulate(seed, site_type, keep_log=keep_log)
        log += judge.log
        for what, count in judge.counts.items():
            counts[what] = counts.get(what, 0) + count
    return counts, log


def fresh_seeds(count: int) -> range:
    """Seeds that nobody has run before. They follow a random number of fifteen digits."""
    first = 10**14 + secrets.randbelow(9 * 10**14)
    return range(first, first + count)


def seeds_of(text: str) -> list[int]:
    """`7`, `0-99`, or several of them with commas."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds.extend(range(int(first), int(last or first) + 1))
    return seeds


def _chosen(words: Sequence[str], count: int) -> Sequence[int]:
    if list(words) != ["fresh"]:
        return seeds_of(",".join(words) or "0-999")
    seeds = fresh_seeds(count)
    sys.stdout.write(f"fresh seeds: {seeds[0]}-{seeds[-1]}\n")
    sys.stdout.flush()
    return seeds


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m fenced_testkit.simulation", description="Seeded worlds.")
    parser.add_argument(
        "seeds", nargs="*", help="7, 0-99, or several of them; fresh: new ones; 0-999 if none is named"
    )
    parser.add_argument("--count", type=int, default=1000, help="how many fresh ones")
    parser.add_argument("--authority", choices=sorted(BACKENDS), default="memory")
    parser.add_argument("--log", action="store_true", help="print every event")
    options = parser.parse_args(arguments)
    seeds = _chosen(options.seeds, options.count)
    try:
        counts, log = run_worlds(options.authority, seeds, keep_log=options.log)
    except PromiseBroken as error:
        sys.stderr.write(f"{error}\n" + "\n".join(error.__notes__) + "\n")
        return 1
    if options.log:
        sys.stdout.write("\n".join(log) + "\n")
    summary = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    sys.stdout.write(f"{len(seeds)} worlds, no promise broken: {summary}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
