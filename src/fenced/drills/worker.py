"""A holder process: it reads commands as JSON lines, runs them, and reports what happened.

It never checks its lease before it writes. A holder that was paused cannot know that it was, and the drill shows that
the resource detects it.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fenced.client import registry
from fenced.client.faces import Client
from fenced.client.leases import Lease
from fenced.drills.bound import die_with_parent
from fenced.drills.garbage import slow_to_collect
from fenced.drills.history import Decision, Kind
from fenced.drills.resource import Orders, Resource, orders_in, resource, stock_of
from fenced.errors import FencedError, Indeterminate, LeaseLost, NotGranted, Refused, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.clocks import now
from fenced.values.contracts import Authority
from fenced.values.model import Ask, Ended, Granted, Holder, Kept, RenewAnswer, Stamp, grant_id

T = TypeVar("T")

WORK_SECONDS = (0.004, 0.016)
"""How long a holder in the storm works between its read and its write."""
WAIT_SECONDS = 1.0
BACKOFF_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class HolderSetup:
    """Which holder this process is, and its addresses. Sent through a pipe: others could read an argument."""

    holder: str
    authority: str
    guard: str | None
    table: str
    ttl: float
    seed: str
    guarded: bool = True
    slow_guard: str | None = None
    """A second way to the resource, through a relay."""


class StampMaker(Protocol):
    """Makes the stamps of operations: a lease, or a grant without a keeper."""

    @property
    def token(self) -> int: ...
    def announcement(self) -> Stamp: ...
    def next_stamp(self) -> Stamp: ...


class BareGrant:
    """A grant that no keeper of this process renews, and that has no local deadline."""

    def __init__(self, stamp: Stamp, secret: str = "") -> None:
        self.secret = secret
        self.token = stamp.token
        self._first = stamp._replace(seq=0)
        self._sequence = itertools.count(1)

    def announcement(self) -> Stamp:
        return self._first

    def next_stamp(self) -> Stamp:
        return self._first._replace(seq=next(self._sequence))


def report(event: str, **facts: object) -> None:
    """Send an event to the drill. One write for each line, so that lines of several threads do not mix."""
    os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


class Worker:
    """A holder that uses one name at a time: acquire, read, work, write, release."""

    def __init__(self, setup: HolderSetup) -> None:
        self._setup = setup
        self._random = random.Random(setup.seed)
        self._client = Client(setup.authority, label=f"drill {setup.holder}", guarantee="best-effort")
        self._resource = resource(setup.guard, setup.table, guarded=setup.guarded)
        self._resource.open()
        self._slow: Resource | None = None
        if setup.slow_guard is not None:
            self._slow = resource(setup.slow_guard, setup.table, guarded=setup.guarded)
            self._slow.open()
        self._updates = itertools.count(1)
        self._name = ""
        self._source: StampMaker | None = None
        self._seen: Orders | None = None
        self._authority: Authority | None = None
        self._garbage: list[object] = []

    # Steps that the drill requests one by one.

    def acquire(self, name: str, wait: float) -> bool:
        """Take a lease that the keeper renews."""
        began = now()
        report("asking", name=name, time=began)
        try:
            lease = self._client.acquire(name, ttl=self._setup.ttl, wait=wait)
        except (NotGranted, Unavailable, Indeterminate) as error:
            report("not_granted", name=name, why=f"{type(error).__name__}: {error}", time=now())
            return False
        self._take(name, lease, began)
        return True

    def adopt(self) -> None:
        """Use the lease of the `fenced run` that started this process: it renews, and this process stamps."""
        stamp = Stamp.parse(os.environ["FENCED_STAMP"])
        report("asking", name=stamp.names[0], time=now())
        self._take(stamp.names[0], BareGrant(stamp), now())

    def ask(self, name: str) -> None:
        """Take a grant directly from the authority, without a keeper."""
        runtime = BlockingRuntime()
        self._authority = registry.authority(self._setup.authority, runtime)
        realm = step(self._authority.open()).realm
        secret, began = runtime.secret(), now()
        holder = Holder(runtime.secret(), f"drill {self._setup.holder}", os.uname().nodename, os.getpid())
        report("asking", name=name, time=began)
        answer = step(self._authority.ask(Ask(secret, (name,), self._setup.ttl, holder)))
        if not isinstance(answer, Granted):
            report("not_granted", name=name, why=repr(answer), time=now())
            return
        stamp = Stamp(realm, (name,), answer.token, 0, grant_id(secret))
        self._take(name, BareGrant(stamp, secret), began)

    def _take(self, name: str, source: StampMaker, began: float) -> None:
        self._name, self._source, self._seen = name, source, None
        report("granted", name=name, token=source.token, began=began, time=now())

    def read(self, announce: bool = True) -> bool:
        """Announce, then read: in this order no older holder can change the value after the read."""
        source, name = self._held(), self._name
        stamp = source.announcement()
        if not announce:
            self._seen = orders_in(self._resource.peek(name).value)
            report("peeked", name=name, token=stamp.token, stock=stock_of(self._seen), time=now())
            return True
        if self._resource.guarded and not self._operate("announce", stamp, lambda: self._announce(stamp)):
            return False
        return self._operate("read", stamp, lambda: self._look(stamp, name))

    def _announce(self, stamp: Stamp) -> dict[str, object]:
        self._resource.announce(stamp)
        return {}

    def _look(self, stamp: Stamp, name: str) -> dict[str, object]:
        found = self._resource.read(stamp, name)
        self._seen = orders_in(found.value)
        return {"version": found.version, "stock": stock_of(self._seen)}

    def write(self, amount: int, slowly: bool = False) -> bool:
        """Sell `amount` from the stock that was read, without checking the lease.

        `slowly`: on the connection through the relay, in a thread, so that the next write need not wait for it.
        """
        source, name = self._held(), self._name
        if self._seen is None:
            return False
        update = f"{self._setup.holder}{next(self._updates)}"
        orders = [*self._seen, (update, amount)]
        stamp = source.next_stamp()
        report("writing", name=name, token=source.token, amount=amount, stock=stock_of(orders), time=now())
        value = json.dumps(orders).encode()
        there = self._slow if slowly and self._slow is not None else self._resource

        def act() -> bool:
            return self._operate(
                "write", stamp, lambda: {"version": there.write(stamp, name, value)}, update=update
            )

        if not slowly:
            return act()
        threading.Thread(target=act, daemon=True).start()
        return True

    # Faults that a holder makes itself.

    def check(self) -> None:
        """Ask the lease whether it is still held, as careful programs do before they write."""
        source, left = self._held(), None
        assert isinstance(source, Lease)
        try:
            source.check()
            left = source.remaining()
        except LeaseLost as error:
            report("checked", name=self._name, token=source.token, left=None, why=str(error), time=now())
        else:
            report("checked", name=self._name, token=source.token, left=left, why="", time=now())

    def fill(self, seconds: float) -> None:
        """Fill the memory with objects until a collection takes `seconds`."""
        self._garbage, took = slow_to_collect(seconds)
        report("filled", seconds=took, time=now())

    def collect(self) -> None:
        """A collection. It holds the interpreter's lock to its end, so the keeper does not run either."""
        began = now()
        report("collecting", time=began)
        gc.collect()
        report("collected", seconds=now() - began, time=now())

    def burn(self) -> None:
        """Work until the next command comes."""
        report("burning", time=now())
        while not select.select([sys.stdin.buffer], [], [], 0.0)[0]:
            sum(range(1000))

    def release(self) -> None:
        """Give the lease back, and report whether it had been lost."""
        source, self._source, self._seen = self._held(), None, None
        try:
            if isinstance(source, Lease):
                _release(source)
            elif isinstance(source, BareGrant) and self._authority is not None:
                step(self._authority.release(source.secret))
        except LeaseLost as error:
            report("lost", name=self._name, token=source.token, reason=error.reason, time=now())
        else:
            report("released", name=self._name, token=source.token, time=now())

    def hold_up_renewal(self) -> None:
        """Begin a renewal that the network holds up: it reaches the authority with the next `renew`."""
        report("renewing", name=self._name, token=self._held().token, time=now())

    def renew(self) -> None:
        """Renew the grant once."""
        source = self._held()
        assert isinstance(source, BareGrant)
        assert self._authority is not None
        began = now()
        (answer,) = step(self._authority.renew([source.secret]))
        report(
            "renewed", name=self._name, token=source.token, answer=_in_words(answer), began=began, time=now()
        )

    def _held(self) -> StampMaker:
        assert self._source is not None
        return self._source

    # The storm: the same steps in a loop.

    def storm(self, names: list[str], seconds: float) -> None:
        """Read, modify and write for `seconds`; report outages of the authority and go on."""
        end = now() + seconds
        while (left := end - now()) > 0:
            try:
                self._turn(self._random.choice(names), min(left, WAIT_SECONDS))
            except (Unavailable, Indeterminate) as error:
                report("trouble", why=str(error), time=now())
                time.sleep(BACKOFF_SECONDS)
        report("done", time=now())

    def _turn(self, name: str, wait: float) -> None:
        if not self.acquire(name, wait):
            return
        try:
            if self.read():
                self._work()
                self.write(1)
        finally:
            self.release()

    def _work(self) -> None:
        seconds = self._random.uniform(*WORK_SECONDS)
        report("holding", name=self._name, token=self._held().token, time=now(), until=now() + seconds)
        time.sleep(seconds)

    # One operation at the resource.

    def _operate(
        self, kind: Kind, stamp: Stamp, act: Callable[[], dict[str, object]], update: str | None = None
    ) -> bool:
        """Run `act` and report how it ended; True if it was admitted."""
        began = now()
        facts: dict[str, object] = {}
        decision: Decision = "admitted"
        mark = stamp.token if self._resource.guarded else None
        try:
            facts = act()
        except Refused as error:
            decision, mark, facts = "refused", error.mark, {"why": error.kind}
        except Indeterminate as error:
            decision, mark, facts = "unknown", None, {"why": str(error)}
        except FencedError as error:
            if error.retry not in ("later", "transaction"):
                raise
            decision, mark, facts = "failed", None, {"why": str(error)}
        report(
            "operation",
            kind=kind,
            name=self._name,
            stamp=str(stamp),
            token=stamp.token,
            decision=decision,
            mark=mark,
            update=update,
            began=began,
            time=now(),
            **facts,
        )
        return decision == "admitted"

    def close(self) -> None:
        self._resource.close()
        self._client.close()
        if self._authority is not None:
            step(self._authority.close())


