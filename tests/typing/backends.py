"""Every registered class satisfies its protocol. Nothing here runs: `mypy --strict` reads it, as `make lint` does."""

from __future__ import annotations

from fenced.authorities.etcd.authority import EtcdAuthority
from fenced.authorities.memory import MemoryAuthority
from fenced.authorities.postgresql.authority import PostgresqlAuthority
from fenced.authorities.redis.authority import RedisAuthority
from fenced.authorities.sqlite.authority import SqliteAuthority
from fenced.authorities.zookeeper.authority import ZooKeeperAuthority
from fenced.contracts import Authority, NamedValues, Runtime
from fenced.guards.dynamodb.values import DynamoValues
from fenced.guards.etcd.values import EtcdValues
from fenced.guards.memory import MemoryGuard
from fenced.guards.postgresql.values import PostgresqlGuard
from fenced.guards.sqlite.values import SqliteGuard
from fenced.guards.zookeeper.values import ZooKeeperValues
from fenced.registry import AuthorityType, GuardType
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime
from fenced.runtime.simulated import SimulatedRuntime

AUTHORITIES: list[type[Authority]] = [
    EtcdAuthority,
    MemoryAuthority,
    PostgresqlAuthority,
    RedisAuthority,
    SqliteAuthority,
    ZooKeeperAuthority,
]
GUARDS: list[type[NamedValues]] = [
    DynamoValues,
    EtcdValues,
    MemoryGuard,
    PostgresqlGuard,
    SqliteGuard,
    ZooKeeperValues,
]
RUNTIMES: list[type[Runtime]] = [AioRuntime, BlockingRuntime, SimulatedRuntime]

AUTHORITY_TYPES: list[AuthorityType] = [
    EtcdAuthority,
    MemoryAuthority,
    PostgresqlAuthority,
    RedisAuthority,
    SqliteAuthority,
    ZooKeeperAuthority,
]
GUARD_TYPES: list[GuardType] = [
    DynamoValues,
    EtcdValues,
    MemoryGuard,
    PostgresqlGuard,
    SqliteGuard,
    ZooKeeperValues,
]
