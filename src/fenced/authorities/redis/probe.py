"""Whether tokens could repeat on this server, judged by its settings: one sentence for each reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fenced.authorities.redis.replies import refused, weakened
from fenced.errors import FencedError
from fenced.wire.resp import ErrorReply, command

SETTINGS = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory", "maxmemory-policy")
REQUESTS = (
    *(command("CONFIG", "GET", name) for name in SETTINGS),
    command("INFO", "replication"),
    command("INFO", "cluster"),
)
_DENIED = ("NOPERM", "ERR")
"""The user may not run the command, or it was disabled. Any other error means that the server cannot answer now."""


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
    settings: dict[str, str] = {}
    for name, pair in zip(SETTINGS, replies, strict=False):
        if isinstance(pair, ErrorReply) and pair.code not in _DENIED:
            raise refused(pair, where)
        if not isinstance(pair, ErrorReply) and pair:
            settings[name] = pair[1].decode()
    texts = replies[len(SETTINGS) :]
    for text in texts:
        if isinstance(text, ErrorReply):
            raise refused(text, where)
    return (*_storing(settings or None), *_copies("\n".join(text.decode() for text in texts)))


def _storing(settings: Mapping[str, str] | None) -> list[str]:
    """Every setting that is wrong, also one that only counts when another is corrected."""
    if settings is None:
        return ["CONFIG GET is denied, so nobody can check whether tokens reach the disk (allow +config|get)"]
    found = []
    if settings.get("appendonly") != "yes":
        found.append("without the append-only file a crash loses tokens (redis.conf: appendonly yes)")
    if (sync := settings.get("appendfsync")) != "always":
        found.append(f"with appendfsync {sync} a power cut loses tokens (redis.conf: appendfsync always)")
    if settings.get("no-appendfsync-on-rewrite") == "yes":
        found.append(
            "while the append-only file is rewritten, tokens are not synced (redis.conf: no-appendfsync-on-rewrite no)"
        )
    policy = settings.get("maxmemory-policy", "")
    if settings.get("maxmemory", "0") != "0" and policy.startswith("allkeys-"):
        found.append(f"{policy} may evict the counter (redis.conf: maxmemory-policy noeviction)")
    return found


def _copies(info: str) -> list[str]:
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    found = []
    if fields.get("connected_slaves", "0") != "0":
        found.append(
            f"it has {fields['connected_slaves']} replicas, and one that is promoted may lack the last tokens "
            "(run it without replicas)"
        )
    if fields.get("cluster_enabled") == "1":
        found.append(
            "a node of a cluster may be replaced by a replica that lacks tokens (redis.conf: cluster-enabled no)"
        )
    return found
