"""Requests that schemathesis makes from the OpenAPI document of the service, right and wrong ones.

Looked for: a 5xx, and an answer whose status, media type or body the document does not describe. One 5xx is right: the
503 of a read with `at_least`, which asks the client to look again.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok

from fenced_testkit.servers import ServiceServer

EXAMPLES = 150
NOT_CHECKED = {
    "positive_data_acceptance",  # a stamp, a name or a realm that fits its schema may still be none
    "not_a_server_error",  # `answers` does that
}
WITHOUT_WRONG_FORMS = {
    "PUT /v1/values/{name}",
    "GET /v1/marks/{name}",
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",
    "GET /openapi.json",
}


def answers(schema: Any, examples: int, **call: Any) -> Counter[int]:
    """Send requests to each operation; raises at the first wrong answer. Returns how many had each status."""
    skipped: list[Any] = [check for check in CHECKS.get_all() if check.__name__ in NOT_CHECKED]
    seen: Counter[int] = Counter()

    def check(operation: Any, mode: GenerationMode) -> None:
        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def answered(case: Any) -> None:
            response = case.call(**call)
            seen[response.status_code] += 1
            if response.status_code >= 500:
                assert response.json()["type"] == "urn:fenced:problem:contended", response.text
            case.validate_response(response, excluded_checks=skipped)

        answered()

    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if operation.label == "GET /v1/events":
            continue  # a stream, which does not end
        check(operation, GenerationMode.POSITIVE)
        if operation.label not in WITHOUT_WRONG_FORMS:
            check(operation, GenerationMode.NEGATIVE)
    return seen


def run() -> dict[str, Any]:
    figures = {}
    for kind in ("ledger", "sqlite"):
        with (
            tempfile.TemporaryDirectory() as folder,
            ServiceServer(store=f"{kind}:///{folder}/leases") as server,
        ):
            schema = schemathesis.openapi.from_url(f"{server.url()}/openapi.json")
            seen = answers(schema, EXAMPLES, base_url=server.url())
            figures[kind] = {
                "requests": sum(seen.values()),
                "by status": {str(status): seen[status] for status in sorted(seen)},
                "answers that are not described": 0,
                "5xx, except 503 look again": 0,
            }
    return figures
