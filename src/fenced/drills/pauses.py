"""Drills of a holder that does not run, or whose clock does not: A has read, B takes over and writes, then A writes."""

from __future__ import annotations

from fenced.drills.declared import Cast, Drill
from fenced.drills.history import Findings, History
from fenced.drills.play import Play
from fenced.drills.programs import BURNERS, NICE, NotShown, starved

_KNEW_NOTHING = "A did not know that it was late. The database did, and refused it."


def sigstop(play: Play) -> None:
    play.take("A")
    play.stop()
    play.take_over()
    play.sleep(0.2)
    # A's next command waits in its pipe: A runs it as soon as it is resumed.
    play.tell("A", "write", amount=1)
    play.wake()
    play.late_write(sent=True)
    play.conclude()


def check_then_write(play: Play) -> None:
    play.take("A")
    checked = play.ask("A", "check", "checked")
    if checked["left"] is None:
        raise NotShown(f"the check of A did not pass: {checked['why']}")
    text = f"checks its lease: it is held, {checked['left']:.2f} s are left"
    play.log.add(checked["time"], "A", "A", "note", text, "check() passes")
    play.stop(text="is stopped between the check and the write (SIGSTOP)")
    play.take_over()
    play.wake(text="wakes up (SIGCONT) and writes: it has checked")
    play.late_write()
    play.conclude()


def gc_pause(play: Play) -> None:
    """The same for both languages: the holder fills its memory until a collection takes long, and collects."""
    filled = play.ask("A", "fill", "filled", within=120.0, seconds=1.5 * play.ttl)
    play.history.facts["calibrated_seconds"] = round(filled["seconds"], 3)
    play.take("A")
    play.ask("A", "collect", "collecting")
    play.begin_fault("runs its garbage collector, which stops everything else in it", "collects garbage")
    play.take_over()
    collected = play.hear("A", "collected", within=120.0)
    play.history.facts["collected_seconds"] = round(collected["seconds"], 3)
    play.end_fault(f"goes on: the collection took {collected['seconds']:.2f} s", "the collection is over")
    play.late_write()
    play.conclude()


def cpu_starvation(play: Play) -> None:
    play.take("A")
    play.ask("A", "burn", "burning")
    with starved(play.holders["A"].popen.pid):
        play.begin_fault(
            f"gets hardly any CPU: it is nice {NICE}, beside {BURNERS} busy processes", "starves"
        )
        play.take_over()
    play.end_fault("gets its CPU back and goes on", "has its CPU back")
    play.late_write()
    play.conclude()


def machine_freeze(play: Play) -> None:
    play.take("A", how="adopt")
    play.stop(text="and its `fenced run` freeze, as on a machine that is suspended")
    play.take_over()
    # The command runs first after the thaw: `fenced run`, which would end it, does not have its turn any more.
    play.tell("A", "write", amount=1)
    play.wake(text="is thawed a moment before its `fenced run`, and goes on", below=True)
    play.late_write(sent=True)
    play.holders.kill("A")
    play.conclude()


def clock_skew(play: Play) -> None:
    play.take("A")
    play.begin_fault("has a clock that runs 20 times too slowly, so it renews too late", "its clock is slow")
    play.take_over()
    checked = play.ask("A", "check", "checked")
    left = checked["left"]
    play.history.facts["left_by_the_slow_clock"] = left
    said = "is lost" if left is None else f"is held, {left:.2f} s are left by its own clock"
    play.end_fault(f"checks its lease: it {said}", "check() passes" if left is not None else "check() fails")
    play.late_write()
    play.conclude()


def crash(play: Play) -> None:
    play.take("A")
    killed = play.holders.kill("A")
    play.log.add(
        killed, "A", "A", "stop", "crashes with the lease in its hand (SIGKILL)", "crashes (SIGKILL)"
    )
    play.take_over()
    taken = play.history.grants[-1].time - killed
    play.history.facts |= {"died": True, "taken_over_after_ttls": round(taken / play.ttl, 2)}
    play.note(
        "B", f"took over {taken:.2f} s after the crash ({taken / play.ttl:.2f} ttl); no operator was needed"
    )
    play.conclude()


