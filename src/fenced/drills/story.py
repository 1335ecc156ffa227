"""The steps of a drill, for people to read: each step is a sentence and an arrow in a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fenced.drills.history import Grant, History, Operation, Pause, RenewalEvent
from fenced.drills.processes import Message

Tone = Literal[
    "ask",
    "busy",
    "grant",
    "announce",
    "read",
    "write",
    "admitted",
    "refused",
    "corrupt",
    "stop",
    "wake",
    "expiry",
    "held_up",
    "late",
    "ended",
    "final",
    "note",
]
"""The kind of a step; it determines colour and arrow."""

AUTHORITY = "authority"
DATABASE = "database"


@dataclass(frozen=True, slots=True)
class StoryStep:
    """One event. Without `text` it appears only in the picture, without `label` only in the list."""

    time: float
    actor: str
    target: str
    tone: Tone
    text: str = ""
    label: str = ""


@dataclass(slots=True)
class Log:
    """The history of one drill and its steps, built from the messages of the holders."""

    start: float
    guarded: bool = True
    on_step: Callable[[StoryStep], None] = lambda step: None
    history: History = field(default_factory=History)
    steps: list[StoryStep] = field(default_factory=list)

    def add(self, time: float, actor: str, target: str, tone: Tone, text: str = "", label: str = "") -> None:
        step = StoryStep(time - self.start, actor, target, tone, text, label)
        self.steps.append(step)
        self.on_step(step)

    def take(self, holder: str, message: Message) -> None:
        """Record a message of a holder in the history."""
        match message["event"]:
            case "granted":
                self.history.grants.append(
                    Grant(message["name"], message["token"], holder, message["began"], message["time"])
                )
            case "operation":
                self.history.operations.append(_operation(holder, message))
            case "renewed":
                self.history.renewals.append(_renewal(holder, message))

    def paused(self, holder: str, message: Message, began: float, ended: float) -> None:
        """Record that `holder` was paused after it sent `message`."""
        self.history.pauses.append(Pause(holder, message["name"], message["token"], began, ended))

    # The sentences of the scenarios with two holders.

    def add_asking(self, holder: str, message: Message, *, busy: bool = False) -> None:
        name = message["name"]
        text = "asks for it too, and waits in line" if busy else f"asks for the lease on {name}"
        self.add(message["time"], holder, AUTHORITY, "busy" if busy else "ask", text, f"ask for {name}")

    def add_granted(self, holder: str, message: Message) -> None:
        self.take(holder, message)
        token = message["token"]
        text = f"grants it to {holder} with token {token}"
        self.add(message["time"], AUTHORITY, holder, "grant", text, f"granted, token {token}")

    def add_announced(self, holder: str, message: Message) -> None:
        self.take(holder, message)
        self.add(message["time"], holder, DATABASE, "announce", "", f"announce token {message['token']}")

    def add_read(self, holder: str, message: Message) -> None:
        self.take(holder, message)
        token, stock = message["token"], message["stock"]
        reads = f"reads: stock {stock}"
        text = f"announces token {token}, then {reads}" if self.guarded else reads
        self.add(message["time"], DATABASE, holder, "read", "", f"read: stock {stock}")
        self.add(message["time"], holder, holder, "read", text)

    def add_writing(self, holder: str, message: Message) -> None:
        token, stock = message["token"], message["stock"]
        text = f"sells {message['amount']}, writes: stock {stock}, with token {token}"
        self.add(message["time"], holder, DATABASE, "write", text, f"write stock {stock}, token {token}")

    def add_written(self, holder: str, message: Message, *, late: bool = False) -> None:
        self.take(holder, message)
        tone, text, label = self._decision(holder, message, late)
        self.add(message["time"], DATABASE, holder, tone, text, label)

    def add_final(self, moment: float, stock: int, *, gone: list[str]) -> None:
        """The last line: what the database holds. `gone`: the holders whose acknowledged sales are missing."""
        writes = self.history.writes("admitted")
        if not gone:
            text = (
                f"holds stock {stock}, as {writes[-1].holder} left it" if writes else f"holds stock {stock}"
            )
            self.add(moment, DATABASE, DATABASE, "final", text, f"stock {stock}")
            return
        text = f"holds stock {stock}: what {gone[0]} sold is back on the shelf"
        self.add(moment, DATABASE, DATABASE, "corrupt", text, f"stock {stock}: {gone[0]}'s sale is gone")

    def _decision(self, holder: str, message: Message, late: bool) -> tuple[Tone, str, str]:
        token, mark = message["token"], message["mark"]
        match message["decision"], late:
            case "refused", _ if message.get("why") == "reused":
                return "refused", f"REFUSED: token {token} was seen from another grant", "refused: reused"
            case "refused", _ if mark == token:
                text = f"REFUSED: a later write with token {token} has been seen"
                return "refused", text, "refused: out of sequence"
            case "refused", _:
                seen = f"token {mark} has been seen" if mark is not None else "a newer one has been seen"
                return (
                    "refused",
                    f"REFUSED: token {token} is stale, {seen}",
                    f"refused: token {token} < mark {mark}",
                )
            case "admitted", True:
                free = "nobody compares tokens" if mark is None else "the guard does not enforce"
                return (
                    "corrupt",
                    f"takes the write of token {token}: {free}",
                    "taken: nobody compares" if mark is None else "let through",
                )
            case "admitted", False:
                text = f"admits it; the mark for this name is now token {token}" if mark else "takes it"
                return "admitted", text, f"admitted, mark {token}" if mark else "done"
            case decision, _:
                return "note", f"{decision}: {message.get('why')}", decision


def _operation(holder: str, message: Message) -> Operation:
    return Operation(
        holder=holder,
        kind=message["kind"],
        name=message["name"],
        stamp=message["stamp"],
        token=message["token"],
        decision=message["decision"],
        began=message["began"],
        time=message["time"],
        why=message.get("why"),
        mark=message["mark"],
        version=message.get("version"),
        update=message["update"],
    )


def _renewal(holder: str, message: Message) -> RenewalEvent:
    return RenewalEvent(
        holder=holder,
        name=message["name"],
        token=message["token"],
        answer=message["answer"],
        began=message["began"],
        time=message["time"],
    )
