"""Replies that are kept, so that a repeated operation gets the same one: one for each name, of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fenced.decision import Mark
from fenced.errors import InvalidStamp, Misconfigured, Misuse, shown
from fenced.model import Stamp

REPLY_BYTES_MAX = 65_536
"""How long the body of a kept reply may be. A longer or streamed one is not kept."""
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
        """The part that is kept; None if the body is too long."""
        if len(body) > REPLY_BYTES_MAX:
            return None
        return cls(status, tuple(pair for pair in headers if pair[0].lower() not in _NOT_KEPT), body)


@dataclass(frozen=True, slots=True)
class LastOperation:
    """The newest operation on a name: which one it was, and how far it came."""

    mark: Mark
    request: str
    """The request that it came with."""
    done: bool = False
    """The program has answered."""
    reply: KeptReply | None = None

    def is_of(self, stamp: Stamp) -> bool:
        """Whether this is the operation of a stamp."""
        return (self.mark.grant, self.mark.seq) == (stamp.grant, stamp.seq)

    def check_request(self, request: str) -> None:
        if self.request != request:
            raise InvalidStamp("this stamp came with another request before; each operation needs a new one")

    def packed(self) -> bytes:
        reply = self.reply and [self.reply.status, self.reply.headers]
        header = [[self.mark.token, self.mark.grant, self.mark.seq], self.request, self.done, reply]
        return json.dumps(header).encode() + b"\n" + (self.reply.body if self.reply else b"")

    @classmethod
    def unpacked(cls, text: bytes) -> LastOperation:
        header, _, body = text.partition(b"\n")
        try:
            mark, request, done, reply = json.loads(header)
            kept = reply and KeptReply(reply[0], tuple((name, value) for name, value in reply[1]), body)
            return cls(Mark(*mark), request, done, kept)
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
