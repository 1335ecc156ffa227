"""Every registered class satisfies its protocol. Nothing here runs: `mypy --strict` reads it, as `make lint` does."""

from __future__ import annotations

from fenced.client.registry import AuthorityType, GuardType
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime
from fenced.stores.dynamodb.guard.values import DynamoValues
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.guard.values import EtcdValues
from fenced.stores.files.guard.values import FileValues
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.mariadb.authority.authority import MariadbAuthority
from fenced.stores.mariadb.guard.values import MariadbValues
from fenced.stores.memory.authority import MemoryAuthority
from fenced.stores.memory.guard import MemoryValues
from fenced.stores.objects.guard.values import ObjectValues
from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced.stores.postgresql.guard.values import PostgresqlValues
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.stores.redis.guard.values import RedisValues
from fenced.stores.service.authority.authority import ServiceAuthority
from fenced.stores.sqlite.authority.authority import SqliteAuthority
from fenced.stores.sqlite.guard.values import SqliteValues
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.guard.values import ZooKeeperValues
from fenced.values.contracts import Authority, NamedValues, Runtime
from fenced.values.offers import Batches, LimitedConnections, OffersRenewer
from fenced_testkit.runtime.simulated import SimulatedRuntime

_AUTHORITIES = (
    EtcdAuthority,
    LedgerAuthority,
    MariadbAuthority,
    MemoryAuthority,
    PostgresqlAuthority,
    RedisAuthority,
    ServiceAuthority,
    SqliteAuthority,
    ZooKeeperAuthority,
)
_GUARDS = (
    DynamoValues,
    EtcdValues,
    FileValues,
    MariadbValues,
    MemoryValues,
    ObjectValues,
    PostgresqlValues,
    RedisValues,
    SqliteValues,
    ZooKeeperValues,
)
AUTHORITIES: tuple[type[Authority], ...] = _AUTHORITIES
AUTHORITY_TYPES: tuple[AuthorityType, ...] = _AUTHORITIES
GUARDS: tuple[type[NamedValues], ...] = _GUARDS
GUARD_TYPES: tuple[GuardType, ...] = _GUARDS
RUNTIMES: tuple[type[Runtime], ...] = (AioRuntime, BlockingRuntime, SimulatedRuntime)

BATCHES: tuple[type[Batches], ...] = (LedgerAuthority, SqliteAuthority)
LIMITED: tuple[type[LimitedConnections], ...] = (
    EtcdAuthority,
    MariadbAuthority,
    PostgresqlAuthority,
    RedisAuthority,
)
RENEWERS: tuple[type[OffersRenewer], ...] = (ZooKeeperAuthority,)
