"""`fenced drill --holder`: the user's own worker on the user's own tables, and the verdict about it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from typing import Any

import click

from fenced.drills.outside import Outside
from fenced.drills.programs import NotShown

FAULTS = ("sigstop", "cpu-starvation", "partition")
"""The drills that somebody else's program can be put into."""


@dataclass(frozen=True, slots=True)
class HolderOptions:
    """The options of `fenced drill --holder`, as they were given."""

    holder: str
    fault: str
    authority: str | None
    guard: str | None
    table: str | None
    lease: str | None
    check: str | None
    stop_at: str
    takes_lease: bool
    ttl: float | None
    as_json: bool

    def outside(self) -> Outside:
        """Raises UsageError where something is missing."""
        if self.fault not in FAULTS:
            raise click.UsageError(f"--holder goes with {', '.join(FAULTS)}")
        if not self.authority or not self.guard or not self.table or not self.lease:
            raise click.UsageError(
                "--holder needs --authority, --guard, --table, and --lease (the name of its lease)"
            )
        if self.fault == "partition" and not self.takes_lease:
            raise click.UsageError(
                "partition cuts the program off from its authority, so it goes with --takes-lease"
            )
        command, sql = shlex.split(self.holder), self.check

        def check(db: Any) -> object:
            return [tuple(row) for row in db.execute(sql).fetchall()]

        return Outside(
            command,
            self.authority,
            self.guard,
            self.lease,
            self.table,
            self.ttl or 1.0,
            self.takes_lease,
            self.stop_at,
            self.fault,
            check if sql else None,
        )


def run_own(options: HolderOptions) -> int:
    outside = options.outside()
    try:
        late = outside.overtake()
    except NotShown as error:
        verdict, sentence, found = "inconclusive", f"This shows nothing: {error}.", {}
    else:
        verdict, sentence, found = late.verdict, late.sentence, asdict(late)
        if not options.as_json:
            _tell(options, found)
    if options.as_json:
        told = {"drill": options.fault, "verdict": verdict, "sentence": sentence, **found}
        click.echo(json.dumps(told, indent=2, default=str))
    else:
        click.echo(f"{verdict.upper()}  {sentence}")
    return {"held": 0, "broken": 1}.get(verdict, 2)


def _tell(options: HolderOptions, found: dict[str, Any]) -> None:
    for line in found["output"].splitlines()[-10:]:
        click.echo(f"  | {line}")
    click.echo(
        f"  {found['name']}: the program had token {found['token']}, and was overtaken by token {found['newer']}"
    )
    for each in found["refused"]:
        click.echo(f"  refused and recorded: {each['verdict']}, token {each['mark']} had been seen")
    unrecorded = found["counted"] - len(found["refused"])
    if unrecorded > 0:
        click.echo(f"  refused and counted, without a record: {unrecorded}")
    if options.check:
        click.echo(f"  {options.check}: {found['before']} before it went on, {found['after']} after")
    click.echo(f"  exit status {found['status']}")
