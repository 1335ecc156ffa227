"""The embedded default: leases in a file, for the processes of one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.leases.batches import carry_out
from fenced.leases.rowauthority import Kind, RowAuthority, Work
from fenced.leases.rules import NAMESPACE_ORDER
from fenced.net.filesystem import machine_clock, path_of
from fenced.stores.sqlite.authority.connecting import Deadline
from fenced.stores.sqlite.authority.store import Store
from fenced.stores.sqlite.authority.wake import Wakes
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import Ask, AskAnswer, BatchAnswer, BatchOperation, Standing, Waiting, check_name

T = TypeVar("T")
REPORT_SECONDS = 0.02
"""How long after its deadline a worker thread may still report its result."""


class SqliteAuthority(RowAuthority):
    """One client's access to a Store, and its socket for wake-ups."""

    traits: ClassVar[tuple[Trait, ...]] = (
        NAMESPACE_ORDER,
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
        Trait("reboot-frees", "Leases end with the boot they were granted in; the tokens continue."),
        Trait("pushed", "A release wakes the head of the queue at once, across processes."),
        Trait(
            "stopped-writer-blocks",
            "A process stopped inside SQLite's own write transaction blocks the others; their deadlines are kept.",
        ),
        Trait(
            "restore-unnoticed",
            "A restore where no file was, or with all files beside it, looks like the original: raise the floor.",
        ),
    )

    endings_are_quick: ClassVar[bool] = False

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
        return cls(path_of(url, "sqlite", "an SQLite address"), runtime, namespace=namespace)

    async def _do(self, work: Callable[[Deadline], T], until: float | None, *, urgent: bool = False) -> T:
        """Run `work`, at most until the deadline.

        Under asyncio it runs in a worker thread. That thread stops waiting for the file's lock by itself, at the
        deadline or when its caller is cancelled. A thread that hangs in a disk call is left running: whether its
        work takes effect is unknown.
        """
        deadline = Deadline(timing.call_until(self._runtime.now(), until))
        if self._runtime.colour == "blocking":
            return work(deadline)
        import asyncio  # slow to import, and a blocking program does not need it

        answers: list[T] = []
        left = deadline.until + REPORT_SECONDS - self._runtime.now()
        try:
            async with asyncio.timeout(max(left, 0.0)):
                await self._runtime.call(lambda: answers.append(work(deadline)), urgent=urgent)
        except TimeoutError:
            if not answers:
                why = f"{self.url}: the disk, or an earlier call in the queue, did not finish before the deadline"
                raise (Indeterminate(why) if deadline.begun else Unavailable(why)) from None
        finally:
            deadline.caller_gone = True
        return answers[0]

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return await self._do(lambda deadline: self._store.open(create, deadline), until)

    async def _transact(self, work: Work[T], until: float | None, kind: Kind) -> T:
        def done(deadline: Deadline) -> T:
            answer, wakes = self._store.transact(work, kind, deadline)
            self._wakes.send(wakes)  # in the same thread: also if the caller was cancelled meanwhile
            return answer

        return await self._do(done, until, urgent=kind is Kind.RENEWS)

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        # Read once: `next_wakeups` may bind the socket while this ask runs, and the ask was stored without an address.
        address = self._wakes.address
        answer = await self._asked(ask, address, until)
        if not isinstance(answer, Waiting) or address:
            return answer
        try:
            self._wakes.listen()
        except FencedError:
            # It is queued, but an error from here means to the caller that it was never sent.
            await self.withdraw(ask.secret, until)
            raise
        # The first ask that waits: a release before now had no address to notify. Asking again stores the address,
        # and finds the name free if there was such a release.
        return await self._asked(ask, self._wakes.address, until)

    async def _asked(self, ask: Ask, address: str, until: float | None) -> AskAnswer:
        return await self._transact(lambda algorithm: (algorithm.ask(ask, address), ()), until, Kind.MINTS)

    async def many(
        self, operations: Sequence[BatchOperation], until: float | None = None
    ) -> list[BatchAnswer]:
        """All in one transaction, synced if one of them asks."""
        if any(isinstance(each, Ask) and each.wait for each in operations):
            self._wakes.listen()  # before they are stored, so that each of them has the address
        kind = Kind.MINTS if any(isinstance(each, Ask) for each in operations) else Kind.ENDS
        return await self._transact(
            lambda algorithm: carry_out(algorithm, operations, self._wakes.address), until, kind
        )

    async def next_wakeups(self, until: float) -> list[str]:
        await self._runtime.readable(self._wakes.listen(), until)
        return self._wakes.received()

    def interrupt(self) -> None:
        self._wakes.send([(self._wakes.address, "")])

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._store.close()
        self._wakes.close()

    def before_fork(self) -> None:
        self._store.file.close_idle()

    def forked(self) -> None:
        self._wakes.forked()
