"""A segment of a journal: a file with batches one after the other, each with its length, its checksum and its number.

The file is filled with zeros ahead of its batches. A sync of a file that grows also writes what the file system knows
about the file, and takes twice as long.

A crash may leave a batch that was partly written, or a batch without the one before it, which was not synced. So
reading ends at the first batch that is not whole. Nothing is ever written after that point: whoever opens the journal
again begins a new segment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

FILL_MIN, FILL_MAX = 2**14, 2**20
"""How many zeros are written at once: each time as many bytes as the file has already."""
_ENTRY = Struct("<IIqq")


class JournalEntry(NamedTuple):
    number: int
    now: int
    body: bytes


def read(path: Path) -> Iterator[JournalEntry]:
    """All entries up to the first one that is not whole, or zeros. The first one, number 0, is about the segment.

    What is read is on the disk: it may have been written by a process that was killed before its next sync. Pages that
    the kernel could not write, and keeps as if it had, are dropped and read from the disk.
    """
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        left = os.fstat(file.fileno()).st_size
        while len(head := file.read(_ENTRY.size)) == _ENTRY.size:
            size, checksum, number, now = _ENTRY.unpack(head)
            left -= _ENTRY.size + size
            if left < 0:
                return
            body = file.read(size)
            if checksum != _checksum(number, now, body):
                return
            yield JournalEntry(number, now, body)


def _checksum(number: int, now: int, body: bytes) -> int:
    """Of zeros it is not zero, so zeros are no entry."""
    return crc32(b"%d %d " % (number, now) + body)


class Segment:
    """A segment that is being written. One thread at a time uses it."""

    def __init__(self, path: Path, first: JournalEntry) -> None:
        """Create it, with its first entry on the disk. Its name is not: sync the folder."""
        self.path = path
        self.last = 0
        """The number of the last batch in it."""
        self._end = self._filled = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self.append(first, sync=True)
        except BaseException:
            self.close()
            raise

    def append(self, entry: JournalEntry, *, sync: bool) -> None:
        """Write an entry. A sync includes everything before it. After an error nobody knows what the disk has."""
        number, now, body = entry
        data = _ENTRY.pack(len(body), _checksum(number, now, body), number, now) + body
        end = self._end + len(data)
        if end > self._filled:
            self._fill(end)
        _write_all(self._file, data, self._end)
        if sync:
            os.fdatasync(self._file)
        self._end, self.last = end, number

    def _fill(self, end: int) -> None:
        more = max(end, self._filled + min(max(self._filled, FILL_MIN), FILL_MAX)) - self._filled
        _write_all(self._file, bytes(more), self._filled)
        self._filled += more

    def sync(self) -> None:
        os.fdatasync(self._file)

    def file_id(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_dev, status.st_ino

    def close(self) -> None:
        os.close(self._file)


def _write_all(file: int, data: bytes, offset: int) -> None:
    """A write that is interrupted, or that fills the disk, may take some of the bytes only."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written
