"""A table of the program for kept replies: one row for each set of names, in any SQL engine.

The texts in these statements are hexadecimal, or come from the encoded names of a stamp, so nothing needs quoting, and
every driver takes them, whatever its style of parameters is.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fenced.errors import Misuse, shown

Run = Callable[[str], Awaitable[Sequence[tuple[Any, ...]]]]

_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?", re.ASCII)
_NAMES = re.compile(r"[A-Za-z0-9_.~/%,-]+", re.ASCII)


class ReplyTable:
    """The statements."""

    def __init__(self, table: str) -> None:
        if not isinstance(table, str) or not _TABLE.fullmatch(table):
            raise Misuse(f"a table's name is letters, digits and _, not {shown(table)}")
        self.table = table

    @property
    def creation(self) -> str:
        return f"CREATE TABLE IF NOT EXISTS {self.table} (names TEXT PRIMARY KEY, reply TEXT NOT NULL)"

    async def find(self, run: Run, names: str) -> bytes | None:
        found = await run(f"SELECT reply FROM {self.table} WHERE names = '{_checked(names)}'")
        return bytes.fromhex(found[0][0]) if found else None

    async def keep(self, run: Run, names: str, reply: bytes) -> None:
        await run(
            f"INSERT INTO {self.table} (names, reply) VALUES ('{_checked(names)}', '{reply.hex()}') "
            "ON CONFLICT (names) DO UPDATE SET reply = excluded.reply"
        )


def _checked(names: str) -> str:
    if not _NAMES.fullmatch(names):
        raise Misuse(f"not the encoded names of a stamp: {shown(names)}")
    return names
