"""One change to several stores that share no transaction: the next writer finishes what one has begun.

    both = Convergent("orders/42", [fenced.Values(one), fenced.Values(two)])
    with client.hold_all(both.names) as lease:
        both.write(lease, lambda old: [b"new in one", b"new in two"])

A writer announces its lease to *all* stores before it reads. It changes what its predecessor intended; writes what it
intends itself to the first store; then the values, one store after the other; then that it is complete. A writer that
stops in between leaves its intent to the next one, and a late one is refused by every store. Readers see values that
belong together: all those that the completion names, or `Contended` while a change is under way.
"""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from fenced.client.guarding import Fence, credential
from fenced.client.values import AsyncValues, Values
from fenced.errors import Contended, Misuse
from fenced.runtime.blocking import step
from fenced.values.model import check_name

__all__ = ["AsyncConvergent", "Convergent"]


def __dir__() -> list[str]:
    return __all__


Change = Callable[[list[bytes | None]], Sequence[bytes]]


class ConvergentBase:
    """The algorithm, over values of either colour."""

    def __init__(self, name: str, stores: Sequence[Any]) -> None:
        if not stores:
            raise Misuse("give the stores that the change is for")
        self._name, self._stores = check_name(name), tuple(stores)
        self._intent, self._complete = check_name(f"{name}/intent"), f"{name}/complete"

    @property
    def names(self) -> tuple[str, ...]:
        """What a lease must cover: `client.hold_all(convergent.names)`."""
        return self._name, self._intent, self._complete

    async def _written(self, lease: Fence, change: Change) -> None:
        await self._announce(lease)
        new = list(change(await self._present()))
        if len(new) != len(self._stores):
            raise Misuse(f"{len(self._stores)} stores need as many values, not {len(new)}")
        stamp = credential(lease).stamps[0]
        intent = {
            "id": f"{stamp.grant}:{stamp.seq}",
            "values": [base64.b64encode(each).decode() for each in new],
        }
        # From here on it is not lost: whoever writes next builds on it.
        await _done(self._stores[0].write(lease, self._intent, _text(intent)))
        await self._carry_out(lease, intent)

    async def _announce(self, lease: Fence) -> None:
        """To all of them, before anything is read: from now on no earlier writer changes any."""
        for store in self._stores:
            await _done(store.announce(lease, *self.names))

    async def _present(self) -> list[bytes | None]:
        """What the last writer intended, whether or not it has come to its end: our own intent is built on it."""
        intent = await self._peek(self._intent)
        return await self._stored() if intent is None else _values(intent)

    async def _stored(self) -> list[bytes | None]:
        return [(await _done(store.peek(self._name))).value for store in self._stores]

    async def _carry_out(self, lease: Fence, intent: dict[str, Any]) -> None:
        for store, value in zip(self._stores, _values(intent), strict=True):
            await _done(store.write(lease, self._name, value))
        await _done(self._stores[0].write(lease, self._complete, _text(intent)))

    async def _read(self) -> list[bytes | None]:
        complete = await self._peek(self._complete)
        found = await self._stored()
        if complete is None and not any(found):
            return found
        if complete is None or found != _values(complete):
            raise Contended(f"{self._name}: a change is under way; try again")
        return found

    async def _peek(self, name: str) -> dict[str, Any] | None:
        text = (await _done(self._stores[0].peek(name))).value
        return None if text is None else json.loads(text)


async def _done(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _text(intent: dict[str, Any]) -> bytes:
    return json.dumps(intent, sort_keys=True).encode()


def _values(intent: dict[str, Any]) -> list[bytes | None]:
    return [base64.b64decode(each) for each in intent["values"]]


class AsyncConvergent(ConvergentBase):
    """Values that change together, in several stores, for asyncio."""

    def __init__(self, name: str, stores: Sequence[AsyncValues]) -> None:
        super().__init__(name, stores)

    async def write(self, lease: Fence, change: Change) -> None:
        """Give `change` the present values, in the order of the stores, and write what it returns."""
        await self._written(lease, change)

    async def read(self) -> list[bytes | None]:
        """The values, which belong together. Contended while a change is under way."""
        return await self._read()


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Convergent(ConvergentBase):
    """Values that change together, in several stores."""

    def __init__(self, name: str, stores: Sequence[Values]) -> None:
        super().__init__(name, stores)

    def write(self, lease: Fence, change: Change) -> None:
        """Give `change` the present values, in the order of the stores, and write what it returns."""
        step(self._written(lease, change))

    def read(self) -> list[bytes | None]:
        """The values, which belong together. Contended while a change is under way."""
        return step(self._read())


# end
