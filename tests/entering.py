"""A guarded block is entered once, in both colours: it has one stamp, and sends at its end what it has collected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fenced.errors import Misuse

Make = Callable[[], Any]
Collect = Callable[[Any], object]


def is_entered_once(make: Make, collect: Collect) -> None:
    """Nothing of a block that has raised, or has ended, is sent by a second one. `collect`: adds one in a block."""
    raising, ending = make(), make()
    with pytest.raises(ZeroDivisionError), raising as tx:
        collect(tx)
        raise ZeroDivisionError
    with ending as tx:
        collect(tx)
    for block in (raising, ending):
        with pytest.raises(Misuse, match="entered once"), block:
            raise AssertionError


async def is_entered_once_by_tasks(make: Make, collect: Collect) -> None:
    raising, ending = make(), make()
    with pytest.raises(ZeroDivisionError):
        async with raising as tx:
            await _maybe(collect(tx))
            raise ZeroDivisionError
    async with ending as tx:
        await _maybe(collect(tx))
    for block in (raising, ending):
        with pytest.raises(Misuse, match="entered once"):
            async with block:
                raise AssertionError


async def _maybe(done: object) -> None:
    if hasattr(done, "__await__") and not isinstance(done, type):
        await done
