"""Leases with fencing tokens, and guards that make the resource itself refuse a stale holder.

    client = fenced.Client("sqlite:///leases.db")
    with client.hold("orders/42", ttl=15) as lease:
        ...  # lease.token, lease.check(); and a guard at the resource, such as fenced.sql.Guard

Names are loaded when they are first used, so `import fenced` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fenced import errors as errors
    from fenced import events as events
    from fenced import sql as sql
    from fenced.client.faces import AsyncClient as AsyncClient
    from fenced.client.faces import Client as Client
    from fenced.client.leases import AsyncLease as AsyncLease
    from fenced.client.leases import Lease as Lease
    from fenced.client.values import AsyncValues as AsyncValues
    from fenced.client.values import Values as Values
    from fenced.core.holding import State as State
    from fenced.errors import AlreadyApplied as AlreadyApplied
    from fenced.errors import Conflict as Conflict
    from fenced.errors import Contended as Contended
    from fenced.errors import DuplicateStamp as DuplicateStamp
    from fenced.errors import FencedError as FencedError
    from fenced.errors import ForeignRealm as ForeignRealm
    from fenced.errors import ForgedStamp as ForgedStamp
    from fenced.errors import Indeterminate as Indeterminate
    from fenced.errors import InvalidStamp as InvalidStamp
    from fenced.errors import InvariantBroken as InvariantBroken
    from fenced.errors import LeaseLost as LeaseLost
    from fenced.errors import Misconfigured as Misconfigured
    from fenced.errors import MissingStamp as MissingStamp
    from fenced.errors import Misuse as Misuse
    from fenced.errors import NotEnoughTime as NotEnoughTime
    from fenced.errors import NotGranted as NotGranted
    from fenced.errors import OutOfOrder as OutOfOrder
    from fenced.errors import Overtaken as Overtaken
    from fenced.errors import Refused as Refused
    from fenced.errors import ReusedToken as ReusedToken
    from fenced.errors import StaleToken as StaleToken
    from fenced.errors import Unavailable as Unavailable
    from fenced.errors import Uncovered as Uncovered
    from fenced.errors import Unsupported as Unsupported
    from fenced.values.contracts import Versioned as Versioned
    from fenced.values.model import HeldBy as HeldBy
    from fenced.values.model import Stamp as Stamp

__version__ = "0.2.0"

_HOME = {
    "Client": "fenced.client.faces",
    "AsyncClient": "fenced.client.faces",
    "Lease": "fenced.client.leases",
    "AsyncLease": "fenced.client.leases",
    "Values": "fenced.client.values",
    "AsyncValues": "fenced.client.values",
    "State": "fenced.core.holding",
    "HeldBy": "fenced.values.model",
    "Stamp": "fenced.values.model",
    "Versioned": "fenced.values.contracts",
    **dict.fromkeys(
        (
            "AlreadyApplied",
            "Conflict",
            "Contended",
            "DuplicateStamp",
            "FencedError",
            "ForeignRealm",
            "ForgedStamp",
            "Indeterminate",
            "InvalidStamp",
            "InvariantBroken",
            "LeaseLost",
            "Misconfigured",
            "MissingStamp",
            "Misuse",
            "NotEnoughTime",
            "NotGranted",
            "OutOfOrder",
            "Overtaken",
            "Refused",
            "ReusedToken",
            "StaleToken",
            "Unavailable",
            "Uncovered",
            "Unsupported",
        ),
        "fenced.errors",
    ),
}
_MODULES = frozenset({"errors", "events", "sql", "testing"})

__all__ = [*sorted(_HOME), "errors", "events", "sql"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"fenced.{name}")
    if name in _HOME:
        value: object = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fenced' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
