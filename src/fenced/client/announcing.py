"""What `hold(guards=[...])` accepts: guards that announce a lease as soon as it is granted."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from fenced.errors import Misuse, shown


class Announces(Protocol):
    """The part of a guard that `hold(guards=[...])` needs."""

    def announce(self, fence: Any, *names: str) -> Any: ...


def announcers(guards: Iterable[Announces]) -> tuple[Announces, ...]:
    """These guards; Misuse, before a lease is acquired, if one of them cannot announce a lease by itself."""
    if not isinstance(guards, Iterable):
        raise Misuse(f"guards is a list of guards, not {shown(guards)}")
    found = tuple(guards)
    for guard in found:
        if hasattr(guard, "on"):
            kind = type(guard).__name__
            raise Misuse(
                f"a {kind} works on your client, which hold() does not know: pass guards=[guard.on(client)]"
            )
        if not callable(getattr(guard, "announce", None)):
            raise Misuse(f"guards is a list of guards, and {shown(guard)} is none")
    return found


def wrong_colour(guard: object, unfinished: object) -> Misuse:
    if isinstance(unfinished, Coroutine):
        unfinished.close()
    kind = type(guard).__name__
    return Misuse(
        f"{kind}.announce() is for the other kind of client, blocking or asyncio; the lease was released"
    )
