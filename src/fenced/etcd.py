"""EtcdGuard: your own transactions on etcd, behind the fence in the same transaction."""

from fenced.stores.etcd.guard.own import (
    AsyncEtcdClient,
    AsyncEtcdGuard,
    AsyncEtcdTransaction,
    EtcdClient,
    EtcdCompares,
    EtcdGuard,
    EtcdTransaction,
    EtcdValue,
)

__all__ = [
    "AsyncEtcdClient",
    "AsyncEtcdGuard",
    "AsyncEtcdTransaction",
    "EtcdClient",
    "EtcdCompares",
    "EtcdGuard",
    "EtcdTransaction",
    "EtcdValue",
]


def __dir__() -> list[str]:
    return __all__
