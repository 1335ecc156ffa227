"""The embedded default: leases in a file, for the processes of one machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from fenced import timing
from fenced.authorities.sqlite import place
from fenced.authorities.sqlite.connecting import Patience
from fenced.authorities.sqlite.store import Store, Wake
from fenced.authorities.sqlite.wake import Wakes
from fenced.contracts import Runtime, Trait
from fenced.errors import Indeterminate, Misuse, Unavailable, redacted, shown
from fenced.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    check_name,
)
from fenced.runtime import clocks

T = TypeVar("T")
TOLD_SECONDS = 0.05
"""How long after its deadline a thread may still tell that it has come to its end."""

_URL = re.compile(r"sqlite:///(?P<path>[^?#]+)")


def path_of(url: str) -> Path:
    """The absolute path behind `sqlite:///relative.db` or `sqlite:////absolute.db`, links resolved."""
    found = _URL.fullmatch(url)
    if found is None or "\0" in url or found["path"] == ":memory:":
        raise Misuse(f"an SQLite address is sqlite:///path/to/file.db, not {shown(redacted(url))}")
    try:
        os.fsencode(url)
    except UnicodeEncodeError:
        raise Misuse(f"this is not a path of the file system: {shown(url)}") from None
    return Path(os.path.realpath(found["path"]))


def machine_clock() -> Callable[[], int]:
    """Nanoseconds since boot, the same for all processes of this machine."""
    offset = place.clock_offset_ns()
    return clocks.now_ns if offset == 0 else lambda: clocks.now_ns() - offset


class SqliteAuthority:
    """A client's door to a Store, and its socket for wake-ups."""

    traits: ClassVar[tuple[Trait, ...]] = (
        Trait(
            "one-machine", "For the processes of one machine: no network file system, no bind-mounted file."
        ),
        Trait(
            "synced-grants",
            "A token is on the disk (write-ahead log, synchronous=FULL) before it is handed out.",
        ),
        Trait(
            "lost-log-noticed",
            "A removed log, or an older copy put back in place, grants nothing until the floor is raised.",
        ),
        Trait("reboot-frees", "Leases end with the boot they were granted in; the tokens go on."),
        Trait("pushed", "A release wakes the head of the queue at once, across processes."),
        Trait(
            "stopped-writer-blocks",
            "A process stopped inside SQLite's own write transaction blocks the others; their deadlines are kept.",
        ),
        Trait(
            "restore-unnoticed",
            "A file restored where none was, or with all beside it, cannot be told from the original: raise the floor.",
        ),
    )

    def __init__(
        self,
        path: Path,
        runtime: Runtime,
        *,
        namespace: str = "default",
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.url = f"sqlite:///{path}"
        self._runtime = runtime
        self._store = Store(path, check_name(namespace), clock or machine_clock())
        self._wakes = Wakes(path)

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> SqliteAuthority:
        return cls(path_of(url), runtime, namespace=namespace)

    async def _do(self, work: Callable[[Patience], T], until: float | None, *, urgent: bool = False) -> T:
        """Do it until the deadline.

        Under asyncio it runs in a thread. That thread ends its waiting by itself, also when its caller is cancelled.
        Only one that the disk does not answer is left behind: what it does later is unknown.
        """
        patience = Patience(timing.call_until(self._runtime.now(), until))
        if self._runtime.colour == "blocking":
            return work(patience)
        import asyncio  # slow to import, and a blocking program does without it

        answers: list[T] = []
        left = patience.until + TOLD_SECONDS - self._runtime.now()
        try:
            async with asyncio.timeout(max(left, 0.0)):
                await self._runtime.call(lambda: answers.append(work(patience)), urgent=urgent)
        except TimeoutError:
            if not answers:
                why = f"{self.url}: the disk, or a call before this one, did not come to its end in time"
                raise (Indeterminate(why) if patience.begun else Unavailable(why)) from None
        finally:
            patience.gone = True
        return answers[0]

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return await self._do(lambda patience: self._store.open(create, patience), until)

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        if ask.wait:
            self._wakes.listen()
        return await self._do(lambda patience: self._store.ask(ask, self._wakes.address, patience), until)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return await self._do(lambda patience: self._store.renew(secrets, patience), until, urgent=True)

    async def release(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._do(lambda patience: self._end(self._store.release, secret, patience), until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._do(lambda patience: self._end(self._store.withdraw, secret, patience), until)

    def _end(
        self,
        how: Callable[[str, Patience], tuple[ReleaseAnswer, list[Wake]]],
        secret: str,
        patience: Patience,
    ) -> ReleaseAnswer:
        """Also if the caller has gone meanwhile, whoever comes next is told."""
        answer, wakes = how(secret, patience)
        self._wakes.send(wakes)
        return answer

    async def hear(self, until: float) -> list[str]:
        await self._runtime.readable(self._wakes.listen(), until)
        return self._wakes.heard()

    def nudge(self) -> None:
        self._wakes.send([(self._wakes.address, "")])

    async def survey(self, *, after: str = "", limit: int = 1000) -> list[NameView]:
        return await self._runtime.call(self._store.survey, after, limit)

    async def observe(self, name: str) -> NameView:
        return await self._runtime.call(self._store.observe, check_name(name))

    async def force_release(self, name: str) -> int | None:
        token, wakes = await self._runtime.call(self._store.force_release, check_name(name))
        self._wakes.send(wakes)
        return token

    async def raise_floor(self, above: int) -> int:
        return await self._runtime.call(self._store.raise_floor, above)

    async def tidy(self) -> int:
        return await self._runtime.call(self._store.tidy)

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._store.close()
        self._wakes.close()

    def before_fork(self) -> None:
        self._store.close_idle()

    def forked(self) -> None:
        self._wakes.forked()
