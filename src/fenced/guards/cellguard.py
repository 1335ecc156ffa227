"""One guard over compare-and-swap cells: judge, swap and retry, once for every store that can swap a blob."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from types import MappingProxyType
from typing import Any

from fenced import events
from fenced.errors import Conflict, Contended, FencedError, Indeterminate, Unsupported
from fenced.guards.answers import check_value, error_for, one_stamp
from fenced.guards.cells import CONFIG, KEPT, Cell, Config, Swapped, key_of
from fenced.guards.guardedcells import (
    SEEN_MAX,
    TRIES,
    Admitted,
    Changes,
    GuardedCells,
    KnownConfig,
    read_cell,
)
from fenced.values.contracts import Versioned
from fenced.values.decision import Judgement, Mark, Mode, Ruling, Verdict, judge, rule_on
from fenced.values.model import Credential, Stamp, check_name, is_seq
from fenced.values.rollout import Decision

Sent = Mapping[str, tuple[Any, bytes | None]]
"""The cells that the store sent with a failed swap."""


class _Trust(Enum):
    """What an operation uses of what this guard object has read before."""

    MEMORY = "the configuration and the cells"
    CONFIG = "the configuration"
    NOTHING = "nothing"


@dataclass(slots=True)
class _Try:
    """The cells as they were read once, and the judgement about them."""

    found: dict[str, tuple[Any, Cell]]
    current: bool = False
    """The store sent all of them during this operation, so it may be decided without comparing them again."""
    after: dict[str, Cell] = field(default_factory=dict)
    notes: list[Decision] = field(default_factory=list)
    admitted: bool = False
    refusal: FencedError | None = None

    @property
    def changes(self) -> list[str]:
        """The names whose cells this operation changes."""
        if self.refusal is not None:
            return []
        return [name for name, (_, cell) in self.found.items() if self.after[name] is not cell]

    def record(self, operation: str) -> None:
        """Put the operation's id also into the cells that it would leave unchanged."""
        for name in self.found if self.refusal is None else ():
            if self.after[name] is self.found[name][1]:
                self.after[name] = self.after[name].recorded(operation)