def _release(lease: Lease) -> None:
    """Release; if the authority does not answer, retry until the lease has expired."""
    while True:
        try:
            lease.release()
            return
        except (Unavailable, Indeterminate) as error:
            report("trouble", why=str(error), time=now())
            if lease.remaining() <= 0:
                return
            time.sleep(BACKOFF_SECONDS)


def _in_words(answer: RenewAnswer) -> str:
    match answer:
        case Kept():
            return "kept"
        case Ended(reason):
            return reason
        case _:
            return type(answer).__name__.lower()


def run_command(worker: Worker, command: dict[str, Any]) -> None:
    match command.pop("do"):
        case "acquire":
            worker.acquire(**command)
        case "ask":
            worker.ask(**command)
        case "read":
            worker.read(**command)
        case "adopt":
            worker.adopt()
        case "check":
            worker.check()
        case "fill":
            worker.fill(**command)
        case "collect":
            worker.collect()
        case "burn":
            worker.burn()
        case "write":
            worker.write(**command)
        case "release":
            worker.release()
        case "hold_up_renewal":
            worker.hold_up_renewal()
        case "renew":
            worker.renew()
        case "storm":
            worker.storm(**command)
        case unknown:
            raise ValueError(f"no such command: {unknown}")


def main() -> None:
    if len(sys.argv) > 1:  # else whoever started it binds it
        die_with_parent(int(sys.argv[1]))
    try:
        # Unbuffered: `burn` asks the system whether another command has come.
        with open(0, "rb", buffering=0, closefd=False) as commands:
            worker = Worker(HolderSetup(**json.loads(commands.readline())))
            report("ready", time=now())
            for line in commands:
                run_command(worker, json.loads(line))
            worker.close()
    except FencedError as error:
        report("failed", why=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
