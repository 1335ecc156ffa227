"""Problem documents of the service that are no error of fenced's own, and problems as responses."""

from __future__ import annotations

from starlette.responses import Response

from fenced.wire.problems import Problem, plain_problem


def plain(status: int, title: str, detail: str) -> Problem:
    retry = "later" if status in (408, 429) else "no"
    return plain_problem(
        status, {"type": "about:blank", "title": title, "status": status, "detail": detail, "retry": retry}
    )


def as_response(found: Problem) -> Response:
    return Response(found.body, found.status, dict(found.headers))
