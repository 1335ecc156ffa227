"""Stamps for the calls of an HTTP client.

    api = httpx.Client(transport=StampingTransport("https://orders.internal"), timeout=5)
    with client.hold("orders/42", ttl=30) as lease, stamping(lease):
        api.post("https://orders.internal/orders/42/ship")

A hook in the client (fenced.http.httpx, fenced.http.requests, fenced.http.aiohttp) adds the headers to what leaves for
the listed origins, and raises the error that an answer means. Which lease it uses, `stamping` says: for the calls of
this thread or asyncio task, in the body of the `with`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from fenced.client.leases import AsyncLease, Lease
from fenced.errors import Misuse, NotEnoughTime, Refused, shown
from fenced.http.protocol import PROOF_HEADER, SAFE_METHODS, STAMP_HEADER, fence_headers
from fenced.net.problems import PROBLEM_MEDIA_TYPE, error_from
from fenced.proofs import Proof
from fenced.values import timing
from fenced.values.model import Stamp
from fenced.values.timing import Seconds


class SigningKey(Protocol):
    """A key of fenced.proofs that can sign."""

    def sign(self, stamp: Stamp) -> Proof: ...


@dataclass(slots=True)
class _Scope:
    """What the calls in the body of a `with` are stamped with."""

    lease: Lease | AsyncLease | None
    fixed: Stamp | Proof | None
    """The stamp of every call; None: each call gets the next one of the lease."""
    need: float | None
    key: SigningKey | None
    ended: bool = False
    """The body has ended. A task that was started in it has a copy of its context, and may still run."""

    def fence(self, method: str, timeout: float | None) -> Stamp | Proof:
        """The stamp of a call that may take `timeout` seconds; None means no limit."""
        if self.ended:
            raise Misuse(
                "this call comes from a task that was started in the body of stamping() or operation(), and the body "
                "has ended: wait for the task in the body, or start it elsewhere"
            )
        if self.lease is not None:
            need = timeout if self.need is None else self.need
            if need is None:
                raise Misuse(
                    "a call without a timeout can outlive the lease: give it a timeout, or pass need= to stamping()"
                )
            _check(self.lease, need)
        is_safe = method in SAFE_METHODS
        if self.lease is None or (self.fixed is not None and not is_safe):
            assert self.fixed is not None
            return self.fixed
        stamp = self.lease.announcement() if is_safe else self.lease.next_stamp()
        return stamp if self.key is None else self.key.sign(stamp)


def _check(lease: Lease | AsyncLease, need: float) -> None:
    try:
        lease.check(need)
    except NotEnoughTime as error:
        raise NotEnoughTime(
            f"{error}, since the call may take that long: give it a shorter timeout, or the lease a longer ttl",
            remaining=error.remaining,
            need=error.need,
        ) from None


_SCOPE: ContextVar[_Scope | None] = ContextVar("fenced.http scope", default=None)


@contextmanager
def stamping(
    fence: Lease | AsyncLease | Stamp | Proof, *, need: Seconds | None = None, key: SigningKey | None = None
) -> Iterator[None]:
    """Stamp the calls in the body. A lease gives each call a stamp of its own; a stamp or a proof is sent as it is.

    Before each call the lease must have `need` seconds left, by default the timeout of the call: else the call raises
    NotEnoughTime or LeaseLost, and nothing is sent. With `key` each stamp gets a proof. Tasks that are
    started in the body stamp their calls, too, until the body ends; after that their calls raise Misuse.
    """
    if isinstance(fence, Lease | AsyncLease):
        scope = _Scope(fence, None, _seconds(need), key)
    elif isinstance(fence, Stamp | Proof):
        if need is not None or key is not None:
            raise Misuse("need= and key= go with a lease: a stamp is sent as it is")
        scope = _Scope(None, fence, None, None)
    else:
        raise Misuse(f"calls are stamped with a lease or a stamp, not {shown(fence)}")
    with _entered(scope):
        yield


@contextmanager
def operation(
    lease: Lease | AsyncLease, *, need: Seconds | None = None, key: SigningKey | None = None
) -> Iterator[Stamp]:
    """Give all calls that change something the same stamp: they are one operation, its first attempt and its retries.

    The rest is as with `stamping`.
    """
    if not isinstance(lease, Lease | AsyncLease):
        raise Misuse(f"an operation belongs to a lease, not to {shown(lease)}")
    stamp = lease.next_stamp()
    fixed = stamp if key is None else key.sign(stamp)
    with _entered(_Scope(lease, fixed, _seconds(need), key)):
        yield stamp


@contextmanager
def _entered(scope: _Scope) -> Iterator[None]:
    before = _SCOPE.set(scope)
    try:
        yield
    finally:
        scope.ended = True
        _SCOPE.reset(before)


def _seconds(need: Seconds | None) -> float | None:
    return None if need is None else timing.check_need(need)


_PORTS = {"http": 80, "https": 443}


class Stamper:
    """Stamps calls to the listed origins. A stamp is sent to no other, not by a redirect either."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        if not origins:
            raise Misuse('list the origins that get stamps, such as "https://orders.internal"')
        self._listed = frozenset(_origin(url) for url in origins)

    def stamp(
        self,
        origin: tuple[str, str | None, int | None],
        method: str,
        headers: MutableMapping[str, Any],
        timeout: float | None,
    ) -> SentCall:
        """Add the headers of a call that is about to leave. For an origin that is not listed, remove them.

        A stamp that the caller has put there stays for a listed origin, and an Idempotency-Key for any.
        """
        scheme, host, port = origin
        if (scheme, (host or "").lower(), port or _PORTS.get(scheme, 0)) not in self._listed:
            for name in (STAMP_HEADER, PROOF_HEADER):
                if name in headers:
                    del headers[name]
            return SentCall(False, None)
        scope = _SCOPE.get()
        if scope is None or STAMP_HEADER in headers:
            return SentCall(True, None)
        fence = scope.fence(method.upper(), timeout)
        for name, value in fence_headers(fence).items():
            headers.setdefault(name, value)
        return SentCall(True, fence, scope.fixed is not None)


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call that has left, and what its answer is read for."""

    listed: bool
    fence: Stamp | Proof | None
    one_operation: bool = False
    """Whether the next call has the same stamp, so that a client may repeat this one by itself."""

    def is_problem(self, content_type: str | None) -> bool:
        """Whether the body must be read, since it may mean an error."""
        return self.listed and (content_type or "").lower().startswith(PROBLEM_MEDIA_TYPE)

    def raise_if_problem(self, status: int, content_type: str | None, body: bytes) -> None:
        """Raise the error that an answer means, if it means one."""
        error = error_from(status, content_type, body)
        if isinstance(error, Refused):
            error.stamp = self.fence.stamp if isinstance(self.fence, Proof) else self.fence
        if error is not None:
            raise error


def _origin(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except (ValueError, AttributeError, TypeError):
        raise Misuse(f"not an origin: {shown(url)}") from None
    whole = parts.scheme in _PORTS and parts.hostname and "@" not in parts.netloc and url.isascii()
    if not whole or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise Misuse(
            f'an origin is a scheme and a host, such as "https://orders.internal:8443", not {shown(url)}'
        )
    assert parts.hostname is not None
    return parts.scheme, parts.hostname, port or _PORTS[parts.scheme]


def longest(*timeouts: float | None) -> float | None:
    """The longest of the timeouts of a call; None if there is none or one of them has no limit."""
    limited = [timeout for timeout in timeouts if timeout is not None]
    return max(limited) if limited and len(limited) == len(timeouts) else None
