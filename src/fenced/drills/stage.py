"""What a drill runs against: the authority, the guard or plain table, and the names. All are opened first."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fenced.client import registry
from fenced.client.faces import Client
from fenced.drills.history import History
from fenced.drills.processes import PATIENCE_SECONDS, CouldNotRun, HolderProcess, HolderProcesses
from fenced.drills.resource import GuardedResource, Orders, Resource, orders_in, resource
from fenced.drills.served import has_values
from fenced.drills.worker import HolderSetup
from fenced.errors import FencedError, LeaseLost, Misconfigured, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.clocks import now
from fenced.values import timing
from fenced.values.contracts import Authority, NamedValues

NO_GUARD = "none"
_SECRET = re.compile(r"(?<=//)[^/@\s]*@|(?i:(?<=password=)|(?<=secret=)|(?<=token=))[^&\s'\"]+")
_PROBE_SECONDS = 0.25
_PROBE_TRIES = 20
_NOBODY = "0" * 32
STORM_SECONDS_MIN = 8.0
STORM_SECONDS_MAX = 3600.0
STORM_TTLS = 20.0
"""How long a storm lasts by default: STORM_SECONDS_MIN, or this many ttls if that is longer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the command line."""

    scenario: str
    authority: str | None
    guard: str | None
    """A URL, `none` for no guard, or None for the values of the service that is the authority, or else a fresh one."""
    ttl: float
    """The ttl that the holders ask for; `DrillStage.ttl` is the one that they get."""
    seconds: float | None
    """How long the storm lasts, or None for as many ttls as it takes."""
    holders: int
    names: int
    seed: int
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

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.fresh_authority = plan.authority is None
        self._authority_url = plan.authority or f"sqlite:///{folder / 'leases.db'}"
        guard = plan.guard
        if guard is None and has_values(self._authority_url):
            guard = self._authority_url
        self.fresh_guard = guard in (None, NO_GUARD)
        self._guard_url = None if guard == NO_GUARD else guard or f"sqlite:///{folder / 'stock.db'}"
        self._table = str(folder / "plain.db")
        timing.check_ttl(plan.ttl)
        self.authority: Authority = registry.authority(self._authority_url, BlockingRuntime())
        _check_shared(self.authority, "authority")
        self.resource: Resource = resource(self._guard_url, self._table)
        if isinstance(self.resource, GuardedResource):
            _check_shared(self.resource.guard, "guard")
        standing = step(self.authority.open())
        self.doubts = standing.doubts
        self.resource.open()
        if isinstance(self.resource, GuardedResource) and not self.fresh_guard:
            _check_trust(self.resource.guard, standing.realm)
        self.names = self._names()
        self.ttl = plan.ttl if self.fresh_authority else self._granted_ttl()
        by_ttl = min(STORM_TTLS * self.ttl, STORM_SECONDS_MAX)
        self.seconds = max(STORM_SECONDS_MIN, by_ttl) if plan.seconds is None else plan.seconds

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
        count = self.plan.names
        return [first] if count == 1 else [f"{first}/{number}" for number in range(1, count + 1)]

    @property
    def guarded(self) -> bool:
        return self.resource.guarded

    @property
    def authority_shown(self) -> str:
        return without_secrets(self.authority.url)

    @property
    def guard_shown(self) -> str:
        return without_secrets(self.resource.url)

    def start_holders(self, holders: list[str]) -> HolderProcesses:
        """Start the holder processes."""
        return HolderProcesses([self._setup(each) for each in holders], self.folder)

    def _setup(self, holder: str) -> HolderSetup:
        seed = f"{self.plan.seed} {holder}"
        return HolderSetup(holder, self._authority_url, self._guard_url, self._table, self.plan.ttl, seed)

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
        history.finals.update((name, frozenset(orders)) for name, orders in finals.items())
        return finals

    def close(self) -> None:
        self.resource.close()
        step(self.authority.close())


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


class DrillRun:
    """Opens a stage in a temporary folder; closes the stage and deletes the folder at the end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __enter__(self) -> DrillStage:
        self._folder = tempfile.TemporaryDirectory(prefix="fenced-drill-")
        try:
            self._stage = DrillStage(self._plan, Path(self._folder.name))
        except FencedError as error:
            self._folder.cleanup()
            raise CouldNotRun(without_secrets(str(error))) from error
        except BaseException:
            self._folder.cleanup()
            raise
        return self._stage

    def __exit__(self, *exc: object) -> None:
        try:
            self._stage.close()
        finally:
            self._folder.cleanup()
