"""What guards take, and what guards on a program's own clients share: the client comes with every call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fenced.client.leases import AsyncLease, Lease
from fenced.errors import LeaseLost, Misuse, shown
from fenced.guards.answers import entered_again, one_stamp
from fenced.proofs import Proof
from fenced.values.contracts import Runtime
from fenced.values.model import Credential, Stamp, check_name

M = TypeVar("M")


class StampedGrant(Protocol):
    """What makes the stamps of an operation, and knows until when: a grant, or a claim under one."""

    runtime: Runtime
    realm: str
    names: tuple[str, ...]
    token: int
    grant: str
    hold_until: float | None
    released: bool

    def next_stamp(self) -> Stamp: ...
    def announcement(self) -> Stamp: ...
    def error_if_lost(self) -> LeaseLost | None: ...


class ClaimFence:
    """A claimed row: guards take it where they take a lease."""

    @property
    def _grant(self) -> StampedGrant:
        raise NotImplementedError


Fence = Lease | AsyncLease | Stamp | Proof | ClaimFence
"""What an operation is fenced with: the lease that makes the next stamp, or a stamp as it is, or a proven one."""
Fences = Fence | Sequence[Fence]
"""One of these, or several at once."""
_LEASES = (Lease, AsyncLease, ClaimFence)


def credential(
    fence: Fences, names: tuple[str, ...] = (), *, announcing: bool = False, still_held: bool = False
) -> Credential:
    """What this operation carries to a guard: the stamps of the fences, and the proofs if there are any.

    A lease makes its next stamp; `announcing`, it makes one with seq 0. Leases are renewed while a transaction runs,
    so only `max_hold` limits how long it may idle.
    """
    chosen = tuple(map(check_name, names))
    if isinstance(fence, _LEASES):  # nearly always
        grant = fence._grant
        stamp = grant.announcement() if announcing else grant.next_stamp()
        left = None if grant.hold_until is None else grant.hold_until - grant.runtime.now()
        return Credential((stamp,), chosen, left, still_held, lost=grant.error_if_lost)
    if isinstance(fence, Stamp):
        return Credential((fence.announcing() if announcing else fence,), chosen, None, still_held)
    several = isinstance(fence, Sequence)
    fences: Sequence[Fence] = fence if several else (fence,)  # type: ignore[assignment]
    if not fences:
        raise Misuse("give a guard the lease that hold() returned, or a list of at least one")
    leases = [one for one in fences if isinstance(one, _LEASES)]
    limits = [limit for limit in map(_hold_left, leases) if limit is not None]
    proofs = tuple(one.text if isinstance(one, Proof) else "-" for one in fences)
    return Credential(
        tuple(_stamp(one, announcing) for one in fences),
        chosen,
        min(limits, default=None),
        still_held,
        proofs if any(isinstance(one, Proof) for one in fences) else (),
        lambda: next(filter(None, (lease._grant.error_if_lost() for lease in leases)), None),
    )


def stamp_of(fence: Fences, guard: str, *, announcing: bool = False) -> Stamp:
    """What this operation carries to a guard that takes one lease at a time, and nothing else of a credential."""
    if isinstance(fence, _LEASES):  # nearly always
        return fence._grant.announcement() if announcing else fence._grant.next_stamp()
    if isinstance(fence, Stamp) and fence.names and not announcing:
        return fence
    return one_stamp(credential(fence, announcing=announcing), guard)


class EnteredOnce:
    """A block that is entered once: it has one stamp, and sends at its end what it has collected."""

    _entered = False

    def _enter(self) -> None:
        if self._entered:
            raise entered_again()
        self._entered = True


class CollectsWrites(EnteredOnce):
    """A block whose writes are sent at its end. The blocking class has methods of its own in place of these."""

    def __enter__(self) -> Any:
        raise Misuse(f"an {type(self).__name__} is entered by: async with guard.transaction(...) as tx")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


class Announcer(Protocol):
    """A guard object that remembers for which leases it has raised marks."""

    def has_announced(self, grant: str, names: tuple[str, ...]) -> bool:
        """Whether it has raised the marks of all these names for this lease."""


def is_announced(fence: Fences, names: tuple[str, ...], marks: Announcer) -> bool:
    """Whether this guard object has raised the marks for this lease before: then nothing is sent before a read.

    False also for a released lease, or several: their credential is made next, and raises what is wrong.
    """
    if isinstance(fence, _LEASES):
        grant = fence._grant
        return not grant.released and marks.has_announced(grant.grant, names or grant.names)
    return isinstance(fence, Stamp) and marks.has_announced(fence.grant, names or fence.names)


def _stamp(fence: object, announcing: bool) -> Stamp:
    if isinstance(fence, _LEASES):
        return fence._grant.announcement() if announcing else fence._grant.next_stamp()
    stamp = fence.stamp if isinstance(fence, Proof) else fence
    if not isinstance(stamp, Stamp):
        raise _no_fence(fence)
    return stamp.announcing() if announcing else stamp


def _hold_left(lease: Lease | AsyncLease | ClaimFence) -> float | None:
    grant = lease._grant
    return None if grant.hold_until is None else grant.hold_until - grant.runtime.now()


def _no_fence(fence: object) -> Misuse:
    hint = ""
    if fence is None:
        hint = " (did try_hold give None?)"
    elif hasattr(fence, "__enter__") or hasattr(fence, "__aenter__"):
        hint = "; enter it first: with client.hold(...) as lease"
    return Misuse(f"give a guard the lease that hold() returned, or a stamp, not {shown(fence)}{hint}")


def names_of(fence: Fences) -> tuple[str, ...]:
    """Every name that the fences cover."""
    stamps = credential(fence, announcing=True).stamps
    return tuple(dict.fromkeys(name for stamp in stamps for name in stamp.names))


class AnnouncesOn(Protocol):
    """The part of a guard on a program's own client that `hold(guards=[guard.on(client)])` needs."""

    def announce(self, client: Any, fence: Any, /, *names: str) -> Any: ...


class GuardOn(NamedTuple):
    """A guard together with the client that it works on: `hold(guards=[guard.on(client)])`."""

    guard: AnnouncesOn
    client: Any

    def announce(self, fence: Any, *names: str) -> Any:
        """Raise the marks through this client. With an asyncio guard the caller awaits it."""
        return self.guard.announce(self.client, fence, *names)


class ClientGuard(Generic[M]):
    """A guard that gets the program's client with every call. It owns no connection, so nothing closes it.

    For each client it keeps what it has learned there, as long as the client exists. That must not keep the client:
    every operation does.
    """

    def __init__(self) -> None:
        self._learned: dict[int, tuple[weakref.ref[Any], M]] = {}

    def on(self: Any, client: Any) -> GuardOn:
        """This guard on this client, for `hold(guards=[guard.on(client)])`, which announces each new lease."""
        return GuardOn(self, client)

    def _of(self, client: Any) -> M:
        """What this guard knows on a client; Misuse if it is none that it can use."""
        key, learned = id(client), self._learned  # by id: stores of obstore have no hash
        known = learned.get(key)
        if known is not None and known[0]() is client:
            return known[1]
        made = self._made(client)
        # The callback runs before the id can be given to another object. If two threads come here at once, the first
        # one's entry stays: what is learned in the other is learned again.
        known = weakref.ref(client, lambda _: learned.pop(key, None)), made
        return learned.setdefault(key, known)[1]

    def _made(self, client: Any) -> M:
        raise NotImplementedError
