"""What the parts expect of each other: Runtime, Authority, Guard.

Core, authorities and guards are written once, as `async def`, and await only their Runtime and their
driver. Under the blocking runtime nothing ever suspends and the coroutine is stepped once to its end;
under asyncio the leaves suspend; in the simulation they yield to a seeded scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from fenced.decision import Mark, Ruling, Verdict
from fenced.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Stamp,
    Standing,
)

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")
Colour = Literal["blocking", "asyncio"]
Endpoint = tuple[str, int] | str
"""Where a server listens: a host and a port, or the path of a Unix socket."""


class Wakeup(Protocol):
    """A flag that one side sets and the other waits for. Setting it twice is setting it once."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...


class Readable(Protocol):
    """Anything with a file descriptor to wait on."""

    def fileno(self) -> int: ...


class SocketLike(Protocol):
    """One end of a connection. As with a non-blocking socket, calls that would have to wait raise BlockingIOError."""

    def send(self, data: bytes | bytearray, /) -> int: ...
    def recv(self, count: int, /) -> bytes: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...


class ByteStream(Protocol):
    """A connection with deadlines; not safe for concurrent use. OSError: none in time, or the connection has ended."""

    link: SocketLike

    async def send(self, data: bytes, until: float) -> None: ...
    async def receive(self, until: float) -> bytes:
        """The next bytes, at least one."""

    def read_available(self) -> bytes:
        """The bytes that arrived while nobody waited."""

    def detach(self) -> bytes:
        """Stop reading, so that the link can be used directly. Returns bytes that were read but not consumed."""

    def interrupt(self) -> None:
        """End the connection from any thread: whoever waits for it wakes. The owner still closes it."""

    def close(self) -> None: ...


class Selector(Protocol):
    """Waits for several links at once. One thread or task waits; any may add, remove and wake."""

    def add(self, link: SocketLike, owner: object) -> None: ...
    def remove(self, link: SocketLike) -> None: ...
    def wake(self) -> None:
        """Let `wait` return soon, also the next one if none is under way."""

    async def wait(self, until: float) -> list[object] | None:
        """The owners of the links that can be read (none: woken), or None when `until` is reached.

        OSError or ValueError: the selector is closed.
        """

    def close(self) -> None: ...


class Task(Protocol):
    """A loop that runs beside its client: a thread, an asyncio task or a simulated one."""

    async def join(self, until: float | None = None) -> None:
        """Wait for its end, at most until `until` (None: ten seconds). A task that joins itself returns at once."""


class Runtime(Protocol):
    """The leaves: what core, authorities and guards await. Time, tasks and the network come from here alone."""

    colour: Colour
    """Which form of a driver fits: the one that blocks, or the one that suspends."""

    def now(self) -> float:
        """Seconds on a clock that never goes back and also runs while the machine is suspended."""

    def random(self) -> float:
        """A number in [0, 1), for jitter."""

    def secret(self) -> str:
        """32 hexadecimal digits that nobody can guess."""

    def whoami(self) -> object:
        """The thread or task that runs now, for telling re-entrance."""

    def wakeup(self) -> Wakeup: ...

    def lock(self) -> AbstractContextManager[object]:
        """For a few lines that never wait; what runs in one thread alone needs none."""

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        """Wait until the flag is set (True) or `now()` reaches `until` (False)."""

    async def readable(self, source: Readable, until: float) -> bool:
        """Wait until `source` can be read (True) or `now()` reaches `until` (False)."""

    async def writable(self, source: Readable, until: float) -> bool:
        """Wait until `source` can be written (True) or `now()` reaches `until` (False)."""

    async def connect(
        self, endpoint: Endpoint, until: float, context: ssl.SSLContext | None = None
    ) -> SocketLike:
        """Look the host up and connect, with TLS if there is a context. OSError if that fails or takes too long."""

    def stream(self, link: SocketLike) -> ByteStream:
        """A connected link with deadlines. The stream owns the link from now on."""

    def selector(self) -> Selector: ...

    async def call(self, function: Callable[..., T], *args: Any, urgent: bool = False) -> T:
        """Run a blocking function. `urgent` calls never queue behind the others."""

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task: ...


@dataclass(frozen=True, slots=True)
class Trait:
    """A promise (or a limit) of a backend, in one sentence, proven by the test that names its key."""

    key: str
    sentence: str


