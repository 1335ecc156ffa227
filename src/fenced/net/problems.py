"""Problem documents (RFC 9457): which answer each error is, and which error an answer means. Nothing here does I/O.

A receiver answers an error with `problem(error)`. A sender turns the answer back into that error by `error_from(...)`.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from fenced.errors import (
    REFUSALS,
    AlreadyApplied,
    Conflict,
    Contended,
    FencedError,
    Indeterminate,
    LeaseLost,
    Misconfigured,
    Misuse,
    Refused,
    Unavailable,
    Unsupported,
)

PROBLEM_MEDIA_TYPE = "application/problem+json"
PROBLEM_BYTES_MAX = 65_536
"""An answer longer than this is not read as a problem document."""
DETAIL_LENGTH_MAX = 1000
RETRY_AFTER_SECONDS = 1
TYPE_PREFIX = "urn:fenced:problem:"

_SECRETS = re.compile(r"1:[0-9a-f]{16}:[0-9]+:(?:-|[0-9]+):[0-9a-f]{32}\S*|[0-9a-f]{64,}", re.ASCII)


class ProblemType(NamedTuple):
    """One row of the table: an error, and the answer that means it."""

    kind: str
    error: type[FencedError]
    status: int
    says: str
    """The title, in which `{by}` is who answers."""

    def title(self, by: str = "receiver") -> str:
        return self.says.format(by=by)

    @property
    def uri(self) -> str:
        return TYPE_PREFIX + self.kind


PROBLEM_TYPES = tuple(
    ProblemType(*row)
    for row in (
        ("missing", REFUSALS["missing"], 428, "The request needs a stamp"),
        ("invalid", REFUSALS["invalid"], 400, "Not a stamp, or not one that the rule can use"),
        ("stale", REFUSALS["stale"], 412, "A newer holder has been seen"),
        ("duplicate", REFUSALS["duplicate"], 412, "This grant has already made its one operation"),
        ("out_of_order", REFUSALS["out_of_order"], 412, "A later operation of the same lease was applied before"),
        ("reused", REFUSALS["reused"], 412, "The same token was seen from another grant"),
        ("lost", LeaseLost, 412, "The lease of the stamp has ended"),
        ("conflict", Conflict, 412, "The value has changed since it was read"),
        ("uncovered", REFUSALS["uncovered"], 403, "The lease does not cover this name"),
        ("foreign", REFUSALS["foreign"], 403, "The stamp comes from another authority"),
        ("forged", REFUSALS["forged"], 403, "A proof was required and did not verify"),
        ("applied", AlreadyApplied, 200, "This same operation was applied before"),
        ("contended", Contended, 503, "Another operation is using the same name"),
        ("unavailable", Unavailable, 503, "The {by} cannot serve this request now"),
        ("indeterminate", Indeterminate, 504, "The operation may or may not have been applied"),
        ("misuse", Misuse, 400, "The request itself is wrong"),
        ("unsupported", Unsupported, 501, "The {by} lacks this ability"),
        ("misconfigured", Misconfigured, 500, "The {by} is not set up correctly"),
    )
)  # fmt: skip
_BY_ERROR = {row.error: row for row in PROBLEM_TYPES}
_BY_URI = {row.uri: row for row in PROBLEM_TYPES}


class Problem(NamedTuple):
    """An answer: its status, its headers, and a problem document (RFC 9457) as its body."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def problem(error: FencedError, *, by: str = "receiver", title: str | None = None) -> Problem:
    """The answer that means `error`. `by`: who answers, for its title; `title`: another one, where that says more.

    An error that says nothing about the request, such as NotGranted in the receiver's own code, is a 500 without
    details. The answer contains no stamp, no proof and no grant, whatever the message of the error contains.
    """
    row = next((_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _BY_ERROR), None)
    if row is None:
        return plain_problem(500, {"type": "about:blank", "title": "Internal Server Error", "status": 500})
    document: dict[str, object] = {
        "type": row.uri,
        "title": title or row.title(by),
        "status": row.status,
        "detail": _without_secrets(error),
        "retry": error.retry,
    }
    if isinstance(error, Refused):
        document |= {"name": error.name, "mark": error.mark}
    if isinstance(error, LeaseLost):
        document["reason"] = error.reason
    return plain_problem(row.status, {key: value for key, value in document.items() if value is not None})


def detail_of(error: FencedError) -> str:
    """What its answer says about an error, for a log: without what would let its reader write as a holder."""
    return _without_secrets(error)


def plain_problem(status: int, document: dict[str, object]) -> Problem:
    """An answer with this document. `error_from` reads only documents whose `type` is in the table."""
    body = json.dumps(document).encode()
    headers = [("Content-Type", PROBLEM_MEDIA_TYPE), ("Content-Length", str(len(body)))]
    if status == 503:
        headers.append(("Retry-After", str(RETRY_AFTER_SECONDS)))
    return Problem(status, headers, body)


def _without_secrets(error: FencedError) -> str:
    """The message, without what would let its reader write as a holder."""
    text = _SECRETS.sub("***", str(error))
    if isinstance(error, Refused):
        for grant in (error.stamp.grant if error.stamp else None, error.holder):
            text = text.replace(grant, "***") if grant else text
    return text[:DETAIL_LENGTH_MAX]


def error_from(status: int, content_type: str | None, body: bytes) -> FencedError | None:
    """The error that an answer means; None if the answer is not a problem document of this protocol."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != PROBLEM_MEDIA_TYPE or len(body) > PROBLEM_BYTES_MAX:
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    uri = document.get("type") if isinstance(document, dict) else None
    row = _BY_URI.get(uri) if isinstance(uri, str) else None
    if row is None or row.status != status:
        return None
    detail = document.get("detail")
    message = detail[:DETAIL_LENGTH_MAX] if isinstance(detail, str) and detail else row.title()
    if issubclass(row.error, Refused):
        name, mark = document.get("name"), document.get("mark")
        return row.error(
            message,
            name=name if isinstance(name, str) else None,
            mark=mark if type(mark) is int else None,
        )
    if issubclass(row.error, LeaseLost):
        reason = document.get("reason")
        return row.error(message, reason=reason if isinstance(reason, str) else "")
    return row.error(message)
