"""`fenced run`: a command that runs only while its lease is held.

When renewals have failed for so long that little time is left, the command gets SIGTERM. It is killed before anybody
else can be granted the lease. A holder cannot do more; the guard does the rest.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import click

from fenced.cli import exits
from fenced.cli.child import Child
from fenced.cli.inbox import Inbox, Stopped
from fenced.cli.options import authority_option, guarantee_option, namespace_option
from fenced.cli.output import complain
from fenced.client.faces import Client, Guarantee
from fenced.client.leases import Lease
from fenced.core.holding import State
from fenced.errors import FencedError, LeaseLost, Misuse, NotGranted
from fenced.events import Event, KeeperFailed, LeaseInJeopardy
from fenced.runtime.blocking import expect_interrupts
from fenced.runtime.supervised import notify, watchdog_seconds
from fenced.values import timing
from fenced.values.durations import duration

F = TypeVar("F", bound=Callable[..., Any])

SLICE_SECONDS = 1.0
"""The longest single wait: the clock of poll's timeout stops while the machine is suspended."""
PATIENCE_SECONDS = 2.0
"""Longer than a client's default: this client has to open a connection first, and has no earlier reply."""

KILL_SECONDS_MAX = 1.0


class CommandAfterDashes(click.Command):
    """Everything after `--` is the command, even if it looks like an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        before, command = args[:at], args[at + 1 :]
        if not command and not ctx.resilient_parsing and not {"-h", "--help"} & set(before):
            raise click.UsageError(
                f"run what? The command goes after --: fenced {ctx.info_name} NAME -- CMD ARGS", ctx
            )
        super().parse_args(ctx, before)
        ctx.args = command
        return command

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- CMD [ARGS]..."]


def time_option(
    option: str, text: str, low: float, high: float, default: float | None = None
) -> Callable[[F], F]:
    return click.option(option, type=duration(low, high), metavar="TIME", default=default, help=text)


@click.command(cls=CommandAfterDashes)
@click.argument("name")
@time_option(
    "--ttl",
    "How long the lease lasts without renewal.  [default: 30s]",
    timing.TTL_MIN,
    timing.TTL_MAX,
    default=timing.TTL_DEFAULT,
)
@time_option("--wait", "How long to wait for NAME; 0: not at all.  [default: no limit]", 0.0, timing.WAIT_MAX)
@time_option(
    "--at-least-for",
    "After success, keep NAME taken until this long after the grant.  [default: 0]",
    0.0,
    timing.AT_LEAST_FOR_MAX,
    default=0.0,
)
@time_option(
    "--grace",
    "How long before the end of an unrenewed lease CMD gets SIGTERM.  [default: a sixth of ttl]",
    0.0,
    timing.TTL_MAX / 2,
)
@time_option(
    "--max-hold",
    "How long to renew at most; then CMD is stopped.  [default: no limit]",
    timing.TTL_MIN,
    timing.WAIT_MAX,
)
@time_option(
    "--lock-delay",
    "How long nobody is granted NAME after this lease has expired.  [default: 0]",
    0.0,
    timing.LOCK_DELAY_MAX,
    default=0.0,
)
@click.option("--label", metavar="TEXT", help="Who holds it, for people.  [default: host:pid]")
@authority_option
@namespace_option
@guarantee_option
@click.pass_context
def run(
    ctx: click.Context,
    name: str,
    ttl: float,
    wait: float | None,
    at_least_for: float,
    grace: float | None,
    max_hold: float | None,
    lock_delay: float,
    label: str | None,
    url: str,
    namespace: str,
    guarantee: Guarantee,
) -> int:
    """Acquire the lease of NAME, run CMD while it is held, and release it.

    CMD gets FENCED_NAME, FENCED_TOKEN, FENCED_STAMP, FENCED_AUTHORITY and FENCED_NAMESPACE in its
    environment; it passes FENCED_STAMP to a guard. The exit status is CMD's own, 75 if NAME was not granted
    (CMD is not started), 76 if the lease was lost (CMD was stopped). `fenced help exits` lists all.

    For a job that every machine's cron starts at the same time: with --wait 0 one of them runs it, and with
    --at-least-for longer than the machines' clocks differ, a machine that starts late does not run it again.

    \b
    Examples:
      fenced run deploy --ttl 60s -- make deploy
      fenced run nightly-report --wait 0 --at-least-for 10m -- ./report.sh --all
    """
    check_grace(grace, ttl)
    expect_interrupts()
    if os.environ.get("FENCED_DEBUG") != "1":
        threading.excepthook = lambda _: None  # the loss of the lease is reported instead
    failure = LastFailure()
    try:
        with (
            Inbox() as inbox,
            Client(
                url,
                namespace=namespace,
                label=label,
                guarantee=guarantee,
                patience=PATIENCE_SECONDS,
                on_event=failure,
            ) as client,
        ):
            acquire = partial(
                client.acquire,
                name,
                ttl=ttl,
                max_hold=max_hold,
                lock_delay=lock_delay,
                at_least_for=at_least_for,
            )
            lease = _take(acquire, name, wait)
            inbox.listen()
            environment = environment_of(lease, name, url, client, namespace)
            margins = Margins.of(lease.ttl, grace)
            return _run_under(lease, ctx.args, environment, inbox, margins, failure)
    except Stopped as stopped:
        return exits.SIGNALLED + stopped.signum


def check_grace(grace: float | None, ttl: float) -> None:
    # A lease is renewed every third of its ttl, so a healthy one has between two thirds and all of it left.
    if grace is not None and not 0 <= grace <= timing.check_ttl(ttl) / 2:
        raise Misuse(f"grace is 0 to half the ttl ({ttl / 2:g} s), not {grace:g} s")


def environment_of(lease: Lease, name: str, url: str, client: Client, namespace: str) -> dict[str, str]:
    """The environment of a command that runs under a lease."""
    return {
        **os.environ,
        "FENCED_NAME": name,
        "FENCED_TOKEN": str(lease.token),
        "FENCED_STAMP": str(lease.bare_stamp()),
        "FENCED_AUTHORITY": _address(url, client),
        "FENCED_NAMESPACE": namespace,
    }


def _address(url: str, client: Client) -> str:
    """The authority for the child: an absolute path for SQLite, otherwise the whole address with its secrets."""
    return client.url if url.startswith("sqlite:") else url


class LastFailure:
    """Remembers why the last renewal failed."""

    def __init__(self) -> None:
        self.why = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, LeaseInJeopardy | KeeperFailed):
            self.why = event.why


@dataclass(frozen=True, slots=True)
class Margins:
    """How many seconds before the deadline the child gets SIGTERM (`warn`), and SIGKILL (`kill`)."""

    warn: float
    kill: float

    @classmethod
    def of(cls, ttl: float, grace: float | None) -> Margins:
        warn = ttl / 6 if grace is None else grace
        return cls(warn, min(max(warn / 4, ttl / 100), KILL_SECONDS_MAX))


def _take(acquire: Callable[..., Lease], name: str, wait: float | None) -> Lease:
    """Acquire the lease. If that takes a wait, first say on stderr who holds the name."""
    try:
        return acquire(wait=0.0)
    except NotGranted as refused:
        if wait == 0:
            raise
        complain(f"waiting for {name}, {refused.why}")
        return acquire(wait=wait)


def _run_under(
    lease: Lease,
    command: list[str],
    environment: dict[str, str],
    inbox: Inbox,
    margins: Margins,
    failure: LastFailure,
) -> int:
    try:
        status = supervised(lease, command, environment, inbox, margins)
    except NotStarted as error:
        return _release(lease, error.status, at_once=True)
    return lost(lease, failure) if status is None else _release(lease, status, at_once=status != exits.OK)


class NotStarted(Exception):
    """The command could not be started; it has been said why."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__(command)
        self.status = exits.NOT_FOUND if isinstance(error, FileNotFoundError) else exits.NOT_EXECUTABLE
        why = (
            "command not found" if self.status == exits.NOT_FOUND else f"cannot be executed: {error.strerror}"
        )
        complain(f"{command}: {why}")


