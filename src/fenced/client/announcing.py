"""What `hold(guards=[...])` accepts: guards that announce a lease as soon as it is granted."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from fenced.errors import Misuse, shown


class Announces(Protocol):
    """The part of a guard that `hold(guards=[...])` needs."""

    def announce(self, fence: Any, *names: str) -> Any: ...


class ClientGuard(Protocol):
    """A guard that works on the program's own client, and gets it with every call."""

    def announce(self, client: Any, fence: Any, /, *names: str) -> Any: ...


class GuardOn(NamedTuple):
    """A guard together with the client that it works on: `hold(guards=[guard.on(client)])`."""

    guard: ClientGuard
    client: Any

    def announce(self, fence: Any, *names: str) -> Any:
        """Raise the marks through this client. With an asyncio client the caller awaits it."""
        return self.guard.announce(self.client, fence, *names)


def announcers(guards: Iterable[Announces]) -> tuple[Announces, ...]:
    """These guards; Misuse, before a lease is acquired, if one of them cannot announce a lease by itself."""
    if not isinstance(guards, Iterable):
        raise Misuse(f"guards is a list of guards, not {shown(guards)}")
    found = tuple(guards)
    for guard in found:
        if not callable(getattr(guard, "announce", None)):
            raise Misuse(f"guards is a list of guards, and {shown(guard)} is none")
        try:
            inspect.signature(guard.announce).bind(None)
        except TypeError:
            kind = type(guard).__name__
            raise Misuse(
                f"a {kind} works on your client, which hold() does not know: pass guards=[guard.on(client)]"
                if hasattr(guard, "on")
                else f"{kind}.announce() needs more than the lease: call it in the block, before you read"
            ) from None
    return found


def wrong_colour(guard: object, unfinished: object) -> Misuse:
    if inspect.iscoroutine(unfinished):
        unfinished.close()
    kind = type(guard).__name__
    return Misuse(
        f"{kind}.announce() is for the other kind of client, blocking or asyncio; the lease was released"
    )
