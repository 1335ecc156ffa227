"""A holder is stopped past its ttl, another takes over, the first wakes up and writes."""

from __future__ import annotations

from fenced.drills.crew import PATIENCE_SECONDS, CouldNotRun, Crew, Message
from fenced.drills.resource import stock_of
from fenced.drills.stage import DrillStage
from fenced.drills.story import AUTHORITY, Log
from fenced.drills.terminal import Screen
from fenced.runtime.clocks import now

TTL = 2.0
_TICK_SECONDS = 0.1


def run(stage: DrillStage, log: Log, screen: Screen) -> None:
    """Play the story; every step waits for the one before it, so a slow machine tells it slower."""
    name = stage.names[0]
    with stage.crew(["A", "B"]) as crew:
        log.start = now()
        granted = _take(crew, log, "A", name)
        stopped = stage.stop_outside_transactions(crew["A"])
        log.add(
            stopped, "A", "A", "stop", "is stopped in the middle of its work (SIGSTOP)", "stopped (SIGSTOP)"
        )
        expires = stage.expiry(name, granted["token"])
        crew["B"].tell("acquire", name=name, wait=stage.plan.ttl + PATIENCE_SECONDS)
        log.tell_asking("B", crew.expect(crew["B"], "asking"), busy=True)
        wait_for_expiry(crew, log, screen, expires)
        taken = crew.expect(crew["B"], "granted", stage.plan.ttl + PATIENCE_SECONDS)
        log.tell_granted("B", taken)
        read(crew, log, "B")
        write(crew, log, "B", 3)
        screen.tick("A is still stopped")
        crew.rest(now() + min(0.4, stage.plan.ttl / 4))
        # The rest of A's program lies in its pipe: it goes on by itself as soon as it runs again.
        crew["A"].tell("write", amount=1)
        woken = now()
        log.paused("A", granted, crew["A"].resume(), woken)
        log.add(woken, "A", "A", "wake", "wakes up (SIGCONT) and goes on where it was", "wakes up (SIGCONT)")
        finish_write(crew, log, "A", late=True)
        conclude(stage, crew, log)


def _take(crew: Crew, log: Log, holder: str, name: str) -> Message:
    crew[holder].tell("acquire", name=name, wait=PATIENCE_SECONDS)
    log.tell_asking(holder, crew.expect(crew[holder], "asking"))
    granted = crew.expect(crew[holder], "granted")
    log.tell_granted(holder, granted)
    read(crew, log, holder)
    return granted


def read(crew: Crew, log: Log, holder: str) -> None:
    """Have a holder announce and read."""
    crew[holder].tell("read")
    if log.guarded:
        log.tell_announced(holder, _admitted(crew.expect(crew[holder], "operation")))
    log.tell_read(holder, _admitted(crew.expect(crew[holder], "operation")))


def write(crew: Crew, log: Log, holder: str, amount: int) -> None:
    """Have a holder write what must be admitted."""
    crew[holder].tell("write", amount=amount)
    log.tell_writing(holder, crew.expect(crew[holder], "writing"))
    log.tell_written(holder, _admitted(crew.expect(crew[holder], "operation")))


def finish_write(crew: Crew, log: Log, holder: str, *, late: bool) -> None:
    """Hear how a write ended that may be refused."""
    log.tell_writing(holder, crew.expect(crew[holder], "writing"))
    answer = crew.expect(crew[holder], "operation")
    log.tell_written(holder, answer, late=late)
    if answer["decision"] not in ("admitted", "refused"):
        raise CouldNotRun(f"the late write was not decided: {answer.get('why')}")


def conclude(stage: DrillStage, crew: Crew, log: Log) -> None:
    """Let both go, and look at what is left."""
    for holder in ("A", "B"):
        crew[holder].tell("release")
    orders = stage.look_at_finals(log.history)[stage.names[0]]
    log.tell_final(now(), stock_of(orders), as_left=all(each in orders for each in _sold_by("B", log)))


def _sold_by(holder: str, log: Log) -> list[str | None]:
    return [each.update for each in log.history.writes("admitted") if each.holder == holder]


def _admitted(message: Message) -> Message:
    if message["decision"] != "admitted":
        raise CouldNotRun(why_not(message))
    return message


def why_not(message: Message) -> str:
    """Why an honest holder got nowhere."""
    why = message.get("why")
    if why == "foreign":
        return "the guard trusts another authority; name that one with --authority"
    return f"an honest {message['kind']} was {message['decision']}: {why}"


def wait_for_expiry(crew: Crew, log: Log, screen: Screen, expires: float, prefix: str = "") -> None:
    """Wait until A's lease has ended by the authority's clock."""
    while (left := expires - now()) > 0:
        screen.tick(f"A's lease ends in {left:.1f} s")
        crew.rest(now() + min(left, _TICK_SECONDS))
    text = f"{prefix}A's lease has expired: nobody renewed it"
    log.add(expires, AUTHORITY, AUTHORITY, "expiry", text, "A's lease expires")
