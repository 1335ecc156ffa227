"""EtcdGuard: your own transactions on etcd, behind the fence in the same transaction."""

from fenced.stores.etcd.guard.own import (
    AsyncEtcdGuard,
    AsyncEtcdTransaction,
    EtcdFence,
    EtcdGuard,
    EtcdTransaction,
    EtcdValue,
)

__all__ = ["AsyncEtcdGuard", "AsyncEtcdTransaction", "EtcdFence", "EtcdGuard", "EtcdTransaction", "EtcdValue"]


def __dir__() -> list[str]:
    return __all__
