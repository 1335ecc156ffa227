"""The gate: lets requests through to the upstream in the order of their tokens, by permits in a store.

The store is any guard with values under names. One step judges the stamp, raises the mark and writes the permit,
because a guard decides atomically with its write. A proxy that is alone keeps its permits: a request with the newest
token then costs no step. Several proxies give a permit back when it has not been used for LINGER_SECONDS.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from fenced.errors import Conflict, Contended, FencedError, Misconfigured, Refused, Unavailable
from fenced.proxy.order import BEAT_SECONDS, SEND_SECONDS, InFlight, Permit, Watch
from fenced.values.contracts import NamedValues, Runtime, Wakeup
from fenced.values.model import Credential, Stamp

LINGER_SECONDS = 0.05
"""How long several proxies let requests enter by a permit before they look at the store again."""
POLL_SECONDS = 0.002
POLL_SECONDS_MAX = 0.1
"""How often a waiter looks whether the permits of other proxies have gone: seldom after a while."""
UNSTAMPED_SECONDS = 1.0
"""How often the store is asked what it does about requests without a stamp on one name."""
CLOSE_SECONDS = 5.0
"""How long a proxy that stops takes to give its permits back, and to do what an operator wants."""
STAMP = b"fenced-stamp"
SEQ_DIGITS = 15
ZERO = ord("0")
LINES_MAX = 50_000
"""How many idle names are remembered."""


class Line:
    """What this proxy knows of one name. Its store steps run one at a time."""

    __slots__ = (
        "fresh_until",
        "in_flight",
        "locked",
        "name",
        "open",
        "open_text",
        "overtaken",
        "queue",
        "tended",
        "verified",
        "version",
        "waiters",
        "wanted",
        "watch",
    )

    def __init__(self, name: str, settle: float) -> None:
        self.name = name
        self.in_flight = InFlight()
        self.version: int | None = None
        """Of the value that `in_flight` was read from; None: it must be read first."""
        self.open: Stamp | None = None
        """Requests with this token enter at once, until `fresh_until`."""
        self.open_text = (b"", b"")
        """The header of such a request, without the seq in its middle."""
        self.fresh_until = -math.inf
        self.verified: dict[int, float] = {}
        """By token: when the last step that renewed our permit began."""
        self.wanted: dict[int, int] = {}
        """By token: how many requests are in flight here or wait. A permit without any is idle."""
        self.overtaken: dict[int, float] = {}
        """By token of requests that are in flight here: since when a newer one is known."""
        self.watch = Watch(settle)
        self.waiters: set[Wakeup] = set()
        self.locked = False
        self.queue: deque[Wakeup] = deque()
        self.tended = False

    def learn(self, version: int, found: InFlight, now: float) -> None:
        """What the store has now. The time by which others' permits are judged begins when they are seen."""
        self.version, self.in_flight = version, found
        self.watch.look(found.permits, now)
        newest = found.newest.token if found.newest is not None else 0
        self.overtaken = {token: self.overtaken.get(token, now) for token in self.wanted if token < newest}

    def renewed(self, proxy: str, before: InFlight, began: float) -> None:
        """Note which permits of ours a step has renewed. One that others have deleted permits nothing any more."""
        self.verified = {
            permit.token: self.verified.get(permit.token, -math.inf) if permit in before.permits else began
            for permit in self.in_flight.permits
            if permit.proxy == proxy and not permit.unknown
        }


