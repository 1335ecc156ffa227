"""A mark file: two pages, of which the newest whole one counts. A change overwrites the other one in place.

A page has a number, the length of its body, a checksum, and the body. A page that was written in part has a wrong
checksum, and the other one still counts. Overwriting blocks that a file already has changes nothing in the file
system's journal, so it is synced in a fraction of the time that a rename takes.

A page whose head is overwritten with zeros is taken back: the one before it counts again.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple
from zlib import crc32

SIZE = 4096
"""A page is a block of its own: a block that a power cut has damaged does not damage the other page."""
END = 2 * SIZE
_HEAD = Struct("<QII")
NO_HEAD = bytes(_HEAD.size)


class Page(NamedTuple):
    """The contents of a mark file. The numbers of its pages only grow, except that one may be taken back."""

    number: int
    body: bytes

    @property
    def offset(self) -> int:
        return self.number % 2 * SIZE

    def packed(self) -> bytes:
        text = _HEAD.pack(self.number, len(self.body), crc32(self.body, self.number)) + self.body
        assert len(text) <= SIZE
        return text


def whole(text: bytes) -> list[Page]:
    """The whole pages, the newest first; none: nothing was ever written completely. ValueError: the file is damaged."""
    if len(text) < END:
        return []
    found = []
    for offset in (0, SIZE):
        number, size, checksum = _HEAD.unpack_from(text, offset)
        body = text[offset + _HEAD.size : offset + _HEAD.size + size]
        if number and checksum == crc32(body, number):
            found.append(Page(number, body))
    if not found and any(text[:SIZE]):
        # Until the second page is whole, the first one is empty.
        raise ValueError("no page is whole")
    return sorted(found, reverse=True)
