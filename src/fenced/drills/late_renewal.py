"""A renewal is held up in the network, the lease moves on, and then the renewal arrives after all.

The story has a clock of its own: T=0 grant, T=6 renewal sent, T=10 expiry, T=12 renewal arrives. It is
played at the contract of the authority, without a keeper, and scaled so that ten seconds take one ttl.
"""

from __future__ import annotations

from fenced.drills import pause
from fenced.drills.crew import PATIENCE_SECONDS, Crew
from fenced.drills.stage import DrillStage
from fenced.drills.story import AUTHORITY, Log
from fenced.drills.terminal import Screen
from fenced.runtime.clocks import now

TTL = 2.0
STORY_SECONDS = 10.0


def run(stage: DrillStage, log: Log, screen: Screen) -> None:
    """Play the story; what must follow something waits for it."""
    name, scale = stage.names[0], stage.plan.ttl / STORY_SECONDS
    with stage.crew(["A", "B"]) as crew:
        log.start = now()
        crew["A"].tell("ask", name=name)
        log.tell_asking("A", crew.expect(crew["A"], "asking"))
        granted = crew.expect(crew["A"], "granted")
        log.tell_granted("A", granted)
        pause.read(crew, log, "A")
        zero = granted["began"]
        crew.rest(zero + 6 * scale)
        crew["A"].tell("renew", delay=max(0.0, zero + 12 * scale - now()))
        _tell_renewing(crew, log)
        expires = stage.expiry(name, granted["token"])
        crew.rest(zero + 8 * scale)
        crew["B"].tell("acquire", name=name, wait=stage.plan.ttl + PATIENCE_SECONDS)
        log.tell_asking("B", crew.expect(crew["B"], "asking"), busy=True)
        pause.wait_for_expiry(crew, log, screen, expires, "T=10: ")
        log.tell_granted("B", crew.expect(crew["B"], "granted", stage.plan.ttl + PATIENCE_SECONDS))
        pause.read(crew, log, "B")
        pause.write(crew, log, "B", 3)
        _tell_renewed(crew, log)
        crew["A"].tell("write", amount=1)
        pause.finish_write(crew, log, "A", late=True)
        pause.conclude(stage, crew, log)


def _tell_renewing(crew: Crew, log: Log) -> None:
    message = crew.expect(crew["A"], "renewing")
    text = "T=6: sends its renewal; the network holds it up"
    log.add(message["time"], "A", "A", "held_up", text, "renewal sent, held up")


def _tell_renewed(crew: Crew, log: Log) -> None:
    message = crew.expect(crew["A"], "renewed", within=PATIENCE_SECONDS)
    log.take("A", message)
    log.add(
        message["began"], "A", AUTHORITY, "late", "T=12: its renewal arrives at last", "the renewal arrives"
    )
    answer = message["answer"]
    if answer == "kept":
        log.add(message["time"], AUTHORITY, "A", "corrupt", "takes it: the lease is REVIVED", "kept")
    else:
        text = f"answers A: the lease is over ({answer}); nothing is revived"
        log.add(message["time"], AUTHORITY, "A", "ended", text, f"over: {answer}")
