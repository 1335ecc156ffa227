"""A name whose lock this thread has: its mark, and the two ways in which its file changes.

Both ways change everything or nothing. If the process dies on the way, or an error cannot be undone, the next process
that locks the name reads in the mark file what was under way, and completes it or undoes it, before it does anything
else.

- `replace` renames new contents over the file. If the mark rises with it, the page of the new mark comes first. It is
  the commit point: it names the contents, and whoever locks the name next renames them. Otherwise the rename is the
  commit point.
- `append` first writes a page with the old mark and the old size. Then it writes to the file, and then the page of the
  new mark, which is the commit point. Whoever finds an old size in the mark file cuts the file off there.

An OSError out of these methods has changed nothing. Where that is not sure they raise Indeterminate.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote

from fenced.errors import FencedError, Indeterminate, Misconfigured
from fenced.stores.files.guard import disk, pages
from fenced.stores.files.guard.disk import PRIVATE

NO_FILE = -1
"""The size of a file that is not there."""
_OPERATION = re.compile("[0-9a-f]{32}")
_LENGTH_MAX = 200
"""How many characters of a key a file name has: file systems allow 255."""


class Room(NamedTuple):
    """Descriptors of the guarded folder and of `.fenced` in it. Paths begin there, whatever is renamed meanwhile."""

    top: int
    private: int


class Marked(NamedTuple):
    """What a mark file says."""

    header: bytes
    """The cell's header, with the mark; empty: the name has none yet."""
    key: str
    operation: str
    """The operation whose new contents belong at `path`, if they are still waiting."""
    path: str
    """Where the contents of the name are, relative to the guarded folder."""
    size: int | None = None
    """An append is under way, and the file had this size before it."""

    def packed(self) -> bytes:
        return self.header + b"\n" + json.dumps(self[1:], ensure_ascii=False).encode()


