"""The files of a ledger: a journal of batches, and a snapshot of what came before them.

`leases.ledger` is the head. The process that has locked it has the ledger, and it says which segment of the journal
is the newest; once that process has closed the journal, also at which batch it ends. The segments are
`leases.ledger.journal-1` and so on. Each start of the process and each snapshot begins a new one, and a snapshot
deletes those that it replaces. The snapshot is a text file, which is written under another name, synced and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.net import filesystem
from fenced.runtime.machine import boot_id
from fenced.stores.ledger.authority import segments
from fenced.stores.ledger.authority.changes import Change
from fenced.stores.ledger.authority.segments import JournalEntry, Segment
from fenced.values.failures import FileInUse
from fenced.values.schema import Schema, check_readable

SCHEMA_VERSION = 2
CHANGES_PER_LINE = 5
"""Of a snapshot. The interpreter runs nothing else while a line is encoded."""
READ_BYTES = 2**20
"""How much of a snapshot is read at once. A line is longer than the usual buffer."""
SEGMENTS_MAX = 16
"""A process that is started again and again gets a snapshot after this many segments."""
HEAD_BYTES = 512
"""A disk writes this much as a whole or not at all."""

try:  # five times as fast, and there wherever a service runs
    import msgspec

    _text: Callable[[Any], bytes] = msgspec.json.Encoder().encode
    _value: Callable[[bytes | str], Any] = msgspec.json.Decoder().decode
except ImportError:
    _encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    _value = json.loads

    def _text(value: Any) -> bytes:
        return _encode(value).encode()


class Batch(NamedTuple):
    number: int
    now: int
    changes: list[Change]


class Journal(Protocol):
    """Where the changes of a ledger are kept. One thread at a time calls `append`, and one `save` and `trim`."""

    @property
    def finished(self) -> bool:
        """Of a journal that was read: whether `finish` vouches that nothing is missing at its end."""

    def open(self, create: bool) -> None: ...

    def read(self) -> Iterator[Batch]:
        """The snapshot in several parts, all with its number, then the batches that follow it, each number once."""

    def clock_ahead(self, clock: int, last: int) -> int:
        """What to add to a clock that shows `clock` now, so that it does not fall behind `last`, the last batch's."""

    def has_many_segments(self) -> bool:
        """Whether it is in so many pieces that a snapshot is due, however few changes there were."""

    def append(self, batch: Batch, sync: bool) -> None:
        """Write a batch. A sync includes those before it. After an error nobody knows what the disk has."""

    def save(self, number: int, now: int, changes: Iterable[Change]) -> None:
        """Replace the snapshot by one that has everything up to batch `number`."""

    def trim(self, number: int) -> None:
        """A snapshot has the batches up to `number`: delete them, or some of them."""

    def finish(self, number: int) -> None:
        """Nothing is appended after batch `number`, which is the last one: say so on the disk."""

    def close(self) -> None: ...
    def abandon(self) -> None:
        """In a forked child: let go of the files, which stay locked for the parent."""


