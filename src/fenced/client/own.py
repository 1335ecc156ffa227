"""What guards on a program's own clients share: the client comes with every call, and `on` binds one for `hold`."""

from __future__ import annotations

import weakref
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

M = TypeVar("M")


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
