"""A held answer: the 202 of a waiter is sent when it is worth asking again.

Never a held grant: its time would have begun to run when the request was sent, and it could go to a client that is
dead by now. So the client always asks again, and a notification stays a hint.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec

from fenced.runtime import clocks
from fenced.service.bodies import AskBody, Turn, WaitingAnswer
from fenced.service.namespaces import HeldRequest
from fenced.service.requests import RequestHeaders
from fenced.values import timing

HELD_SECONDS_MAX = 30.0
SPREAD = 0.2
"""By how much of it the times of different waiters differ."""
LINES_MEDIA_TYPE = "application/x-ndjson"
LINES_HEADERS = (("content-type", LINES_MEDIA_TYPE), ("x-accel-buffering", "no"))
"""A proxy must pass the first line on at once."""
_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*([0-9]{1,6}(?:\.[0-9]{0,6})?)\s*(?:$|[,;])")
_encode = msgspec.json.Encoder().encode


def held_seconds(headers: RequestHeaders, body: AskBody) -> float:
    """How long the answer may be held: as `Prefer: wait=S` asks for.

    A client that does not renew its place itself is answered after half of the place's life: the service renews for
    nobody, because a client that is dead but still connected would keep its place.
    """
    found = _WAIT.search(headers.get("prefer") or "")
    if found is None:
        return 0.0
    limit = HELD_SECONDS_MAX if body.keeps else timing.waiter_ttl(body.ttl) / 2
    # Waiters that were answered at one moment, after a pause of the instance, would ask together again and again.
    return min(float(found[1]), limit) * (1 - SPREAD * int(body.attempt[:2], 16) / 255)


class HeldAnswer:
    """The answer to a waiter. In lines, the first is sent at once, the second when it is worth asking again."""

    __slots__ = ("_answer", "_began", "_request", "_seconds", "_send", "_timer", "first", "in_lines")
    first: bytes
    """What is sent at once: a line, or nothing."""
    _answer: WaitingAnswer
    _began: float

    def __init__(self, request: HeldRequest, seconds: float, headers: RequestHeaders) -> None:
        self.in_lines = LINES_MEDIA_TYPE in (headers.get("accept") or "")
        self._request = request
        self._seconds = seconds
        self._send: Callable[[bytes], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, answer: WaitingAnswer) -> None:
        self._answer, self._began = answer, clocks.now()
        self.first = _encode(answer) + b"\n" if self.in_lines else b""

    def then(self, send: Callable[[bytes], None]) -> None:
        """Call `send` with the rest, once, when it is worth asking again or the time is over; maybe at once."""
        self._send = send
        seconds = min(self._seconds, self._answer.check_in)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._late)
        self._request.then(self._end)

    def _late(self) -> None:
        self._end(self._seconds >= self._answer.check_in)

    def _end(self, turn: bool) -> None:
        """`turn`: whether it may be the client's turn."""
        # Closed first: time-out, wake-up and the end of the connection may all come, and only the first one answers.
        send = self._send
        self.close()
        if send is None:
            return
        if self.in_lines:
            send(_encode(Turn(turn)) + b"\n")
            return
        waited = clocks.now() - self._began
        self._answer.check_in = 0.0 if turn else max(0.0, self._answer.check_in - waited)
        send(_encode(self._answer))

    def send_on(self) -> None:
        """This instance stops: let the client ask another one."""
        self._request.wake(False)

    def close(self) -> None:
        """Send nothing more. The client is gone, or not a waiter; that ends neither its place nor its lease."""
        self._send = None
        self._request.close()
        if self._timer is not None:
            self._timer.cancel()
