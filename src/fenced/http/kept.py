"""Replies that are kept, so that a repeated operation gets the same one: one for each name, of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fenced.errors import InvalidStamp, Misconfigured, Misuse, shown
from fenced.http.bodies import TOO_LONG, RememberedBody
from fenced.values.decision import Mark
from fenced.values.model import Stamp

REPLY_BYTES_MAX = 65_536
"""How long the body of a kept reply may be, and how long its headers. A longer or streamed one is not kept."""
HAPPENED = range(200, 300)
"""The statuses of answers that say that an operation was carried out: only these replies are kept."""
REPLAYED_HEADER = "Fenced-Replayed"
_NOT_KEPT = frozenset(
    {
        "connection",
        "date",
        "keep-alive",
        "server",
        "set-cookie",
        "transfer-encoding",
        REPLAYED_HEADER.lower(),
    }
)
"""Headers of one connection or of one moment; cookies, which are secrets; and the header that every repeat gets."""


class KeptReply(NamedTuple):
    """An answer of the program."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def replayed(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """The same answer, with a header that says that it is a repeat."""
        return self.status, [*self.headers, (REPLAYED_HEADER, "?1")], self.body

    @staticmethod
    def is_short(status: int, lengths: Sequence[str]) -> bool:
        """Whether a reply can be kept, by its status and its Content-Length. A streamed one has none."""
        if status in (204, 205, 304):
            return True
        return len(lengths) == 1 and lengths[0].isdecimal() and int(lengths[0]) <= REPLY_BYTES_MAX

    @classmethod
    def of(cls, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> KeptReply | None:
        """The part that is kept; None if it is too long."""
        kept = tuple(pair for pair in headers if pair[0].lower() not in _NOT_KEPT)
        lengths = sum(len(name) + len(value) for name, value in kept)
        return None if max(len(body), lengths) > REPLY_BYTES_MAX else cls(status, kept, body)


class Asked(NamedTuple):
    """Which request it was, as digests."""

    what: str
    """Of method, path and query."""
    by: str
    """Of the caller's credentials."""
    body: str | None = None
    """None while it is not known."""


@dataclass(frozen=True, slots=True)
class LastOperation:
    """The newest operation on a name: which one it was, and how far it came."""

    mark: Mark
    asked: Asked
    """The request that it came with."""
    done: bool = False
    """The program has answered."""
    reply: KeptReply | None = None

    def is_of(self, stamp: Stamp) -> bool:
        """Whether this is the operation of a stamp."""
        return (self.mark.grant, self.mark.seq) == (stamp.grant, stamp.seq)

    def answered(self, reply: KeptReply | None, body: RememberedBody | None) -> LastOperation:
        """It has happened. The reply is kept if the program has read the whole body of its request."""
        digest = body.digest() if body is not None else None
        asked = self.asked._replace(body=digest)
        return replace(self, asked=asked, done=True, reply=None if digest in (None, TOO_LONG) else reply)

    def check_request(self, asked: Asked) -> None:
        if self.asked.what != asked.what or asked.body not in (None, self.asked.body):
            raise InvalidStamp("this stamp came with another request before; each operation needs a new one")

    async def reply_to(self, asked: Asked, body: RememberedBody | None) -> KeptReply | None:
        """The kept reply, if this request may have it: it comes from the same caller, and asks for the same thing.

        None: there is none, or it is for another caller. InvalidStamp: the request asks for something else.
        """
        self.check_request(asked)
        if self.reply is None or self.asked.by != asked.by:
            return None
        digest = await body.read_digest() if body is not None else None
        self.check_request(asked._replace(body=digest))
        return self.reply if digest is not None else None

    def packed(self) -> bytes:
        reply = self.reply and [self.reply.status, self.reply.headers]
        header = [[self.mark.token, self.mark.grant, self.mark.seq], self.asked, self.done, reply]
        return json.dumps(header).encode() + b"\n" + (self.reply.body if self.reply else b"")

    @classmethod
    def unpacked(cls, text: bytes) -> LastOperation:
        header, _, body = text.partition(b"\n")
        try:
            mark, asked, done, reply = json.loads(header)
            kept = reply and KeptReply(reply[0], tuple((name, value) for name, value in reply[1]), body)
            return cls(Mark(*mark), Asked(*asked), done, kept)
        except (ValueError, TypeError, IndexError) as error:
            raise Misconfigured("a kept reply cannot be read: something else wrote to its place") from error


def reply_in(response: Any) -> KeptReply | None:
    """The reply in a response of Starlette, FastAPI, Django or Flask; None if it is streamed or too long."""
    if hasattr(response, "raw_headers"):  # Starlette's; a streamed one has no `body`
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers]
        body = getattr(response, "body", None)
    elif hasattr(response, "get_data"):  # Flask's
        pairs = list(response.headers.items())
        body = None if response.is_streamed else response.get_data()
    elif hasattr(response, "streaming"):  # Django's
        pairs = list(response.items())
        body = None if response.streaming else response.content
    else:
        raise Misuse(
            "a kept reply takes a response of Starlette, FastAPI, Flask or Django, such as JSONResponse(...) or "
            f"make_response(...), not {shown(type(response))}"
        )
    if not isinstance(body, bytes):
        return None
    return KeptReply.of(response.status_code, pairs, body)