def supervised(
    lease: Lease, command: list[str], environment: dict[str, str], inbox: Inbox, margins: Margins
) -> int | None:
    """Run the command while the lease is held, and return its status. None: it was stopped, its lease is over."""
    lease.check()  # the reply may have been slow
    watchdog = Watchdog.of(lease)
    try:
        child = Child(command, environment)
    except OSError as error:
        raise NotStarted(command[0], error) from error
    try:
        lease.on_lost(inbox.interrupt)
        cut_short = _watch(lease, child, inbox, margins, watchdog)
    except BaseException:
        child.kill()  # nobody watches its lease any more
        raise
    finally:
        status = child.status()
    return None if cut_short else status


class Watchdog:
    """Tells a service manager (systemd) that the lease will last, so that it kills a stopped `fenced` and its command.

    `WATCHDOG=1` is sent only while the lease outlasts the time that the service manager then waits. So the unit is
    killed before the lease can be granted to another, also if this process is stopped and can do nothing itself.
    """

    def __init__(self, lease: Lease, interval: float | None) -> None:
        self._lease = lease
        self._interval = interval

    @classmethod
    def of(cls, lease: Lease) -> Watchdog:
        interval = watchdog_seconds()
        if interval is not None and interval > lease.ttl / 2:
            raise Misuse(f"WatchdogSec is at most half the ttl ({lease.ttl / 2:g} s), not {interval:g} s")
        notify("READY=1")
        return cls(lease, interval)

    def beat(self, wait: float) -> float:
        """Send a sign of life if the lease will last. Returns how long the caller may wait until the next one."""
        if self._interval is None:
            return wait
        if self._lease.remaining() > self._interval:
            notify("WATCHDOG=1")
        return min(wait, self._interval / 3)


