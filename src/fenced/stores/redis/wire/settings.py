"""What a Redis server's settings say about what it stores: one sentence for each way in which it could be lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fenced.stores.redis.address import ClusterAddress, RedisAddress, SentinelAddress
from fenced.stores.redis.wire.resp import ErrorReply, command

SETTINGS = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory", "maxmemory-policy")
QUESTIONS = (
    *(("CONFIG", "GET", name) for name in SETTINGS),
    ("INFO", "replication"),
    ("INFO", "cluster"),
)
REQUESTS = tuple(command(*words) for words in QUESTIONS)
_DENIED = ("NOPERM", "ERR")
"""The user may not run the command, or it was disabled. Any other error means that the server cannot answer now."""


class ServerSettings:
    """The replies to QUESTIONS, in their order, as any client returns them. An error reply is an ErrorReply."""

    def __init__(self, replies: Sequence[Any], refused: Callable[[ErrorReply], Exception]) -> None:
        self._settings: dict[str, str] = {}
        for name, pair in zip(SETTINGS, replies, strict=False):
            if isinstance(pair, ErrorReply) and pair.code not in _DENIED:
                raise refused(pair)
            if not isinstance(pair, ErrorReply) and pair:
                value = next(iter(pair.values())) if isinstance(pair, Mapping) else pair[1]
                self._settings[name] = _text(value)
        texts = replies[len(SETTINGS) :]
        for text in texts:
            if isinstance(text, ErrorReply):
                raise refused(text)
        lines = "\n".join(_text(text) for text in texts).splitlines()
        self._info = dict(line.split(":", 1) for line in lines if ":" in line)

    @property
    def is_cluster_node(self) -> bool:
        return self._info.get("cluster_enabled") == "1"

    @property
    def has_replicas(self) -> bool:
        """Whether replicas are connected now."""
        return self._info.get("connected_slaves", "0") != "0"

    @property
    def evicts(self) -> str | None:
        """The policy by which the server may evict any key; None if it does not."""
        policy = self._settings.get("maxmemory-policy", "")
        full = self._settings.get("maxmemory", "0") != "0"
        return policy if full and policy.startswith("allkeys-") else None

    def doubts(self, what: str, evicted: str) -> tuple[str, ...]:
        """How `what` (tokens, marks) could be lost, and `evicted` be evicted. Empty: a crash loses nothing."""
        return (*self._storing(what, evicted), *self._copies(what))

    def _storing(self, what: str, evicted: str) -> list[str]:
        """Every setting that is wrong, also one that only counts when another is corrected."""
        settings = self._settings
        if not settings:
            return [
                f"CONFIG GET is denied, so nobody can check whether {what} reach the disk (allow +config|get)"
            ]
        found = []
        if settings.get("appendonly") != "yes":
            found.append(f"without the append-only file a crash loses {what} (redis.conf: appendonly yes)")
        if (sync := settings.get("appendfsync")) != "always":
            found.append(f"with appendfsync {sync} a power cut loses {what} (redis.conf: appendfsync always)")
        if settings.get("no-appendfsync-on-rewrite") == "yes":
            found.append(
                f"while the append-only file is rewritten, {what} are not synced "
                "(redis.conf: no-appendfsync-on-rewrite no)"
            )
        if self.evicts:
            found.append(f"{self.evicts} may evict {evicted} (redis.conf: maxmemory-policy noeviction)")
        return found

    def _copies(self, what: str) -> list[str]:
        found = []
        if self.has_replicas:
            found.append(
                f"it has {self._info['connected_slaves']} replicas, and one that is promoted may lack the last {what} "
                "(run it without replicas)"
            )
        if self.is_cluster_node:
            found.append(
                f"a node of a cluster may be replaced by a replica that lacks {what} "
                "(redis.conf: cluster-enabled no)"
            )
        return found


def group_doubts(address: RedisAddress, what: str) -> tuple[str, ...]:
    """How `what` could be lost because of what the address names, whatever the settings are."""
    if not isinstance(address, SentinelAddress | ClusterAddress):
        return ()
    who = "sentinels" if isinstance(address, SentinelAddress) else "a cluster"
    return (f"{who} may promote a replica that lacks the last {what} (name one server that has no replicas)",)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
