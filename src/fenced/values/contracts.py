"""The contracts between the parts: Runtime, Authority, and one protocol for each ability of a guard.

Core, authorities and guards are written once, as `async def`, and await only their Runtime and their driver. The
blocking runtime never suspends, so one `send` runs a coroutine to its end. Under asyncio the runtime's methods suspend;
in the simulation they yield to a seeded scheduler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from fenced.errors import Unsupported
from fenced.values.decision import Mark
from fenced.values.model import (
    Ask,
    AskAnswer,
    Credential,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
)
from fenced.values.rollout import (
    QUIET_SECONDS,
    Change,
    DatabaseStatus,
    Decision,
    DecisionCount,
    KeyView,
    Override,
)

if TYPE_CHECKING:
    import ssl

    from fenced.proofs import VerifyingKey

T = TypeVar("T")
Colour = Literal["blocking", "asyncio"]
Endpoint = tuple[str, int] | str
"""Where a server listens: a host and a port, or the path of a Unix socket."""


class Wakeup(Protocol):
    """A flag that one side sets and the other waits for. Setting it twice is the same as setting it once."""

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
    """A connection with deadlines; not safe for concurrent use.

    Methods raise OSError if the deadline passes or the connection has ended.
    """

    link: SocketLike

    async def send(self, data: bytes, until: float) -> None: ...
    async def receive(self, until: float) -> bytes:
        """The next bytes, at least one."""

    def read_available(self) -> bytes:
        """The bytes that arrived while nobody waited."""

    def detach(self) -> bytes:
        """Stop reading, so that the link can be used directly. Returns bytes that were read but not consumed."""

    def interrupt(self) -> None:
        """End the connection from any thread, and wake whoever waits for it. The owner still closes it."""

    def close(self) -> None: ...


class Selector(Protocol):
    """Waits for several links at once. One thread or task waits; any may add, remove and wake."""

    def add(self, link: SocketLike, owner: object) -> None: ...
    def remove(self, link: SocketLike) -> None: ...
    def wake(self) -> None:
        """Let the running `wait` return soon, or the next one if none is running."""

    async def wait(self, until: float) -> list[object] | None:
        """The owners of the links that can be read (empty: woken), or None if `until` is reached first.

        OSError or ValueError: the selector is closed.
        """

    def close(self) -> None: ...


class Task(Protocol):
    """A loop that runs beside its client: a thread, an asyncio task or a simulated one."""

    async def join(self, until: float | None = None) -> None:
        """Wait for its end, at most until `until` (None: ten seconds). A task that joins itself returns at once."""


class Pulse(Protocol):
    """Whether an event loop runs, for a thread that watches it."""

    def ask(self, answer: Callable[[], None]) -> None:
        """Let the event loop call `answer`."""

    def where(self) -> str:
        """The line of the program that its thread is at; "" if that is unknown."""

    def over(self) -> bool:
        """Whether it was closed."""


class Runtime(Protocol):
    """What core, authorities and guards await. Time, tasks and the network come only from here."""

    colour: Colour
    """Which form of a driver to use: the one that blocks, or the one that suspends."""

    def now(self) -> float:
        """Seconds on a clock that never goes back and also runs while the machine is suspended."""

    def random(self) -> float:
        """A number in [0, 1), for jitter."""

    def secret(self) -> str:
        """32 hexadecimal digits that nobody can guess."""

    def whoami(self) -> object:
        """The current thread or task, to detect re-entrance."""

    def wakeup(self) -> Wakeup: ...

    def runs_here(self) -> bool:
        """Whether the caller may wait with this runtime: it runs in its event loop, or it may block."""

    def lock(self) -> AbstractContextManager[object]:
        """A lock for a few lines that never wait. A runtime with one thread returns one that does nothing."""

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
        """Run a blocking function. `urgent` calls do not queue behind other calls."""

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task: ...

    def deliver(self, call: Callable[..., object], *args: object) -> None:
        """Call a function of the program where its code runs: at once, or soon in its event loop. From any thread."""

    def pulse(self) -> Pulse | None:
        """That of the event loop that runs here; None if there is none."""


@dataclass(frozen=True, slots=True)
class Trait:
    """A guarantee or a limit of a backend, in one sentence. A test that names its key proves it."""

    key: str
    sentence: str


MANY_NAMES = Trait("many-names", "Several names are written in one atomic step: all admitted, or none.")
SEVERAL_LEASES = Trait("several-leases", "One operation may carry the stamps of several leases.")
PROOFS = Trait("proofs", "A stamp may carry a proof; if proofs are required, a stamp without one is refused.")
STILL_HELD = Trait(
    "still-held",
    "An authority in the same database can be asked, in the same step, whether the lease is still held.",
)
ANNOUNCES_SEPARATELY = Trait(
    "announces-separately",
    "A new token is announced and committed before its first write, so the mark stays if that write fails.",
)
LAG_SECONDS = 1.0
MODE_LAG = Trait("mode-lag", "Each guard object notices a new mode within a second of its next operation.")
"""The configuration, with modes and realm, is read again if the last reading is older than LAG_SECONDS."""


class Authority(Protocol):
    """Grants leases and mints tokens.

    Every method returns an answer, or raises Unavailable (nothing happened), Indeterminate (unknown: repeat the same
    attempt), Misconfigured or Misuse. It never raises a driver's error. `ask`, `renew`, `release` and `withdraw` never
    wait for another holder.

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
        """Connect, create what is missing, and find out whether tokens could repeat on this store.

        Without `create` nothing is created: Misconfigured where there is no such authority or namespace. It may be
        called again at any time: leases and waiters stay as they are, and the answer describes the store as it is
        now. A store that was replaced since the first call is refused, not adopted.
        """

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        """Grant, queue (`ask.wait`) or refuse. The same attempt gets the same grant.

        `Busy` is final: no copy of this ask that is still on its way is granted later. So an authority that has
        repeated a request whose outcome was unknown withdraws the attempt before it answers `Busy`.

        Only the head of the queue is granted. Its token is greater than the token of every earlier grant of each of
        its names, and than every token that was handed out before the attempt first asked. With the trait
        `namespace-order` the token is minted at the grant: it is greater than every token of the namespace that was
        handed out before the request that granted it. With `per-name-order` it is minted when the attempt is queued.
        """

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        """Renew leases and places in queues, in one batch. Never creates an attempt, never revives an ended one."""

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        """End the lease, free its names and wake the heads of their queues. Repeating it gives the same answer.

        With `keep` nobody is granted the names for that many seconds from now, as in a lock_delay, although the
        lease has ended: the client may exit at once. `keep` of an attempt that was released before has no effect.
        """

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        """End the attempt, whether granted or waiting, and leave a tombstone that stops a delayed ask."""

    async def next_wakeups(self, until: float) -> list[str]:
        """Wait for wake-ups: public ids of attempts that may now be at the head of their queue. Only a hint."""

    def interrupt(self) -> None:
        """Let a running `next_wakeups` return soon, because the client is closing."""

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        """The names that are held or waited for, in order, starting after `after`."""

    async def observe(self, name: str, until: float | None = None) -> NameView:
        """One name as it is now, whether anybody holds it or not."""

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        """Take the name from the holder that has this token, and mint a token above it.

        None: that grant does not hold the name, so nothing was done. The name may be free, or have another holder,
        whom the operator has not seen.
        """

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        """Make every later token greater than `above`; returns the floor that now holds."""

    async def tidy(self, until: float | None = None) -> int:
        """Delete attempts that ended long ago; returns how many. Never changes the token counter."""

    async def close(self) -> None: ...

    def abandon(self) -> None:
        """Close connections and descriptors at once, from any thread, and send nothing to the server.

        For a client that its program has dropped: no lease is released. May be repeated.
        """

    def before_fork(self) -> None:
        """In the parent, before a fork: close what a child must not inherit. No transaction is running."""

    def forked(self) -> None:
        """In a forked child: drop the parent's connections without using them."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A value and its version, for `expect`. None and 0 if nothing has been written yet."""

    value: bytes | None
    version: int


