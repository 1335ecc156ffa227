"""The guard in Redis passes the kit: the server decides, in one script."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from fenced.stores.redis.guard.values import TRAITS, RedisValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.values.contracts import NamedValues, Runtime, Trait
from fenced.values.decision import Rule
from fenced_testkit.servers import RedisServer

BACKEND = "redis"


class Harness:
    """Each rule has a tag of its own: one guard has one rule."""

    def __init__(self, runtime: Runtime, server: RedisServer) -> None:
        self.runtime = runtime
        self.traits: tuple[Trait, ...] = TRAITS
        self._server = server
        self._prefix = secrets.token_hex(8)
        self._rule: Rule = "retry"
        self._opened: list[RedisValues] = []

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        return await self._open(rule=rule, mode=mode)

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        return await self._open(rule=rule, mode="observe")  # what is there keeps its own mode

    async def _open(self, **options: Any) -> NamedValues:
        guard = RedisValues(self._server.url(), self.runtime, tag=self._prefix + self._rule, **options)
        self._opened.append(guard)
        await guard.open()
        return guard

    async def write_raw(self, name: str, value: bytes) -> bool:
        key = f"fenced:{{{self._prefix}{self._rule}}}:value:{name}"
        self._server.execute("HSET", key, "value", value)
        return True

    async def close(self) -> None:
        for guard in self._opened:
            await guard.close()


# proves guard redis: many-names, exact-modes, kept-records, cooperative
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_redis(check: Check[GuardHarness], colour: Colour, redis_server: RedisServer) -> None:
    run(check, lambda runtime: Harness(runtime, redis_server), colour)
