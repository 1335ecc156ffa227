"""The last token of each namespace, written down a second time, in a file beside the database.

A write-ahead log that is removed, or a database that is put back from a copy, takes tokens with it that were handed
out. The file here tells: if the database counts from below it, nothing is granted until the floor is raised. It is not
synced. What it says was committed before, and a power cut that takes its last lines takes only a warning.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from fenced.authorities.sqlite.place import share
from fenced.errors import Indeterminate, Misconfigured

_RECORD = struct.Struct(">8sQ")
"""The realm and its last token. The number of the namespace says where it stands."""


class _Descriptor:
    """Closed when nobody uses it any more: one that were closed under a thread could be another file's by then."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone by then
        close(self.number)


class Floor:
    def __init__(self, database: Path) -> None:
        # A dot, where SQLite's own files have a dash: whoever removes those leaves this one.
        self._path = database.with_name(database.name + ".floor")
        self._database = database
        self._place = 0
        self._realm = b""
        self._file: _Descriptor | None = None

    def open(self, namespace: int, realm: str, token: int) -> None:
        """From now on this namespace is meant."""
        self._place, self._realm = namespace * _RECORD.size, bytes.fromhex(realm)
        self._opened()
        self.rise(token)  # also so that there is room on the disk for it

    def _opened(self) -> _Descriptor:
        held = self._file
        if held is None:
            try:
                made = not self._path.exists()
                held = _Descriptor(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                if made:
                    share(self._path, self._database, os.stat(self._database).st_mode & 0o666)
            except OSError as error:
                raise Misconfigured(
                    f"{self._path} cannot be opened for writing ({error}); it must be writable like the file that it "
                    "belongs to, and the file system not mounted read-only"
                ) from error
            self._file = held
        return held

    def read(self) -> int:
        """The last token that was handed out, as far as it is known here."""
        data = os.pread(self._opened().number, _RECORD.size, self._place)
        if len(data) < _RECORD.size:
            return 0
        realm, token = _RECORD.unpack(data)
        return int(token) if realm == self._realm else 0  # another realm's tokens are compared with by nobody

    def rise(self, token: int) -> None:
        """A token was committed, and is about to be handed out.

        Without a lock: of two that rise at once the lower may win. It is made good by the next one, and what is missing
        until then is the last token alone.
        """
        try:
            if self.read() < token:
                os.pwrite(self._opened().number, _RECORD.pack(self._realm, token), self._place)
        except OSError as error:
            raise Indeterminate(f"{self._path} cannot be written: {error}") from error

    def let_go(self) -> None:
        self._file = None
