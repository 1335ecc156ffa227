"""Which class serves which URL scheme. Other packages register theirs under the entry points of the same names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from fenced.errors import Misconfigured, Misuse, redacted, shown
from fenced.values.contracts import Authority, NamedValues, Runtime

if TYPE_CHECKING:
    from fenced.guards.engine import Engine

Kind = Literal["fenced.authorities", "fenced.guards"]

BUILT_IN: dict[Kind, dict[str, str]] = {
    "fenced.authorities": {
        "etcd": "fenced.stores.etcd.authority.authority:EtcdAuthority",
        "etcds": "fenced.stores.etcd.authority.authority:EtcdAuthority",
        "http": "fenced.stores.service.authority.authority:ServiceAuthority",
        "https": "fenced.stores.service.authority.authority:ServiceAuthority",
        "fenced+unix": "fenced.stores.service.authority.authority:ServiceAuthority",
        "ledger": "fenced.stores.ledger.authority.authority:LedgerAuthority",
        "mariadb": "fenced.stores.mariadb.authority.authority:MariadbAuthority",
        "memory": "fenced.stores.memory.authority:MemoryAuthority",
        "mysql": "fenced.stores.mariadb.authority.authority:MariadbAuthority",
        "postgresql": "fenced.stores.postgresql.authority.authority:PostgresqlAuthority",
        "redis": "fenced.stores.redis.authority.authority:RedisAuthority",
        "redis+cluster": "fenced.stores.redis.authority.authority:RedisAuthority",
        "redis+sentinel": "fenced.stores.redis.authority.authority:RedisAuthority",
        "rediss": "fenced.stores.redis.authority.authority:RedisAuthority",
        "rediss+cluster": "fenced.stores.redis.authority.authority:RedisAuthority",
        "rediss+sentinel": "fenced.stores.redis.authority.authority:RedisAuthority",
        "sqlite": "fenced.stores.sqlite.authority.authority:SqliteAuthority",
        "unix": "fenced.stores.redis.authority.authority:RedisAuthority",
        "zookeeper": "fenced.stores.zookeeper.authority.authority:ZooKeeperAuthority",
        "zookeepers": "fenced.stores.zookeeper.authority.authority:ZooKeeperAuthority",
    },
    "fenced.guards": {
        "dynamodb": "fenced.stores.dynamodb.guard.values:DynamoValues",
        "etcd": "fenced.stores.etcd.guard.values:EtcdValues",
        "etcds": "fenced.stores.etcd.guard.values:EtcdValues",
        "file": "fenced.stores.files.guard.values:FileValues",
        "mariadb": "fenced.stores.mariadb.guard.values:MariadbValues",
        "memory": "fenced.stores.memory.guard:MemoryValues",
        "mysql": "fenced.stores.mariadb.guard.values:MariadbValues",
        "postgresql": "fenced.stores.postgresql.guard.values:PostgresqlValues",
        "redis": "fenced.stores.redis.guard.values:RedisValues",
        "redis+cluster": "fenced.stores.redis.guard.values:RedisValues",
        "redis+sentinel": "fenced.stores.redis.guard.values:RedisValues",
        "rediss": "fenced.stores.redis.guard.values:RedisValues",
        "rediss+cluster": "fenced.stores.redis.guard.values:RedisValues",
        "rediss+sentinel": "fenced.stores.redis.guard.values:RedisValues",
        "s3": "fenced.stores.objects.guard.values:ObjectValues",
        "gs": "fenced.stores.objects.guard.values:ObjectValues",
        "az": "fenced.stores.objects.guard.values:ObjectValues",
        "sqlite": "fenced.stores.sqlite.guard.values:SqliteValues",
        "unix": "fenced.stores.redis.guard.values:RedisValues",
        "zookeeper": "fenced.stores.zookeeper.guard.values:ZooKeeperValues",
        "zookeepers": "fenced.stores.zookeeper.guard.values:ZooKeeperValues",
    },
}

ENGINES = {
    "mariadb": "fenced.stores.mariadb.guard.engine:ENGINE",
    "mysql": "fenced.stores.mariadb.guard.engine:ENGINE",
    "postgresql": "fenced.stores.postgresql.guard.engine:ENGINE",
    "sqlite": "fenced.stores.sqlite.guard.engine:ENGINE",
}
"""The SQL databases whose tables can be guarded; others are registered under the entry point `fenced.engines`."""

ALIASES = {"postgres": "postgresql"}
"""Other spellings of a scheme."""

DRIVERS = {
    "dynamodb": "pip install boto3",
    "etcd": "pip install hpack",
    "mariadb": "pip install PyMySQL asyncmy",
    "objects": "pip install obstore",
    "postgresql": "pip install 'psycopg[binary]', which includes libpq",
}
"""What to do where a driver is missing, or the library that it calls."""

NOT_OFFERED = {"memory"}
"""Schemes that messages do not suggest: the leases and values in memory are visible to one process only."""


def one_per_class() -> list[tuple[Kind, str]]:
    """Each class once, under its first scheme. Its other schemes differ only in how they reach the server."""
    first: dict[tuple[Kind, str], str] = {}
    for kind, table in BUILT_IN.items():
        for scheme, target in table.items():
            first.setdefault((kind, target), scheme)
    return [(kind, scheme) for (kind, _), scheme in first.items()]


class AuthorityType(Protocol):
    def at(self, url: str, runtime: Runtime, namespace: str) -> Authority: ...


class GuardType(Protocol):
    def at(self, url: str, runtime: Runtime) -> NamedValues: ...


def authority(url: str, runtime: Runtime, namespace: str = "default") -> Authority:
    """The authority behind a URL, not yet opened."""
    return cast(
        AuthorityType, _find("authority", "fenced.authorities", BUILT_IN["fenced.authorities"], url)
    ).at(url, runtime, namespace)


def renewer(own: Authority, url: str, runtime: Runtime, namespace: str) -> Authority:
    """An authority that renews what `own`, which is the one behind that URL, was granted under another runtime."""
    make: Callable[[Runtime], Authority] | None = getattr(own, "renewer", None)
    return authority(url, runtime, namespace) if make is None else make(runtime)


def guard(url: str, runtime: Runtime) -> NamedValues:
    """The guard behind a URL, not yet opened."""
    return cast(GuardType, _find("guard", "fenced.guards", BUILT_IN["fenced.guards"], url)).at(url, runtime)


def is_engine(url: str) -> bool:
    """Whether a URL names a SQL database, whose tables are guarded."""
    scheme = url.partition(":")[0]
    built_in = ALIASES.get(scheme, scheme) in ENGINES
    return built_in or any(engine.name == scheme for engine in _other_engines())


def engine(url: str) -> Engine:
    """The SQL engine behind a URL."""
    return cast("Engine", _find("SQL engine", "fenced.engines", ENGINES, url))


def engines() -> Iterator[Engine]:
    """All SQL engines: the built-in ones first, because looking for others takes milliseconds."""
    for target in dict.fromkeys(ENGINES.values()):
        yield cast("Engine", _load(target))
    yield from _other_engines()


@lru_cache(maxsize=1)
def _other_engines() -> tuple[Engine, ...]:
    from importlib.metadata import entry_points

    return tuple(cast("Engine", entry.load()) for entry in entry_points(group="fenced.engines"))


def needs_driver(scheme: str, error: ImportError) -> Misconfigured:
    why = str(error).partition("\n")[0].rstrip(".")
    remedy = f": {DRIVERS[scheme]}" if scheme in DRIVERS else ""
    return Misconfigured(f"{scheme}: needs a driver ({why}){remedy}")


def needs_package(module: str, error: ImportError) -> ImportError:
    """The error of a module of ours that cannot be imported, because a package is missing that it is for."""
    why, package = str(error).partition("\n")[0].rstrip("."), (error.name or module).partition(".")[0]
    return ModuleNotFoundError(f"{module} needs a package ({why}): pip install {package}", name=error.name)


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _find(what: str, group: str, built_in: dict[str, str], url: object) -> Any:
    if not isinstance(url, str) or ":" not in url:
        raise Misuse(f"an address looks like sqlite:///leases.db, not {shown(redacted(url))}")
    spelled = url.partition(":")[0]
    scheme = ALIASES.get(spelled, spelled)
    if (target := built_in.get(scheme)) is not None:
        try:
            return _load(target)
        except ImportError as error:
            raise needs_driver(target.split(".")[2], error) from error
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    for entry in entry_points(group=group, name=scheme):
        return entry.load()
    plain, plus, _ = scheme.partition("+")
    if plus and ALIASES.get(plain, plain) in built_in:
        raise Misconfigured(
            f"{shown(scheme)} names a driver in the style of SQLAlchemy; write {plain}:// and keep the rest"
        )
    known = ", ".join(sorted(built_in.keys() - NOT_OFFERED))
    raise Misconfigured(f"no {what} for {shown(scheme)}; known: {known}")
