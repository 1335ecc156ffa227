"""ZooKeeperGuard: transactions of your own kazoo client, behind the fence in one multi."""

from fenced.stores.zookeeper.guard.own import ZooKeeperGuard

__all__ = ["ZooKeeperGuard"]


def __dir__() -> list[str]:
    return __all__
