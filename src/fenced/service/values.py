"""The values of the service: small values under names, behind a guard that refuses stale holders. docs/service.md.

A request carries its stamp as docs/protocol.md says. The guard decides, in the same atomic step as the write.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePath
from typing import TypeVar

import msgspec

from fenced.client import registry
from fenced.client.guarding import credential
from fenced.errors import FencedError, Misuse, Refused, Unsupported, redacted
from fenced.events import observe_guards
from fenced.http.protocol import read_fence
from fenced.http1.writing import ServerReply
from fenced.net.problems import detail_of
from fenced.runtime.aio import AioRuntime
from fenced.runtime.logs import LimitedLog, OutageLog
from fenced.service.bodies import MarkBody, WrittenBody
from fenced.service.events import Events
from fenced.service.metrics import ServiceNumbers
from fenced.service.replies import JSON, as_reply, plain
from fenced.service.requests import Call
from fenced.values.contracts import NamedValues
from fenced.values.model import TOKEN_MAX, Credential, check_name

T = TypeVar("T")
log = logging.getLogger("fenced.service")

_VERSION = re.compile(r'"(0|[1-9][0-9]{0,15})"', re.ASCII)
_EMBEDDED = re.compile(r"(?:sqlite|ledger)://(/[^?]+)")


def values_beside(store: str) -> str | None:
    """Where the values are if nobody says: in a SQLite file beside an embedded store; None for all other stores.

    A database on another machine may belong to other programs, so nothing is created there unasked.
    """
    found = _EMBEDDED.fullmatch(store)
    return None if found is None else f"sqlite://{PurePath(found[1]).with_suffix('.values.db')}"


class ServedValues:
    """The guard of one instance, in a runtime of its own: a slow write must not delay the grants."""

    def __init__(
        self,
        url: str | None,
        realm: Callable[[], Awaitable[str]],
        numbers: ServiceNumbers,
        events: Events,
        watched: Sequence[str] = (),
    ) -> None:
        """`watched` are the addresses of the guards whose records the live page reads."""
        self._url = url
        self._watched = watched
        self._realm = realm
        self._numbers = numbers
        self._events = events
        self._opening = asyncio.Lock()
        self._runtime: AioRuntime | None = None
        self._guard: NamedValues | None = None
        self._outages = OutageLog(log, "the guard of the values")
        self._refusals = LimitedLog(log)
        self._ignore: Callable[[], None] | None = None
        """Ends the telling of marks that rise."""
        self._reports = True
        """Whether a refusal becomes an event here. If not, it becomes one by its record."""

    async def open(self) -> NamedValues:
        """The guard, opened by the first caller.

        One that has not seen any token yet is told which authority to trust, and refuses writes without a stamp from
        now on. Every other one keeps the realm and the modes that it has.
        """
        if self._guard is not None:
            return self._guard
        if self._url is None:
            raise Unsupported("this service has no values; start it with --values URL")
        async with self._opening:  # two first requests must not open two guards; others wait for its end
            if self._guard is None:
                runtime = AioRuntime()
                try:
                    guard = registry.guard(self._url, runtime)
                    await guard.open()
                    if await guard.highest() == 0 and set((await guard.modes()).values()) <= {"enforce"}:
                        await guard.adopt(await self._realm())
                        await guard.set_mode("require")
                except BaseException:
                    runtime.close()
                    raise
                self._ignore = observe_guards(self._numbers.decided)
                self._runtime, self._guard = runtime, guard
                self._reports = not self._is_watched(guard)
        return self._guard

    def _is_watched(self, guard: NamedValues) -> bool:
        """Whether the live page finds every refusal in the records of this guard, also those of other instances."""
        own = {redacted(self._url), guard.url}
        return any(redacted(each) in own for each in self._watched)

    async def close(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None and self._runtime is not None:
            await guard.close()
            self._runtime.close()
        if self._ignore is not None:
            self._ignore()

    # Requests.

    async def write(self, call: Call) -> ServerReply:
        expect = _expected(call)

        async def work(guard: NamedValues) -> int:
            stamp = _credential(call)
            done = await guard.write(stamp, call.name, call.body, expect=expect)
            if stamp is None:
                self._numbers.unstamped("pass")
            return done

        version = await self._guarded(work)
        return ServerReply(200, (("etag", f'"{version}"'), *JSON), msgspec.json.encode(WrittenBody(version)))

    async def read(self, call: Call) -> ServerReply:
        """With a stamp: announce, then read. Without: what is there, if a token as high as `at_least` was seen."""
        at_least = _at_least(call)

        async def work(guard: NamedValues) -> ServerReply:
            with_stamp = _credential(call, announcing=True)
            found = await (
                guard.peek(call.name, at_least) if with_stamp is None else guard.read(with_stamp, call.name)
            )
            if found.value is None:
                return as_reply(plain(404, "There is no value", "nothing was written under this name yet"))
            headers = (("etag", f'"{found.version}"'), ("cache-control", "no-store"))
            return ServerReply(200, (*headers, ("content-type", "application/octet-stream")), found.value)

        return await self._guarded(work)

    async def mark(self, name: str) -> MarkBody:
        found = await (await self.open()).mark(check_name(name))
        return MarkBody(name, 0 if found is None else found.token)

    async def _guarded(self, work: Callable[[NamedValues], Awaitable[T]]) -> T:
        try:
            guard = await self.open()
            done = await work(guard)
        except FencedError as error:
            self._outages.note([error])
            if isinstance(error, Refused):
                self._refused(error)
            raise
        self._outages.worked()
        return done

    def _refused(self, error: Refused) -> None:
        self._numbers.refused(error)
        self._refusals.warning(f"refused by the guard of the values: {detail_of(error)}")
        if self._reports and self._guard is not None:
            self._events.refused(self._guard.url, error)


def _credential(call: Call, *, announcing: bool = False) -> Credential | None:
    fence = read_fence(call.headers.raw)
    return None if fence is None else credential(fence, announcing=announcing)


def _expected(call: Call) -> int | None:
    """The version that the value must still have: `If-Match: "3"`, or `If-None-Match: *` for none; None: any."""
    match, none = call.headers.getlist("if-match"), call.headers.getlist("if-none-match")
    if not match and not none:
        return None
    if not match and none == ["*"]:
        return 0
    found = _VERSION.fullmatch(match[0].strip()) if len(match) == 1 and not none else None
    if found is None:
        raise Misuse(
            'If-Match takes the ETag of one answer, such as "3"; If-None-Match takes * alone: no value yet'
        )
    return int(found[1])


def _at_least(call: Call) -> int:
    text = call.query.get("at_least", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= TOKEN_MAX):
        raise Misuse(f"at_least is a token, from 0 to {TOKEN_MAX}")
    return int(text)
