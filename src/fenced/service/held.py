"""A held answer: the 202 of a waiter is sent when it is worth asking again.

Never a held grant: its time would have begun to run when the request was sent, and it could go to a client that is
dead by now. So the client always asks again, and a notification stays a hint.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fenced import timing
from fenced.runtime import clocks
from fenced.service.bodies import AskBody, Turn, WaitingAnswer
from fenced.service.namespaces import HeldRequest
from fenced.service.replies import ServiceRequest

HELD_SECONDS_MAX = 30.0
SPREAD = 0.2
"""By how much of it the times of different waiters differ."""
LINES_MEDIA_TYPE = "application/x-ndjson"
_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*([0-9]{1,6}(?:\.[0-9]{0,6})?)\s*(?:$|[,;])")


def held_seconds(request: ServiceRequest, body: AskBody) -> float:
    """How long the answer may be held: as `Prefer: wait=S` asks for.

    A client that does not renew its place itself is answered after half of the place's life: the service renews for
    nobody, because a client that is dead but still connected would keep its place.
    """
    found = _WAIT.search(request.headers.get("prefer") or "")
    if found is None:
        return 0.0
    limit = HELD_SECONDS_MAX if body.keeps else timing.waiter_ttl(body.ttl) / 2
    # Waiters that were answered at one moment, after a pause of the instance, would ask together again and again.
    return min(float(found[1]), limit) * (1 - SPREAD * int(body.attempt[:2], 16) / 255)


class HeldAnswer(Response):
    """The answer to a waiter. In lines, the first is sent at once, the second when it is worth asking again."""

    def __init__(
        self, answer: WaitingAnswer, held: HeldRequest, seconds: float, request: ServiceRequest
    ) -> None:
        self._in_lines = LINES_MEDIA_TYPE in (request.headers.get("accept") or "")
        super().__init__(
            status_code=202, media_type=LINES_MEDIA_TYPE if self._in_lines else "application/json"
        )
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"  # a proxy must pass the first line on at once
        self._answer = answer
        self._held = held
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._respond(receive, send)
        finally:
            self._held.close()

    async def _respond(self, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 202, "headers": self.raw_headers}
        if self._in_lines:
            await send(start)
            await send(_piece(msgspec.json.encode(self._answer) + b"\n", more=True))
        began = clocks.now()
        turn = await self._wait(receive)
        if turn is None:
            return
        if self._in_lines:
            await send(_piece(msgspec.json.encode(Turn(turn)) + b"\n"))
            return
        self._answer.check_in = 0.0 if turn else max(0.0, self._answer.check_in - (clocks.now() - began))
        await send(start)
        await send(_piece(msgspec.json.encode(self._answer)))

    async def _wait(self, receive: Receive) -> bool | None:
        """Whether it may be the client's turn; None: the client is gone, which ends neither its place nor its lease."""
        seconds = min(self._seconds, self._answer.check_in)
        gone = asyncio.ensure_future(receive())
        waits_for: set[asyncio.Future[Any]] = {gone, self._held.turn}
        try:
            done, _ = await asyncio.wait(waits_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if self._held.turn in done:
            return self._held.turn.result()
        return None if done else seconds >= self._answer.check_in


def _piece(body: bytes, *, more: bool = False) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": more}
