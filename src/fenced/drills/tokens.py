"""Drills of tokens: handed out twice, lost, seen too late; and the moment in which a lease ends."""

from __future__ import annotations

from fenced.drills.declared import Cast, Drill
from fenced.drills.history import Findings, History
from fenced.drills.play import Play
from fenced.drills.story import AUTHORITY, DATABASE
from fenced.runtime.clocks import now

_ONLY_A = {"A": Cast()}


def split_brain(play: Play) -> None:
    play.take("A")
    token = play.token("A")
    other = play.stage.copy_of_authority(token - 1)
    play.note(AUTHORITY, "is split: its other half knows nothing of A", "split in two")
    play.start("B", other)
    play.take("B", read=False)
    if play.may("B", "read"):
        play.write("B", 3)
        play.late_write()
    else:
        play.write("A", 1)
    play.conclude()


def _one_token_twice(history: History, findings: Findings) -> bool:
    tokens = [each.token for each in history.grants]
    return len(tokens) == 2 and tokens[0] == tokens[1]


def lost_counter(play: Play) -> None:
    play.take("A")
    play.stop()
    old = play.stage.copy_of_authority(play.token("A") - 3)
    play.note(AUTHORITY, "is restored from a copy that is three grants old", "restored from an old copy")
    play.start("B", old)
    play.take("B", read=False)
    if play.may("B", "read"):
        play.write("B", 3)
    else:
        play.ask("B", "release", "released")
        play.stage.raise_floor(old, play.token("A"))
        play.note(
            AUTHORITY, f"is raised above token {play.token('A')} (fenced authority raise)", "floor raised"
        )
        play.take("B")
        play.write("B", 3)
    play.wake()
    play.late_write()
    play.conclude()


def _token_again(history: History, findings: Findings) -> bool:
    return bool(findings.tokens_fallen) and (findings.refused > 0 or findings.acknowledged > 1)


def read_visibility(play: Play) -> None:
    """With a read fence (B announces, then reads) the stale write is refused even before B has written."""
    play.take("A")
    play.stop()
    play.take_over(read=False)
    play.read("B")
    play.wake(text="wakes up before B has written anything (SIGCONT)")
    play.late_write()
    play.write("B", 3)
    play.history.facts["without_read_fence"] = _without_fence(play)
    play.conclude()


def _without_fence(play: Play) -> str:
    """The same on a second name, where B reads without announcing: what a guard cannot know it cannot refuse."""
    name = play.stage.names[1]
    for holder in ("A", "B"):
        play.ask(holder, "release", ("released", "lost"))
    play.holders["A"].send("ask", name=name)
    play.hear("A", "asking")
    play.hear("A", "granted")
    play.tell("A", "read")
    for _ in range(2 if play.stage.guarded else 1):
        play.hear("A", "operation")
    play.ask("B", "acquire", "asking", name=name, wait=20.0)
    play.hear("B", "granted", within=play.ttl + 20.0)
    play.ask("B", "read", "peeked", announce=False)
    play.ask("A", "write", "writing", amount=1)
    late = play.hear("A", "operation")
    text = (
        f"without the read fence: A's stale write is {late['decision']}, and a reader sees it until B writes"
    )
    play.log.add(now(), DATABASE, DATABASE, "note", text, f"no read fence: {late['decision']}")
    return str(late["decision"])


def expiry_race(play: Play) -> None:
    """A writes in the moment in which its lease ends: a little earlier, a little later, and certainly too late."""
    for share in (-0.05, 0.0, 0.03, None):
        play.take("A", how="ask")
        grant = play.history.grants[-1]
        expires = max(play.stage.expiry(play.name, grant.token), grant.began + play.ttl)
        play.tell("B", "acquire", name=play.name, wait=play.ttl + 20.0)
        play.log.add_asking("B", play.hear("B", "asking"), busy=True)
        if share is not None:
            play.holders.sleep_until(expires + share * play.ttl)
            play.tell("A", "write", amount=1)
        play.granted("B", within=play.ttl + 20.0)
        play.read("B")
        if share is None:
            play.write("B", 3)
            play.tell("A", "write", amount=1)
        play.late_write(sent=True)
        if share is not None:
            play.write("B", 3)
        for holder in ("A", "B"):
            play.tell(holder, "release")
            play.hear(holder, ("released", "lost"))
    play.conclude()


SPLIT_BRAIN = Drill(
    "split-brain",
    "split brain: a lock service that is not linearizable",
    "Two authorities hand out the same token",
    "Two halves of one authority hand out the same token. Do both holders write?",
    "A token is as good as its authority. The guard also remembers whose grant a token was, and refuses the second.",
    split_brain,
    "Two holders had the same token. The guard refused the one that came second (reused), and A went on.",
    cast=_ONLY_A,
    happened=_one_token_twice,
    accepts=frozenset({"tokens_fallen"}),
    broken="Two holders had the same token, and both wrote: B's sale is gone.",
    bar="",
)
LOST_COUNTER = Drill(
    "lost-counter",
    "the counter is lost or reset",
    "The authority is restored from an old copy and counts again",
    "The authority lost its last grants and counts again. Do old tokens pass?",
    "The guard's mark survives the authority's loss: nobody writes until the floor is raised above it.",
    lost_counter,
    "Old tokens were refused until the floor was raised; then B wrote, and A's late write was refused.",
    cast=_ONLY_A,
    happened=_token_again,
    accepts=frozenset({"tokens_fallen"}),
    broken="The authority counted again, nobody noticed, and B's sale is gone.",
)
READ_VISIBILITY = Drill(
    "read-visibility",
    "a stale write that arrives before the newer one",
    "A stale write arrives before the newer holder has written",
    "A stale write arrives before the newer one. Can a reader see it?",
    "A guard knows a newer token when it has seen it: announce before you read, and nothing older comes between.",
    read_visibility,
    "B had only announced and read, and A was refused already. Without that announcement A's write is admitted.",
    names=2,
    broken="A's stale write was admitted before B's, and B wiped it out.",
)
EXPIRY_RACE = Drill(
    "expiry-race",
    "lease-expiry race",
    "A holder writes in the moment in which its lease ends",
    "A holder writes just when its lease ends. Is every write decided one way?",
    "At the end of a lease nobody can say who is first, and nobody needs to: each write is in order, or refused.",
    expiry_race,
    "Each write at the end of a lease was either in order or refused; none was lost.",
    bar="",
)
