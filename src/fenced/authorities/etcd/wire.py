"""Calls to a cluster: one channel per member, deadlines of our own, and leaving a member that does not answer.

gRPC's own balancing stays with a member that stands still, so it is not used. Every call asks for a member that
knows a leader (`hasleader`); one that does not says so at once, and the call waits for an election to end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from fenced.authorities.etcd import messages
from fenced.authorities.etcd.address import Address
from fenced.authorities.etcd.ends import End, Metadata, Stream, new_end
from fenced.contracts import Runtime
from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.runtime.pool import Broken

T = TypeVar("T")

TRY_SECONDS = 1.5
"""How long one of several members may take to answer before another is asked."""

ELECTION_BACKOFF_SECONDS = 0.05
SECONDS_MIN = 0.001
HAS_LEADER = ("hasleader", "true")

_NOT_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed", "empty address list")
_TOKEN_OVER = ("invalid auth token", "revision of auth store is old", "revision in header is old")


class LeaseExists(Exception):
    """There is such a lease already: an earlier try has made it."""


class LeaseGone(Exception):
    """The server knows no such lease: nothing happened."""


class _NotSent(Exception):
    """The request was not carried out. `passing`: the member waits for a leader, and may do it soon."""

    def __init__(self, why: str, *, passing: bool = False) -> None:
        super().__init__(why)
        self.passing = passing


class _TokenOver(Exception):
    """The authentication is not valid any more; the request was not carried out."""


class Wire:
    """All members of one cluster. One of them is asked, until it fails; then it is the next one's turn."""

    def __init__(self, address: Address, runtime: Runtime) -> None:
        self.url = address.url
        self._address = address
        self._runtime = runtime
        self.forked()

    def forked(self) -> None:
        """Start without channels; those of a parent process are left as they are."""
        self._ends: dict[str, End] = {}
        self._turn = 0
        self._token = ""

    def inherited(self) -> list[End]:
        return list(self._ends.values())

    # One call.

    async def call(self, path: str, request: bytes, until: float, *, repeatable: bool = True) -> bytes:
        """The reply. Unavailable: nothing happened. Indeterminate: perhaps. LeaseGone: it names a lost lease."""

        async def work(end: End, seconds: float, metadata: Metadata) -> bytes:
            return await end.unary(path, request, seconds, metadata)

        return await self._anywhere(work, until, repeatable)

    async def exchange(self, path: str, requests: Sequence[bytes], until: float) -> list[bytes]:
        """The replies to several messages of one stream; only for what may be repeated."""

        async def work(end: End, seconds: float, metadata: Metadata) -> list[bytes]:
            return await end.exchange(path, requests, seconds, metadata)

        return await self._anywhere(work, until, repeatable=True)

    async def stream(self, path: str, until: float) -> Stream:
        """A stream to the member whose turn it is."""
        end = self._end()
        try:
            if self._address.user and not self._token:
                await self._authenticate(end, until)
            return end.stream(path, self._metadata())
        except (grpc.RpcError, grpc.aio.UsageError, ValueError) as error:  # closed by another caller just now
            raise Unavailable(f"{self.url}: {error}") from error

    async def _anywhere(
        self, work: Callable[[End, float, Metadata], Awaitable[T]], until: float, repeatable: bool
    ) -> T:
        """Do it at one member after the other. Once a try has broken, no later error is a definite no."""
        doubt: Broken | None = None
        broken = unreached = 0
        while True:
            turn = self._turn
            try:
                return await self._at(self._end(), work, until)
            except _NotSent as error:
                await self._leave(turn)
                unreached += not error.passing
                over = unreached >= len(self._address.targets) or self._runtime.now() >= until
                if over:
                    raise self._unavailable(error, doubt) from error
                if error.passing:
                    pause = min(until, self._runtime.now() + ELECTION_BACKOFF_SECONDS)
                    await self._runtime.wait(self._runtime.wakeup(), pause)
            except Broken as error:
                await self._leave(turn)
                broken += 1
                over = broken > max(1, len(self._address.targets) - 1) or self._runtime.now() >= until
                if not repeatable or over:
                    raise Indeterminate(f"{self.url}: {error}") from error
                doubt = error
            except FencedError as error:
                raise (error if doubt is None else Indeterminate(f"{doubt}; then: {error}")) from error

    def _unavailable(self, error: _NotSent, doubt: Broken | None) -> FencedError:
        if doubt is not None:
            return Indeterminate(f"{self.url}: {doubt}; then: {error}")
        return Unavailable(f"{self.url}: {error}")

    async def _at(self, end: End, work: Callable[[End, float, Metadata], Awaitable[T]], until: float) -> T:
        for renewed in (False, True):
            try:
                if self._address.user and not self._token:
                    await self._authenticate(end, until)
                return await work(end, self._seconds(until), self._metadata())
            except grpc.RpcError as error:
                try:
                    raise _read(error, self.url) from error
                except _TokenOver as over:
                    if renewed or not self._address.user:
                        raise Misconfigured(f"{self.url}: {over}") from error
                    self._token = ""
            except (
                EOFError,
                ValueError,
                grpc.aio.UsageError,
            ) as error:  # ended without an answer; closed by another caller
                raise Broken(f"the call was ended: {error}") from error
        raise AssertionError  # the second round returns or raises

    def _seconds(self, until: float) -> float:
        """For one try: with several members never so long that no other could be asked."""
        left = max(until - self._runtime.now(), SECONDS_MIN)
        return min(left / 2, TRY_SECONDS) if len(self._address.targets) > 1 else left

    async def _authenticate(self, end: End, until: float) -> None:
        request = messages.authenticate(self._address.user, self._address.password)
        reply = await end.unary(messages.AUTHENTICATE, request, self._seconds(until), (HAS_LEADER,))
        self._token = messages.text_of(reply, 2)

    def _metadata(self) -> Metadata:
        return (HAS_LEADER, ("token", self._token)) if self._token else (HAS_LEADER,)

    # Channels.

    def _end(self) -> End:
        target = self._address.targets[self._turn % len(self._address.targets)]
        end = self._ends.get(target)
        if end is None:
            end = self._ends[target] = new_end(target, self._address, self._runtime.colour)
        return end

    async def _leave(self, turn: int) -> None:
        """The next member's turn, unless somebody else has seen to that. Its channel is made anew when it is due."""
        if self._turn == turn:
            self._turn = turn + 1
            target = self._address.targets[turn % len(self._address.targets)]
            if (end := self._ends.pop(target, None)) is not None:
                await end.close()

    async def close(self) -> None:
        while self._ends:
            _, end = self._ends.popitem()
            await end.close()


def _read(error: grpc.RpcError, url: str) -> Exception:
    """What an error of gRPC means for the request."""
    code, text = error.code(), str(error.details() or error.code())
    known = grpc.StatusCode
    if code == known.UNAVAILABLE:
        if "etcdserver: no leader" in text:
            return _NotSent(text, passing=True)
        return _NotSent(text) if text.startswith(_NOT_CONNECTED) else Broken(text)
    if code == known.NOT_FOUND and "lease not found" in text:
        return LeaseGone(text)
    if "lease already exists" in text:
        return LeaseExists(text)
    if code == known.RESOURCE_EXHAUSTED:
        return Unavailable(f"{url}: {text}")
    if any(sign in text for sign in _TOKEN_OVER):
        return _TokenOver(text)
    if code in (known.DEADLINE_EXCEEDED, known.CANCELLED, known.UNKNOWN, known.INTERNAL, known.ABORTED):
        return Broken(text)
    return Misconfigured(f"{url}: {text}")