class Marks(Protocol):
    """What every guard can do: keep the highest token of each name, and refuse lower ones.

    A guard decides as `decision.judge` does, in the same atomic step as the effect. The id that it gives to an
    operation is unique for ever, even after its process or its store restarts: `judge` treats two operations with
    the same id as one.

    Every method that is fenced takes a whole `Credential`. A guard that cannot use a part of it (a proof, a second
    stamp, `still_held`) raises Unsupported: nothing of a credential is dropped.
    """

    @property
    def traits(self) -> tuple[Trait, ...]:
        """What this instance promises, its limits, and its abilities. The kit runs the checks that they name."""

    @property
    def url(self) -> str:
        """Where it is, without secrets."""

    async def open(self) -> None:
        """Connect, and create what is missing. A guard that exists keeps its rule and its modes."""

    async def announce(self, credential: Credential) -> None:
        """Raise the marks to the credential's tokens, separately from any write, durably, before anything is read."""

    async def mark(self, name: str) -> Mark | None: ...

    async def highest(self) -> int:
        """The highest token among all marks, including those of other tables there; 0 if there is none.

        May be called before `open`, and creates nothing: Misconfigured where there is no guard.
        """

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        """Set the mode, the stage of the rollout, of the names that match."""

    async def modes(self) -> dict[str, str]:
        """The mode of each pattern that has one."""

    async def adopt(self, realm: str) -> None:
        """Trust this authority from now on, and no other."""

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        """Run `work` with this guard's Operator: `guard.operate(lambda operator: operator.status())`.

        May be called before `open`, and creates nothing: Misconfigured where there is no guard.
        """

    async def close(self) -> None: ...


class UnitOfWork(Protocol):
    """A guard around the caller's own transaction, request or message."""

    async def enter(self, credential: Credential | None) -> None:
        """Begin, and announce before the caller reads or writes anything.

        None: the caller has no stamp. The mode of the guard decides about each write.
        """

    async def leave(self, error: BaseException | None) -> None:
        """End it: commit, or undo if the caller's body raised `error`. Raises the typed refusal if there was one."""


