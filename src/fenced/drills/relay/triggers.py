"""Faults that wait for a particular request."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable


class Fault(enum.Enum):
    """What happens to the request that a trigger waits for.

    A request begins with the chunk in which the match ends. Its reply is the first one that arrives after it. If the
    client pipelines requests, that may be the reply to an earlier one.
    """

    CUT_BEFORE = "the request never reaches the server; the connection is reset"
    LOSE_REPLY = "the server does what it was asked; its reply is swallowed, and the connection is reset"
    CUT_AFTER_REPLY = "the server does what it was asked, and replies; the connection ends with that reply"
    CUT_AFTER = "the request goes to the server; the client is reset at once"
    SWALLOW = "the request never reaches the server; the connection stays open and silent"
    SWALLOW_REPLY = "the server does what it was asked; the connection stays open and silent"
    HOLD_REPLY = "the server does what it was asked; its reply is held until `deliver`"
    HOLD = "the request is held until `deliver`, and reaches the server then"
    CUT_AND_HOLD = (
        "the client is reset at once; the request is held until `deliver`, and reaches the server then"
    )


AT_THE_REPLY = (
    Fault.LOSE_REPLY,
    Fault.CUT_AFTER_REPLY,
    Fault.SWALLOW_REPLY,
    Fault.HOLD_REPLY,
    Fault.CUT_AND_HOLD,
)


class Trigger:
    """A fault that waits for its request; made by `Proxy.on`.

    `fired` is incremented when the fault has happened. Faults about a reply happen when the reply arrives, so the
    server has done its work by then. CUT_AND_HOLD has happened when the server has answered the late
    request, or has ended its connection before.
    """

    def __init__(
        self,
        match: bytes,
        fault: Fault,
        times: int,
        *,
        deliver: Callable[[Trigger], None],
        disarm: Callable[[Trigger], None],
    ) -> None:
        self.match = match
        self.fault = fault
        self.left = times
        self.fired = 0
        self._deliver = deliver
        self._disarm = disarm
        self._change = threading.Condition()

    def wait(self, timeout: float = 10.0, times: int = 1) -> None:
        """Block until it has fired `times` times; TimeoutError if it does not."""
        with self._change:
            if not self._change.wait_for(lambda: self.fired >= times, timeout):
                raise TimeoutError(f"{self.match!r} did not come to {self.fault.name} within {timeout:g} s")

    def deliver(self) -> None:
        """Deliver the requests and replies that it holds."""
        self._deliver(self)

    def disarm(self) -> None:
        """Let later requests pass. Effects remain, and what it holds stays held."""
        self._disarm(self)

    def fire(self) -> None:
        """Called by the proxy when the fault has happened."""
        with self._change:
            self.fired += 1
            self._change.notify_all()
