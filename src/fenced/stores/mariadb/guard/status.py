"""The guards of a database as they are now, for its operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fenced.errors import Misconfigured
from fenced.guards.spec import Spec
from fenced.stores.mariadb.guard import claiming, install, schema
from fenced.stores.mariadb.guard.install import likes_of, text
from fenced.stores.mariadb.guard.schema import RunsStatements
from fenced.stores.mariadb.guard.triggers import DIGEST, EVENTS, MariadbShape, trigger_name
from fenced.stores.mariadb.wire.connection import literal
from fenced.values import sqlfile
from fenced.values.rollout import DecisionCount, GuardStatus, Override, Stage

SQL = sqlfile.load(Path(__file__).with_name("operator.sql"))
_WHY = {
    "TRIGGER": "may drop the triggers",
    "DROP": "may truncate the table",
    "ALTER": "may rename the table",
    "SUPER": "administrator",
}

Rows = list[tuple[Any, ...]]


async def run(session: RunsStatements, what: str, scope: str, **parts: str) -> Rows:
    return await session.run(SQL[what].format(scope=literal(scope), **parts))


async def guards(
    session: RunsStatements, scope: str, table: str | None, quiet_for: float, *, counts_marks: bool
) -> list[GuardStatus]:
    chosen = [row for row in await run(session, "guards", scope) if table in (None, text(row[0]))]
    if table is not None and not chosen:
        raise Misconfigured(f"no guard is installed for {table}")
    modes = _by_guard(await run(session, "modes", scope))
    overrides = _by_guard(await run(session, "overrides", scope))
    counts = _by_guard(await run(session, "counts", scope, quiet=repr(float(quiet_for))))
    triggers = _by_guard(await run(session, "triggers", scope))
    found = []
    for name, template, rule, mandatory, epoch, digest, engine, claims in chosen:
        guard = text(name)
        marks = highest = 0
        if counts_marks:
            ((marks, highest),) = await run(session, "marks", scope, **_likes(text(template)))
        shape = MariadbShape(scope, guard, {})
        there = {trigger for (trigger,) in triggers[guard]}
        wrong = [
            *_wrong(
                guard,
                engine,
                text(digest) == (claiming.DIGEST if claims else DIGEST),
                there,
                mandatory,
                epoch,
            ),
            *await install.cascades(shape, session),
        ]
        found.append(
            GuardStatus(
                guard,
                text(template),
                text(rule),
                bool(mandatory),
                text(epoch) or None,
                tuple(Stage(text(pattern), text(mode), at(since)) for pattern, mode, since in modes[guard]),
                tuple(
                    Override(text(pattern), at(until), text(who), text(why))
                    for pattern, until, who, why in overrides[guard]
                ),
                int(marks),
                int(highest),
                None,
                tuple(_count(row) for row in counts[guard]),
                tuple(wrong),
                await _bypass(session, scope, guard),
            )
        )
    return found


async def _bypass(session: RunsStatements, scope: str, table: str) -> tuple[str, ...]:
    rows = await run(session, "bypass", scope, database=literal(scope), table=literal(table))
    return tuple(
        f"{who} ({', '.join(_WHY[privilege] for privilege in text(privileges).split(', '))})"
        for who, privileges in rows
    )


def doubts(flush: int, log_bin: int, sync: int, doublewrite: object) -> list[str]:
    says = []
    if flush != 1:
        says.append("a crash loses the last marks and writes (my.cnf: innodb_flush_log_at_trx_commit = 1)")
    if log_bin and sync != 1:
        says.append("a power cut may lose marks and data of the binary log (my.cnf: sync_binlog = 1)")
    if str(doublewrite).upper() in ("0", "OFF"):
        says.append("a power cut may damage marks and data (my.cnf: innodb_doublewrite = ON)")
    return says


def _wrong(
    table: str, engine: object, current: bool, there: set[str], mandatory: object, epoch: object
) -> list[str]:
    """What keeps a guard from seeing every write."""
    if engine is None:
        return ["the table was dropped or renamed"]
    says = []
    if str(engine).lower() != "innodb":
        says.append(f"the table is of {engine}: a refused row stays")
    if not mandatory:
        return says
    labels = [*EVENTS, *(("epoch_i", "epoch_u") if epoch else ())]
    missing = [name for name in (trigger_name(table, label) for label in labels) if name not in there]
    if len(missing) == len(labels):  # without the privilege the server shows none
        return [
            *says,
            "no trigger is to be seen: install the guard again, or GRANT TRIGGER on the table to this user",
        ]
    says += [f"trigger {name} is missing: install the guard again" for name in missing]
    if not missing and not current:
        says.append(f"its triggers are those of another version of fenced: {schema.UPGRADE}")
    return says


def _count(row: Sequence[Any]) -> DecisionCount:
    verdict, ruling, mode, count, recent, last, who, pattern, address, pid = row
    where = some(address), int(text(pid)) if pid is not None else None
    return DecisionCount(
        *(text(verdict), text(ruling), text(mode), int(count), int(recent), at(last), text(who)),
        *(None, some(pattern), *where),
    )


def _likes(template: str) -> dict[str, str]:
    """The names that a template can make."""
    spec = Spec("x", template)
    pattern = "".join("*" if column else piece for piece, column in spec.pieces)
    return {
        "likes": literal(likes_of(pattern)),
        "whole": "TRUE" if spec.whole else "FALSE",
        "slashes": str(template.count("/")),
    }


def _by_guard(rows: Rows) -> defaultdict[str, Rows]:
    """Rows by their first column, without it."""
    found: defaultdict[str, Rows] = defaultdict(list)
    for guard, *rest in rows:
        found[text(guard)].append(tuple(rest))
    return found


def at(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC)


def some(value: object) -> str | None:
    return None if value is None else text(value)