def _watch(lease: Lease, child: Child, inbox: Inbox, margins: Margins, watchdog: Watchdog) -> bool:
    """Forward signals to the child until it ends. True if we stopped it, because the lease was running out or lost."""
    warned = False
    while not child.has_ended():
        left = lease.remaining() - (margins.kill if warned else max(margins.warn, margins.kill))
        signum = inbox.wait(watchdog.beat(min(left, SLICE_SECONDS)))
        # Check the lease before forwarding the signal: SIGCONT must not continue a child past the deadline.
        remaining = 0.0 if lease.state is State.LOST else lease.remaining()
        if remaining <= margins.kill:
            child.kill()
            return True
        if remaining <= margins.warn and not warned:
            warned = True
            child.send(signal.SIGTERM)
            child.send(signal.SIGCONT)
        _forward(signum, child, inbox)
    cut_short = warned or lease.state is State.LOST
    if cut_short:
        child.kill()  # processes that the command left behind in its group must stop too
    return cut_short


def _forward(signum: int, child: Child, inbox: Inbox) -> None:
    ctrl_z = signum == signal.SIGCHLD and child.has_stopped()
    if ctrl_z or signum == signal.SIGTSTP:
        # Stop both: the child must not continue while this process, which renews its lease, is stopped.
        child.pause()
        inbox.stop(group=ctrl_z)
    elif signum == signal.SIGCONT:
        child.resume()
    elif signum not in (0, signal.SIGCHLD):
        child.send(signum)


def lost(lease: Lease, failure: LastFailure) -> int:
    bounded = lease._grant.hold_until is not None and not failure.why
    reason = lease.lost_reason or ("max_hold is over" if bounded else "it could not be renewed in time")
    why = "" if reason in ("revoked", "gone") or not failure.why else f" ({failure.why})"
    complain(f"stopped the command, its lease of {lease.name} (token {lease.token}) is lost: {reason}{why}")
    if lease.state is State.HELD:  # renewals work again; otherwise it expires soon
        _release(lease, exits.LOST, at_once=True)
    return exits.LOST


def _release(lease: Lease, status: int, *, at_once: bool) -> int:
    """Release, and return the status: the child's own if it ended while the lease was held, even if this fails."""
    left = lease.remaining()
    try:
        lease.release(at_once=at_once)
    except LeaseLost as lost:
        if lost.reason != "expired":  # revoked or gone: perhaps before the child's end
            complain(str(lost))
            return exits.LOST
    except FencedError as error:
        complain(f"{lease.name} was not released and expires in {left:.1f} s: {error}")
    return status
