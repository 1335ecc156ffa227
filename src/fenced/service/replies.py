"""Replies of the service, and problem documents."""

from __future__ import annotations

from fenced.http1.writing import ServerReply
from fenced.net.problems import Problem, plain_problem

JSON = (("content-type", "application/json"),)
"""The headers of nearly all replies."""
TEXT = (("content-type", "text/plain; charset=utf-8"),)


class NotAdmitted(Exception):
    """A request that is answered by this problem before anything is done."""

    def __init__(self, found: Problem, *headers: tuple[str, str]) -> None:
        super().__init__(found.status)
        self.problem = found._replace(headers=[*found.headers, *headers])


def plain(status: int, title: str, detail: str) -> Problem:
    retry = "later" if status in (408, 429) else "no"
    return plain_problem(
        status, {"type": "about:blank", "title": title, "status": status, "detail": detail, "retry": retry}
    )


def as_reply(found: Problem) -> ServerReply:
    headers = tuple((name.lower(), value) for name, value in found.headers if name != "Content-Length")
    return ServerReply(found.status, headers, found.body)
