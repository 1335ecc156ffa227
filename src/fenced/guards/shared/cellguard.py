"""One guard over compare-and-swap cells: judge, mode, audit and retry, once for every store that can swap a blob."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlsplit

from fenced.contracts import MANY_NAMES, Operator, Runtime, Trait, Versioned
from fenced.decision import RULES, Judgement, Mark, Mode, Rule, Ruling, Verdict, judge, rule_on
from fenced.errors import (
    Conflict,
    Contended,
    FencedError,
    Indeterminate,
    Misconfigured,
    Misuse,
    Unavailable,
    Unsupported,
    shown,
)
from fenced.guards.shared.answers import RECORDS_MAX, check_pattern, check_value, error_for, one_stamp
from fenced.guards.shared.cells import CONFIG, KEPT, Cell, Cells, Config
from fenced.model import Credential, Stamp, check_name, check_realm
from fenced.rollout import (
    QUIET_SECONDS,
    DatabaseStatus,
    Decision,
    DecisionCount,
    GuardStatus,
    Stage,
    advised,
)

T = TypeVar("T")

TRIES = 50
"""How often an operation is tried if others change the same cell."""
LAG_SECONDS = 1.0
AUDIT_LOCAL = Trait("audit-local", "Decisions are recorded and counted in the process that made them alone.")
MODE_LAG = Trait("mode-lag", "Each guard object notices a new mode within a second of its next operation.")
_PAUSE_SECONDS = 0.002


class _Known(NamedTuple):
    """The configuration as it was read last."""

    version: Any
    config: Config
    at: float


@dataclass(slots=True)
class _Try:
    """The cells as they were read once, and the judgement about them."""

    found: dict[str, tuple[Any, Cell]]
    after: dict[str, Cell] = field(default_factory=dict)
    notes: list[Decision] = field(default_factory=list)
    admitted: bool = False
    refusal: FencedError | None = None


class CellGuard:
    """Values under names, in cells. A subclass names its traits, and how it is made from a URL."""

    traits: tuple[Trait, ...] = (AUDIT_LOCAL, MODE_LAG)
    kind = "this guard"

    def __init__(
        self,
        cells: Cells,
        runtime: Runtime,
        url: str,
        *,
        rule: Rule = "retry",
        mode: str = "enforce",
        clock: Callable[[], float] = time.time,
    ) -> None:
        if rule not in RULES:
            raise Misuse(f"a rule is {', '.join(RULES)}, not {shown(rule)}")
        self.url = url
        self.cells = cells
        self.records: deque[Decision] = deque(maxlen=RECORDS_MAX)
        self.counted: Counter[tuple[str, str, str]] = Counter()
        self._runtime = runtime
        self._first = Config(rule, {"*": str(Mode.parse(mode))})
        self._clock = clock
        self._known: _Known | None = None
        self._many = MANY_NAMES in self.traits

    async def open(self) -> None:
        version, blob = await self.cells.get(CONFIG)
        if blob is None:
            await self.cells.swap([(CONFIG, version, self._first.packed())])
        await self._config(fresh=True)  # if another process was first, its configuration counts

    async def announce(self, credential: Credential) -> None:
        names = credential.names or one_stamp(credential, self.kind).names
        if self._many:
            await self._operate(credential, dict.fromkeys(names), announce=True)
            return
        for name in names:  # one swap each: a refusal leaves the marks that rose before it, which is harmless
            await self._operate(credential, {name: None}, announce=True)

    async def read(self, credential: Credential, name: str) -> Versioned:
        cells = await self._operate(credential, {check_name(name): None}, announce=True)
        return Versioned(cells[name].value, cells[name].version)

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        _, cell = await self._cell(name)
        if at_least and (cell.mark is None or cell.mark.token < at_least):
            raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
        return Versioned(cell.value, cell.version)

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        values: dict[str, bytes | None] = {check_name(name): check_value(value)}
        return (await self._operate(credential, values, expect=expect))[name].version

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        if len(values) > 1 and not self._many:
            raise Unsupported(f"{self.kind} writes one name at a time; write them one by one")
        await self._operate(credential, {check_name(name): check_value(values[name]) for name in values})

    async def _operate(
        self,
        credential: Credential | None,
        values: dict[str, bytes | None],
        *,
        announce: bool = False,
        expect: int | None = None,
        operation: str | None = None,
    ) -> dict[str, Cell]:
        """Read, judge and swap until it is decided; returns the cells as this operation left them.

        No lock is held: a swap that finds another version has done nothing, and everything is read again. A swap
        whose outcome is unknown is settled by the operation's id, which is in the cell if and only if it happened.
        """
        stamp = None if credential is None else one_stamp(credential, self.kind)
        operation = operation or self._new_id()
        unsettled: _Try | None = None
        fresh = False
        for tried in range(TRIES):
            try:
                known = await self._config(fresh=fresh)
                this = _Try({name: await self._cell(name) for name in values})
            except Unavailable as error:
                raise (error if unsettled is None else _unknown(str(error))) from error
            if unsettled is not None:
                if _happened(operation, this):
                    self._note(unsettled.notes)
                    return unsettled.after
                if not _may_still_happen(this, unsettled):
                    unsettled = None
            self._judge(this, known.config, stamp, operation, values, announce, expect)
            changed = [name for name in values if this.after.get(name) != this.found[name][1]]
            if (this.refusal or (self._many and not changed)) and not fresh:
                fresh = True  # no swap compares the configuration, so it is read again before it is believed
                continue
            if this.refusal is not None:
                raise self._refused(this, unsettled) from None
            if not changed:
                return this.after
            try:
                if await self._swap(this, changed, known, stamp):
                    self._note(this.notes)
                    return this.after
            except Indeterminate:
                unsettled = this
            fresh = True
            # Operations that collided retry at different times.
            await self._runtime.wait(self._runtime.wakeup(), self._soon(tried))
        if unsettled is not None:
            raise _unknown(f"{TRIES} tries had no clear answer")
        raise Contended(f"{', '.join(values)}: others were quicker {TRIES} times; try again")

    def _new_id(self) -> str:
        """Unique for ever: `judge` takes two operations with one id for one, also across restarts."""
        return self._runtime.secret()

    def _soon(self, tried: int) -> float:
        return self._runtime.now() + self._runtime.random() * _PAUSE_SECONDS * min(tried, 20)

    def _judge(
        self,
        this: _Try,
        config: Config,
        stamp: Stamp | None,
        operation: str,
        values: dict[str, bytes | None],
        announce: bool,
        expect: int | None,
    ) -> None:
        """Judge the cells that were found, and fill in the verdicts and the cells to write."""
        for name, (_, cell) in this.found.items():
            judged = self._decide(cell.mark, stamp, name, config, announce, operation)
            mode = config.mode_of(name)
            ruling = rule_on(judged.verdict, mode, name)
            if judged.verdict is Verdict.ADMIT:
                this.admitted = True
            elif judged.verdict is not Verdict.APPLIED:
                this.notes.append(self._decision(name, stamp, cell.mark, judged.verdict, ruling, mode))
            if ruling is Ruling.REFUSE or judged.verdict is Verdict.APPLIED:
                this.refusal = error_for(
                    judged.verdict, name=name, stamp=stamp, mark=cell.mark, realm=config.realm
                )
                return
            mark = judged.mark if judged.verdict is Verdict.ADMIT else cell.mark
            this.after[name] = cell.changed(operation, mark, values[name])
        for name, (_, cell) in this.found.items():
            if expect is not None and cell.version != expect:
                this.refusal = Conflict(f"{name}: version {cell.version}, not {expect}")
                this.notes.clear()

    def _decide(
        self,
        mark: Mark | None,
        stamp: Stamp | None,
        name: str,
        config: Config,
        announce: bool,
        operation: str,
    ) -> Judgement:
        return judge(
            mark,
            stamp,
            name=name,
            rule=config.rule,
            realm=config.realm,
            announce=announce,
            operation=operation,
        )

    def _refused(self, this: _Try, unsettled: _Try | None) -> FencedError:
        assert this.refusal is not None
        if unsettled is not None:  # an earlier swap of this operation may still arrive at the store
            return _unknown(str(this.refusal))
        self._note(this.notes)
        return this.refusal

    async def _swap(self, this: _Try, changed: list[str], known: _Known, stamp: Stamp | None) -> bool:
        """Swap the changed cells; if the store can, only while the configuration is the one that was used to judge."""
        config = None
        if stamp is not None and this.admitted and known.config.realm is None:
            config = replace(known.config, realm=stamp.realm).packed()
        changes: list[tuple[str, Any, bytes | None]] = [
            (key_of(name), this.found[name][0], this.after[name].packed()) for name in changed
        ]
        if self._many:
            changes.append((CONFIG, known.version, config))
        elif config is not None and not await self.cells.swap([(CONFIG, known.version, config)]):
            return False
        if config is not None:
            self._known = None
        return await self.cells.swap(changes)

    def _decision(
        self, name: str, stamp: Stamp | None, mark: Mark | None, verdict: Verdict, ruling: Ruling, mode: Mode
    ) -> Decision:
        at = datetime.fromtimestamp(self._clock(), UTC)
        return Decision.about(at, self.url, name, stamp, mark, verdict, ruling, str(mode))

    def _note(self, notes: list[Decision]) -> None:
        for note in notes:
            self.counted[note.verdict.value, note.ruling.value, note.mode] += 1
            if note.ruling is not Ruling.COUNT:
                self.records.append(note)

    async def _cell(self, name: str) -> tuple[Any, Cell]:
        version, blob = await self.cells.get(key_of(check_name(name)))
        return version, Cell.unpacked(name, blob)

    async def _config(self, *, fresh: bool = False) -> _Known:
        """The configuration. It is read again if the last reading is too old, or with `fresh`."""
        known = self._known
        if known is None or fresh or (not self._many and self._runtime.now() - known.at > LAG_SECONDS):
            at = self._runtime.now()
            version, blob = await self.cells.get(CONFIG)
            if blob is None:
                raise Misconfigured(f"{self.url}: there is no guard here; open() makes one")
            known = self._known = _Known(version, Config.unpacked(blob), at)
        return known

    async def _reconfigure(self, change: Callable[[Config], Config]) -> Config:
        """Change the configuration; returns the previous one."""
        for tried in range(TRIES):
            known = await self._config(fresh=True)
            wanted = change(known.config)
            if wanted == known.config:
                return known.config
            try:
                if await self.cells.swap([(CONFIG, known.version, wanted.packed())]):
                    self._known = None
                    return known.config
            except Indeterminate:
                pass  # unknown outcome: read again, and repeat the change if it is missing, which is harmless
            await self._runtime.wait(self._runtime.wakeup(), self._soon(tried))
        raise Contended(f"{self.url}: others changed the configuration {TRIES} times; try again")

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        new = {check_pattern(pattern): str(Mode.parse(mode))}
        await self._reconfigure(lambda config: replace(config, modes={**config.modes, **new}))

    async def unset_mode(self, pattern: str) -> bool:
        before = await self._reconfigure(
            lambda config: replace(config, modes={p: m for p, m in config.modes.items() if p != pattern})
        )
        return pattern in before.modes

    async def modes(self) -> dict[str, str]:
        return dict((await self._config(fresh=True)).config.modes)

    async def adopt(self, realm: str) -> None:
        check_realm(realm)
        await self._reconfigure(lambda config: replace(config, realm=realm))

    async def mark(self, name: str) -> Mark | None:
        return (await self._cell(name))[1].mark

    async def marks(self) -> list[Mark]:
        """The marks of all names."""
        cells = [await self.cells.get(key) for key in await self.cells.keys() if key != CONFIG]
        marks = [Cell.unpacked("a cell", blob).mark for _, blob in cells]
        return [mark for mark in marks if mark is not None]

    async def highest(self) -> int:
        await self._config(fresh=True)  # Misconfigured where there is no guard
        return max((mark.token for mark in await self.marks()), default=0)

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await work(CellOperator(self))

    async def status(self, quiet_for: float) -> DatabaseStatus:
        """One guard, as it is now, with the counts of this process."""
        config = (await self._config(fresh=True)).config
        now, marks = datetime.fromtimestamp(self._clock(), UTC), await self.marks()
        current = set(config.modes.values())
        counts = [
            DecisionCount(verdict, ruling, mode, count, count if mode in current else 0)
            for (verdict, ruling, mode), count in self.counted.items()
        ]
        stages = tuple(Stage(pattern, mode) for pattern, mode in sorted(config.modes.items()))
        found = GuardStatus(
            self.url,
            "{name}",
            config.rule,
            mandatory=any(trait.key == "mandatory" for trait in self.traits),
            epoch=None,
            stages=stages,
            marks=len(marks),
            highest=max((mark.token for mark in marks), default=0),
            counts=tuple(counts),
        )
        return DatabaseStatus(now, config.realm, (advised(found, now, quiet_for),))

    async def close(self) -> None:
        await self.cells.close()


class CellOperator(Operator):
    """What operators do with a guard over cells."""

    def __init__(self, guard: CellGuard) -> None:
        self.kind = guard.kind
        self._guard = guard

    async def status(self, table: str | None = None, quiet_for: float = QUIET_SECONDS) -> DatabaseStatus:
        return await self._guard.status(quiet_for)

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        return list(self._guard.records)[-limit:]

    async def modes(self, table: str | None = None) -> dict[str, str]:
        return await self._guard.modes()

    async def set_mode(
        self, table: str | None, mode: str, pattern: str = "*", wait: float = 0.0
    ) -> tuple[str, ...]:
        await self._guard.set_mode(mode, pattern)
        return ()

    async def adopt(self, realm: str) -> None:
        await self._guard.adopt(realm)

    async def unset_mode(self, table: str | None, pattern: str) -> bool:
        if check_pattern(pattern) == "*":
            raise Misuse("the mode of * is the guard's own: set another one")
        return await self._guard.unset_mode(pattern)


def key_of(name: str) -> str:
    return f"n/{name}"


def _happened(operation: str, this: _Try) -> bool:
    return any(operation in cell.written for _, cell in this.found.values())


def _may_still_happen(this: _Try, unsettled: _Try) -> bool:
    """Whether a swap without a reply can still happen: only while every version that it compares is unchanged."""
    for name, (version, before) in unsettled.found.items():
        now = this.found[name]
        if now[1].swaps - before.swaps > KEPT:
            raise _unknown(f"{name}: more than {KEPT} others have written since")
        if now[0] != version:
            # The cell changed and does not have the operation's id: the swap did not happen, and cannot any more.
            return False
    return True


def _unknown(why: str) -> Indeterminate:
    return Indeterminate(f"the reply was lost, and whether the operation happened is unknown: {why}")


def options_in(url: str) -> dict[str, Any]:
    """`rule` and `mode` from `?rule=...&mode=...` of a guard's address."""
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"rule", "mode"}):
        raise Misuse(f"a guard's address takes ?rule= and ?mode=, not {shown(', '.join(unknown))}")
    return options