class Authority(Protocol):
    """Grants leases and mints tokens.

    Every method ends in an answer, or raises Unavailable (nothing happened), Indeterminate (unknown:
    repeat the same attempt), Misconfigured or Misuse. No driver error leaves. `ask`, `renew`, `release`
    and `withdraw` never wait for another holder.

    `until`, on the runtime's clock, is the caller's deadline for the whole call: name look-up, connecting,
    every retry and every partial read. If the server has not answered by then, or has sent only part of an
    answer, the call raises Indeterminate (Unavailable if nothing was sent). None means `timing.CALL_SECONDS`.

    A lease must not outlive its own ttl because another lease of the same client is alive: an attempt that the
    client has released or withdrawn, with whatever outcome, and no longer renews must expire by itself.
    """

    @property
    def traits(self) -> tuple[Trait, ...]:
        """What this instance promises. A class may declare it for all of its instances."""

    @property
    def url(self) -> str:
        """Where it is, without secrets."""

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        """Connect, create what is missing, and find out whether tokens could repeat here.

        Without `create` nothing is made: Misconfigured where there is no such authority or namespace. It may be
        called again at any time: leases and waiters stay as they are, and the answer describes the store as it is
        now. A store that was replaced since the first call is refused, not adopted.
        """

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        """Grant, queue (`ask.wait`) or refuse. The same attempt gets the same grant.

        Only the head of the queue is granted. Its token is greater than the token of every earlier grant of each of
        its names, and than every token that was handed out before the attempt first asked. With the trait
        `namespace-order` the token is minted at the grant: it is greater than every token of the namespace that was
        handed out before the request that granted it. With `per-name-order` it is minted when the attempt is queued.
        """

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        """Keep leases and places in queues alive, in one batch. Never creates, never revives."""

    async def release(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        """Free the names and wake the heads of their queues. Repeating it gives the same answer."""

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        """End the attempt, whatever became of it, and leave a tombstone: a delayed ask finds it."""

    async def next_wakeups(self, until: float) -> list[str]:
        """Wait for wake-ups: public ids of attempts that may have come to the head. A hint only."""

    def interrupt(self) -> None:
        """Let a `next_wakeups` that is under way return soon: the client closes."""

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        """The names that are held or waited for, in order, beginning behind `after`."""

    async def observe(self, name: str, until: float | None = None) -> NameView:
        """One name as it is now, whether anybody holds it or not."""

    async def force_release(self, name: str, until: float | None = None) -> int | None:
        """Take the name from its holder and mint a token above it; None when nobody held it."""

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        """Make every later token greater than `above`; returns the floor that now holds."""

    async def tidy(self, until: float | None = None) -> int:
        """Forget attempts that are long over. Never touches the counter."""

    async def close(self) -> None: ...

    def abandon(self) -> None:
        """Close connections and descriptors at once, from any thread, and send nothing to the server.

        For a client that its program has dropped: no lease is released. May be repeated.
        """

    def before_fork(self) -> None:
        """In the parent, about to fork: close what a child must not inherit. Nothing is under way."""

    def forked(self) -> None:
        """In a forked child: forget what belongs to the parent."""


@dataclass(frozen=True, slots=True)
class Record:
    """One decision of a guard, for the audit."""

    time: float
    name: str | None
    stamp: Stamp | None
    mark: Mark | None
    verdict: Verdict
    ruling: Ruling
    mode: str


@dataclass(frozen=True, slots=True)
class Versioned:
    """A value and its version, for `expect`."""

    value: str | None
    version: int


class Guard(Protocol):
    """Sits at a resource of named values and decides with `decision.judge`, atomically with the effect.

    SQL guards protect the user's own tables instead (`fenced.sql.Guard`); their values under names
    are one guarded table of their own.
    """

    traits: ClassVar[tuple[Trait, ...]]

    @property
    def url(self) -> str: ...

    async def open(self) -> None: ...

    async def announce(self, stamp: Stamp, *names: str) -> None:
        """Raise the marks to this stamp's token, on its own, durably, before anything is read."""

    async def read(self, stamp: Stamp, name: str) -> Versioned:
        """Announce, then read."""

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        """Read without a lease; Contended when the mark is still below `at_least`."""

    async def write(self, stamp: Stamp | None, name: str, value: str, *, expect: int | None = None) -> int:
        """Write if admitted; returns the new version. `expect`: only if the version is still that."""

    async def write_many(self, stamp: Stamp | None, values: dict[str, str]) -> None:
        """Write several names in one atomic step: all admitted, or none."""

    async def set_mode(self, mode: str, pattern: str = "*") -> None: ...

    async def adopt(self, realm: str) -> None:
        """Trust this authority from now on, and no other."""

    async def mark(self, name: str) -> Mark | None: ...

    async def highest(self) -> int:
        """The highest token among all marks, also of other tables there; 0 when there is none.

        May be asked before `open`, and creates nothing: Misconfigured where there is no guard.
        """

    async def records(self) -> list[Record]: ...

    async def tally(self) -> dict[tuple[str, str], int]:
        """How many operations met each (verdict, mode) that was not plainly admitted."""

    async def close(self) -> None: ...
