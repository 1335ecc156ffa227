"""The scripts of the guard, and the user's own script behind the same check."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from fenced.errors import Misuse, shown

HERE = Path(__file__).parent


class GuardScript:
    """A script's text, and the words that run it where the server knows it already."""

    def __init__(self, source: str, function: str | None = None) -> None:
        self.source = source
        self.sha = _sha(source)
        self.words = ("FCALL", function) if function else ("EVALSHA", self.sha)


class GuardLibrary:
    """The caller's library of functions, each behind the check."""

    def __init__(self, name: str, source: str, prefix: str) -> None:
        self.name = name
        self.source = source
        self.prefix = prefix

    def function(self, name: str) -> GuardScript:
        return GuardScript(self.source, self.prefix + name)


def _sha(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read(*parts: str) -> str:
    return "\n".join((HERE / f"{part}.lua").read_text() for part in parts)


COMMANDS = GuardScript(_read("judge", "moving", "compare", "commit", "commands"))
"""Checks, compares, and runs the caller's commands."""
ONE = GuardScript(_read("one"))
"""The same for one command on one name, if there is nothing to decide and nothing to compare."""
SWAP = GuardScript(_read("moving", "swap"))
REGISTER = GuardScript(_read("register"))
COPY = GuardScript(_read("moving", "copy"))

_WRAPPED = """
local guard_commit
do
  CHECK
  if full then
    guard_commit = commit
  elseif not decided then
    commit()
  end
end
local guard_keys, guard_arguments = tonumber(ARGV[2]) + (ARGV[3] == '' and 0 or 4), 3
local shifted_keys, shifted_arguments = {}, {}
for index = guard_keys + 1, #KEYS do shifted_keys[index - guard_keys] = KEYS[index] end
for index = guard_arguments + 1, #ARGV do shifted_arguments[index - guard_arguments] = ARGV[index] end
local KEYS, ARGV = shifted_keys, shifted_arguments
local function guard_own()
OWN
end
if not guard_commit then return guard_own() end
-- At maxmemory the caller's script comes first: Redis then refuses what it would refuse without a guard.
local guard_ok, guard_reply = pcall(guard_own)
local guard_error = guard_reply
if type(guard_reply) == 'table' then guard_error = guard_reply.err end
if not (type(guard_error) == 'string' and string.find(guard_error, 'OOM', 1, true)) then guard_commit() end
if not guard_ok then error(guard_reply, 0) end
return guard_reply
"""


def wrapped_library(text: object) -> GuardLibrary:
    """The caller's library, with every function behind the check.

    Its names begin with a hash of the check, so that a program never calls the function of another version of fenced,
    or the caller's own without the check.
    """
    shebang, _, body = text.partition("\n") if isinstance(text, str) else ("", "", "")
    found = re.match(r"#!lua\s+name=(\w+)\s*$", shebang, re.ASCII)
    if found is None:
        raise Misuse(f"a library is a text in Lua that begins with #!lua name=..., not {shown(text)}")
    if "no-writes" in body:
        raise Misuse("a guarded function writes the mark, so it cannot have the flag no-writes")
    check = _read("library").replace("CHECK\n", _read("judge", "commit"))
    prefix = f"fenced_{_sha(check)[:8]}_"
    name = prefix + found[1]
    return GuardLibrary(name, f"#!lua name={name}\n{check.replace('PREFIX', prefix)}{body}", prefix)


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
    check = _WRAPPED.replace("CHECK\n", _read("judge", "commit"))
    return GuardScript(shebang + check.replace("OWN\n", text + "\n"))
