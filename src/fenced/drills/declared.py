"""What a drill is: a name, what it teaches, how its holders are started, its fault, and which facts decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fenced.drills.history import Findings, History, Verdict

if TYPE_CHECKING:
    from fenced.drills.play import Play

Reaches = Literal["directly", "by relay", "by both"]
"""How a holder reaches the resource; `by both`: on two connections, of which one goes through the relay."""


@dataclass(frozen=True, slots=True)
class Cast:
    """How one holder is started."""

    authority_by_relay: bool = False
    guard: Reaches = "directly"
    slow_clock: bool = False
    java: bool = False
    under_run: bool = False
    """As the command of `fenced run`, from which it has its stamp."""


def overtaken(history: History, findings: Findings) -> bool:
    """A holder acted after a newer one had read or written: there was something to refuse."""
    return findings.overtaken > 0


@dataclass(frozen=True, slots=True)
class Drill:
    """One failure of which people have lost data. `run` makes the fault; the recorded facts decide."""

    name: str
    failure: str
    """Its name in the literature."""
    title: str
    question: str
    teaches: str
    run: Callable[[Play], None]
    held: str
    """The verdict HELD in a sentence that claims no more than was shown."""
    tokens: tuple[int, int] = (33, 34)
    """In the literature; a fresh authority starts there, so that A and B get them."""
    story_seconds: float = 10.0
    """The ttl in the literature. All times of the drill are its share of the ttl."""
    ttl: float = 1.0
    cast: Mapping[str, Cast] = field(default_factory=lambda: {"A": Cast(), "B": Cast()})
    """The holders that are started at once; `run` may start more."""
    rule: Literal["retry", "sequenced"] | None = None
    """The rule that a new guard gets."""
    names: int = 1
    bar: str = "process stopped"
    """What the bar beside a holder means in the picture."""
    happened: Callable[[History, Findings], bool] = overtaken
    """Whether the fault happened. If it did not, nothing was shown."""
    accepts: frozenset[str] = frozenset()
    """Harm that is the fault itself."""
    loses: bool = True
    """Whether it can lose data where there is no guard."""
    broken: str = "A did not know that it was late: its write wiped out B's sale."
    tries: int = 3
    """How often it is run until its fault has happened."""

    @property
    def many(self) -> bool:
        """Many holders that run by themselves, instead of a story of two."""
        return not self.cast

    @property
    def authority_over_tcp(self) -> bool:
        """A holder whose clock is wrong must not be the authority, as a process with an embedded store is."""
        return any(each.authority_by_relay or each.slow_clock for each in self.cast.values())

    @property
    def guard_over_tcp(self) -> bool:
        return any(each.guard != "directly" for each in self.cast.values())

    @property
    def over_http(self) -> bool:
        return any(each.java for each in self.cast.values())

    def verdict(self, history: History, findings: Findings) -> Verdict:
        """Broken by any harm. Held only if the fault happened: otherwise there was nothing to refuse."""
        if findings.harm - self.accepts:
            return "broken"
        return "held" if self.happened(history, findings) else "inconclusive"
