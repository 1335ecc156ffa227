"""`make evidence`: run the long figures and write docs/evidence/*.json. Names on the command line choose some of them.

For the storms on authorities: `make evidence ARGS="authority_storms --authority etcd --seconds 60"`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fenced
from evidence import (
    alerts,
    authority_storms,
    capacity,
    celery_visibility,
    claim_storm,
    contested_tables,
    drills,
    elections,
    guard_holders,
    ledger,
    live_page,
    message_storm,
    once,
    permits,
    power_cut,
    replicas,
    server_cut,
    service_crashes,
    service_kills,
    service_kits,
    service_memory,
    service_requests,
    service_waiters,
    walks,
    worlds,
    zookeeper_search,
)
from evidence.elections import workers as election_workers
from evidence.elections import worlds as election_worlds
from fenced_testkit.servers import (
    DynamoServer,
    EtcdServer,
    PostgresqlServer,
    RedisServer,
    SeaweedServer,
    ZooKeeperServer,
)
from fenced_testkit.servers.dynamodb import KEYS

FOLDER = Path(__file__).parents[1] / "docs" / "evidence"
STORM_SECONDS = 60
GUARD_STORM_SECONDS = 20
SET_SECONDS = 600.0
SET_CONTROL_SECONDS = 120.0
ROLES = ("guarded", "control")
JEPSEN = "leases from etcd with a ttl of 2 s"
"""As in Jepsen's test of etcd's locks; its values are in SQLite."""
ETCD_DEFAULTS = {"heartbeat-interval": "100", "election-timeout": "1000"}
ZOOKEEPER_DEFAULTS = {"tickTime": "2000", "minSessionTimeout": "4000"}
"""The storms run with the shortest ttls of servers as they are shipped; those of the tests are shorter."""
STORM_SIZE = ("--holders", "6", "--names", "3")


def _storm(seconds: float, *options: str, seed: int = 1, drill: str = "storm") -> dict[str, Any]:
    command = [sys.executable, "-m", "fenced", "drill", drill, "--json", "--seconds", str(seconds)]
    done = subprocess.run(
        [*command, "--seed", str(seed), *options], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise RuntimeError(f"{drill} {' '.join(options)}: {done.stderr}")
    told = json.loads(done.stdout)
    keys = (
        "ttl",
        "acknowledged",
        "contested",
        "overtaken",
        "refused",
        "lost_updates",
        "doubled_updates",
        "stale_admitted",
        "verdict",
        "seed",
    )
    return {key: told.get(key) for key in keys}


def storms() -> dict[str, Any]:
    """With leases from each authority: a storm behind the SQLite guard, and the control without a guard."""
    found: dict[str, Any] = {"sqlite": _storm_and_control()}
    etcd, zookeeper = EtcdServer(ETCD_DEFAULTS), ZooKeeperServer(ZOOKEEPER_DEFAULTS)
    for server in (PostgresqlServer(), RedisServer(), etcd, zookeeper):
        with server:
            name = type(server).__name__.removesuffix("Server").lower()
            found[name] = _storm_and_control("--authority", server.url())
    return {**found, "seconds_each": STORM_SECONDS}


def _storm_and_control(*options: str) -> dict[str, Any]:
    guarded, none = _storm(STORM_SECONDS, *options), _storm(STORM_SECONDS, *options, "--guard", "none")
    lost = none["lost_updates"] / none["acknowledged"]
    return {"guarded": guarded, "none": none, "lost_without_guard": round(lost, 4)}


@contextlib.contextmanager
def _guards() -> Iterator[dict[str, Callable[[str], str]]]:
    """By kind, the address of a guard at a place of this name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        start = stack.enter_context
        postgresql, redis = start(PostgresqlServer()), start(RedisServer())
        etcd, zookeeper, objects = start(EtcdServer()), start(ZooKeeperServer()), start(SeaweedServer())
        dynamodb = start(DynamoServer())
        os.environ.update(KEYS)
        yield {
            "postgresql": lambda _: postgresql.url(postgresql.create_database()),
            "redis": lambda place: f"{redis.url()}?tag={place}",
            "etcd": lambda place: f"{etcd.url()}?prefix={place}",
            "zookeeper": lambda place: f"{zookeeper.url()}/{place}",
            "objects": objects.url,
            "dynamodb": dynamodb.url,
            "files": lambda place: Path(tempfile.mkdtemp(prefix=place, dir=folder)).as_uri(),
        }


