"""The scripts of the guard, and the user's own script behind the same check."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from fenced.errors import Misuse, shown

HERE = Path(__file__).parent


class GuardScript:
    """A script's text, and the name under which a server caches it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def _read(*parts: str) -> str:
    return "\n".join((HERE / f"{part}.lua").read_text() for part in parts)


COMMANDS = GuardScript(_read("judge", "compare", "commit", "commands"))
"""Checks, compares, and runs the caller's commands."""
ONE = GuardScript(_read("one"))
"""The same for one command on one name, if there is nothing to decide and nothing to compare."""
SWAP = GuardScript(_read("swap"))

_SHIFT = """
local guard_keys, guard_arguments = tonumber(ARGV[2]) + (ARGV[3] == '' and 0 or 4), 3
local shifted_keys, shifted_arguments = {}, {}
for index = guard_keys + 1, #KEYS do shifted_keys[index - guard_keys] = KEYS[index] end
for index = guard_arguments + 1, #ARGV do shifted_arguments[index - guard_arguments] = ARGV[index] end
local KEYS, ARGV = shifted_keys, shifted_arguments
"""


def wrapped(text: object) -> GuardScript:
    """The user's script behind the check. It finds its own KEYS and ARGV, and its reply is returned as it is."""
    if not isinstance(text, str) or not text.strip():
        raise Misuse(f"a script is a text in Lua, not {shown(text)}")
    shebang = ""
    if text.startswith("#!"):  # must stay in the first line
        shebang, _, text = text.partition("\n")
        if not re.match(r"#!lua\b", shebang) or "no-writes" in shebang:
            raise Misuse(f"a guarded script writes the mark, so it cannot begin with {shown(shebang)}")
        shebang += "\n"
    return GuardScript(f"{shebang}do\n{_read('judge', 'commit')}\nend\n{_SHIFT}\n{text}")
