"""The process that plays a holder: it does what it is told, one JSON line at a time, and says what it saw.

It never asks its lease whether it is still held before it writes. A holder that was paused cannot know
that it was, and the drill is about who notices: the resource.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fenced import registry
from fenced.client import Client, Lease
from fenced.contracts import Authority
from fenced.drills.history import Decision, Kind
from fenced.drills.resource import Orders, orders_in, resource, stock_of
from fenced.errors import FencedError, Indeterminate, LeaseLost, NotGranted, Refused, Unavailable
from fenced.model import Ask, Ended, Granted, Holder, Kept, RenewAnswer, Stamp, grant_id
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.clocks import now

T = TypeVar("T")

WORK_SECONDS = (0.004, 0.016)
"""How long a holder of the storm works between its read and its write."""
WAIT_SECONDS = 1.0
BACKOFF_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Part:
    """Who this process plays, and where. Comes by pipe: an argument could be read by anybody."""

    holder: str
    authority: str
    guard: str | None
    table: str
    ttl: float
    seed: str


class Right(Protocol):
    """What stamps operations: a lease, or a grant that nobody keeps."""

    @property
    def token(self) -> int: ...
    def announcement(self) -> Stamp: ...
    def next_stamp(self) -> Stamp: ...


class BareGrant:
    """A grant straight from the authority: no keeper renews it, no local clock doubts it."""

    def __init__(self, realm: str, name: str, secret: str, token: int) -> None:
        self.secret = secret
        self.token = token
        self._first = Stamp(realm, (name,), token, 0, grant_id(secret))
        self._sequence = itertools.count(1)

    def announcement(self) -> Stamp:
        return self._first

    def next_stamp(self) -> Stamp:
        return self._first._replace(seq=next(self._sequence))


def say(event: str, **facts: object) -> None:
    """Tell the drill what happened. One write for a line, so that lines stay whole."""
    os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


class Worker:
    """A holder with one name at a time: acquire, read, work, write, release."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._random = random.Random(part.seed)
        self._client = Client(part.authority, label=f"drill {part.holder}", guarantee="best-effort")
        self._resource = resource(part.guard, part.table)
        self._resource.open()
        self._updates = itertools.count(1)
        self._name = ""
        self._right: Right | None = None
        self._seen: Orders | None = None
        self._authority: Authority | None = None

    # Steps that the drill commands one by one.

    def acquire(self, name: str, wait: float) -> bool:
        """Take a lease that the keeper renews."""
        began = now()
        say("asking", name=name, time=began)
        try:
            lease = self._client.acquire(name, ttl=self._part.ttl, wait=wait)
        except NotGranted as error:
            say("not_granted", name=name, why=str(error), time=now())
            return False
        self._take(name, lease, began)
        return True

    def ask(self, name: str) -> None:
        """Take a grant by the authority's contract alone, without a keeper."""
        runtime = BlockingRuntime()
        self._authority = registry.authority(self._part.authority, runtime)
        realm = step(self._authority.open()).realm
        secret, began = runtime.secret(), now()
        holder = Holder(runtime.secret(), f"drill {self._part.holder}", os.uname().nodename, os.getpid())
        say("asking", name=name, time=began)
        answer = step(self._authority.ask(Ask(secret, (name,), self._part.ttl, holder)))
        if not isinstance(answer, Granted):
            say("not_granted", name=name, why=repr(answer), time=now())
            return
        self._take(name, BareGrant(realm, name, secret, answer.token), began)

    def _take(self, name: str, right: Right, began: float) -> None:
        self._name, self._right, self._seen = name, right, None
        say("granted", name=name, token=right.token, began=began, time=now())

    def read(self) -> bool:
        """Announce, and then read: in this order the value cannot change behind the reader's back."""
        right, name = self._held(), self._name
        stamp = right.announcement()
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

    def write(self, amount: int) -> bool:
        """Sell `amount` from the stock as it was read, whatever became of the lease meanwhile."""
        right, name = self._held(), self._name
        if self._seen is None:
            return False
        update = f"{self._part.holder}{next(self._updates)}"
        orders = {**self._seen, update: amount}
        stamp = right.next_stamp()
        say("writing", name=name, token=right.token, amount=amount, stock=stock_of(orders), time=now())
        value = json.dumps(orders).encode()
        return self._operate(
            "write", stamp, lambda: {"version": self._resource.write(stamp, name, value)}, update=update
        )

    def release(self) -> None:
        """Give the lease back; a lost one is no news to a holder that goes on anyway."""
        right, self._right, self._seen = self._held(), None, None
        try:
            if isinstance(right, Lease):
                _release(right)
            elif isinstance(right, BareGrant) and self._authority is not None:
                step(self._authority.release(right.secret))
        except LeaseLost as error:
            say("lost", name=self._name, token=right.token, reason=error.reason, time=now())
        else:
            say("released", name=self._name, token=right.token, time=now())

    def renew(self, delay: float) -> None:
        """Send a renewal that the network keeps for `delay` seconds."""
        right = self._held()
        assert isinstance(right, BareGrant)
        assert self._authority is not None
        say("renewing", name=self._name, token=right.token, time=now())
        time.sleep(delay)
        began = now()
        (answer,) = step(self._authority.renew([right.secret]))
        say("renewed", name=self._name, token=right.token, answer=_in_words(answer), began=began, time=now())

    def _held(self) -> Right:
        assert self._right is not None
        return self._right

    # The storm: the same steps, over and over.

    def storm(self, names: list[str], seconds: float) -> None:
        """Read, modify and write until the time is over, and survive whatever happens meanwhile."""
        end = now() + seconds
        while (left := end - now()) > 0:
            try:
                self._turn(self._random.choice(names), min(left, WAIT_SECONDS))
            except (Unavailable, Indeterminate) as error:
                say("trouble", why=str(error), time=now())
                time.sleep(BACKOFF_SECONDS)
        say("done", time=now())

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
        say("holding", name=self._name, token=self._held().token, time=now(), until=now() + seconds)
        time.sleep(seconds)

    # One operation at the resource, whatever comes of it.

    def _operate(
        self, kind: Kind, stamp: Stamp, act: Callable[[], dict[str, object]], update: str | None = None
    ) -> bool:
        """Run `act` and say how it ended; True when it was admitted."""
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
        say(
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
    """Release, and while the authority is away try again until the lease is over anyway."""
    while True:
        try:
            lease.release()
            return
        except (Unavailable, Indeterminate) as error:
            say("trouble", why=str(error), time=now())
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


def die_with_parent(parent: int) -> None:
    """End with the drill, however it ends: a stopped process cannot notice that its pipe was closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def obey(worker: Worker, command: dict[str, Any]) -> None:
    match command.pop("do"):
        case "acquire":
            worker.acquire(**command)
        case "ask":
            worker.ask(**command)
        case "read":
            worker.read()
        case "write":
            worker.write(**command)
        case "release":
            worker.release()
        case "renew":
            worker.renew(**command)
        case "storm":
            worker.storm(**command)
        case unknown:
            raise ValueError(f"no such command: {unknown}")


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    try:
        worker = Worker(Part(**json.loads(sys.stdin.readline())))
        say("ready", time=now())
        for line in sys.stdin:
            obey(worker, json.loads(line))
        worker.close()
    except FencedError as error:
        say("failed", why=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
