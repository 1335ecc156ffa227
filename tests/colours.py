"""Stories and checks in the blocking and the asyncio colour."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing import AUTHORITY_CHECKS, COLOURS
from fenced.testing.kit import Check, H
from fenced.values.contracts import Colour, Runtime


def play(story: Callable[[Runtime], Coroutine[Any, Any, None]], colour: Colour) -> None:
    if colour == "blocking":
        step(story(BlockingRuntime()))
        return

    async def within() -> None:
        runtime = AioRuntime()
        try:
            await story(runtime)
        finally:
            runtime.close()

    asyncio.run(within())


def alternating(checks: Sequence[Check[H]], order: Sequence[Colour] = COLOURS) -> list[ParameterSet]:
    """Every check in one colour, taken in turn: for a variant of a backend that runs the whole kit in both already."""
    colours = itertools.cycle(order)
    return [
        pytest.param(check, colour, id=f"{check.name}-{colour}")
        for check, colour in zip(checks, colours, strict=False)
    ]


def named(checks: Sequence[Check[H]], *names: str) -> list[Check[H]]:
    """The checks with these names."""
    by_name = {check.name: check for check in checks}
    return [by_name[name] for name in names]


CHANNEL_CHECKS = named(
    AUTHORITY_CHECKS,
    "the_same_attempt_gets_the_same_grant",
    "a_batch_is_answered_one_by_one",
    "a_release_wakes_the_head",
    "surveying",
    "a_client_keeps_its_lease",
    "no_update_is_lost_under_contention",
)
"""For the same authority over TLS: single and pipelined calls, large replies, pushes, many clients at once."""
