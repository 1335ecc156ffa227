"""Fenced requests over HTTP: the protocol on the wire, and what sends and receives it.

Receivers are loaded when they are first used, so that a program that only sends does not load asyncio for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fenced.http.protocol import (
    KEY_HEADER,
    PROOF_HEADER,
    SAFE_METHODS,
    STAMP_HEADER,
    fence_headers,
    operation_id,
    read_fence,
)
from fenced.http.sending import operation, stamping
from fenced.net.problems import PROBLEM_MEDIA_TYPE, Problem, error_from, problem

if TYPE_CHECKING:
    from fenced.http.asgi import Before as Before
    from fenced.http.asgi import Receiver as Receiver
    from fenced.http.handlers import BeforeHandler as BeforeHandler
    from fenced.http.receiving import Received as Received
    from fenced.http.receiving import Replayed as Replayed
    from fenced.http.receiving import answer as answer
    from fenced.http.receiving import flask_answer as flask_answer
    from fenced.http.serving import Serving as Serving
    from fenced.http.serving import WsgiServing as WsgiServing
    from fenced.http.transactions import AsyncAtomic as AsyncAtomic
    from fenced.http.transactions import Atomic as Atomic
    from fenced.http.transactions import atomic as atomic
    from fenced.http.transactions import replies_table as replies_table
    from fenced.http.wsgi import WsgiBefore as WsgiBefore
    from fenced.http.wsgi import WsgiReceiver as WsgiReceiver

_HOME = {
    "AsyncAtomic": "fenced.http.transactions",
    "Atomic": "fenced.http.transactions",
    "Before": "fenced.http.asgi",
    "BeforeHandler": "fenced.http.handlers",
    "Received": "fenced.http.receiving",
    "Receiver": "fenced.http.asgi",
    "Replayed": "fenced.http.receiving",
    "Serving": "fenced.http.serving",
    "WsgiBefore": "fenced.http.wsgi",
    "WsgiReceiver": "fenced.http.wsgi",
    "WsgiServing": "fenced.http.serving",
    "answer": "fenced.http.receiving",
    "flask_answer": "fenced.http.receiving",
    "atomic": "fenced.http.transactions",
    "replies_table": "fenced.http.transactions",
}

__all__ = [
    "KEY_HEADER",
    "PROBLEM_MEDIA_TYPE",
    "PROOF_HEADER",
    "SAFE_METHODS",
    "STAMP_HEADER",
    "AsyncAtomic",
    "Atomic",
    "Before",
    "BeforeHandler",
    "Problem",
    "Received",
    "Receiver",
    "Replayed",
    "Serving",
    "WsgiBefore",
    "WsgiReceiver",
    "WsgiServing",
    "answer",
    "atomic",
    "error_from",
    "fence_headers",
    "flask_answer",
    "operation",
    "operation_id",
    "problem",
    "read_fence",
    "replies_table",
    "stamping",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        value: object = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fenced.http' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
