"""RedisGuard: commands on the program's own Redis client, behind the fence in one atomic step."""

from fenced.stores.redis.guard.own import (
    AsyncGuardedLibrary,
    AsyncGuardedScript,
    AsyncRedisGuard,
    AsyncRedisTransaction,
    GuardedLibrary,
    GuardedScript,
    RedisGuard,
    RedisTransaction,
)

__all__ = [
    "AsyncGuardedLibrary",
    "AsyncGuardedScript",
    "AsyncRedisGuard",
    "AsyncRedisTransaction",
    "GuardedLibrary",
    "GuardedScript",
    "RedisGuard",
    "RedisTransaction",
]


def __dir__() -> list[str]:
    return __all__