def guard_storms() -> dict[str, Any]:
    """Each guard with leases from SQLite and from PostgreSQL, and the control: the same guard in observe, which refuses
    nothing."""
    found: dict[str, Any] = {}
    with PostgresqlServer() as leases, _guards() as guards:
        for kind, address in guards.items():
            by_postgresql = ("--authority", leases.url(leases.create_database()))
            observed = address("observed")
            with fenced.Values(observed) as observing:
                observing.set_mode("observe")
            control = _storm(GUARD_STORM_SECONDS, "--guard", observed, *STORM_SIZE)
            found[kind] = {
                "sqlite": _storm(GUARD_STORM_SECONDS, "--guard", address("one"), *STORM_SIZE),
                "postgresql": _storm(
                    GUARD_STORM_SECONDS, "--guard", address("two"), *by_postgresql, *STORM_SIZE
                ),
                "observed": control,
                "lost_in_observe": round(control["lost_updates"] / control["acknowledged"], 4),
            }
    return {**found, "seconds_each": GUARD_STORM_SECONDS}


def in_rounds(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of drills; the file keeps those of the same code."""
    how = {"jobs": options.jobs, "spin": not options.no_spinning}
    return drills.run(options.rounds, partial(keep, "drills"), before("drills"), **how)


def sets(options: argparse.Namespace) -> dict[str, Any]:
    """The set of unique elements behind each guard, all at once; then the controls, in which nothing is refused.

    One of the two alone is added to what the file has, with another seed.
    """
    roles = [options.set_role] if options.set_role else ROLES
    kinds: dict[str, Any] = before("sets").get("kinds", {}) if options.set_role else {}
    lock = threading.Lock()

    def run(role: str, kind: str, words: Sequence[str]) -> None:
        runs, seconds = (
            kinds.setdefault(kind, {}).setdefault(role, []),
            getattr(options, f"set_{role}_seconds"),
        )
        one = {"seconds": seconds, **_storm(seconds, *words, seed=len(runs) + 1, drill="set")}
        with lock:  # all of them write one file
            runs.append({**one, "lost_share": round(one["lost_updates"] / one["acknowledged"], 4)})
            keep("sets", _sets_together(kinds))

    with _guards() as guards, EtcdServer(ETCD_DEFAULTS) as etcd:
        jepsen = ("--authority", etcd.url(), "--ttl", "2")
        sides: dict[str, dict[str, Sequence[str]]] = {"guarded": {}, "control": {}}
        sides["guarded"] |= {"sqlite": (), JEPSEN: jepsen}
        sides["control"] |= {
            each: (*options, "--guard", "none") for each, options in sides["guarded"].items()
        }
        sides["guarded"] |= {kind: ("--guard", at("set")) for kind, at in guards.items()}
        sides["control"] |= {kind: ("--guard", _observing(at("observed"))) for kind, at in guards.items()}
        for role in roles:
            with ThreadPoolExecutor(len(sides[role])) as pool:
                list(pool.map(partial(run, role), sides[role], sides[role].values()))
    return _sets_together(kinds)


def _observing(address: str) -> str:
    with fenced.Values(address) as values:
        values.set_mode("observe")
    return address


def _sets_together(kinds: dict[str, Any]) -> dict[str, Any]:
    guarded, control = ([run for each in kinds.values() for run in each.get(role, [])] for role in ROLES)
    return {
        "kinds": kinds,
        "acknowledged_with_guard": sum(run["acknowledged"] for run in guarded),
        "lost_with_guard": sum(run["lost_updates"] for run in guarded),
        "least_lost_share_of_a_control": min((run["lost_share"] for run in control), default=None),
    }


def holders() -> dict[str, Any]:
    with _guards() as guards:
        return guard_holders.run(guards)


def on_authorities(options: argparse.Namespace) -> dict[str, Any]:
    """The storms on the chosen authorities; the file keeps its figures of the others."""
    chosen = options.authority or authority_storms.AUTHORITIES
    found = authority_storms.run(
        tuple(chosen), seconds=options.seconds, workers=options.workers, seed=options.seed
    )
    together = {**before("authority_storms"), **found}
    return {name: together[name] for name in authority_storms.AUTHORITIES if name in together}


def in_worlds(options: argparse.Namespace) -> dict[str, Any]:
    """Worlds of the chosen kinds; the file keeps its figures of the others."""
    found = before("worlds")
    for kind in options.world or worlds.KINDS:
        found[kind] = worlds.together(found.get(kind), worlds.run(kind, options.count))
        found = {each: found[each] for each in worlds.KINDS if each in found}
        keep("worlds", found)
    return found


def bench() -> dict[str, Any]:
    path = FOLDER / "bench.json"
    subprocess.run([sys.executable, "-m", "bench", "--json", str(path)], check=True)
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "power_cut": lambda _: power_cut.run(),
    "server_cut": lambda _: server_cut.run(),
    "ledger": lambda _: ledger.run(),
    "storms": lambda _: storms(),
    "authority_storms": on_authorities,
    "guard_storms": lambda _: guard_storms(),
    "drills": in_rounds,
    "drill_times": lambda _: drills.times(),
    "sets": sets,
    "guard_holders": lambda _: holders(),
    "contested_tables": lambda _: contested_tables.run(),
    "capacity": lambda _: capacity.run(),
    "live_page": lambda _: live_page.run(),
    "claim_storm": lambda _: claim_storm.run(),
    "celery_visibility": lambda _: celery_visibility.run(),
    "message_storm": lambda _: message_storm.run(),
    "service_kills": lambda _: service_kills.run(),
    "service_crashes": lambda _: service_crashes.run(),
    "service_waiters": lambda _: service_waiters.run(),
    "service_requests": lambda _: service_requests.run(),
    "service_kits": lambda _: service_kits.run(),
    "service_memory": lambda _: service_memory.run(),
    "zookeeper_search": lambda _: zookeeper_search.run(),
    "worlds": in_worlds,
    "elections": lambda options: elections.run(changes=options.changes),
    "election_worlds": lambda _: election_worlds.evidence(),
    "election_workers": lambda _: election_workers.run(),
    "replicas": lambda _: replicas.run(),
    "permits": lambda _: permits.run(),
    "once": lambda _: once.run(),
    "alerts": lambda _: alerts.run(),
    "walks": lambda _: walks.run(),
    "bench": lambda _: bench(),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m evidence", description="The long figures.")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(FIGURES))
    storm = parser.add_argument_group("authority_storms")
    storm.add_argument("--authority", action="append", choices=authority_storms.AUTHORITIES)
    storm.add_argument("--seconds", type=float, default=authority_storms.SECONDS)
    storm.add_argument("--workers", type=int, default=authority_storms.WORKERS)
    storm.add_argument("--seed", type=int, default=authority_storms.SEED)
    parser.add_argument("--world", action="append", choices=worlds.KINDS, help="only these worlds")
    parser.add_argument("--count", type=int, default=worlds.WORLDS, help="of worlds, of each kind")
    rounds = parser.add_argument_group("drills")
    rounds.add_argument("--rounds", type=int, default=drills.ROUNDS)
    rounds.add_argument("--jobs", type=int, default=drills.JOBS, help="at a time, on each stack")
    rounds.add_argument("--no-spinning", action="store_true", help="the machine is busy enough")
    parser.add_argument(
        "--changes", type=int, default=elections.CHANGES, help="of leaders, on each authority"
    )
    sets_of = parser.add_argument_group("sets")
    sets_of.add_argument("--set-role", choices=ROLES, help="more of these")
    sets_of.add_argument("--set-guarded-seconds", type=float, default=SET_SECONDS)
    sets_of.add_argument("--set-control-seconds", type=float, default=SET_CONTROL_SECONDS)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - FIGURES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(FIGURES)}")
    for name in options.names or list(FIGURES):
        print(f"{name} ...", flush=True)
        found = FIGURES[name](options)
        keep(name, found)
        print(json.dumps(found, indent=2))
    return 0


def before(name: str) -> dict[str, Any]:
    """What the file has."""
    path = FOLDER / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text())[name] if path.exists() else {}
    return found


def keep(name: str, found: dict[str, Any]) -> None:
    """Write a figure. Long ones are written again and again, so that an interruption leaves what they have found."""
    figure = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "fenced": fenced.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": platform.platform(),
        name: found,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(figure, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