class LockedName:
    """A name whose lock this thread has. What the mark file says cannot change meanwhile."""

    __slots__ = ("_descriptor", "_file", "_pages", "_room", "judged", "marked")

    def __init__(self, room: Room, file: str, descriptor: int) -> None:
        self._room = room
        self._file = file
        self._descriptor = descriptor
        self._pages = pages_in(descriptor, file)
        self.marked = self._newest()
        self.judged: bytes | None = None
        """The header that the caller's judgement has made, to be written with the contents; None: the mark stays."""

    def _newest(self) -> Marked | None:
        return parsed(self._pages[0].body, self._file) if self._pages else None

    @property
    def header(self) -> bytes | None:
        """The header of the name's cell; None: it has none yet."""
        return (self.marked.header or None) if self.marked else None

    def contents(self) -> bytes:
        """The contents of the name's file."""
        assert self.marked is not None
        parent = disk.open_parent(self._room.top, self.marked.path)
        try:
            return disk.read(_last(self.marked.path), parent)
        except FileNotFoundError:
            return b""  # the name has a mark, and no contents yet
        finally:
            disk.close(parent)

    # After a writer that died.

    def recover(self, mine: str) -> None:
        """Complete or undo what a dead writer has begun, and remove what it left. `mine` is the caller's operation."""
        if self.marked is not None and self.marked.size is not None:
            self._undo_append(self.marked)
        for name in disk.listed(f"new/{self._file}", self._room.private):
            if name == mine:
                continue
            if self.marked is not None and self.marked.operation == name:
                self._complete(self.marked)
            disk.remove_if_dead(f"new/{self._file}/{name}", self._room.private)

    def _complete(self, marked: Marked) -> None:
        """Rename contents that were committed. If that is impossible, they are dropped: nobody was told of them."""
        try:
            parent = disk.open_parent(self._room.top, marked.path)
        except (OSError, Misconfigured):
            self._take_back()
            return
        try:
            self._rename(marked.operation, parent, marked.path)
        except OSError:
            self._take_back()
        else:
            disk.sync(parent)
        finally:
            disk.close(parent)

    # The mark.

    def raise_mark(self, marked: Marked) -> None:
        """Write a page."""
        if not self._pages:
            folder = disk.open_folder("marks", self._room.private)
            try:
                disk.sync(folder)  # before the first page: a mark lies in a file that stays
            finally:
                disk.close(folder)
        page = pages.Page(self._pages[0].number + 1 if self._pages else 1, marked.packed())
        text, offset = page.packed(), page.offset
        if not self._pages:  # the first page is empty; later changes find both blocks allocated
            text, offset = bytes(pages.SIZE) + text.ljust(pages.SIZE, b"\0"), 0
        self._pages, self.marked = [page, *self._pages[:1]], marked
        try:
            disk.write_all(self._descriptor, text, offset)
        except OSError as error:
            self._take_back(error)
            raise

    def _take_back(self, cause: OSError | None = None) -> None:
        """Let the page before the newest one count again. Nobody has judged by the newest: this thread has the lock."""
        newest = self._pages[0]
        if newest.number > 1 and len(self._pages) == 1:
            raise _damaged(self._file)
        try:
            disk.write_all(self._descriptor, pages.NO_HEAD, newest.offset)
        except OSError as failure:
            if cause is None:
                raise  # in a recovery: what its caller wants has not begun
            raise disk.unknown(cause, self._file) from failure
        del self._pages[0]
        self.marked = self._newest()

    # Changes of the file.

    def replace(self, marked: Marked | None, operation: str, path: str) -> None:
        """Rename new contents over a file. None: the mark stays as it is."""
        parent = disk.open_parent(self._room.top, path)
        try:
            if marked is not None:
                self.raise_mark(marked)
            try:
                self._rename(operation, parent, path)
            except OSError as error:
                if marked is not None:
                    self._take_back(error)
                raise
            try:
                disk.sync(parent)
            except OSError as error:  # it is there, and a power cut may undo it
                raise disk.unknown(error, path) from error
        finally:
            disk.close(parent)

    def _rename(self, operation: str, parent: int, path: str) -> None:
        disk.rename(f"new/{self._file}/{operation}", self._room.private, _last(path), parent)

    def append(self, marked: Marked, body: bytes) -> None:
        """Append to a file."""
        name, parent = _last(marked.path), disk.open_parent(self._room.top, marked.path)
        try:
            size = disk.size_of(name, parent)
            before = NO_FILE if size is None else size
            under_way = marked._replace(header=self.header or b"", size=before)
            self.raise_mark(under_way)
            try:
                disk.append_at(name, parent, body, size or 0)
                if size is None:
                    disk.sync(parent)
                self.raise_mark(marked)
            except Indeterminate:
                raise
            except (OSError, FencedError) as error:
                try:
                    self._undo_append(under_way)
                except OSError as failure:
                    raise disk.unknown(failure, marked.path) from error
                raise
        finally:
            disk.close(parent)

    def _undo_append(self, under_way: Marked) -> None:
        """Cut off what was appended, then say so in the mark file."""
        assert under_way.size is not None
        try:
            parent = disk.open_parent(self._room.top, under_way.path)
        except Misconfigured:
            pass  # the folder has gone, and the file with it
        else:
            try:
                disk.cut(_last(under_way.path), parent, None if under_way.size == NO_FILE else under_way.size)
            finally:
                disk.close(parent)
        self.raise_mark(under_way._replace(size=None))


def _last(path: str) -> str:
    return path.rpartition("/")[2]


# What a mark file says.


@lru_cache(maxsize=4096)
def file_of(key: str) -> str:
    """The name of a key's files. No key's is another's folder."""
    text = quote(key, safe=" @+=,").replace(".", "%2E")
    return text if len(text) <= _LENGTH_MAX else f"{text[:100]}#{sha256(key.encode()).hexdigest()}"


def value_path(file: str) -> str:
    """Where a value under a name is."""
    return f"{PRIVATE}/values/{file}"


def pages_in(descriptor: int, file: str) -> list[pages.Page]:
    try:
        return pages.whole(disk.read_start(descriptor, pages.END))
    except ValueError as error:
        raise _damaged(file) from error


@lru_cache(maxsize=256)
def parsed(body: bytes, file: str) -> Marked:
    """What a page says; the same ones are read again and again."""
    header, _, rest = body.partition(b"\n")
    try:
        marked = Marked(header, *json.loads(rest))
        if not _is_sound(marked, file):
            raise ValueError(marked)
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged(file) from error
    return marked


def _is_sound(marked: Marked, file: str) -> bool:
    """Whether a page can be this guard's own: it is about this name, and a file of this folder."""
    if not _OPERATION.fullmatch(marked.operation) or file_of(marked.key) != file:
        return False
    if marked.size is not None and (type(marked.size) is not int or marked.size < NO_FILE):
        return False
    parts = marked.path.split("/")
    return marked.path == value_path(file) or not {"", ".", "..", PRIVATE}.intersection(parts)


def _damaged(file: str) -> Misconfigured:
    return Misconfigured(f"{PRIVATE}/marks/{file}.mark is not a mark file, or it is damaged: restore it")
