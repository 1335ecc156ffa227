"""The scripts, and requests that run them. The parts of a request that never change are packed once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from urllib.parse import quote

from fenced.leases.rules import QUEUE_MAX
from fenced.stores.redis.wire.resp import bulks
from fenced.values import timing
from fenced.values.model import TOKEN_MAX

HERE = Path(__file__).parent
SCRIPTS = ("open", "ask", "renew", "release", "force_release", "raise_floor", "tidy", "survey")
KEYS = ("meta", "attempts", "places", "forget")
SWEEP_EVERY = 16
"""One in this many tokens or tickets also checks three times as many old attempts, and deletes those it may."""


def us(seconds: float) -> int:
    """Whole microseconds, as the scripts count."""
    return round(seconds * 1e6)


def _constants() -> str:
    values = {
        "REMEMBER_MIN": us(timing.REMEMBER_SECONDS_MIN),
        "WAITER_TTL_MAX": us(timing.WAITER_TTL_MAX),
        "QUEUE_MAX": QUEUE_MAX,
        "TOKEN_MAX": TOKEN_MAX,
        "SWEEP_EVERY": SWEEP_EVERY,
    }
    return f"local {', '.join(values)} = {', '.join(map(str, values.values()))}\n"


def tag(namespace: str) -> str:
    """A namespace escaped for the braces that keep its keys in one cluster slot: it contains no brace."""
    return quote(namespace, safe="/")


@cache
def source_of(name: str) -> str:
    """The text of a script, its includes expanded."""
    base, text, prelude = ((HERE / f"{part}.lua").read_text() for part in ("base", name, "prelude"))
    return (
        _constants()
        + base
        + re.sub(r"^ *-- include prelude\.lua\n", lambda _: prelude, text, flags=re.MULTILINE)
    )


@cache
def called(name: str) -> tuple[str, bytes, bytes]:
    """The digest of a script, and the words that call it by its digest and by its text: once for all clients."""
    source = source_of(name)
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return sha, bulks(("EVALSHA", sha)), bulks(("EVAL", source))


class RedisScript:
    """One script over the keys of one namespace."""

    def __init__(self, name: str, namespace: str) -> None:
        self.sha, self._by_sha, self._by_source = called(name)
        keys = [f"fenced:{{{tag(namespace)}}}:{key}" for key in KEYS]
        self._words = 3 + len(keys)
        self._opening = self._by_sha + bulks((len(keys), *keys))

    def opening(self, arguments: int) -> bytes:
        """A request up to its arguments, of which `arguments` will follow."""
        return b"*%d\r\n%b" % (self._words + arguments, self._opening)

    def request(self, *arguments: str | bytes | int) -> bytes:
        return self.opening(len(arguments)) + bulks(arguments)

    def with_source(self, request: bytes) -> bytes:
        """The same request with the script's text, for a server that does not have the script and then caches it."""
        return request.replace(self._by_sha, self._by_source, 1)

    def batch(self, first: str, publics: Iterable[str]) -> bytes:
        """A request whose further arguments are public ids, all of one length."""
        ids = "".join([f"$32\r\n{public}\r\n" for public in publics]).encode()
        return self.opening(1 + len(ids) // 39) + bulks((first,)) + ids


def scripts_of(namespace: str) -> dict[str, RedisScript]:
    return {name: RedisScript(name, namespace) for name in SCRIPTS}
