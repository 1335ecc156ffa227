"""What a drill runs against: the authority, the guard or plain table, and the names. All are opened first."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fenced.client import registry
from fenced.client.faces import Client
from fenced.drills import java
from fenced.drills.bound import bound
from fenced.drills.declared import Cast, Drill
from fenced.drills.history import History
from fenced.drills.processes import PATIENCE_SECONDS, CouldNotRun, HolderProcess, HolderProcesses, Start
from fenced.drills.programs import EMBEDDED, LocalService, copied_authority, faketime, relay_to
from fenced.drills.relay import Proxy
from fenced.drills.resource import GuardedResource, Orders, Resource, orders_in, resource
from fenced.drills.served import SCHEMES, has_values
from fenced.drills.worker import HolderSetup
from fenced.errors import FencedError, LeaseLost, Misconfigured, Unavailable
from fenced.guards.tablevalues import TableValues
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.clocks import now
from fenced.values import timing
from fenced.values.contracts import Authority, NamedValues
from fenced.values.decision import Rule

NO_GUARD = "none"
_SECRET = re.compile(r"(?<=//)[^/@\s]*@|(?i:(?<=password=)|(?<=secret=)|(?<=token=))[^&\s'\"]+")
_PROBE_SECONDS = 0.25
_PROBE_TRIES = 20
_NOBODY = "0" * 32
_CLOCK_SPEED = 0.05
STORM_SECONDS_MIN = 8.0
STORM_SECONDS_MAX = 3600.0
STORM_TTLS = 20.0
"""How long a storm lasts by default: STORM_SECONDS_MIN, or this many ttls if that is longer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the command line."""

    drill: Drill
    authority: str | None = None
    guard: str | None = None
    """A URL, `none` for no guard, or None for the values of the service that is the authority, or else a fresh one."""
    ttl: float = 1.0
    """The ttl that the holders ask for; `DrillStage.ttl` is the one that they get."""
    seconds: float | None = None
    """How long the storm lasts, or None for as many ttls as it takes."""
    holders: int = 2
    names: int = 1
    seed: int = 0
    name: str | None = None
    """The name to use; None: fresh names."""


def shown_ttl(asked: float, granted: float) -> str:
    """The ttl that was granted, and the one that was asked for if it is another."""
    differs = not math.isclose(asked, granted, abs_tol=0.001)
    return f"{granted:g} s" + (f" (asked: {asked:g} s)" if differs else "")


def without_secrets(text: str) -> str:
    """An address, or a message that may quote one, with its secrets replaced."""
    return _SECRET.sub("***", text)


class DrillStage:
    """The authority, the resource and the names of one drill.

    Opened before any holder starts, so that a wrong address is reported at once.
    """

    def __init__(self, plan: Plan, folder: Path, closing: contextlib.ExitStack) -> None:
        self.plan, self.drill = plan, plan.drill
        self.folder = folder
        self._closing = closing
        self._relays: dict[str, tuple[str, Proxy]] = {}
        self.fresh_authority = plan.authority is None
        authority_url = plan.authority or f"sqlite:///{folder / 'leases.db'}"
        guard = plan.guard
        if guard is None and has_values(authority_url):
            guard = authority_url
        self.fresh_guard = guard in (None, NO_GUARD)
        self.guarded = guard != NO_GUARD
        self._table = str(folder / "plain.db")
        timing.check_ttl(plan.ttl)
        self.authority: Authority = registry.authority(authority_url, BlockingRuntime())
        closing.callback(lambda: step(self.authority.close()))
        _check_shared(self.authority, "authority")
        standing = step(self.authority.open())
        self.realm, self.doubts = standing.realm, standing.doubts
        if self.fresh_authority and not self.drill.many:
            step(self.authority.raise_floor(self.drill.tokens[0] - 1))
        guard_url = self._guard_to_open(guard)
        self._authority_url, self._guard_url = self._over_tcp(authority_url, guard_url)
        self.resource: Resource = resource(self._guard_url, self._table, guarded=self.guarded)
        closing.callback(self.resource.close)
        if isinstance(self.resource, GuardedResource):
            _check_shared(self.resource.guard, "guard")
        self.resource.open()
        if isinstance(self.resource, GuardedResource) and not self.fresh_guard:
            _check_trust(self.resource.guard, self.realm)
        self.names = self._names()
        self.ttl = plan.ttl if self.fresh_authority else self._granted_ttl()
        by_ttl = min(STORM_TTLS * self.ttl, STORM_SECONDS_MAX)
        self.seconds = max(STORM_SECONDS_MIN, by_ttl) if plan.seconds is None else plan.seconds

    def _guard_to_open(self, guard: str | None) -> str | None:
        """The address of the guard; None for the plain table. A new guard gets the rule of the drill."""
        needs_server = self.drill.guard_over_tcp or self.drill.over_http
        if guard == NO_GUARD and not needs_server:
            return None
        url = f"sqlite:///{self.folder / 'stock.db'}" if self.fresh_guard or guard is None else guard
        if url.partition(":")[0] not in SCHEMES:
            with_rule(url, self.drill.rule)
        if not self.guarded:  # a network needs a server: one whose guard refuses nothing
            values = registry.guard(url, BlockingRuntime())
            step(values.open())
            step(values.set_mode("observe"))
            step(values.close())
        return url

    def _over_tcp(self, authority: str, guard: str | None) -> tuple[str, str | None]:
        """The addresses for the holders, behind a service where files would be too near."""
        drill = self.drill
        embedded = authority.partition(":")[0] in EMBEDDED
        serves_leases = (drill.authority_over_tcp and embedded) or (
            drill.over_http and authority.partition(":")[0] not in SCHEMES
        )
        serves_values = (drill.guard_over_tcp or drill.over_http) and self.fresh_guard
        if not serves_leases and not serves_values:
            return authority, guard
        service = LocalService(authority, guard if serves_values else None, self.folder)
        self._closing.callback(service.stop)
        return service.url if serves_leases else authority, service.url if serves_values else guard

    def _granted_ttl(self) -> float:
        """The ttl of a lease on a name of its own: etcd and ZooKeeper round up, and have minimums of their own.

        The drill's own SQLite file grants what is asked for, and its first token stays that of the first holder.
        """
        with Client(self._authority_url, label="drill", guarantee="best-effort") as client:
            lease = client.acquire(f"{self.names[0]}/ttl", ttl=self.plan.ttl, wait=PATIENCE_SECONDS)
            with contextlib.suppress(LeaseLost):  # a short one may be over already
                lease.release()
            return lease.ttl

    def _names(self) -> list[str]:
        """Fresh names: a drill never touches names that are in use."""
        if self.plan.name is not None:
            return [self.plan.name]
        fresh = self.fresh_authority and self.fresh_guard
        first = "stock" if fresh else f"drill-{secrets.token_hex(3)}/stock"
        count = max(self.plan.names, self.drill.names)
        return [first] if count == 1 else [f"{first}/{number}" for number in range(1, count + 1)]

    @property
    def authority_shown(self) -> str:
        return without_secrets(self.authority.url)

    @property
    def guard_shown(self) -> str:
        return without_secrets(self.resource.url) if self.guarded else NO_GUARD

    # Holders.

    def start_holders(self, casts: Mapping[str, Cast]) -> HolderProcesses:
        """Start the holder processes."""
        holders = HolderProcesses(self.folder)
        try:
            holders.start([self.how_to_start(holder, cast) for holder, cast in casts.items()])
        except BaseException:
            holders.end(grace=0.0)
            raise
        return holders

    def how_to_start(
        self, holder: str, cast: Cast, authority: str | None = None
    ) -> tuple[HolderSetup, Start]:
        url = authority or self._authority_url
        guard, slow = self._guard_url, None
        if cast.guard == "by relay" and guard is not None:
            guard = self._relayed("guard", guard)
        elif cast.guard == "by both" and guard is not None:
            slow = self._relayed("guard", guard)
        setup = HolderSetup(
            holder,
            self._relayed("authority", url) if cast.authority_by_relay else url,
            guard,
            self._table,
            self.plan.ttl,
            f"{self.plan.seed} {holder}",
            self.guarded,
            slow,
        )
        if cast.java:
            return setup, java.start(setup)
        if cast.under_run:
            return setup, _run_start(setup, self.names[0])
        if cast.slow_clock:
            environment = {"LD_PRELOAD": faketime(), "FAKETIME": f"+0 x{_CLOCK_SPEED}"}
            return setup, Start((), environment, wrong_clock=True)
        return setup, Start()

    def _relayed(self, what: str, url: str) -> str:
        if what not in self._relays:
            self._relays[what] = relay_to(url)
            self._closing.callback(self._relays[what][1].stop)
        return self._relays[what][0]

    def relay(self, what: str) -> Proxy:
        """The relay in front of the `authority`, or of the `guard`."""
        return self._relays[what][1]

    def copy_of_authority(self, token: int) -> str:
        return copied_authority(self.folder, self.realm, token)

    def raise_floor(self, url: str, above: int) -> None:
        """What `fenced authority raise` does."""
        authority = registry.authority(url, BlockingRuntime())
        try:
            step(authority.open())
            step(authority.raise_floor(above))
        finally:
            step(authority.close())

    def stop_outside_transactions(self, process: HolderProcess) -> float:
        """Stop a process, but not while its keeper is inside a transaction that would block everyone else."""
        for _ in range(_PROBE_TRIES):
            stopped_at = process.stop()
            try:
                step(self.authority.renew([_NOBODY], now() + _PROBE_SECONDS))
                return stopped_at
            except Unavailable:
                process.resume()
        raise CouldNotRun(f"holder {process.holder} could not be stopped outside of a transaction")

    def expiry(self, name: str, token: int) -> float:
        """When the lease with `token` on `name` expires at the authority, unless it is renewed."""
        asked = now()
        held_by = step(self.authority.observe(name)).held_by
        return asked + held_by.remaining if held_by is not None and held_by.token == token else asked

    def read_finals(self, history: History) -> dict[str, Orders]:
        """Read the values at the end of the drill, and add them to the history."""
        finals = {name: orders_in(self.resource.peek(name).value) for name in self.names}
        history.finals.update((name, tuple(each for each, _ in orders)) for name, orders in finals.items())
        return finals


def _run_start(setup: HolderSetup, name: str) -> Start:
    """A holder as the command of `fenced run`, which takes the lease, renews it, and hands over the stamp."""
    fenced = [sys.executable, "-P", "-m", "fenced"]
    run = [
        *fenced,
        "run",
        name,
        "--ttl",
        f"{setup.ttl:g}",
        "--",
        sys.executable,
        "-P",
        "-m",
        "fenced.drills.worker",
    ]
    return Start(bound(run), {"FENCED_AUTHORITY": setup.authority, "FENCED_GUARANTEE": "best-effort"})


def with_rule(url: str, rule: Rule | None) -> None:
    """Let a guard that does not exist yet have this rule; one that exists keeps its own."""
    if rule is None or not isinstance(guard := registry.guard(url, BlockingRuntime()), TableValues):
        return
    ruled = guard.with_rule(rule)
    try:
        with contextlib.suppress(Misconfigured):  # installed with another rule: it keeps that one
            step(ruled.open())
    finally:
        step(ruled.close())


def _check_trust(guard: NamedValues, realm: str) -> None:
    """A guard of another authority would refuse, and record, every operation of the drill."""
    try:
        trusted = step(guard.operate(lambda operator: operator.status())).realm
    except Misconfigured:
        return  # this role may not read it; then the first refusal ends the drill
    if trusted not in (None, realm):
        raise CouldNotRun(
            f"the guard trusts realm {trusted}, and the authority is realm {realm}; name the guard's own authority "
            "with --authority"
        )


def _check_shared(party: Authority | NamedValues, what: str) -> None:
    if any(trait.key == "one-process" for trait in party.traits):
        raise CouldNotRun(
            f"{without_secrets(party.url)} works within one process only, and a drill has several: "
            f"give it {'an' if what == 'authority' else 'a'} {what} that processes can share, "
            "such as sqlite:///file.db"
        )


@contextlib.contextmanager
def opened(plan: Plan) -> Iterator[DrillStage]:
    """A stage in a temporary folder; at the end it is closed, and the folder deleted."""
    with (
        tempfile.TemporaryDirectory(prefix="fenced-drill-") as folder,
        contextlib.ExitStack() as closing,
    ):
        try:
            stage = DrillStage(plan, Path(folder), closing)
        except FencedError as error:
            raise CouldNotRun(without_secrets(str(error))) from error
        yield stage
