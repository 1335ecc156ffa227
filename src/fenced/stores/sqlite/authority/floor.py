"""The last token of each namespace, written a second time, to a file beside the database.

If the write-ahead log is removed, or an older copy of the database is put back, the database forgets tokens that were
handed out. The floor file still has them: if the database's counter is below the floor, nothing is granted until the
floor is raised. The file is not synced. Every token in it was committed to the database first, so a power cut that
loses its last write loses only a warning.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from fenced.errors import Indeterminate, Misconfigured
from fenced.net.filesystem import share

_RECORD = struct.Struct(">8sQ")
"""The realm and its last token. The namespace's number gives the record's position in the file."""


class _Descriptor:
    """Closed with its last reference. Closed earlier, its number could be reused while a thread still uses it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit the name `os` may be gone
        close(self.number)


class Floor:
    def __init__(self, database: Path) -> None:
        # Named with a dot, not with a dash like SQLite's own files: `rm database-*` leaves it in place.
        self._path = database.with_name(database.name + ".floor")
        self._database = database
        self._place = 0
        self._realm = b""
        self._file: _Descriptor | None = None

    def open(self, namespace: int, realm: str, token: int) -> None:
        """Use this namespace's record from now on."""
        self._place, self._realm = namespace * _RECORD.size, bytes.fromhex(realm)
        self._opened()
        self.rise(token)  # this write also makes sure that the disk has room for the record

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
        """The last token that the file records as handed out."""
        data = os.pread(self._opened().number, _RECORD.size, self._place)
        if len(data) < _RECORD.size:
            return 0
        realm, token = _RECORD.unpack(data)
        return int(token) if realm == self._realm else 0  # tokens of another realm do not count here

    def refuse_known(self, token: int) -> None:
        """Raise Misconfigured if a token that the database is about to mint was handed out before."""
        if (why := self.stops(token - 1)) is not None:
            raise Misconfigured(f"{self._database}: {why}")

    def stops(self, last: int) -> str | None:
        """Why nothing can be granted while this is the database's last token; None: it can."""
        floor = self.read()
        if last >= floor:
            return None
        return (
            f"tokens up to {floor} were handed out, but the file's last token is {last}: it "
            "was restored, or its write-ahead log was removed. Nothing is granted until you run "
            f"`fenced authority raise --above {floor}`, or above every token that a guard has seen"
        )

    def rise(self, token: int) -> None:
        """Record a token that was committed and is about to be handed out.

        Takes no lock: of two concurrent writes the lower token may win. The next grant corrects that; until then only
        the last token is missing from the file.
        """
        try:
            if self.read() < token:
                os.pwrite(self._opened().number, _RECORD.pack(self._realm, token), self._place)
        except OSError as error:
            raise Indeterminate(f"{self._path} cannot be written: {error}") from error

    def close(self) -> None:
        self._file = None
