"""The exceptions for the server's error codes."""

from __future__ import annotations

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.stores.zookeeper.wire import jute


def refused(error: int, where: str) -> FencedError:
    """The exception for an error that the caller does not expect. The request was not carried out."""
    match error:
        case jute.NO_NODE:
            return Misconfigured(f"{where}: the nodes of this namespace are gone; somebody deleted them")
        case jute.NO_AUTH:
            return Misconfigured(
                f"{where}: no right to read, create or delete here: the namespace belongs to other credentials"
            )
        case -114 | jute.AUTH_FAILED:
            return Misconfigured(
                f"{where}: the server does not know who we are; see its authProvider settings"
            )
        case -6:
            return Misconfigured(
                f"{where}: this server knows no container nodes; ZooKeeper 3.5 or later does"
            )
        case _:
            return Unavailable(f"{where}: the server refused with error {error}")
