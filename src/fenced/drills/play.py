"""The verbs of the stories. Every step waits for the previous one, so a slow machine only makes a story slower."""

from __future__ import annotations

from typing import Any

from fenced.drills.declared import Cast
from fenced.drills.history import History
from fenced.drills.processes import PATIENCE_SECONDS, CouldNotRun, HolderProcess, HolderProcesses, Message
from fenced.drills.programs import NotShown
from fenced.drills.relay import Proxy
from fenced.drills.resource import stock_of
from fenced.drills.stage import DrillStage
from fenced.drills.story import AUTHORITY, Log, Tone
from fenced.drills.terminal import Screen
from fenced.runtime.clocks import now

_TICK_SECONDS = 0.1
_INDENT = " " * 11
"""Puts the progress line below the actors of the steps."""


class Play:
    """One run of a drill: its stage, its holders, what they did so far."""

    def __init__(self, stage: DrillStage, holders: HolderProcesses, log: Log, screen: Screen) -> None:
        self.stage = stage
        self.holders = holders
        self.log = log
        self.screen = screen
        self.name = stage.names[0]
        self.ttl = stage.ttl
        self._granted: dict[str, Message] = {}
        self._paused: dict[str, float] = {}

    @property
    def history(self) -> History:
        return self.log.history

    def token(self, holder: str) -> int:
        return int(self._granted[holder]["token"])

    def note(self, who: str, text: str, label: str = "", tone: Tone = "note") -> None:
        """A step that happens now."""
        self.log.add(now(), who, who, tone, text, label)

    # What the drill says to its holders, and waits to hear.

    def tell(self, holder: str, command: str, **details: Any) -> HolderProcess:
        process = self.holders[holder]
        process.send(command, **details)
        return process

    def ask(
        self,
        holder: str,
        command: str,
        answer: str | tuple[str, ...],
        within: float = PATIENCE_SECONDS,
        **details: Any,
    ) -> Message:
        """Send a command, and wait for its answer."""
        return self.holders.expect(self.tell(holder, command, **details), answer, within)

    def hear(self, holder: str, event: str | tuple[str, ...], within: float = PATIENCE_SECONDS) -> Message:
        return self.holders.expect(self.holders[holder], event, within)

    def sleep(self, ttls: float) -> None:
        self.holders.sleep_until(now() + ttls * self.ttl)

    # A holder takes the lease, reads and writes.

    def start(self, holder: str, authority: str | None = None, cast: Cast | None = None) -> None:
        """Start a holder in the middle of a story, on an authority of its own if there is one."""
        self.holders.start([self.stage.how_to_start(holder, cast or Cast(), authority)])

    def take(self, holder: str, *, name: str | None = None, how: str = "acquire", read: bool = True) -> None:
        """`how`: `acquire` a lease that is renewed, `ask` for one that is not, `adopt` that of `fenced run`."""
        details: dict[str, object] = {} if how == "adopt" else {"name": name or self.name}
        if how == "acquire":
            details["wait"] = PATIENCE_SECONDS
        self.tell(holder, how, **details)
        self.log.add_asking(holder, self.hear(holder, "asking"))
        self.granted(holder)
        if read:
            self.read(holder)

    def granted(self, holder: str, within: float = PATIENCE_SECONDS) -> Message:
        message = self._granted[holder] = self.hear(holder, "granted", within)
        self.log.add_granted(holder, message)
        return message

    def read(self, holder: str) -> None:
        """Let a holder announce and read; both must be admitted."""
        self.tell(holder, "read")
        if self.stage.guarded:
            self.log.add_announced(holder, _admitted(self.hear(holder, "operation")))
        self.log.add_read(holder, _admitted(self.hear(holder, "operation")))

    def write(self, holder: str, amount: int) -> None:
        """Let a holder write; it must be admitted."""
        self.log.add_writing(holder, self.ask(holder, "write", "writing", amount=amount))
        self.log.add_written(holder, _admitted(self.hear(holder, "operation")))

    def late_write(self, holder: str = "A", amount: int = 1, *, sent: bool = False) -> None:
        """Let a holder write that may be refused. `sent`: the command is in its pipe already."""
        if not sent:
            self.tell(holder, "write", amount=amount)
        self.log.add_writing(holder, self.hear(holder, "writing"))
        self.late_answer(holder)

    def late_answer(self, holder: str = "A", *, not_before: float = 0.0) -> None:
        """The outcome of a write that may be refused. It reached the resource `not_before` that moment."""
        answer = self.hear(holder, "operation")
        answer["began"] = max(answer["began"], not_before)
        self.log.add_written(holder, answer, late=True)
        if answer["decision"] not in ("admitted", "refused"):
            raise NotShown(f"the late write was not decided: {answer.get('why')}")

    def may(self, holder: str, command: str, **details: Any) -> bool:
        """Let a holder announce and read where it may be refused; False if it was."""
        self.tell(holder, command, **details)
        for _ in range(2 if self.stage.guarded else 1):
            answer = self.hear(holder, "operation")
            if answer["decision"] == "refused":
                self.log.add_written(holder, answer, late=True)
                return False
            self.log.take(holder, answer)
        return True

    # Faults of processes.

    def stop(self, holder: str = "A", text: str = "is stopped in the middle of its work (SIGSTOP)") -> None:
        stopped = self.stage.stop_outside_transactions(self.holders[holder])
        self.log.add(stopped, holder, holder, "stop", text, "stopped (SIGSTOP)")

    def wake(
        self,
        holder: str = "A",
        text: str = "wakes up (SIGCONT) and goes on where it was",
        *,
        below: bool = False,
    ) -> None:
        """`below`: only what the process has started."""
        woken = now()
        self.log.paused(holder, self._granted[holder], self.holders[holder].resume(below=below), woken)
        self.log.add(woken, holder, holder, "wake", text, "wakes up (SIGCONT)")

    def begin_fault(self, text: str, label: str, holder: str = "A") -> None:
        """From now on the holder does not run, or is cut off; `end_fault` ends the bar in the picture."""
        self._paused[holder] = now()
        self.note(holder, text, label, "stop")

    def end_fault(self, text: str, label: str, holder: str = "A") -> None:
        moment = now()
        self.log.paused(holder, self._granted[holder], self._paused.pop(holder), moment)
        self.log.add(moment, holder, holder, "wake", text, label)

    def relay(self, what: str) -> Proxy:
        return self.stage.relay(what)

    # The other one takes over.

    def take_over(self, *, amount: int = 3, read: bool = True) -> None:
        """B asks while A has the lease, waits for its end, reads and writes. NotShown if A keeps its lease."""
        expires = self.expires()
        patience = self.ttl + PATIENCE_SECONDS
        asked = self.ask("B", "acquire", "asking", name=self.name, wait=patience)
        self.log.add_asking("B", asked, busy=True)
        self.wait_for_expiry(expires)
        taken = self._granted["B"] = self._until_granted(expires + patience)
        self.add_expiry(min(expires, taken["time"]))
        self.log.add_granted("B", taken)
        if read:
            self.read("B")
            self.write("B", amount)

    def expires(self) -> float:
        """When A's lease ends, unless it is renewed. Some authorities say it only roughly."""
        began: float = self._granted["A"]["began"]
        return max(self.stage.expiry(self.name, self.token("A")), began + self.ttl)

    def _until_granted(self, until: float) -> Message:
        """B's grant. If A says meanwhile that its fault is over, it may go on renewing: then B gets nothing."""
        kept: list[tuple[HolderProcess, Message]] = []
        while (received := self.holders.next_message(until)) is not None:
            process, message = received
            if process.holder == "B" and message["event"] == "granted":
                self.holders.keep(kept)
                return message
            if process.holder == "B":
                raise NotShown(f"B was not granted the lease: {message.get('why', message['event'])}")
            kept.append(received)
            until = min(until, now() + 2 * self.ttl)
        raise NotShown("the fault was over before the lease of A was: nobody took over")

    def wait_for_expiry(self, expires: float) -> None:
        """Wait until A's lease should have ended by the authority's clock."""
        while (left := expires - now()) > 0:
            self.screen.tick(f"{_INDENT}A's lease ends in {left:.1f} s")
            self.holders.sleep_until(now() + min(left, _TICK_SECONDS))

    def add_expiry(self, time: float, prefix: str = "") -> None:
        """Add the end of A's lease, once B is granted: ZooKeeper says only when it ends at the latest."""
        text = f"{prefix}A's lease has expired: nobody renewed it"
        self.log.add(time, AUTHORITY, AUTHORITY, "expiry", text, "A's lease expires")

    def conclude(self) -> None:
        """Read the final value, and let the holders release what they have."""
        for holder in self._granted:
            if holder in self.holders.processes:
                self.tell(holder, "release")
        orders = self.stage.read_finals(self.history)[self.name]
        there = {each for each, _ in orders}
        gone = [each.holder for each in self.history.writes("admitted") if each.update not in there]
        self.log.add_final(now(), stock_of(orders), gone=gone)


def _admitted(message: Message) -> Message:
    if message["decision"] != "admitted":
        raise CouldNotRun(why_not(message))
    return message


def why_not(message: Message) -> str:
    """Why an operation that should have been admitted was not."""
    why = message.get("why")
    if why == "foreign":
        return "the guard trusts another authority; name that one with --authority"
    return f"an honest {message['kind']} was {message['decision']}: {why}"
