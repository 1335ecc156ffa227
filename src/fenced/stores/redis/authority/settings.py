"""Whether tokens could repeat on this server, judged by its settings: one sentence for each reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fenced.errors import FencedError
from fenced.stores.redis.authority.answers import refused, weakened
from fenced.stores.redis.wire.settings import REQUESTS, ServerSettings


class SettingsPromise:
    """`given`: `open` found settings without doubts. Then each new connection reads the settings again."""

    def __init__(self, where: str) -> None:
        self.given = False
        self._where = where

    def requests(self) -> Sequence[bytes]:
        return REQUESTS if self.given else ()

    def objection(self, replies: Sequence[Any]) -> FencedError | None:
        found = doubts(replies, self._where)
        return weakened(found, self._where) if found else None


def doubts(replies: Sequence[Any], where: str) -> tuple[str, ...]:
    """How tokens could repeat, by the replies to REQUESTS (in their order)."""
    settings = ServerSettings(replies, lambda error: refused(error, where))
    return settings.doubts("tokens", "the counter")