def _died(history: History, findings: Findings) -> bool:
    return "died" in history.facts and findings.acknowledged > 0


SIGSTOP = Drill(
    "sigstop",
    "process suspension (SIGSTOP)",
    "A stopped holder wakes up and writes",
    "A stopped holder wakes up and writes. Is it refused?",
    "The end of a lease sends no signal to its holder. Whoever wakes up after it goes on writing.",
    sigstop,
    _KNEW_NOTHING,
    ttl=2.0,
)
CHECK_THEN_WRITE = Drill(
    "check-then-write",
    "TOCTOU: valid at the check, expired by the write",
    "A holder checks its lease, pauses, and writes",
    "A holder checks its lease, pauses, and writes. Did the check help?",
    "A check before the write closes nothing: the pause comes between the check and the write.",
    check_then_write,
    "A's check had passed, and its lease was over when it wrote. The database refused it.",
    tokens=(42, 43),
)
GC_PAUSE = Drill(
    "gc-pause",
    "garbage collection pause, in Python",
    "A holder collects garbage for longer than its ttl",
    "A real collection takes longer than the ttl. Is the late write refused?",
    "A collection stops every thread, also the one that renews. No code of the program runs, so none can notice.",
    gc_pause,
    _KNEW_NOTHING,
    ttl=0.6,
    bar="collecting garbage",
)
JAVA_GC = Drill(
    "java-gc",
    "stop-the-world collection, in Java",
    "A Java holder stops the world for longer than its ttl",
    "A Java holder stops the world for longer than its ttl. Is its late write refused?",
    "Any program that sends its stamp is fenced: here Java, with a lease over HTTP and writes over JDBC or HTTP.",
    gc_pause,
    "The Java holder did not know that it was late. The database did, and refused it.",
    tokens=(12344, 12345),
    story_seconds=5.0,
    ttl=0.6,
    cast={"A": Cast(java=True), "B": Cast()},
    bar="the world is stopped",
)
CPU_STARVATION = Drill(
    "cpu-starvation",
    "CPU starvation",
    "A holder gets no CPU and cannot renew",
    "A busy holder gets hardly any CPU. Is its late write refused?",
    "A holder that is neither stopped nor broken loses its lease, because the renewal waits for the CPU as well.",
    cpu_starvation,
    _KNEW_NOTHING,
    bar="hardly any CPU",
)
MACHINE_FREEZE = Drill(
    "machine-freeze",
    "hypervisor freeze",
    "A whole machine freezes, `fenced run` with it",
    "A job and the `fenced run` that renews for it freeze together. Is the job refused?",
    "A renewer outside of the program cures its pauses, and no pause of the machine. (A real freeze stops the clocks "
    "as well: that is clock-skew.)",
    machine_freeze,
    "Neither the job nor its `fenced run` could know that they were late. The database did.",
    cast={"A": Cast(under_run=True), "B": Cast()},
    bar="processes frozen",
)
CLOCK_SKEW = Drill(
    "clock-skew",
    "clock skew and drift of the holder",
    "A holder whose clock is slow believes in its lease for too long",
    "A holder's clock is 20 times too slow. Is its late write refused?",
    "An early stop by the holder's own clock is no protection: the clock may be what is wrong.",
    clock_skew,
    "By its own clock A still held the lease. The database refused its write.",
    cast={"A": Cast(slow_clock=True), "B": Cast()},
    bar="slow clock",
)
CRASH = Drill(
    "crash",
    "crash of the holder",
    "A holder crashes with the lease in its hand",
    "A holder crashes. Does somebody take over, without an operator?",
    "A plain lock would be stuck for ever; a lease ends by itself, whether its holder is dead or slow.",
    crash,
    "B took over when A's lease had ended, with a newer token, and nobody had to intervene.",
    happened=_died,
    loses=False,
    bar="crashed",
)
