"""Which class serves which URL. Third parties register under the entry points of the same names."""

from __future__ import annotations

import importlib
from typing import Any, Literal, Protocol, cast

from fenced.contracts import Authority, NamedValues, Runtime
from fenced.errors import Misconfigured, Misuse, redacted, shown

Kind = Literal["fenced.authorities", "fenced.guards"]

BUILT_IN: dict[Kind, dict[str, str]] = {
    "fenced.authorities": {
        "etcd": "fenced.authorities.etcd.authority:EtcdAuthority",
        "etcds": "fenced.authorities.etcd.authority:EtcdAuthority",
        "memory": "fenced.authorities.memory:MemoryAuthority",
        "postgresql": "fenced.authorities.postgresql.authority:PostgresqlAuthority",
        "redis": "fenced.authorities.redis.authority:RedisAuthority",
        "rediss": "fenced.authorities.redis.authority:RedisAuthority",
        "sqlite": "fenced.authorities.sqlite.authority:SqliteAuthority",
        "unix": "fenced.authorities.redis.authority:RedisAuthority",
        "zookeeper": "fenced.authorities.zookeeper.authority:ZooKeeperAuthority",
        "zookeepers": "fenced.authorities.zookeeper.authority:ZooKeeperAuthority",
    },
    "fenced.guards": {
        "memory": "fenced.guards.memory:MemoryGuard",
        "postgresql": "fenced.guards.postgresql.values:PostgresqlGuard",
        "sqlite": "fenced.guards.sqlite.values:SqliteGuard",
    },
}

ALIASES = {"postgres": "postgresql"}
"""Other spellings of a scheme, which mean the same."""


def one_per_class() -> list[tuple[Kind, str]]:
    """Each class once, by the first of its schemes: the others differ in how its server is reached."""
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
    return cast(AuthorityType, _find("fenced.authorities", url)).at(url, runtime, namespace)


def guard(url: str, runtime: Runtime) -> NamedValues:
    """The guard behind a URL, not yet opened."""
    return cast(GuardType, _find("fenced.guards", url)).at(url, runtime)


def _find(kind: Kind, url: object) -> Any:
    if not isinstance(url, str) or ":" not in url:
        raise Misuse(f"an address looks like sqlite:///leases.db, not {shown(redacted(url))}")
    spelled = url.partition(":")[0]
    scheme = ALIASES.get(spelled, spelled)
    if (target := BUILT_IN[kind].get(scheme)) is not None:
        module, _, name = target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError as error:
            extra = module.split(".")[2]
            raise Misconfigured(
                f"{scheme}: needs a driver ({error}): pip install 'fenced[{extra}]'"
            ) from error
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    for entry in entry_points(group=kind, name=scheme):
        return entry.load()
    plain, plus, _ = scheme.partition("+")
    if plus and ALIASES.get(plain, plain) in BUILT_IN[kind]:
        raise Misconfigured(
            f"{shown(scheme)} is SQLAlchemy's way to name a driver; write {plain}://, and the rest as it is"
        )
    known = ", ".join(sorted(BUILT_IN[kind]))
    what = "authority" if kind == "fenced.authorities" else "guard"
    raise Misconfigured(f"no {what} for {shown(scheme)}; known: {known}")
