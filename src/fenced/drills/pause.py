"""A holder is stopped for longer than its ttl, another takes over, then the first wakes up and writes."""

from __future__ import annotations

from fenced.drills.processes import PATIENCE_SECONDS, CouldNotRun, HolderProcesses, Message
from fenced.drills.resource import stock_of
from fenced.drills.stage import DrillStage
from fenced.drills.story import AUTHORITY, Log
from fenced.drills.terminal import Screen
from fenced.runtime.clocks import now

TTL = 2.0
_TICK_SECONDS = 0.1
_INDENT = " " * 11
"""Puts the progress line below the actors of the steps."""


def run(stage: DrillStage, log: Log, screen: Screen) -> None:
    """Run the scenario. Every step waits for the previous one, so a slow machine only makes it slower."""
    name = stage.names[0]
    with stage.start_holders(["A", "B"]) as holders:
        log.start = now()
        granted = _take(holders, log, "A", name)
        stopped = stage.stop_outside_transactions(holders["A"])
        log.add(
            stopped, "A", "A", "stop", "is stopped in the middle of its work (SIGSTOP)", "stopped (SIGSTOP)"
        )
        expires = max(stage.expiry(name, granted["token"]), granted["began"] + stage.ttl)
        holders["B"].send("acquire", name=name, wait=stage.ttl + PATIENCE_SECONDS)
        log.add_asking("B", holders.expect(holders["B"], "asking"), busy=True)
        wait_for_expiry(holders, screen, expires)
        taken = holders.expect(holders["B"], "granted", stage.ttl + PATIENCE_SECONDS)
        add_expiry(log, min(expires, taken["time"]))
        log.add_granted("B", taken)
        read(holders, log, "B")
        write(holders, log, "B", 3)
        screen.tick(f"{_INDENT}A is still stopped")
        holders.sleep_until(now() + min(0.4, stage.ttl / 4))
        # A's next command already waits in its pipe: A runs it as soon as it is resumed.
        holders["A"].send("write", amount=1)
        woken = now()
        log.paused("A", granted, holders["A"].resume(), woken)
        log.add(woken, "A", "A", "wake", "wakes up (SIGCONT) and goes on where it was", "wakes up (SIGCONT)")
        finish_write(holders, log, "A", late=True)
        conclude(stage, holders, log)


def _take(holders: HolderProcesses, log: Log, holder: str, name: str) -> Message:
    holders[holder].send("acquire", name=name, wait=PATIENCE_SECONDS)
    log.add_asking(holder, holders.expect(holders[holder], "asking"))
    granted = holders.expect(holders[holder], "granted")
    log.add_granted(holder, granted)
    read(holders, log, holder)
    return granted


def read(holders: HolderProcesses, log: Log, holder: str) -> None:
    """Let a holder announce and read."""
    holders[holder].send("read")
    if log.guarded:
        log.add_announced(holder, _admitted(holders.expect(holders[holder], "operation")))
    log.add_read(holder, _admitted(holders.expect(holders[holder], "operation")))


def write(holders: HolderProcesses, log: Log, holder: str, amount: int) -> None:
    """Let a holder write; the write must be admitted."""
    holders[holder].send("write", amount=amount)
    log.add_writing(holder, holders.expect(holders[holder], "writing"))
    log.add_written(holder, _admitted(holders.expect(holders[holder], "operation")))


def finish_write(holders: HolderProcesses, log: Log, holder: str, *, late: bool) -> None:
    """Record the outcome of a write that may be refused."""
    log.add_writing(holder, holders.expect(holders[holder], "writing"))
    answer = holders.expect(holders[holder], "operation")
    log.add_written(holder, answer, late=late)
    if answer["decision"] not in ("admitted", "refused"):
        raise CouldNotRun(f"the late write was not decided: {answer.get('why')}")


def conclude(stage: DrillStage, holders: HolderProcesses, log: Log) -> None:
    """Let both holders release, and read the final value."""
    for holder in ("A", "B"):
        holders[holder].send("release")
    orders = stage.read_finals(log.history)[stage.names[0]]
    log.add_final(now(), stock_of(orders), as_left=all(each in orders for each in _sold_by("B", log)))


def _sold_by(holder: str, log: Log) -> list[str | None]:
    return [each.update for each in log.history.writes("admitted") if each.holder == holder]


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


def wait_for_expiry(holders: HolderProcesses, screen: Screen, expires: float) -> None:
    """Wait until A's lease should have ended by the authority's clock."""
    while (left := expires - now()) > 0:
        screen.tick(f"{_INDENT}A's lease ends in {left:.1f} s")
        holders.sleep_until(now() + min(left, _TICK_SECONDS))


def add_expiry(log: Log, time: float, prefix: str = "") -> None:
    """Add the end of A's lease, once B is granted: ZooKeeper says only when it ends at the latest."""
    text = f"{prefix}A's lease has expired: nobody renewed it"
    log.add(time, AUTHORITY, AUTHORITY, "expiry", text, "A's lease expires")
