"""`fenced drill`: break things on purpose, and watch whether stale holders are refused."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from fenced.drills import late_renewal, pause, storm
from fenced.drills.history import Verdict, check
from fenced.drills.outcome import DrillOutcome, outcome, to_json
from fenced.drills.processes import CouldNotRun
from fenced.drills.report import check_report, write_report
from fenced.drills.stage import (
    NO_GUARD,
    STORM_SECONDS_MAX,
    STORM_SECONDS_MIN,
    STORM_TTLS,
    DrillRun,
    DrillStage,
    Plan,
    without_secrets,
)
from fenced.drills.story import Log
from fenced.drills.terminal import Quiet, Screen, Terminal
from fenced.errors import FencedError
from fenced.runtime.blocking import expect_interrupts
from fenced.runtime.clocks import now
from fenced.values import timing
from fenced.values.durations import duration

SCENARIOS: dict[str, Callable[[DrillStage, Log, Screen], None]] = {
    "pause": pause.run,
    "storm": storm.run,
    "late-renewal": late_renewal.run,
}
_TTLS = {"pause": pause.TTL, "storm": storm.TTL, "late-renewal": late_renewal.TTL}
COULD_NOT_RUN = 2
STATUSES: dict[Verdict, int] = {"held": 0, "broken": 1, "inconclusive": 2}
INTERRUPTED = 130


@click.command("drill")
@click.argument("scenario", type=click.Choice(list(SCENARIOS)), default="pause")
@click.option("--authority", metavar="URL", help="Who grants the leases. Default: a fresh SQLite file.")
@click.option(
    "--guard",
    metavar="URL|none",
    help="What protects the values; `none` for a plain table. Default: the values of the service that is the "
    "authority, or else fresh SQLite.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the timeline.")
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with the picture (.html), or the picture alone (.svg).",
)
@click.option(
    "--ttl",
    type=duration(timing.TTL_MIN, timing.TTL_MAX),
    metavar="TIME",
    help="How long a lease lasts. Default: 2s, in the storm 0.3s. Some stores grant more.",
)
@click.option(
    "--seconds",
    type=duration(0.5, STORM_SECONDS_MAX),
    metavar="TIME",
    help=f"How long the storm lasts. Default: {STORM_SECONDS_MIN:g}s, or {STORM_TTLS:g} ttls if that is longer.",
)
@click.option("--holders", type=click.IntRange(2, 64), help="Processes in the storm. Default: 8.")
@click.option("--names", type=click.IntRange(1, 64), help="Names in the storm. Default: 4.")
@click.option(
    "--seed", type=int, help="Seed of the random choices; timing is not repeatable. Default: a new one."
)
@click.pass_context
def drill(
    context: click.Context,
    scenario: str,
    authority: str | None,
    guard: str | None,
    as_json: bool,
    report: Path | None,
    ttl: float | None,
    seconds: float | None,
    holders: int | None,
    names: int | None,
    seed: int | None,
) -> None:
    """Stop a holder past its ttl, let another take over, wake the first: is it refused?

    \b
    pause         one holder is stopped, wakes up and writes (the default)
    storm         many holders, stopped again and again; counts lost updates
    late-renewal  a renewal arrives after the lease has moved on

    Holders are real processes. The drill uses new names, and leaves them behind in an authority and a guard
    that you name. A guard trusts the first authority that it meets: name the one that it belongs to.

    Exit status: 0 HELD, 1 BROKEN (something stale was admitted, or an update lost), 2 INCONCLUSIVE (nobody
    was overtaken, so nothing was shown) or could not run.
    """
    _refuse_misplaced(scenario, {"--seconds": seconds, "--holders": holders, "--names": names})
    plan = Plan(
        scenario=scenario,
        authority=authority,
        guard=guard,
        ttl=_TTLS[scenario] if ttl is None else ttl,
        seconds=seconds,
        holders=(storm.HOLDERS if scenario == "storm" else 2) if holders is None else holders,
        names=(storm.NAMES if scenario == "storm" else 1) if names is None else names,
        seed=random.SystemRandom().randrange(2**32) if seed is None else seed,
    )
    screen: Screen = Quiet() if as_json else Terminal()
    context.exit(_run(plan, screen, as_json=as_json, report=report))


def _refuse_misplaced(scenario: str, given: dict[str, object]) -> None:
    for option, value in given.items():
        if value is not None and scenario != "storm":
            raise click.UsageError(f"{option} belongs to the storm: fenced drill storm {option} {value}")


def _run(plan: Plan, screen: Screen, *, as_json: bool, report: Path | None) -> int:
    """Run the drill, show and check it; returns the exit status."""
    expect_interrupts()
    try:
        with _ending_on_signals():
            if report is not None:
                check_report(report)
            result = run_drill(plan, screen)
    except CouldNotRun as error:
        return _give_up(str(error))
    except (FencedError, OSError, ImportError) as error:
        return _give_up(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        click.echo("drill: interrupted; its processes are ended", err=True)
        return INTERRUPTED
    status = STATUSES[result.findings.verdict]
    screen.verdict(result)
    if as_json:
        click.echo(json.dumps(to_json(result), indent=2))
    if report is not None:
        status = _write_report(report, result, status, as_json=as_json)
    return status


def _write_report(report: Path, result: DrillOutcome, status: int, *, as_json: bool) -> int:
    """Write the report last: whatever happens to it, the verdict has been shown."""
    try:
        write_report(report, result)
    except OSError as error:
        click.echo(f"drill: the report could not be written: {error}", err=True)
        return status or COULD_NOT_RUN
    if not as_json:
        click.echo(f"Report: {report}")
    return status


def _give_up(why: str) -> int:
    line = " ".join(without_secrets(why).split())
    click.echo(f"drill: could not run: {line}", err=True)
    return COULD_NOT_RUN


def run_drill(plan: Plan, screen: Screen) -> DrillOutcome:
    """Run one drill, from opening the stage to its findings."""
    if plan.guard == "":
        raise CouldNotRun(f"--guard is an address, or {NO_GUARD}")
    with DrillRun(plan) as stage:
        screen.heading(stage)
        log = Log(now(), stage.guarded, screen.step)
        log.history.ttl = stage.ttl
        SCENARIOS[plan.scenario](stage, log, screen)
        ended = now()
        return outcome(stage, log, check(log.history), ended=ended)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that processes and files are cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, _interrupt) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
