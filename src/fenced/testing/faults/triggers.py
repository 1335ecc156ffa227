"""Faults that wait for a particular request."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable


class Fault(enum.Enum):
    """What happens to the request that a trigger waits for.

    A request begins with the chunk in which the match ends. Its reply is what comes back first after it: with
    requests that were sent before their turn, it may be the reply to an earlier one.
    """

    CUT_BEFORE = "the request never reaches the server; the connection is reset"
    LOSE_REPLY = "the server does what it was asked; its reply is swallowed, and the connection is reset"
    CUT_AFTER = "the request goes to the server; the client is reset at once"
    SWALLOW = "the request never reaches the server; the connection stays open and silent"
    SWALLOW_REPLY = "the server does what it was asked; the connection stays open and silent"
    HOLD_REPLY = "the server does what it was asked; its reply is held until `let_go`"
    HOLD = "the request is held until `let_go`, and reaches the server then"


AT_THE_REPLY = (Fault.LOSE_REPLY, Fault.SWALLOW_REPLY, Fault.HOLD_REPLY)


class Trigger:
    """A fault that waits for its request; made by `Proxy.on`.

    `fired` counts up when what the fault says has happened. For the faults about a reply that is when the
    reply has come, so that the server has done its work by then.
    """

    def __init__(
        self,
        match: bytes,
        fault: Fault,
        times: int,
        *,
        let_go: Callable[[Trigger], None],
        disarm: Callable[[Trigger], None],
    ) -> None:
        self.match = match
        self.fault = fault
        self.left = times
        self.fired = 0
        self._let_go = let_go
        self._disarm = disarm
        self._change = threading.Condition()

    def wait(self, timeout: float = 10.0, times: int = 1) -> None:
        """Block until it has fired, so many times; TimeoutError if it does not."""
        with self._change:
            if not self._change.wait_for(lambda: self.fired >= times, timeout):
                raise TimeoutError(f"{self.match!r} did not come to {self.fault.name} within {timeout:g} s")

    def let_go(self) -> None:
        """Deliver what it holds now."""
        self._let_go(self)

    def disarm(self) -> None:
        """Let later requests pass. What it has done stays done, and what it holds is held."""
        self._disarm(self)

    def fire(self) -> None:
        """For the proxy: it has happened."""
        with self._change:
            self.fired += 1
            self._change.notify_all()
