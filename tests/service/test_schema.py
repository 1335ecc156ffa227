"""Requests that schemathesis makes from the OpenAPI document: each answer is as described, and none is 5xx."""

from __future__ import annotations

from fenced.runtime import clocks
from fenced.service.api import Api
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from tests.service.inside import app_of

EXAMPLES = 5
"""The evidence has more."""


def test_answers_are_as_described() -> None:
    import schemathesis

    from evidence.service_requests import answers

    store = MemoryStore(clocks.now)
    api = Api(lambda runtime, _: MemoryAuthority(store, runtime), values="memory:schema")
    seen = answers(schemathesis.openapi.from_asgi("/openapi.json", app_of(api)), EXAMPLES)
    assert {200, 400} <= seen.keys()
