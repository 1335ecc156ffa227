"""A mark file: two pages, of which the newest whole one counts. A change overwrites the other one in place.

A page has a number, the length of its body, a checksum, and the body. A page that was written in part has a wrong
checksum, and the other one still counts. Overwriting blocks that a file already has changes nothing in the file
system's journal, so it is synced in a fraction of the time that a rename takes.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from fenced.guards.files.disk import write_all

SIZE = 4096
"""A page is a block of its own: a block that a power cut has damaged does not damage the other page."""
END = 2 * SIZE
_HEAD = Struct("<QII")


class Page(NamedTuple):
    """The contents of a mark file. The numbers of its pages only grow."""

    number: int
    body: bytes


def newest(text: bytes) -> Page | None:
    """The newest whole page; None: nothing was ever written completely. ValueError: the file is damaged."""
    if len(text) < END:
        return None
    first, second = _HEAD.unpack_from(text), _HEAD.unpack_from(text, SIZE)
    for offset, (number, size, checksum) in ((0, first), (SIZE, second))[:: 1 if first > second else -1]:
        body = text[offset + _HEAD.size : offset + _HEAD.size + size]
        if number and checksum == crc32(body, number):
            return Page(number, body)
    if any(text[:SIZE]):
        raise ValueError(
            "no page is whole"
        )  # until the second page is whole, `write` leaves the first one empty
    return None


def write(path: str, after: Page | None, body: bytes) -> Page:
    """Write the page that follows `after`. The caller has the file locked.

    O_DSYNC: whoever locks the file next and finds this page finds one that is on the disk.
    """
    page = Page(after.number + 1 if after else 1, body)
    text = _HEAD.pack(page.number, len(body), crc32(body, page.number)) + body
    assert len(text) <= SIZE
    offset = page.number % 2 * SIZE
    if after is None:  # the first page is empty; later changes find both blocks allocated
        text, offset = bytes(SIZE) + text.ljust(SIZE, b"\0"), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC)
    try:
        write_all(descriptor, text, offset)
    finally:
        os.close(descriptor)
    return page