class FileJournal:
    """A journal in the files of one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._snapshot = path.with_name(path.name + ".snapshot")
        self._head = -1
        """The descriptor of the head, which has the lock."""
        self._newest = 0
        """The segment that the head names; 0: there was none yet."""
        self._end: int | None = None
        """The batch at which the journal ends, if the head says so."""
        self._old: dict[Path, int] = {}
        """The segments that nothing is written to any more, and the number of the last batch in each."""
        self._segment: Segment | None = None
        self._watched: tuple[tuple[str, filesystem.FileId], ...] = ()
        self._boot: tuple[str, int] = ("", 0)
        """The boot in which the newest segment was begun, and what was added to its clock."""
        self._last = 0
        """The last batch that was read."""
        self._broken: FencedError | None = None
        """Why nothing more is appended."""
        self._using = threading.Lock()
        """Held for one append, and for the change to another segment: two threads do these."""

    # Opening.

    def open(self, create: bool) -> None:
        filesystem.check_file(self.path, create=create)
        try:
            self._head = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock()
            self._newest, self._end = self._read_head()
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        """Until the head is closed, which the end of the process does, too."""
        try:
            fcntl.flock(self._head, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileInUse(
                f"{self.path} is used by another process: a ledger belongs to one process at a time. Stop that "
                "process, or ask it for leases; processes of one machine that share a file need sqlite:///"
            ) from error
        if _file_id(self._head) != filesystem.file_id(str(self.path)):
            raise Unavailable(f"{self.path} was replaced while it was opened; nothing happened")

    def _read_head(self) -> tuple[int, int | None]:
        text = os.pread(self._head, HEAD_BYTES, 0)
        if not text.strip(b"\0"):  # zeros: it was created, and the power failed
            return 0, None
        try:
            known = json.loads(text)
            version, newest, end = int(known["fenced ledger"]), int(known["newest"]), known.get("end")
        except (ValueError, TypeError, LookupError):
            raise Misconfigured(
                f"{self.path} is a file of another program, or damaged; a ledger needs its own file"
            ) from None
        check_readable(str(self.path), Schema(version, version), SCHEMA_VERSION)
        return newest, end

    def _write_head(self, newest: int, end: int | None = None) -> None:
        text = json.dumps({"fenced ledger": SCHEMA_VERSION, "newest": newest, "end": end}) + "\n"
        self._newest = newest  # first: a head that could not be synced may still get to the disk
        os.pwrite(self._head, text.ljust(HEAD_BYTES).encode(), 0)
        os.fdatasync(self._head)

    def clock_ahead(self, clock: int, last: int) -> int:
        """The same boot: as before. Another boot: the clock goes on from the last batch, as if no time had passed.

        So a lease lasts at least as long as its holder believes: the machine was down for a time that nobody knows.
        """
        boot, ahead = self._boot
        if boot == boot_id():
            return ahead
        self._boot = boot_id(), last - clock if last else 0
        if last:  # for the next start in this boot, even if nothing is written until then
            self._use(self._new_segment(self._last))
        return self._boot[1]

    # Reading.

    def read(self) -> Iterator[Batch]:
        try:
            yield from self._read()
        except (ValueError, OSError) as error:
            raise self._damaged(f"it is damaged ({error})") from error

    def _read(self) -> Iterator[Batch]:
        last = 0
        for part in self._read_snapshot():
            last = part.number
            yield part
        if last and not self._newest:
            raise self._damaged(f"it is empty, and {self._snapshot.name} is not")
        for index in sorted(self._indexes()):
            path = self._segment_path(index)
            entries = segments.read(path, named=index <= self._newest)
            about = next(entries, None)
            if index > self._newest:
                # A crash came before the head named it. Batches are written to it only after that.
                if next(entries, None) is not None:
                    raise self._damaged(f"{path.name} is newer than {self.path.name}")
                path.unlink()
                continue
            if about is None:
                raise self._damaged(f"{path.name} is damaged")
            *boot, after = _value(about.body)
            self._boot = tuple(boot)
            if after > last:
                raise self._damaged(f"batch {after} is missing, or {self._snapshot.name}")
            self._old[path] = 0
            for number, now, body in entries:
                if number > last + 1:
                    raise self._damaged(
                        f"batch {last + 1} is missing, or {self._snapshot.name} is older than it"
                    )
                self._old[path] = number
                if number > last:
                    last = number
                    yield Batch(number, now, _value(body))
        if self._newest and self._segment_path(self._newest) not in self._old:
            raise self._damaged(f"{self._segment_path(self._newest).name} is missing")
        if self._end not in (None, last):
            raise self._damaged(f"it says that the journal ends at batch {self._end}, and that is at {last}")
        self._last = last

    @property
    def finished(self) -> bool:
        """A journal without any segment has no batch, so none can be missing."""
        return self._end is not None or not self._newest

    def _segment_path(self, index: int) -> Path:
        return self.path.with_name(f"{self.path.name}.journal-{index}")

    def _indexes(self) -> list[int]:
        begin = f"{self.path.name}.journal-"
        names = [name.removeprefix(begin) for name in os.listdir(self.path.parent) if name.startswith(begin)]
        return [int(name) for name in names if name.isdecimal()]

    def _read_snapshot(self) -> Iterator[Batch]:
        try:
            file = self._snapshot.open("rb", READ_BYTES)
        except FileNotFoundError:
            return
        with file:
            head = file.readline()
            check, (number, now) = zlib.crc32(head), _value(head)
            for line in file:
                if line.startswith(b"{"):
                    if _value(line) != {"crc32": check}:
                        raise self._damaged(
                            f"{self._snapshot.name} is damaged: it does not match its checksum"
                        )
                    return
                check = zlib.crc32(line, check)
                yield Batch(number, now, _value(line))
        raise self._damaged(f"{self._snapshot.name} is damaged: it has no end")

    def _damaged(self, why: str) -> Misconfigured:
        return Misconfigured(
            f"{self.path}: {why}. Restore all files of the ledger from one backup, then run `fenced authority raise`"
        )

    # Writing.

    def append(self, batch: Batch, sync: bool) -> None:
        entry = JournalEntry(batch.number, batch.now, _text(batch.changes))
        with self._using:  # the other thread holds it only to put another segment in place
            if self._broken is not None:
                raise self._broken
            try:
                if self._segment is None:
                    self._use(self._new_segment(self._last))
                self._check_files()
                self._segment.append(entry, sync=sync)  # type: ignore[union-attr]
            except OSError as error:
                raise self._failed(error) from error

    def _new_segment(self, after: int) -> Segment:
        """One that is on the disk, and that the head names. What is appended to the old one still counts.

        Everything up to batch `after` is on the disk: in older segments, or in the snapshot.
        """
        index = self._newest + 1
        about = JournalEntry(0, 0, _text([*self._boot, after]))
        try:
            made = Segment(self._segment_path(index), about)
            try:
                self._share(made.path)
                self._sync_folder()
                self._write_head(index)
            except BaseException:
                made.close()
                raise
        except OSError as error:
            raise self._failed(error) from error
        return made

    def _share(self, path: Path) -> None:
        """Whoever may read the head may read this file, and nobody else."""
        filesystem.share(path, self.path, os.fstat(self._head).st_mode & 0o666)

    def _use(self, segment: Segment) -> None:
        """Append to this one from now on. The caller holds `_using`.

        A sync of the new one does not include the old one, whose last batches may not be synced yet.
        """
        if (old := self._segment) is not None:
            old.sync()
            self._old[old.path] = old.last
        self._watched = ((str(self.path), _file_id(self._head)), (str(segment.path), segment.file_id()))
        self._segment = segment  # before the old one is closed: a forked child closes what it finds here
        if old is not None:
            old.close()

    def _check_files(self) -> None:
        """The paths must lead to the files that were opened: what is written to a removed file is lost."""
        for path, known in self._watched:
            if filesystem.file_id(path) != known:
                raise Misconfigured(f"{path} was removed or replaced while this process had it open")

    def _failed(self, error: OSError) -> FencedError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Unavailable(f"the disk under {self.path} is full; free some space and try again")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Misconfigured(
                f"{self.path} cannot be written ({error}); the file, its folder and the files beside it must be "
                "writable, and the file system not mounted read-only"
            )
        return Unavailable(f"the disk under {self.path} failed: {error}")

    def save(self, number: int, now: int, changes: Iterable[Change]) -> None:
        new = self._snapshot.with_name(self._snapshot.name + ".new")
        try:
            self._write_snapshot(new, number, now, iter(changes))
            new.replace(self._snapshot)
        except BaseException:
            new.unlink(missing_ok=True)  # on a full disk the journal needs the space
            raise
        self._sync_folder()

    def _write_snapshot(self, path: Path, number: int, now: int, changes: Iterator[Change]) -> None:
        with path.open("wb") as file:
            self._share(path)
            check = _write_line(file, [number, now], 0)
            while part := list(itertools.islice(changes, CHANGES_PER_LINE)):
                check = _write_line(file, part, check)
            file.write(_text({"crc32": check}) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def trim(self, number: int) -> None:
        """Begin another segment, and delete those that have nothing after `number`.

        The new one is made before the lock is taken, so batches are written meanwhile. Those that came after the
        snapshot keep their segment until the next one.
        """
        made = self._new_segment(number)
        with self._using:
            try:
                self._use(made)
            except OSError as error:
                # After a failed sync the next one may succeed although something before it is not on the disk.
                self._broken = self._failed(error)
                made.close()
                raise
        for path in [path for path, last in self._old.items() if last <= number]:
            path.unlink(missing_ok=True)
            del self._old[path]

    def has_many_segments(self) -> bool:
        return len(self._old) > SEGMENTS_MAX

    # Closing.

    def finish(self, number: int) -> None:
        if self._broken is not None:
            raise self._broken  # a sync has failed: the next one would not tell what is missing
        if self._segment is not None:  # else nothing was written, and the head is as it was found
            self._segment.sync()
            self._write_head(self._newest, number)

    def close(self) -> None:
        segment, self._segment, head, self._head = self._segment, None, self._head, -1
        if head >= 0:
            os.close(head)  # which unlocks it
        if segment is not None:
            segment.close()

    def abandon(self) -> None:
        """The lock belongs to the open file, which the parent has, too: it ends when the last of them is closed."""
        self.close()


def _file_id(file: int) -> filesystem.FileId:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _write_line(file: object, value: object, check: int) -> int:
    line = _text(value) + b"\n"
    file.write(line)  # type: ignore[attr-defined]
    return zlib.crc32(line, check)
