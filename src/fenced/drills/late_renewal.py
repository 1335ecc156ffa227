"""A renewal is delayed in the network, the lease expires and is granted to another holder, then the renewal arrives.

The scenario has its own clock, on which the ttl is 10: T=0 grant, T=6 renewal sent, T=10 expiry, T=12 renewal arrives,
or later if B is granted later. It calls the authority directly, without a keeper.
"""

from __future__ import annotations

from fenced.drills import pause
from fenced.drills.processes import PATIENCE_SECONDS, HolderProcesses
from fenced.drills.stage import DrillStage
from fenced.drills.story import AUTHORITY, Log
from fenced.drills.terminal import Screen
from fenced.runtime.clocks import now

TTL = 2.0
STORY_SECONDS = 10.0


def run(stage: DrillStage, log: Log, screen: Screen) -> None:
    """Run the scenario. A step that depends on another waits for it, whatever the clock says."""
    name, scale = stage.names[0], stage.ttl / STORY_SECONDS
    with stage.start_holders(["A", "B"]) as holders:
        log.start = now()
        holders["A"].send("ask", name=name)
        log.add_asking("A", holders.expect(holders["A"], "asking"))
        granted = holders.expect(holders["A"], "granted")
        log.add_granted("A", granted)
        pause.read(holders, log, "A")
        zero = granted["began"]
        holders.sleep_until(zero + 6 * scale)
        holders["A"].send("hold_up_renewal")
        _add_renewing(holders, log)
        expires = max(stage.expiry(name, granted["token"]), zero + stage.ttl)
        holders.sleep_until(zero + 8 * scale)
        holders["B"].send("acquire", name=name, wait=stage.ttl + PATIENCE_SECONDS)
        log.add_asking("B", holders.expect(holders["B"], "asking"), busy=True)
        pause.wait_for_expiry(holders, screen, expires)
        taken = holders.expect(holders["B"], "granted", stage.ttl + PATIENCE_SECONDS)
        expired = min(expires, taken["time"])
        pause.add_expiry(log, expired, f"T={(expired - zero) / scale:.0f}: ")
        log.add_granted("B", taken)
        pause.read(holders, log, "B")
        pause.write(holders, log, "B", 3)
        # B has been granted and has written: from here on the renewal is late, however long the expiry took.
        holders.sleep_until(zero + 12 * scale)
        holders["A"].send("renew")
        _add_renewed(holders, log, zero, scale)
        holders["A"].send("write", amount=1)
        pause.finish_write(holders, log, "A", late=True)
        pause.conclude(stage, holders, log)


def _add_renewing(holders: HolderProcesses, log: Log) -> None:
    message = holders.expect(holders["A"], "renewing")
    text = "T=6: sends its renewal; the network holds it up"
    log.add(message["time"], "A", "A", "held_up", text, "renewal sent, held up")


def _add_renewed(holders: HolderProcesses, log: Log, zero: float, scale: float) -> None:
    message = holders.expect(holders["A"], "renewed", within=PATIENCE_SECONDS)
    log.take("A", message)
    text = f"T={(message['began'] - zero) / scale:.0f}: its renewal arrives at last"
    log.add(message["began"], "A", AUTHORITY, "late", text, "the renewal arrives")
    answer = message["answer"]
    if answer == "kept":
        log.add(message["time"], AUTHORITY, "A", "corrupt", "takes it: the lease is REVIVED", "kept")
    else:
        text = f"answers A: the lease is over ({answer}); nothing is revived"
        log.add(message["time"], AUTHORITY, "A", "ended", text, f"over: {answer}")
