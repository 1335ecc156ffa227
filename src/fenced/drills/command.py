"""`fenced drill`: make failures happen, and watch whether stale holders are refused."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fenced.drills.catalog import DRILLS
from fenced.drills.every import JOBS
from fenced.drills.history import Verdict
from fenced.drills.outcome import to_json
from fenced.drills.outside import START
from fenced.drills.own import HolderOptions, run_own
from fenced.drills.processes import CouldNotRun
from fenced.drills.report import check_report, write_report
from fenced.drills.runner import run_drill
from fenced.drills.stage import STORM_SECONDS_MAX, STORM_SECONDS_MIN, STORM_TTLS, Plan, without_secrets
from fenced.drills.storm import HOLDERS, NAMES
from fenced.drills.summary import COULD_NOT_RUN, AllOptions, reported, run_all
from fenced.drills.terminal import Quiet, Screen, Terminal
from fenced.errors import FencedError
from fenced.runtime.blocking import expect_interrupts
from fenced.values import timing
from fenced.values.durations import duration

STATUSES: dict[Verdict, int] = {"held": 0, "broken": 1, "inconclusive": 2}
INTERRUPTED = 130
_PASSED_ON = ("authority", "guard", "ttl", "seed")
"""The options of `all` that each drill gets."""
_OF_MANY = ("seconds", "holders", "names")
_OF_ALL = ("control", "pictures", "jobs")
_OF_OWN = ("holder", "table", "lease", "check", "stop_at", "takes_lease")
_NOT_OF_OWN = ("report", "real_time", "seed")


@click.command("drill")
@click.argument(
    "name", metavar="[list|all|DRILL]", type=click.Choice(["list", "all", *DRILLS]), default="sigstop"
)
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
    help="How long a lease lasts. Default: 1s or 2s, in storm and set 0.3s. Some stores grant more.",
)
@click.option("--real-time", is_flag=True, help="The times of the literature, such as 10 s, unscaled.")
@click.option(
    "--seconds",
    type=duration(0.5, STORM_SECONDS_MAX),
    metavar="TIME",
    help=f"How long storm and set last. Default: {STORM_SECONDS_MIN:g}s, or {STORM_TTLS:g} ttls if that is longer.",
)
@click.option(
    "--control",
    is_flag=True,
    help="all: run each drill without the guard as well, to see which failures lose data.",
)
@click.option(
    "--pictures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="all: draw each drill there.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=JOBS, show_default=True, help="all: drills at a time."
)
@click.option(
    "--holder", metavar="CMD", help="Your own worker instead of ours; it finds its lease in FENCED_STAMP."
)
@click.option("--table", metavar="TABLE", help="With --holder: the guarded table to which it writes.")
@click.option("--lease", metavar="NAME", help="With --holder: the name of its lease, such as orders/42.")
@click.option(
    "--check", metavar="SQL", help="With --holder: a SELECT whose result a late write would change."
)
@click.option(
    "--stop-at",
    metavar="WHEN",
    default=START,
    help="With --holder: at its `start` (default), when it stops `itself` (kill -STOP $$), at a text of its output.",
)
@click.option(
    "--takes-lease", is_flag=True, help="With --holder: it takes its lease itself, from FENCED_AUTHORITY."
)
@click.option("--holders", type=click.IntRange(2, 64), help="Processes in storm (default 8) and set (5).")
@click.option("--names", type=click.IntRange(1, 64), help="Names in storm (default 4) and set (1).")
@click.option(
    "--seed", type=int, help="Seed of the random choices; timing is not repeatable. Default: a new one."
)
@click.pass_context
def drill(context: click.Context, /, name: str, **given: Any) -> None:
    """Make a failure happen, with real processes, and see whether anything stale is admitted.

    \b
    fenced drill list                     every failure, and what it teaches
    fenced drill all --control            each of them, with the guard and without
    fenced drill                          sigstop: a stopped holder wakes up and writes
    fenced drill delayed-write            ... or another one of the list
    fenced drill partition --guard none   ... and what is lost without the guard
    fenced drill storm --seconds 60       many holders, stopped again and again
    fenced drill --holder ./worker ...    your own worker on your own table

    The drill uses new names, and leaves them behind in an authority and a guard that you name. A guard trusts
    the first authority that it meets: name the one that it belongs to.

    Exit status: 0 HELD, 1 BROKEN (something stale was admitted, or an update lost), 2 INCONCLUSIVE (the fault
    did not happen, so nothing was shown) or could not run.
    """
    _check_options(context, name, own=given["holder"] is not None)
    if name == "list":
        click.echo(listing())
        return
    if name == "all":
        work = partial(run_all, _all_options(**given))
    elif given["holder"] is not None:
        fields = {field: given[field] for field in HolderOptions.__dataclass_fields__ if field != "fault"}
        work = partial(run_own, HolderOptions(fault=name, **fields))
    else:
        screen: Screen = Quiet() if given["as_json"] else Terminal()
        work = partial(_run, _plan(name, **given), screen, as_json=given["as_json"], report=given["report"])
    context.exit(_told(work))


def _check_options(context: click.Context, name: str, *, own: bool) -> None:
    """Refuse what would be ignored: whoever gives an option relies on it."""
    many = name in DRILLS and DRILLS[name].many
    misplaced = {
        "`fenced drill storm` and `set`": () if many else _OF_MANY,
        "`fenced drill all`": () if name == "all" else _OF_ALL,
        "--holder": () if own else _OF_OWN,
        "the drills with our own holders, not to --holder": _NOT_OF_OWN if own else (),
    }
    for place, options in misplaced.items():
        for each in context.command.params:
            given = context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
            if given and each.name in options:
                raise click.UsageError(f"{each.opts[0]} belongs to {place}")


def _all_options(
    *, control: bool, jobs: int, as_json: bool, report: Path | None, pictures: Path | None, **given: Any
) -> AllOptions:
    options = [
        word for each in _PASSED_ON if given[each] is not None for word in (f"--{each}", str(given[each]))
    ]
    options += ["--real-time"] if given["real_time"] else []
    return AllOptions(options, control, jobs, as_json, report, pictures)


def _plan(name: str, *, ttl: float | None, real_time: bool, seed: int | None, **given: Any) -> Plan:
    chosen = DRILLS[name]
    if real_time and (ttl is not None or chosen.many):
        raise click.UsageError("--real-time gives a story the ttl that it is told with: no --ttl, no storm")
    told = chosen.story_seconds if real_time else chosen.ttl
    return Plan(
        chosen,
        authority=given["authority"],
        guard=given["guard"],
        ttl=told if ttl is None else ttl,
        seconds=given["seconds"],
        holders=given["holders"] or HOLDERS.get(name, 2),
        names=given["names"] or NAMES.get(name, 1),
        seed=random.SystemRandom().randrange(2**32) if seed is None else seed,
    )


def listing() -> str:
    """Every drill: its name, the failure, and what it teaches, in 80 columns."""
    width = max(map(len, DRILLS))
    parts = []
    for each in DRILLS.values():
        first, second = each.tokens
        told = "" if each.many else f" (Tokens {first} and {second}, ttl {each.story_seconds:g} s.)"
        parts.append(f"{each.name:<{width}}  {each.failure}")
        parts.append(click.wrap_text(each.teaches + told, 80, "    ", "    "))
    return "\n".join(parts)


def _run(plan: Plan, screen: Screen, *, as_json: bool, report: Path | None) -> int:
    """Run the drill and show it; returns the exit status."""
    if report is not None:
        check_report(report)
    result = run_drill(plan, screen)
    status = STATUSES[result.verdict]
    screen.verdict(result)
    if as_json:
        click.echo(json.dumps(to_json(result), indent=2))
    if report is not None:
        status = reported(report, lambda: write_report(report, result), status, quiet=as_json)
    return status


def _told(work: Callable[[], int]) -> int:
    """The status of `work`; what prevents it is one line."""
    expect_interrupts()
    try:
        with _ending_on_signals():
            return work()
    except CouldNotRun as error:
        return _give_up(str(error))
    except (FencedError, OSError, ImportError) as error:
        return _give_up(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        click.echo("drill: interrupted; its processes are ended", err=True)
        return INTERRUPTED


def _give_up(why: str) -> int:
    line = " ".join(without_secrets(why).split())
    click.echo(f"drill: could not run: {line}", err=True)
    return COULD_NOT_RUN


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
