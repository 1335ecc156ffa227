"""A log on three replicas, each a guarded file in a folder of its own. A primary is deposed, and changes nothing more.

python examples/replicas.py
"""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path

import fenced
from fenced.files import FileGuard
from fenced.recipes.replicas import Entry, Log, Primary, ReplicaLog, drive


class FileStore:
    """One replica's log, a line for each entry. The guard compares the version in the step that changes the file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._guard = FileGuard(folder)

    def announce(self, version: fenced.Stamp) -> None:
        self._guard.announce(version, "log")

    def read(self, version: fenced.Stamp) -> Log:
        try:
            text = self._guard.read(version, "log")
        except FileNotFoundError:
            return ()
        lines = text.split(b"\n")[:-1]  # a line without its end was never acknowledged
        return tuple(_entry(line) for line in lines)

    def replace(self, version: fenced.Stamp, log: Log) -> None:
        self._guard.write(version, "log", b"".join(map(_line, log)))

    def extend(self, version: fenced.Stamp, entries: Log) -> None:
        self._guard.append(version, "log", b"".join(map(_line, entries)))


def _line(entry: Entry) -> bytes:
    value = None if entry.value is None else base64.b64encode(entry.value).decode()
    return json.dumps([entry.version, value]).encode() + b"\n"


def _entry(line: bytes) -> Entry:
    version, value = json.loads(line)
    return Entry(version, None if value is None else base64.b64decode(value))


def main() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as name,
        fenced.Client(f"sqlite:///{name}/l.db") as client,
    ):
        replicas = [ReplicaLog(FileStore(Path(name) / f"replica-{each}")) for each in range(3)]
        with client.hold("log", ttl=60) as lease:
            old = Primary(lease.announcement(), 3)
            drive(old.open(), replicas)
            drive(old.append(b"one", b"two"), replicas)
        with client.hold("log", ttl=60) as lease:
            new = Primary(lease.announcement(), 3)
            drive(new.open(), replicas)
            try:
                drive(old.append(b"late"), replicas)
            except fenced.StaleToken:
                print("the deposed primary was refused")
            drive(new.append(b"three"), replicas)
            print(new.values)


if __name__ == "__main__":
    main()
