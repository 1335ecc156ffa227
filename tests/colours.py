"""One story, told in both colours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fenced.contracts import Colour, Runtime
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step


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
