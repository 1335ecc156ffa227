"""Every registered class satisfies its protocol. Nothing here runs: `mypy --strict` reads it, as `make lint` does."""

from __future__ import annotations

from fenced.client.registry import AuthorityType, GuardType
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime
from fenced.stores.dynamodb.guard.values import DynamoValues
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.guard.values import EtcdValues
from fenced.stores.memory.authority import MemoryAuthority
from fenced.stores.memory.guard import MemoryValues
from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced.stores.postgresql.guard.values import PostgresqlValues
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.stores.sqlite.authority.authority import SqliteAuthority
from fenced.stores.sqlite.guard.values import SqliteValues
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.guard.values import ZooKeeperValues
from fenced.values.contracts import Authority, NamedValues, Runtime
from fenced_testkit.runtime.simulated import SimulatedRuntime

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
    MemoryValues,
    PostgresqlValues,
    SqliteValues,
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
    MemoryValues,
    PostgresqlValues,
    SqliteValues,
    ZooKeeperValues,
]
