"""Requests that schemathesis makes from the OpenAPI document, right and wrong ones: each answer is as described."""

from __future__ import annotations

from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok

from fenced.authorities.memory import MemoryAuthority, MemoryStore
from fenced.runtime import clocks
from fenced.service.api import Api

EXAMPLES = 5
NOT_CHECKED = {
    "positive_data_acceptance",  # a stamp, a name or a realm that fits its schema may still be none
    "not_a_server_error",  # one 503 is right, see below
}
WITHOUT_WRONG_FORMS = {
    "put /v1/values/{name}",
    "get /v1/marks/{name}",
    "get /healthz",
    "get /readyz",
    "get /metrics",
}


def test_answers_are_as_described() -> None:
    """No answer is 5xx, except the one that asks the client to look again later."""
    store = MemoryStore(clocks.now)
    api = Api(lambda runtime, _: MemoryAuthority(store, runtime), values="memory:schema")
    schema = schemathesis.openapi.from_asgi("/openapi.json", api.app)
    skipped: list[Any] = [check for check in CHECKS.get_all() if check.__name__ in NOT_CHECKED]
    seen: Counter[int] = Counter()

    def check(operation: Any, mode: GenerationMode) -> None:
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def answered(case: Any) -> None:
            response = case.call()
            seen[response.status_code] += 1
            if response.status_code >= 500:
                assert response.json()["type"] == "urn:fenced:problem:contended", response.text
            case.validate_response(response, excluded_checks=skipped)

        answered()

    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if operation.label.lower() == "get /v1/events":
            continue  # a stream, which does not end
        check(operation, GenerationMode.POSITIVE)
        if operation.label.lower() not in WITHOUT_WRONG_FORMS:
            check(operation, GenerationMode.NEGATIVE)
    assert {200, 400} <= seen.keys()