class NamedValues(Marks, Protocol):
    """Small values under names, for drills and for programs that have no store."""

    async def read(self, credential: Credential, name: str) -> Versioned:
        """Announce, then read."""

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        """Read without a lease; Contended when the mark is still below `at_least`."""

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        """Write if admitted; returns the new version. `expect`: only if the version is still that."""

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        """Write several names in one atomic step: all admitted, or none. Unsupported without the trait `many-names`."""


class Operator:
    """What operators do with a guard. A method that the guard does not override raises Unsupported.

    `table` selects one guarded table; None means all. Guards without tables accept only None.
    """

    kind = "this guard"
    """The subject of the error message: "this guard has no ..."."""

    async def status(self, table: str | None = None, quiet_for: float = QUIET_SECONDS) -> DatabaseStatus:
        """How far the rollout has come; the next stage counts as safe after `quiet_for` quiet seconds."""
        raise self._lacks("status")

    async def figures(self) -> DatabaseStatus:
        """The status without advice, and without what takes longer the more marks there are (see `extent`)."""
        return await self.status()

    async def extent(self) -> tuple[int, int]:
        """About how many names have a mark, and the highest token; 0: it would take too long to know."""
        guards = (await self.status()).guards
        return sum(guard.marks for guard in guards), max((guard.highest for guard in guards), default=0)

    async def roles(self) -> frozenset[str]:
        """The names of the database's users."""
        raise self._lacks("list of users")

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        """The newest recorded decisions, oldest first."""
        raise self._lacks("audit")

    async def counts(self, table: str | None = None) -> list[DecisionCount]:
        """How many decisions of each kind there were, without plain admissions."""
        return [count for guard in (await self.status(table)).guards for count in guard.counts]

    async def history(self, table: str | None = None, limit: int = 100) -> list[Change]:
        """The newest changes by operators, oldest first."""
        raise self._lacks("history of changes")

    async def pending(self, table: str | None, wait: float = 0.0) -> tuple[str, ...]:
        """The transactions that the last mode change does not bind, after up to `wait` seconds for them to end."""
        return ()

    async def modes(self, table: str | None = None) -> dict[str, str]:
        """The mode of each pattern that has one."""
        raise self._lacks("modes")

    async def set_mode(
        self, table: str | None, mode: str, pattern: str = "*", wait: float = 0.0
    ) -> tuple[str, ...]:
        """Set the mode of the names that match; returns what `pending` returns after that."""
        raise self._lacks("modes")

    async def adopt(self, realm: str) -> None:
        """Trust this authority from now on, and no other."""
        raise self._lacks("realm to adopt")

    async def waiting_messages(self) -> dict[str, int]:
        """How many messages wait in each outbox beside the guards; none where there are no tables."""
        return {}

    async def unset_mode(self, table: str | None, pattern: str) -> bool:
        """Delete the mode of a pattern; False if it had none."""
        raise self._lacks("modes that can be unset")

    async def override(self, table: str | None, pattern: str, seconds: float, why: str) -> Override:
        """Admit every operation on the names that match for `seconds`, whatever their mode."""
        raise self._lacks("overrides")

    async def end_overrides(self, table: str | None, pattern: str | None) -> int:
        """End overrides now; returns how many."""
        raise self._lacks("overrides")

    async def reset(self, name: str, why: str) -> int | None:
        """Delete the mark of a name; returns its token, None if it had none."""
        raise self._lacks("reset of a mark")

    async def drop_marks(self, realm: str, below: int) -> int:
        """Delete the marks below a token, and refuse every lower token from now on; returns how many were deleted."""
        raise self._lacks("floor below which marks can be dropped")

    async def trust(self, change: dict[str, float | None]) -> None:
        """Change what the guard accepts: `max_jump`, `sample`, `patience`."""
        raise self._lacks("settings of trust")

    async def grant_monitor(self, role: str, *, revoke: bool = False) -> None:
        """Let a role of the database read what operators read, and change nothing; or no longer."""
        raise self._lacks("roles")

    async def policy(self, partition: str) -> dict[str, Any]:
        """A policy of the store's own access control that makes the guard harder to bypass. `partition`: of AWS."""
        raise self._lacks("policy to print")

    async def upgrade(self) -> list[str]:
        """Upgrade what is installed to this version of fenced; returns the guarded tables."""
        raise self._lacks("schema to upgrade")

    async def tidy(self, keep: int = 10_000) -> dict[str, int]:
        """Summarise all but the newest `keep` records, and delete what has expired; returns how many of each."""
        raise self._lacks("tidying")

    async def keys(self) -> list[KeyView]:
        """The keys that may sign stamps, and those that were revoked."""
        raise self._lacks("proofs")

    async def add_key(self, key: VerifyingKey) -> None:
        """Accept proofs that this key made."""
        raise self._lacks("proofs")

    async def revoke_key(self, key_id: str) -> None:
        """Stop accepting proofs that this key made."""
        raise self._lacks("proofs")

    async def require_proofs(self, required: bool) -> None:
        """Refuse stamps without a proof, or stop refusing them."""
        raise self._lacks("proofs")

    def _lacks(self, what: str) -> Unsupported:
        return Unsupported(f"{self.kind} has no {what}")
