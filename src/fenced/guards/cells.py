"""Cells: what a store must supply, and what a guard keeps in them.

A cell holds the mark, the value and its version of one name, so that one swap decides and writes. The rule, the
modes and the realm are in a cell of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from fenced.errors import Misconfigured, shown
from fenced.values.decision import Mark, Mode, Rule, mode_of

CONFIG = "config"
"""The key of the configuration."""
KEPT = 8
"""How many operations a cell remembers, so that an operation whose reply was lost can check whether it happened."""


def key_of(name: str) -> str:
    """The key of a name's cell."""
    return f"n/{name}"


_json = json.JSONEncoder(separators=(",", ":")).encode


class Swapped(NamedTuple):
    """What a swap did. It is true if all blobs were replaced."""

    versions: tuple[Any, ...] | None
    """The versions after it, in the order of the changes; None: nothing was replaced."""
    found: Mapping[str, tuple[Any, bytes | None]] = {}
    """If nothing was replaced: all compared cells as they are, if the store sends them with its refusal."""

    def __bool__(self) -> bool:
        return self.versions is not None


class Cells(Protocol):
    """What a store supplies. The store chooses its versions; the same version must mean the same blob."""

    async def get(self, key: str) -> tuple[Any, bytes | None]:
        """The version and the blob of a cell; None if there is none, with the version that makes `swap` create it."""

    async def swap(self, changes: Sequence[tuple[str, Any, bytes | None]]) -> Swapped:
        """Replace each blob if every version is still that, all or none; None compares and writes nothing.

        Indeterminate: it is unknown whether that happened. Only a guard with the trait `many-names` passes more than
        one change, or a change that writes nothing; with `mode-lag` the configuration is never among them.
        """

    async def keys(self) -> list[str]:
        """The keys of all cells."""

    async def close(self) -> None: ...


class ManyCells(Cells, Protocol):
    """What a store supplies for the trait `many-names`."""

    async def get_many(self, keys: Sequence[str]) -> list[tuple[Any, bytes | None]]:
        """Several cells in one round trip, each as `get` returns it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The mark, the value and the newest operations of a name."""

    mark: Mark | None = None
    value: bytes | None = None
    version: int = 0
    swaps: int = 0
    written: tuple[str, ...] = ()
    """The ids of the newest operations that changed the cell, the newest last."""

    def packed(self) -> bytes:
        mark = self.mark and [self.mark.token, self.mark.grant, self.mark.seq, self.mark.operation]
        header = [self.version, self.swaps, mark, self.written, self.value is not None]
        return _json(header).encode() + b"\n" + (self.value or b"")

    @classmethod
    def unpacked(cls, key: str, blob: bytes | None) -> Cell:
        if blob is None:
            return cls()
        header, _, value = blob.partition(b"\n")
        try:
            mark, version, swaps, written, there = _header(header)
        except (ValueError, TypeError) as error:
            raise Misconfigured(f"{shown(key)} is not a guard's cell: something else wrote to it") from error
        return cls(mark, value if there else None, version, swaps, written)

    def changed(self, operation: str, mark: Mark | None, value: bytes | None) -> Cell:
        """The cell after an operation; `value` None leaves the value as it is."""
        if value is None:
            if mark == self.mark:
                return self
            return replace(self, mark=mark, **self._swapped(operation))
        return replace(self, mark=mark, value=value, version=self.version + 1, **self._swapped(operation))

    def recorded(self, operation: str) -> Cell:
        """The cell after an operation that changes neither its mark nor its value."""
        return replace(self, **self._swapped(operation))

    def _swapped(self, operation: str) -> dict[str, Any]:
        return {"swaps": self.swaps + 1, "written": (*self.written, operation)[-KEPT:]}


def mark_in(header: bytes) -> Mark | None:
    """The mark of a cell, of which only the header is known."""
    return _header(header)[0]


@lru_cache(maxsize=256)
def _header(text: bytes) -> tuple[Mark | None, int, int, tuple[str, ...], bool]:
    """A cell without its value; the same ones are read again and again."""
    version, swaps, mark, written, there = json.loads(text)
    return Mark(*mark) if mark else None, version, swaps, tuple(written), there


_mode = lru_cache(maxsize=64)(Mode.parse)


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of a guard: rule, modes and realm."""

    rule: Rule
    modes: dict[str, str]
    realm: str | None = None

    def packed(self) -> bytes:
        return json.dumps([self.rule, self.modes, self.realm]).encode()

    def mode_of(self, name: str) -> Mode:
        return mode_of(name, ((pattern, _mode(mode)) for pattern, mode in self.modes.items()))

    @classmethod
    def unpacked(cls, blob: bytes) -> Config:
        try:
            return cls(*json.loads(blob))
        except (ValueError, TypeError) as error:
            raise Misconfigured("the configuration is not a guard's: something else wrote to it") from error
