"""The `fenced` command. Commands are imported when they are used, so that `fenced run` starts fast.

Every error becomes one line on stderr and an exit status from the table in `exits`. FENCED_DEBUG=1 also shows the
traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

import fenced
from fenced.cli import exits
from fenced.cli.output import complain
from fenced.errors import FencedError

COMMANDS = {
    "run": ("fenced.cli.run:run", "Hold a lease while a command runs."),
    "once": ("fenced.cli.once:once", "Run a command once for each version, or once in each period."),
    "ls": ("fenced.cli.looking:ls", "List the names that are held or waited for."),
    "show": ("fenced.cli.looking:show", "Show the holder of a name, and its waiters in order."),
    "top": ("fenced.cli.looking:top", "List the names that are most in demand."),
    "release": ("fenced.cli.operating:release", "Take a name from its holder by force."),
    "authority": (
        "fenced.cli.operating:authority",
        "Operate an authority: install, show, raise its floor, move.",
    ),
    "guard": (
        "fenced.cli.guards:guard",
        "Install guards in a database, and operate them.",
    ),
    "work": ("fenced.cli.work:work", "Show who has claimed which rows of a table."),
    "stamp": ("fenced.cli.stamp:stamp", "Read a stamp, or make one of another lock's number."),
    "serve": ("fenced.cli.serve:serve", "Serve leases over HTTP, for programs in any language."),
    "proxy": ("fenced.cli.proxy:proxy", "Put an HTTP service behind a fence, without a change to it."),
    "doctor": ("fenced.cli.doctor:doctor", "Say whether an authority and its guards are safe together."),
    "audit": ("fenced.cli.audit:audit", "Show what guards have refused or let through."),
    "explain": ("fenced.cli.explain:explain", "Say what happened to a name."),
    "tune": ("fenced.cli.tune:tune", "Choose a ttl by the pauses of your machines."),
    "exporter": ("fenced.cli.exporter:exporter", "Show Prometheus what guards and authorities know."),
    "alerts": ("fenced.cli.alerts:alerts", "Print alerts for Prometheus, and a dashboard."),
    "drill": ("fenced.drills.command:drill", "Stop a holder past its ttl and see whether it is refused."),
    "help": ("fenced.cli.topics:help_", "Explain a command, or the exit statuses (`fenced help exits`)."),
}


class LazyGroup(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            import difflib

            similar = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f". Did you mean {similar[0]!r}?" if similar else ""
            raise click.UsageError(f"No such command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fenced.__version__, prog_name="fenced", message="%(prog)s %(version)s")
def app() -> None:
    """Leases with fencing tokens, and guards that refuse stale holders.

    \b
    export FENCED_AUTHORITY=sqlite:////var/lib/app/leases.db
    fenced run nightly-report --ttl 30 -- ./report.sh
    fenced ls
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and exit with a status from `exits`."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "_FENCED_COMPLETE" in os.environ:
        app.main(args, prog_name="fenced")  # a shell asks for completions; this call exits
    if sys.stdout is not None:
        # Show characters that this locale cannot encode as escapes, instead of failing.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(_guarded(args))


def _guarded(args: list[str]) -> int:
    """Run the command; every exception becomes one line and a status."""
    try:
        code = _run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe. Replace stdout, so that the interpreter's flush at exit does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return exits.BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 (the one place that handles all errors)
        if os.environ.get("FENCED_DEBUG") == "1":
            import traceback

            traceback.print_exc()
        return _explain(error)


def _run(args: list[str]) -> int:
    try:
        with app.make_context("fenced", args) as context:
            result = app.invoke(context)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    return result if isinstance(result, int) else exits.OK


def _explain(error: Exception) -> int:
    match error:
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return exits.USAGE
        case click.ClickException():
            complain(error.format_message().rstrip(".") + _hint(error))
            return exits.USAGE
        case click.Abort():
            return exits.INTERRUPTED
        case FencedError():
            complain(str(error))
            return exits.code_of(error)
        case OSError():
            complain(str(error))
            return exits.INTERNAL
    complain(f"{type(error).__name__}: {error} (this is a bug; FENCED_DEBUG=1 shows where)")
    return exits.INTERNAL


def _hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return "" if context is None else f" (see '{context.command_path} --help')"