class CellGuard(GuardedCells):
    """Values under names, in cells. A subclass names its traits, and how it is made from a URL."""

    async def announce(self, credential: Credential) -> None:
        stamp = one_stamp(credential, self.kind)
        names = credential.names or stamp.names
        if not self._many:  # one swap each: a refusal leaves the marks that rose before it, which is harmless
            for name in names:
                await self._operate(stamp, {name: None}, announce=True)
            return
        sent: Sent = {}
        if (compares := self._compares(stamp, names, announce=True)) is not None:
            try:
                swapped = await self._commit(compares, None)
            except Indeterminate:
                swapped = Swapped(None)  # a comparison changes nothing, so it may be repeated
            if swapped.versions is not None:
                return
            sent = self._outdated(names, swapped)
        await self._operate(stamp, dict.fromkeys(names), announce=True, sent=sent)

    async def read(self, credential: Credential, name: str) -> Versioned:
        stamp = one_stamp(credential, self.kind)
        cells = await self._operate(stamp, {check_name(name): None}, announce=True)
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
        return (await self._operate(self._stamp_in(credential), values, expect=expect))[name].version

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        if len(values) > 1 and not self._many:
            raise Unsupported(f"{self.kind} writes one name at a time; write them one by one")
        checked: dict[str, bytes | None] = {check_name(name): check_value(values[name]) for name in values}
        await self._operate(self._stamp_in(credential), checked)

    def _stamp_in(self, credential: Credential | None) -> Stamp | None:
        return None if credential is None else one_stamp(credential, self.kind)

    def has_announced(self, grant: str, names: tuple[str, ...]) -> bool:
        """Whether this object has raised the marks of all names for this grant: then nothing is sent before a read."""
        for name in names:
            try:
                seen = self._seen.get(name)
            except TypeError:  # no name: the announcement raises Misuse
                return False
            if seen is None or (mark := seen[1].mark) is None or mark.grant != grant:
                return False
        return True

    async def write_with(self, stamp: Stamp, names: tuple[str, ...], writes: Any) -> None:
        """Judge, and let the caller's own `writes` happen in the same step, for guards whose `_commit` takes them."""
        sent: Sent = {}
        if (compares := self._compares(stamp, names)) is not None:
            swapped = await self._commit(compares, writes)
            if swapped.versions is not None:
                return
            sent = self._outdated(names, swapped)
        values: dict[str, bytes | None] = {check_name(name): None for name in names}
        await self._operate(stamp, values, writes=writes, sent=sent)

    def _compares(self, stamp: Stamp, names: tuple[str, ...], *, announce: bool = False) -> Changes | None:
        """What the one swap compares that decides a further operation of the same holder, as nearly all are.

        The remembered cells admit it, and it changes none of them. None: they do not, or it does.
        """
        known, seen, before = self._known, [*map(self._seen.get, names)], self._admitted.get(names)
        if before is not None and before.known is known and before.seen == seen:
            asked = before.stamp
            # The same lease: all but the seq is equal, and this rule ignores the seq, if it is one.
            if stamp.grant == asked.grant and stamp[:3] == asked[:3] and is_seq(stamp.seq):
                return before.compares
        if known is None or known.config.realm is None or not self._one_step:
            return None
        compares: Changes = []
        for name, found in zip(names, seen, strict=True):
            if found is None or not self._admits(known.config, found[1].mark, stamp, name, announce):
                return None
            compares.append((key_of(name), found[0], None))
        compares.append((CONFIG, known.version, None))
        if known.config.rule == "retry":
            if len(self._admitted) >= SEEN_MAX:
                self._admitted.clear()
            self._admitted[names] = Admitted(stamp, known, seen, compares)
        return compares

    def _outdated(self, names: tuple[str, ...], swapped: Swapped) -> Sent:
        """Forget what a swap has found to be old; returns the cells that the store sent."""
        self._forget(names)
        self._known = None
        return swapped.found

    def _admits(
        self, config: Config, mark: Mark | None, stamp: Stamp, name: str, announce: bool = False
    ) -> bool:
        """Whether a mark admits an operation and stays as it is."""
        judged = judge(mark, stamp, name=name, rule=config.rule, realm=config.realm, announce=announce)
        return judged.verdict is Verdict.ADMIT and judged.mark is mark

    async def _operate(
        self,
        stamp: Stamp | None,
        values: dict[str, bytes | None],
        *,
        announce: bool = False,
        expect: int | None = None,
        operation: str | None = None,
        writes: Any = None,
        sent: Sent = MappingProxyType({}),
    ) -> dict[str, Cell]:
        """Read, judge and swap until it is decided; returns the cells as this operation left them.

        No lock is held: after a swap that finds another version everything is read again. The operation's id is in
        the cell if and only if its swap happened. So it settles a swap whose outcome is unknown, and one that was
        refused, too: what stands between guard and store may have repeated the request, and forwarded the refusal of
        the second one.
        `writes`: what the caller writes in the same swap, for guards whose `_commit` takes it. `sent`: the cells that
        the store sent with a failed swap.
        """
        operation = operation or self._new_id()
        swapping: _Try | None = None
        in_doubt: _Try | None = None
        trust = _Trust.MEMORY
        for tried in range(TRIES):
            try:
                known, this = await self._look(values, trust, sent)
            except FencedError as error:
                raise (error if swapping is None else _unknown(str(error))) from error
            if swapping is not None and _happened(operation, this):
                return await self._decided(swapping, stamp)
            if in_doubt is not None and not _may_still_happen(this, in_doubt):
                in_doubt = None
            self._judge(this, known.config, stamp, operation, values, announce, expect)
            if writes and self.records_writes:
                this.record(operation)
            if (lacking := self._lacking(this, trust)) is not None:
                trust = lacking
                continue
            if not this.current or (this.refusal is None and (this.changes or writes)):
                swapping = this if this.changes else swapping
                try:
                    swapped = await self._swap(this, known, stamp, writes)
                except Indeterminate as error:
                    if this.changes:
                        in_doubt = this
                    elif writes and not this.refusal:  # no id in a cell will show whether it happened
                        raise _unknown(str(error)) from error
                    swapped = Swapped(None)
                except FencedError as error:
                    raise (error if in_doubt is None else _unknown(str(error))) from error
                if not swapped:
                    trust, sent = _Trust.NOTHING, swapped.found
                    # Operations that collided retry at different times.
                    await self._runtime.wait(self._runtime.wakeup(), self._soon(tried))
                    continue
            if this.refusal is not None and in_doubt is not None:
                # An earlier swap of this operation may still arrive at the store.
                raise _unknown(str(this.refusal))
            return await self._decided(this, stamp)
        if in_doubt is not None:
            raise _unknown(f"{TRIES} tries had no clear answer")
        raise Contended(f"{', '.join(values)}: others were quicker {TRIES} times; try again")

    async def _look(self, names: Iterable[str], trust: _Trust, sent: Sent) -> tuple[KnownConfig, _Try]:
        """The configuration and the cells: from the reply to a failed swap, from memory, or read."""
        if sent:
            self._learn(sent)
            assert self._known is not None
            return self._known, _Try(
                {name: read_cell(name, sent[key_of(name)]) for name in names}, current=True
            )
        known = await self._config(fresh=trust is _Trust.NOTHING)
        found: dict[str, tuple[Any, Cell]] = {}
        if trust is _Trust.MEMORY:
            found = {name: seen for name in names if (seen := self._seen.get(name)) is not None}
        unknown = [check_name(name) for name in names if name not in found]
        if unknown:
            cells = await self._get([key_of(name) for name in unknown])
            found.update({name: read_cell(name, cell) for name, cell in zip(unknown, cells, strict=True)})
        this = _Try(found)
        # A store that decides in one step compares whatever was read in its swap, also in order to refuse.
        this.current = not self._one_step and len(unknown) == len(this.found)
        return known, this

    def _lacking(self, this: _Try, trust: _Trust) -> _Trust | None:
        """What must be read again before a store decides without a swap; None: nothing."""
        if self._one_step:
            return None
        if this.refusal is not None and trust is not _Trust.NOTHING:
            # No swap compares the configuration, so it is read again before it is believed.
            return _Trust.NOTHING
        return None if this.changes or this.current else _Trust.CONFIG

    async def _decided(self, this: _Try, stamp: Stamp | None) -> dict[str, Cell]:
        for note in this.notes:
            self.decisions.note(note)
        if self.decisions.dirty:
            await self.decisions.write()
        if events.is_observed():
            rose = [(n, this.found[n][1].mark, this.after[n].mark) for n in this.changes]
            self._tell(this.notes, stamp, rose)
        if this.refusal is not None:
            raise this.refusal
        return this.after

    def _new_id(self) -> str:
        """Unique for ever: `judge` takes two operations with one id for one, also across restarts."""
        return self._runtime.secret()

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
            ruling = Ruling.ADMIT
            if judged.verdict is Verdict.ADMIT:
                this.admitted = True
            elif judged.verdict is not Verdict.APPLIED:
                mode = config.mode_of(name)
                ruling = rule_on(judged.verdict, mode, name)
                this.notes.append(self._decision(name, stamp, cell.mark, judged.verdict, ruling, mode))
            if ruling is Ruling.REFUSE or judged.verdict is Verdict.APPLIED:
                this.refusal = error_for(
                    judged.verdict, name=name, stamp=stamp, mark=cell.mark, realm=config.realm, tells=False
                )
                return
            mark = judged.mark if judged.verdict is Verdict.ADMIT else cell.mark
            this.after[name] = cell.changed(operation, mark, values[name])
        for name, (_, cell) in this.found.items() if expect is not None else ():
            if cell.version != expect:
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

    async def _swap(self, this: _Try, known: KnownConfig, stamp: Stamp | None, writes: Any) -> Swapped:
        """Swap the changed cells; if the store can, only while all that was read is unchanged."""
        config, changed = None, this.changes
        if stamp is not None and this.admitted and not this.refusal and known.config.realm is None:
            config = replace(known.config, realm=stamp.realm)
        changes: Changes = [
            (key_of(name), version, this.after[name].packed() if name in changed else None)
            for name, (version, _) in this.found.items()
            if self._many or name in changed
        ]
        if self._one_step:
            changes.append((CONFIG, known.version, config.packed() if config else None))
        elif config is not None:
            self._known = None
            if not await self._swap_config(known.version, config):
                return Swapped(None)
        try:
            swapped = await self._commit(changes, None if this.refusal else writes)
        except BaseException:
            self._forget(this.found)
            raise
        if swapped.versions is None:
            self._forget(this.found)
            return swapped
        if self._one_step and config is not None:
            self._known = known._replace(version=swapped.versions[-1], config=config)
        cells = [name for name in this.found if self._many or name in changed]
        # The version of the configuration is the last, if it was compared.
        for name, version in zip(cells, swapped.versions, strict=False):
            if name in changed:
                self._remember(name, version, this.after[name])
            elif name not in self._seen:
                self._remember(name, *this.found[name])
        return swapped

    async def _commit(self, changes: Changes, writes: Any) -> Swapped:
        """One swap. A guard that lets a caller write in the same step overrides it."""
        assert writes is None
        return await self.cells.swap(changes)

    def _decision(
        self, name: str, stamp: Stamp | None, mark: Mark | None, verdict: Verdict, ruling: Ruling, mode: Mode
    ) -> Decision:
        at = datetime.fromtimestamp(self._clock(), UTC)
        return Decision.about(at, self.url, name, stamp, mark, verdict, ruling, str(mode))


def _happened(operation: str, this: _Try) -> bool:
    return any(operation in cell.written for _, cell in this.found.values())


def _may_still_happen(this: _Try, in_doubt: _Try) -> bool:
    """Whether a swap without a reply can still happen: only while every version that it compares is unchanged."""
    for name, (version, before) in in_doubt.found.items():
        now = this.found[name]
        if now[1].swaps - before.swaps > KEPT:
            raise _unknown(f"{name}: more than {KEPT} others have written since")
        if now[0] != version:
            # The cell changed and does not have the operation's id: the swap did not happen, and cannot any more.
            return False
    return True


def _unknown(why: str) -> Indeterminate:
    return Indeterminate(f"the reply was lost, and whether the operation happened is unknown: {why}")
