"""Shows a drill while it runs: a heading, a line for every step, and the verdict."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import Protocol

import click

from fenced.drills.history import Verdict
from fenced.drills.outcome import DrillOutcome, Setting, counted
from fenced.drills.stage import Plan, shown_ttl
from fenced.drills.story import AUTHORITY, DATABASE, StoryStep, Tone
from fenced.runtime.clocks import now

WIDTH = 80
_INDENT = " " * 11
_TICK_SECONDS = 0.1
_ACTORS = {"A": "yellow", "B": "cyan", AUTHORITY: "magenta", DATABASE: "blue"}
_TONES: dict[Tone, str] = {
    "refused": "green",
    "corrupt": "red",
    "stop": "bright_black",
    "expiry": "bright_black",
}
_VERDICTS: dict[Verdict, str] = {"held": "green", "broken": "red", "inconclusive": "yellow"}
_TOKEN = re.compile(r"\btoken \d+\b")


class Screen(Protocol):
    """Shows a running drill."""

    def heading(self, plan: Plan, setting: Setting) -> None: ...
    def again(self, outcome: DrillOutcome) -> None: ...
    def step(self, step: StoryStep) -> None: ...
    def tick(self, text: str) -> None: ...
    def verdict(self, outcome: DrillOutcome) -> None: ...


class Quiet:
    """Shows nothing, for `--json`."""

    def heading(self, plan: Plan, setting: Setting) -> None:
        return

    def again(self, outcome: DrillOutcome) -> None:
        return

    def step(self, step: StoryStep) -> None:
        return

    def tick(self, text: str) -> None:
        return

    def verdict(self, outcome: DrillOutcome) -> None:
        return


class Terminal:
    """Writes lines to the standard output; with colours and a progress line only if it is a terminal."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._color = self._live and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._ticked = 0.0
        self._shown = False
        self._owners: dict[str, str] = {}

    def heading(self, plan: Plan, setting: Setting) -> None:
        self._say(self._style(plan.drill.question, bold=True))
        for key, value in _setup_lines(plan, setting):
            self._say(f"  {self._style(f'{key:<10}', fg=_ACTORS.get(key))} {value}")
        for doubt in setting.doubts:
            self._say(f"  best effort only: {doubt}")
        if setting.fresh_authority and not setting.fresh_guard:
            self._say("  note       a guard trusts the first authority it meets, here the drill's own")
        self._say()

    def again(self, outcome: DrillOutcome) -> None:
        self._say(f"{_INDENT}{outcome.sentence} Once more:")
        self._say()

    def step(self, step: StoryStep) -> None:
        if step.tone == "grant":
            self._owners.setdefault(step.text.rpartition(" with ")[2], step.target)
        if not step.text:
            return
        actor = self._style(f"{step.actor:<10}", fg=_ACTORS.get(step.actor), bold=True)
        self._say(f"{step.time:7.2f} s  {actor} {self._sentence(step)}")

    def tick(self, text: str) -> None:
        """Show `text` in a line that the next output overwrites."""
        if self._live and now() - self._ticked >= _TICK_SECONDS:
            self._ticked, self._shown = now(), True
            room = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[K" + self._style(text[:room], fg="bright_black"))

    def verdict(self, outcome: DrillOutcome) -> None:
        if outcome.plan.drill.many:
            self._counts(outcome)
        verdict = outcome.verdict
        word = verdict.upper()
        indent = max(8, len(word) + 2)
        self._say()
        first, *rest = click.wrap_text(outcome.sentence, WIDTH - indent).splitlines()
        self._say(self._style(word, fg=_VERDICTS[verdict], bold=True) + " " * (indent - len(word)) + first)
        for line in rest:
            self._say(" " * indent + line)
        self._say(_hint(outcome))

    def _counts(self, outcome: DrillOutcome) -> None:
        findings, history = outcome.findings, outcome.history
        percent = f"{findings.lost_percent:.1f} % of the acknowledged"
        self._count("acknowledged updates", findings.acknowledged)
        self._count("pauses of a holder", len(history.pauses), _range(outcome))
        self._count("overtaken holders", findings.overtaken, "acted after a newer holder had read")
        self._count("refused operations", findings.refused, _kinds(outcome))
        self._count("lost updates", len(findings.lost), percent, bad=bool(findings.lost))
        self._count("doubled updates", len(findings.doubled), bad=bool(findings.doubled))
        self._count("stale operations admitted", len(findings.stale), bad=bool(findings.stale))

    def _count(self, what: str, count: int, remark: str = "", *, bad: bool = False) -> None:
        number = self._style(f"{count:>8}", bold=True, fg="red" if bad else None)
        self._say(f"  {what:<27}{number}   {remark}".rstrip())

    def _sentence(self, step: StoryStep) -> str:
        """The text in the colour of its tone, and tokens in the colour of the holder that they were granted to."""
        fg, parts, last = _TONES.get(step.tone), [], 0
        for found in _TOKEN.finditer(step.text):
            parts.append(self._style(step.text[last : found.start()], fg=fg))
            owner = self._owners.get(found[0], "")
            parts.append(self._style(found[0], fg=_ACTORS.get(owner), bold=True))
            last = found.end()
        parts.append(self._style(step.text[last:], fg=fg))
        return "".join(parts)

    def _style(self, text: str, *, fg: str | None = None, bold: bool = False) -> str:
        return click.style(text, fg=fg, bold=bold or None) if self._color and text else text

    def _say(self, line: str = "") -> None:
        if self._shown:
            self._shown = False
            self._write("\r\x1b[K")
        click.echo(line, color=self._color)

    def _write(self, text: str) -> None:
        click.echo(text, nl=False, color=True)


def _setup_lines(plan: Plan, setting: Setting) -> list[tuple[str, str]]:
    authority = "SQLite, a fresh file" if setting.fresh_authority else setting.authority
    if setting.guard == "none":
        guard = "a plain table without a guard"
    else:
        guard = "SQLite, a fresh file, guarded" if setting.fresh_guard else setting.guard
    cast = [(AUTHORITY, f"{authority}; grants leases, mints tokens"), (DATABASE, guard)]
    ttl = shown_ttl(plan.ttl, setting.ttl)
    if plan.drill.many:
        many = (
            f"{plan.holders} processes on {counted(plan.names, 'name')} for {setting.seconds:g} s, ttl {ttl}"
        )
        return [*cast, ("holders", many)]
    scale = setting.ttl / plan.drill.story_seconds
    told = (
        "as told"
        if scale == 1
        else f"1 s is {scale:.3g} s here (ttl in the literature: {plan.drill.story_seconds:g} s)"
    )
    return [*cast, ("A, B", f"two processes that sell from one stock of 10; ttl {ttl}"), ("times", told)]


def _range(outcome: DrillOutcome) -> str:
    lengths = [pause.ended - pause.began for pause in outcome.history.pauses]
    return f"{min(lengths):.1f} to {max(lengths):.1f} s" if lengths else ""


def _kinds(outcome: DrillOutcome) -> str:
    refused = (each for each in outcome.history.operations if each.decision == "refused")
    return ", ".join(sorted({each.why or "" for each in refused}))


def _hint(outcome: DrillOutcome) -> str:
    if outcome.plan.authority is not None or outcome.plan.guard not in (None, "none"):  # may have passwords
        return (
            "See it without the guard:  the same command with --guard none"
            if outcome.guarded
            else "See it with the guard:  the same command without --guard none"
        )
    name = outcome.plan.drill.name
    words = [] if name == "sigstop" else [name]
    words += ["--guard none"] if outcome.guarded else []
    what = "without" if outcome.guarded else "with"
    return f"See it {what} the guard:  {_command(' '.join(words))}"


def _command(words: str) -> str:
    """The command line of a drill with these words, as the caller can type it: the Makefile sets the variable."""
    if os.environ.get("FENCED_DRILL_BY") == "make":
        return f'make drill ARGS="{words}"' if words else "make drill"
    return f"fenced drill {words}".rstrip()
