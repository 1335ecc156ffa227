"""Stories and checks in the blocking and the asyncio colour."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from fenced.contracts import Colour, Runtime
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing import AUTHORITY_CHECKS, COLOURS
from fenced.testing.kit import Check, H


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


_ON_THE_CHANNEL = (
    "the_same_attempt_gets_the_same_grant",
    "a_batch_is_answered_one_by_one",
    "a_release_wakes_the_head",
    "surveying",
    "a_client_keeps_its_lease",
    "no_update_is_lost_under_contention",
)
CHANNEL_CHECKS = [check for check in AUTHORITY_CHECKS if check.name in _ON_THE_CHANNEL]
"""For the same authority over TLS: single and pipelined calls, large replies, pushes, many clients at once."""
assert len(CHANNEL_CHECKS) == len(_ON_THE_CHANNEL)