class Gate:
    """Lets requests through in order. All methods belong to one thread or event loop."""

    def __init__(
        self,
        store: NamedValues,
        runtime: Runtime,
        *,
        settle: float,
        alone: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.store = store
        self.proxy = runtime.secret()[:16]
        self.alone = alone
        self.waiting = 0
        self.unknown = 0
        self._runtime = runtime
        self._settle = settle
        self._report = report
        self._lines: dict[str, Line] = {}
        self._realm: str | None = None
        """The realm of a stamp that the store has admitted."""
        self._unstamped: dict[str, tuple[float, FencedError | None]] = {}
        self._closed = False

    async def open(self) -> None:
        """Open the store, and refuse one whose rule is not `retry`."""
        await self.store.open()
        status = await self.store.operate(lambda operator: operator.status())
        for guard in status.guards:
            if guard.template == "{name}" and guard.rule != "retry":
                raise Misconfigured(
                    f"the rule of {self.store.url} is {guard.rule}; a proxy repeats the stamps of its requests, so "
                    "it needs a store with the rule retry"
                )

    def enter_by_text(self, name: str, header: tuple[bytes, bytes]) -> tuple[Line, int] | None:
        """Let a request with the newest stamp through, if no step is needed; otherwise None, and `enter` decides.

        The stamp is compared as a text, whose parts before and after its seq are those of the newest: a stamp has one
        way to be written.
        """
        line = self._lines.get(name)
        if line is None or (newest := line.open) is None or header[0] != STAMP:
            return None
        (before, after), text = line.open_text, header[1]
        if not text.startswith(before) or not text.endswith(after):
            return None
        seq = text[len(before) : -len(after)]
        if not (seq.isdigit() and len(seq) <= SEQ_DIGITS and seq[0] != ZERO) and seq != b"0" and seq != b"-":
            return None
        if not self.alone and self._runtime.now() >= line.fresh_until:
            return None
        line.wanted[newest.token] = line.wanted.get(newest.token, 0) + 1
        return line, newest.token

    async def enter(self, name: str, stamp: Stamp, until: float) -> Line | None:
        """Wait until a request may go to the upstream. The caller then calls `answered` or `doubt` once.

        None: the store lets it through although its stamp is bad, because of the mode; it is in no order. Raises the
        refusal, or Contended if older requests are still in flight at `until`: the mark has risen nevertheless.
        """
        line = self._line(name)
        # Counted before anything is awaited: the line is not forgotten, and its permit is not taken for an idle one.
        line.wanted[stamp.token] = line.wanted.get(stamp.token, 0) + 1
        self.waiting += 1
        entered = False
        try:
            entered = await self._entered(line, stamp, until)
        finally:
            self.waiting -= 1
            if not entered:
                self.answered(line, stamp.token)
        return line if entered else None

    def may_send(self, line: Line, token: int) -> bool:
        """Whether other proxies still wait for our permit: later they may take this one for dead."""
        return self.alone or self._runtime.now() - line.verified.get(token, -math.inf) < SEND_SECONDS

    def overdue(self, line: Line, token: int, overtime: float) -> bool:
        """Whether a newer token has been known for `overtime` seconds: then a request with this one must end."""
        return self._runtime.now() - line.overtaken.get(token, math.inf) >= overtime

    async def _entered(self, line: Line, stamp: Stamp, until: float) -> bool:
        pause = POLL_SECONDS
        while True:
            await self._lock(line, until)
            try:
                decided = await self._step(line, stamp, until)
            finally:
                self._unlock(line)
            if decided is not None:
                return decided
            now = self._runtime.now()
            if now >= until:
                raise Contended(
                    f"{line.name}: requests with an older token may still be running at the upstream; try again later"
                )
            foreign = any(
                permit.proxy != self.proxy or permit.unknown for permit in line.in_flight.others(stamp.token)
            )
            await self._wait(line, min(until, now + pause) if foreign else until)
            pause = min(pause * 2, POLL_SECONDS_MAX)

    async def _step(self, line: Line, stamp: Stamp, until: float) -> bool | None:
        """One look at the store. True: enter; False: let through without order; None: wait, and look again.

        Safe because our permit is in the store before this looks for others: of two proxies with two tokens either
        the older one finds the mark risen, or the newer one finds the older one's permit.
        """
        while True:
            await self._read(line)
            if not self._known(line, stamp) and not await self._admits(line, stamp):
                return False
            if not await self._write_permit(line, stamp):
                if self._runtime.now() >= until:
                    raise Contended(f"{line.name}: other proxies were quicker; try again")
                continue
            self._tend(line)
            # Nothing is awaited between this look and the wait that may follow: no wake-up is lost.
            if self._blocking(line, stamp.token):
                return None
            line.open = stamp
            line.open_text = _around_seq(stamp)
            line.fresh_until = math.inf if self.alone else line.verified[stamp.token] + LINGER_SECONDS
            return True

    def _known(self, line: Line, stamp: Stamp) -> bool:
        """Whether the store will admit the stamp, as far as can be said here: it decides again when we write."""
        newest = line.in_flight.newest
        if stamp.realm != self._realm or line.name not in stamp.names:
            return False
        if newest is None or stamp.token > newest.token:
            return True
        return (stamp.token, stamp.grant) == (newest.token, newest.grant)

    async def _admits(self, line: Line, stamp: Stamp) -> bool:
        """Ask the store, which refuses, or lets a bad stamp through because of the mode. True: the mark is ours."""
        mark = await self.store.mark(line.name)
        while True:
            before = mark
            await self.store.announce(Credential((stamp.announcing(),), (line.name,)))
            mark = await self.store.mark(line.name)
            if mark is not None and (mark.token, mark.grant) == (stamp.token, stamp.grant):
                self._realm = stamp.realm
                return True
            if mark == before:  # the stamp is bad, and was let through
                return False
            # Otherwise a newer one has been announced since: this one is judged again.

    def _blocking(self, line: Line, token: int) -> list[Permit]:
        """The permits of other tokens under which something may be running."""
        now, blocking = self._runtime.now(), []
        for permit in line.in_flight.others(token):
            if permit.proxy == self.proxy and not permit.unknown:
                if permit.token in line.wanted:
                    blocking.append(permit)
            elif now < line.watch.over_at(permit):
                blocking.append(permit)
        return blocking

    async def _write_permit(self, line: Line, stamp: Stamp) -> bool:
        """Write our permit, unless it is there. False: another proxy wrote first, and everything is read again."""
        found, blocking = line.in_flight, self._blocking(line, stamp.token)
        if stamp.token in line.verified and found.newest is not None and found.newest.grant == stamp.grant:
            age = self._runtime.now() - line.verified[stamp.token]
            if self.alone or (blocking and age < BEAT_SECONDS):
                return True
        self._close_to_older(line, stamp)
        over = [permit for permit in found.others(stamp.token) if permit not in blocking]
        return await self._write(line, found.without(over).admitted(stamp, self.proxy), stamp)

    def _close_to_older(self, line: Line, stamp: Stamp) -> None:
        """No older request enters while a step runs that may delete its permit as idle."""
        if line.open is not None and line.open.token != stamp.token:
            line.open = None

    async def _write(self, line: Line, wanted: InFlight, stamp: Stamp) -> bool:
        """One durable step. False: the value has changed meanwhile, or whether it was written is unknown."""
        began, version = self._runtime.now(), line.version
        line.version = None  # until the outcome is known
        credential = Credential((stamp,), (line.name,))
        try:
            line.version = await self.store.write(credential, line.name, wanted.packed(), expect=version)
        except (Conflict, Contended):
            return False
        before = line.in_flight
        line.learn(line.version, wanted, self._runtime.now())
        line.renewed(self.proxy, before, began)
        return True

    async def _read(self, line: Line) -> None:
        """Read the value, unless we wrote it last. Others' writes make ours fail, so an old value does no harm."""
        newest = line.in_flight.newest
        if line.version is None or newest is None or line.in_flight.others(newest.token):
            value = await self.store.peek(line.name)
            found = InFlight.unpacked(line.name, value.value)
            line.learn(value.version, found, self._runtime.now())
            line.renewed(self.proxy, found, -math.inf)

    def answered(self, line: Line, token: int) -> None:
        """The upstream has answered the whole request, or it was never sent."""
        if line.wanted[token] > 1:
            line.wanted[token] -= 1
            return
        del line.wanted[token]
        if line.waiters:
            self._notify(line)
        self._tend(line)

    def doubt(self, line: Line, token: int) -> None:
        """Whether the upstream carries out the request is unknown: newer tokens wait for `settle` seconds."""
        self.unknown += 1

        async def noted() -> None:
            began = self._runtime.now()
            if not await self._noted(line, lambda found: found.doubted(self.proxy, token)):
                # Our permit stays for as long as the outcome is not settled.
                await self._runtime.wait(self._runtime.wakeup(), began + self._settle)
            self.answered(line, token)

        self._runtime.spawn(noted, "fenced-proxy-doubt")

    async def settle(self, name: str) -> tuple[list[Permit], list[Permit]]:
        """An operator says that no request of this name runs at the upstream whose outcome is unknown.

        Returns the permits that were deleted, and those that stay because their proxy may be alive: it has not been
        silent for SILENT_SECONDS while this one looked. Safe because a proxy that was silent for so long sends nothing.
        """
        line, settled = self._line(name), list[Permit]()

        def change(found: InFlight) -> InFlight:
            now = self._runtime.now()
            settled[:] = [
                permit
                for permit in found.permits
                if permit.unknown or (permit.proxy != self.proxy and line.watch.silent(permit, now))
            ]
            return found.without(settled)

        if not await self._noted(line, change, self._runtime.now() + CLOSE_SECONDS):
            raise Unavailable(f"{name}: the store could not be changed; try again")
        self._notify(line)
        return settled, [permit for permit in line.in_flight.permits if permit.proxy != self.proxy]

    async def unstamped(self, name: str) -> None:
        """Raise the refusal of a request without a stamp if the mode refuses it. The store counts it, once a second."""
        now = self._runtime.now()
        at, refusal = self._unstamped.get(name, (-math.inf, None))
        if now - at >= UNSTAMPED_SECONDS:
            refusal = await self._judged_unstamped(name)
            if len(self._unstamped) >= LINES_MAX:
                self._unstamped.clear()
            self._unstamped[name] = now, refusal
        if refusal is not None:
            raise refusal

    async def _judged_unstamped(self, name: str) -> FencedError | None:
        line = self._line(name)
        await self._lock(line, math.inf)
        try:
            while True:
                await self._read(line)
                version, line.version = line.version, None
                with suppress(Conflict, Contended):
                    line.version = await self.store.write(None, name, line.in_flight.packed(), expect=version)
                    return None
        except Refused as refused:
            return refused
        finally:
            self._unlock(line)

    async def close(self) -> None:
        """Give idle permits back, so that another proxy need not wait for them, and close the store."""
        self._closed = True
        until = self._runtime.now() + CLOSE_SECONDS
        for line in list(self._lines.values()):
            if line.in_flight.permits and not await self._noted(line, partial(self._renewed, line), until):
                break  # the store cannot be used, or there are too many: the others wait for these permits
        await self.store.close()

    # Permits that nobody uses

    def _idle(self, line: Line, found: InFlight) -> list[Permit]:
        return [
            permit
            for permit in found.permits
            if permit.proxy == self.proxy and not permit.unknown and permit.token not in line.wanted
        ]

    def _tend(self, line: Line) -> None:
        """Renew the permits of this line while they are used, and give them back afterwards."""
        if self.alone or line.tended or self._closed:
            return
        line.tended = True
        self._runtime.spawn(lambda: self._tending(line), "fenced-proxy-tending")

    async def _tending(self, line: Line) -> None:
        while not self._closed:
            now = self._runtime.now()
            oldest = min(line.verified.values(), default=-math.inf)
            due = oldest + BEAT_SECONDS if line.wanted else line.fresh_until
            if now < due:
                await self._wait(line, due)
                continue
            noted = await self._noted(line, partial(self._renewed, line))
            if not line.wanted:
                break
            if not noted or not line.verified:
                await self._wait(line, now + BEAT_SECONDS)
        # Nothing is awaited between the last look at `wanted` and this: a later request tends the line again.
        line.tended = False

    def _renewed(self, line: Line, found: InFlight) -> InFlight:
        """Our permits with another beat, without the idle ones."""
        idle = self._idle(line, found)
        if idle:
            line.open = None
        permits = [
            permit._replace(beat=permit.beat + 1)
            if permit.proxy == self.proxy and not permit.unknown
            else permit
            for permit in found.permits
            if permit not in idle
        ]
        return InFlight(found.newest, tuple(permits))

    async def _noted(
        self, line: Line, change: Callable[[InFlight], InFlight], until: float | None = None
    ) -> bool:
        """Change the permits under the newest stamp. False: the store refuses it, or could not be reached for long."""
        pause = POLL_SECONDS
        until = self._runtime.now() + self._settle if until is None else until
        refused: Stamp | None = None
        while self._runtime.now() < until:
            await self._lock(line, math.inf)
            try:
                # Another proxy may have raised the mark: our stamp would be refused as stale.
                line.version = None
                await self._read(line)
                newest = line.in_flight.newest
                if newest is None:
                    return True
                if newest == refused:  # something else than a proxy has raised the mark
                    self._report(
                        f"{line.name}: a permit could not be changed: the mark is above what proxies know"
                    )
                    return False
                wanted = change(line.in_flight)
                if wanted == line.in_flight or await self._write(line, wanted, newest):
                    return True
            except Refused:
                refused = newest
            except FencedError as error:
                self._report(f"{line.name}: a permit could not be changed yet: {error}")
            finally:
                self._unlock(line)
            await self._runtime.wait(self._runtime.wakeup(), self._runtime.now() + pause)
            pause = min(pause * 2, POLL_SECONDS_MAX)
        return False

    # Lines, their locks and their waiters

    def _line(self, name: str) -> Line:
        line = self._lines.get(name)
        if line is None:
            if len(self._lines) >= LINES_MAX:
                self._forget_idle()
            line = self._lines[name] = Line(name, self._settle)
        return line

    def _forget_idle(self) -> None:
        # A permit of ours that is found again later is idle: nothing is in flight under it.
        self._lines = {
            name: line
            for name, line in self._lines.items()
            if line.wanted or line.locked or line.tended or line.queue
        }

    async def _lock(self, line: Line, until: float) -> None:
        """One step at a time for each line. The lock is handed over in order, so nobody starves."""
        if not line.locked:
            line.locked = True
            return
        # Tasks of a proxy are cancelled only when it stops. So who was handed the lock takes it, and unlocks.
        mine = self._runtime.wakeup()
        line.queue.append(mine)
        if not await self._runtime.wait(mine, None if until == math.inf else until) and mine in line.queue:
            line.queue.remove(mine)
            raise Contended(f"{line.name}: other requests were ahead; try again")

    def _unlock(self, line: Line) -> None:
        if line.queue:
            line.queue.popleft().set()  # stays locked, for the next one
        else:
            line.locked = False

    def _notify(self, line: Line) -> None:
        # All of them: each looks again under the lock, so a wake-up too many costs a look, and one too few a second.
        for wakeup in line.waiters:
            wakeup.set()
        line.waiters.clear()

    async def _wait(self, line: Line, until: float) -> None:
        """Until something has changed here, or `until`."""
        # Nothing was awaited since its caller looked, so what changes from now on finds it here.
        mine = self._runtime.wakeup()
        line.waiters.add(mine)
        await self._runtime.wait(mine, until)
        line.waiters.discard(mine)


def _around_seq(stamp: Stamp) -> tuple[bytes, bytes]:
    before, _, after = f'"{stamp._replace(seq=None)}"'.encode().partition(b":-:")
    return before + b":", b":" + after
