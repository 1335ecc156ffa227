"""What a receiver knows about a request, and how it answers errors. No I/O, no framework."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fenced.errors import (
    AlreadyApplied,
    Conflict,
    Contended,
    FencedError,
    ForgedStamp,
    Indeterminate,
    LeaseLost,
    Misuse,
    Refused,
    Unavailable,
    Unsupported,
    shown,
)
from fenced.http.bodies import RememberedBody
from fenced.http.kept import Asked, KeptReply
from fenced.http.protocol import PROOF_HEADER, STAMP_HEADER, read_fence
from fenced.net.problems import Problem, problem
from fenced.proofs import Proof, VerifyingKey, verify
from fenced.values.model import Credential, Stamp

SCOPE_KEY = "fenced"
"""Where a receiver puts what it has read: a key of the ASGI scope and of the WSGI environment."""
ANSWERED = (
    Refused,
    AlreadyApplied,
    Conflict,
    Contended,
    Unavailable,
    Indeterminate,
    LeaseLost,
    Unsupported,
)
"""The errors that a receiver answers. Others, such as Misuse, are bugs of the program: its framework handles them."""


class Replayed(AlreadyApplied):
    """This same operation was applied before, and its reply was kept."""

    def __init__(self, reply: KeptReply) -> None:
        super().__init__("this operation was applied before; its reply is sent again")
        self.reply = reply


def answer(error: FencedError) -> Problem:
    """The status, the headers and the body for an error. Raises it again if it is not about the request."""
    if isinstance(error, Replayed):
        return Problem(*error.reply.replayed())
    if not isinstance(error, ANSWERED):
        raise error
    return problem(error)


def flask_answer(error: FencedError) -> tuple[bytes, int, list[tuple[str, str]]]:
    """`app.register_error_handler(fenced.FencedError, fenced.http.flask_answer)`"""
    answered = answer(error)
    return answered.body, answered.status, answered.headers


class Received(NamedTuple):
    """What a request carries: its stamp or proof, and what tells this request from another one."""

    fence: Stamp | Proof | None
    method: str
    path: str
    query: bytes = b""
    headers: Iterable[tuple[bytes, bytes]] = ()
    """Of the request. By some of them a program usually knows its caller: see CREDENTIALS."""
    body: RememberedBody | None = None
    """None where the receiver does not see it."""

    def __repr__(self) -> str:
        return f"Received({self.method} {self.path})"  # no stamp and no credentials: this may be logged

    @property
    def stamp(self) -> Stamp | None:
        return self.fence.stamp if isinstance(self.fence, Proof) else self.fence

    def asked(self) -> Asked:
        """What is asked for, and by whom, as digests: what is kept contains no credentials."""
        stamp = self.stamp
        salt = f"{stamp.grant}:{stamp.seq}" if stamp else ""
        credentials = sorted(pair for pair in self.headers if pair[0] in CREDENTIALS)
        return Asked(
            _digest(self.method.encode(), self.path.encode(), self.query),
            _digest(salt.encode(), *(bytes(part) for pair in credentials for part in pair)),
        )

    def credential(self, names: tuple[str, ...] = ()) -> Credential | None:
        """What the request is fenced with; None if it has no stamp."""
        if self.fence is None:
            return None
        if isinstance(self.fence, Proof):
            return Credential((self.fence.stamp,), names, proofs=(self.fence.text,))
        return Credential((self.fence,), names)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()


OUR_HEADERS = frozenset(name.lower().encode() for name in (STAMP_HEADER, PROOF_HEADER))
CREDENTIALS = frozenset(b"authorization cookie proxy-authorization x-api-key x-auth-token".split())
"""A kept reply goes only to a caller with the same values of these."""


def is_stamped(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request carries a stamp, or what should be one."""
    return any(name in OUR_HEADERS for name, _ in headers)


def read_request(
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]],
    keys: tuple[VerifyingKey, ...] = (),
    *,
    query: bytes = b"",
    body: RememberedBody | None = None,
) -> Received:
    """Read the stamp of a request. InvalidStamp if it is none; with `keys`, ForgedStamp if it is not proven.

    The names of the headers are in lower case. A proof that was checked here is not passed on: the guard need not know
    the keys.
    """
    ours = [pair for pair in headers if pair[0] in OUR_HEADERS]
    if not ours:
        return Received(None, method, path)
    fence = read_fence(ours)
    if keys and fence is not None:
        fence = proven(fence, keys)
    return Received(fence, method, path, query, headers, body)


def proven(fence: Stamp | Proof, keys: tuple[VerifyingKey, ...]) -> Stamp:
    """The stamp, if one of the keys has signed it; ForgedStamp otherwise."""
    if isinstance(fence, Stamp):
        raise ForgedStamp("the stamp needs a proof, and has none", stamp=fence)
    if not verify(fence, keys):
        raise ForgedStamp("the proof does not verify", stamp=fence.stamp)
    return fence.stamp


def received_by(*candidates: Any) -> Received:
    """What the receiver has read of the first one that is a request.

    A request is an ASGI scope, a WSGI environment, or a framework's request: Starlette and FastAPI have
    `request.scope`, Flask has `request.environ`, Django has `request.META`.
    """
    for candidate in candidates:
        for attribute in (None, "scope", "environ", "META"):
            place = getattr(candidate, attribute, None) if attribute else candidate
            found = place.get(SCOPE_KEY) if isinstance(place, Mapping) else None
            if isinstance(found, Received):
                return found
    kinds = ", ".join(shown(type(candidate)) for candidate in candidates) or "nothing"
    raise Misuse(
        "no request that a receiver has read; add the middleware fenced.http.Receiver, fenced.http.WsgiReceiver or "
        f"fenced.django.ReceiverMiddleware, and give the request as an argument (this is {kinds})"
    )
