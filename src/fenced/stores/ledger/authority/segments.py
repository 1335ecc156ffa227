"""A segment of a journal: a file with batches one after the other, each with its length, its checksum and its number.

The file is filled with zeros ahead of its batches. A sync of a file that grows also writes what the file system knows
about the file, and takes twice as long.

A crash may leave a batch that was partly written, or a batch without the one before it, which was not synced. So
reading ends at the first batch that is not whole. Nothing is ever written after that point: whoever opens the journal
again begins a new segment. But each batch says up to which one everything had been synced when it was written, and how
long the file was. So a batch that was synced once, and is not whole any more, is noticed if a later one is.
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
MAGIC = b"\xf5FJ\xf5"
"""Each entry begins with it. UTF-8 has no such byte, so no body has it: entries after a damaged one can be found."""
_ENTRY = Struct("<4sIIqqqq")
_FIELDS = Struct("<qqqq")


class JournalEntry(NamedTuple):
    number: int
    now: int
    body: bytes


class _Written(NamedTuple):
    """An entry as it is in the file."""

    entry: JournalEntry
    synced: int
    """The last batch of this file that had been synced before this one was written."""
    filled: int
    """How long the file was then."""
    end: int
    """Where it ends in the file."""


def read(path: Path, *, named: bool = True) -> Iterator[JournalEntry]:
    """All entries up to the first one that is not whole, or zeros. The first one, number 0, is about the segment.

    Raises ValueError if something is missing that had been synced. Nothing in this file vouches for the last batch that
    was synced, nor for those directly before it that only end leases and were synced with it. `named`: the head names
    this segment, so its first entry had been synced.

    What is read is on the disk: it may have been written by a process that was killed before its next sync. Pages that
    the kernel could not write, and keeps as if it had, are dropped and read from the disk.
    """
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = file.read()
    at, last, synced = 0, 0, 0
    filled: dict[int, int] = {}
    while (found := _entry_at(data, at)) is not None:
        yield found.entry
        at, last, synced = found.end, found.entry.number, max(synced, found.synced)
        filled[found.filled] = min(last, filled.get(found.filled, last))
    for found in _entries_after(data, at):
        if found.synced > last:
            raise ValueError(
                f"{path.name}: batch {last + 1} is damaged, and was whole when {found.entry.number} came"
            )
    for size, number in filled.items():
        if size > len(data) and number <= synced and (named or synced):
            raise ValueError(
                f"{path.name} has {len(data)} bytes, and had {size} when batch {number} was synced"
            )


def _entry_at(data: bytes, at: int) -> _Written | None:
    if not data.startswith(MAGIC, at) or len(data) - at < _ENTRY.size:
        return None
    _, size, checksum, number, now, synced, filled = _ENTRY.unpack_from(data, at)
    begin = at + _ENTRY.size
    body = data[begin : begin + size]
    if len(body) != size or checksum != _checksum(number, now, synced, filled, body):
        return None
    return _Written(JournalEntry(number, now, body), synced, filled, begin + size)


def _entries_after(data: bytes, at: int) -> Iterator[_Written]:
    """Whole entries anywhere behind this place."""
    while (at := data.find(MAGIC, at)) >= 0:
        if (found := _entry_at(data, at)) is not None:
            yield found
        at += 1


def _checksum(number: int, now: int, synced: int, filled: int, body: bytes) -> int:
    return crc32(body, crc32(_FIELDS.pack(number, now, synced, filled)))


class Segment:
    """A segment that is being written. One thread at a time uses it."""

    def __init__(self, path: Path, first: JournalEntry) -> None:
        """Create it, with its first entry on the disk. Its name is not: sync the folder."""
        self.path = path
        self.last = 0
        """The number of the last batch in it."""
        self._synced = 0
        self._end = self._filled = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self.append(first, sync=True)
        except BaseException:
            self.close()
            raise

    def append(self, entry: JournalEntry, *, sync: bool) -> None:
        """Write an entry. A sync includes everything before it. After an error nobody knows what the disk has."""
        number, now, body = entry
        end = self._end + _ENTRY.size + len(body)
        if end > self._filled:
            self._fill(end)
        fields = number, now, self._synced, self._filled
        head = _ENTRY.pack(MAGIC, len(body), _checksum(*fields, body), *fields)
        _write_all(self._file, head + body, self._end)
        if sync:
            os.fdatasync(self._file)
            self._synced = number
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
