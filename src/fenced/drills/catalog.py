"""All drills, in the order of `fenced drill list`."""

from __future__ import annotations

from fenced.drills import network, pauses, storm, tokens
from fenced.drills.declared import Drill

STORIES = (
    pauses.SIGSTOP,
    pauses.GC_PAUSE,
    pauses.JAVA_GC,
    pauses.CPU_STARVATION,
    pauses.MACHINE_FREEZE,
    pauses.CHECK_THEN_WRITE,
    pauses.CLOCK_SKEW,
    pauses.CRASH,
    network.NETWORK_DELAY,
    network.REORDERING,
    network.PARTITION,
    network.DELAYED_WRITE,
    network.LATE_RENEWAL,
    network.AUTHORITY_DOWN,
    tokens.EXPIRY_RACE,
    tokens.SPLIT_BRAIN,
    tokens.LOST_COUNTER,
    tokens.READ_VISIBILITY,
)
"""Two holders, one fault each."""
DRILLS: dict[str, Drill] = {each.name: each for each in (*STORIES, storm.STORM, storm.SET)}
