"""The cells of a guard: its configuration, its marks, and what a guard object remembers of them and has counted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar, cast

from fenced import events
from fenced.errors import Contended, Indeterminate, Misconfigured
from fenced.guards.answers import DEFAULT_RULE, check_pattern, check_rule, expect_rule, tell_raised
from fenced.guards.cells import CONFIG, Cell, Cells, Config, ManyCells, key_of
from fenced.guards.configoperator import CellOperator
from fenced.guards.remembered import AUDIT_LAGS, RememberedDecisions
from fenced.values.contracts import LAG_SECONDS, MANY_NAMES, MODE_LAG, Operator, Runtime, Trait
from fenced.values.decision import Mark, Mode, Rule
from fenced.values.model import Stamp, check_name, check_realm
from fenced.values.rollout import DatabaseStatus, Decision, DecisionCount, GuardStatus, Stage, advised

T = TypeVar("T")

TRIES = 50
"""How often an operation is tried if others change the same cell."""
SEEN_MAX = 256
SEEN_BYTES_MAX = 65_536
"""How many cells a guard object remembers, and how long a remembered value may be."""
_PAUSE_SECONDS = 0.002


class KnownConfig(NamedTuple):
    """The configuration as it was read last."""

    version: Any
    config: Config
    at: float


Changes = list[tuple[str, Any, bytes | None]]
"""What a swap compares and writes: key, version, and the new blob or None."""


class Admitted(NamedTuple):
    """An operation that was admitted and changed no mark, what it was judged by, and what its swap compared."""

    stamp: Stamp
    known: KnownConfig
    seen: list[tuple[Any, Cell] | None]
    compares: Changes


class GuardedCells:
    """The cells of a guard, and what this guard object remembers of them."""

    traits: tuple[Trait, ...] = (AUDIT_LAGS, MODE_LAG)
    kind = "this guard"
    remembers = False
    """Whether an operation first uses the cells that this object saw last, because a read costs a round trip."""
    records_writes = False
    """Whether a caller's own writes leave the operation's id in the cells, so that a lost reply can be settled."""

    def __init__(
        self,
        cells: Cells,
        runtime: Runtime,
        url: str,
        *,
        rule: Rule | None = None,
        mode: str = "enforce",
        clock: Callable[[], float] = time.time,
        own_client: bool = False,
    ) -> None:
        """`rule`: of a guard that is made here; Misconfigured if the one that is there has another. None: any.

        `own_client`: the connections belong to the program, which may close them at any time.
        """
        if rule is not None:
            check_rule(rule)
        self.url = url
        self.cells = cells
        self._runtime = runtime
        self.decisions = RememberedDecisions(
            self.cells_of_decisions(), runtime, clock, url, alone=not own_client
        )
        self._asked = rule
        self._first = Config(rule or DEFAULT_RULE, {"*": str(Mode.parse(mode))})
        self._clock = clock
        self._opened = False
        self._known: KnownConfig | None = None
        self._seen: dict[str, tuple[Any, Cell]] = {}
        """By name, the cell that was seen last. It may be old: nothing is decided by it unless a swap compares it."""
        self._admitted: dict[tuple[str, ...], Admitted] = {}
        """By names, under rule `retry`, the operation that was judged last; further ones of its holder are like it."""
        self._many = MANY_NAMES in self.traits
        self._one_step = self._many and MODE_LAG not in self.traits
        """Whether the swap that decides compares the configuration, too, and all that was read."""

    async def ready(self) -> None:
        """Open at first use. Two that come at once both open, which is harmless."""
        if not self._opened:
            await self.open()
            self._opened = True

    async def open(self) -> None:
        for tried in range(TRIES):
            version, blob = await self.cells.get(CONFIG)
            if blob is not None or await self._swap_config(version, self._first):
                break
            await self._runtime.wait(self._runtime.wakeup(), self._soon(tried))
        await self._config(fresh=True)  # if another process was first, its configuration counts

    # The configuration.

    async def _config(self, *, fresh: bool = False) -> KnownConfig:
        """The configuration. It is read again if the last reading is too old, or with `fresh`."""
        known = self._known
        if known is None or fresh or (not self._one_step and self._runtime.now() - known.at > LAG_SECONDS):
            at = self._runtime.now()
            known = self._known = self._configured(*await self.cells.get(CONFIG))._replace(at=at)
        return known

    def _configured(self, version: Any, blob: bytes | None) -> KnownConfig:
        if blob is None:
            raise Misconfigured(f"{self.url}: there is no guard here; open() makes one")
        config = Config.unpacked(blob)
        expect_rule(self.url, config.rule, self._asked)
        return KnownConfig(version, config, self._runtime.now())

    async def _swap_config(self, version: Any, config: Config) -> bool:
        """False also if the outcome is unknown: the caller reads again and may repeat the change, which is harmless."""
        try:
            return bool(await self.cells.swap([(CONFIG, version, config.packed())]))
        except Indeterminate:
            return False

    async def _reconfigure(self, change: Callable[[Config], Config]) -> Config:
        """Change the configuration; returns the previous one."""
        for tried in range(TRIES):
            known = await self._config(fresh=True)
            wanted = change(known.config)
            if wanted == known.config:
                return known.config
            if await self._swap_config(known.version, wanted):
                self._known = None
                return known.config
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

    # The marks.

    async def mark(self, name: str) -> Mark | None:
        return (await self._cell(name))[1].mark

    async def marks(self) -> list[Mark]:
        """The marks of all names."""
        cells = await self._get([key for key in await self.cells.keys() if key != CONFIG])
        marks = [Cell.unpacked("a cell", blob).mark for _, blob in cells]
        return [mark for mark in marks if mark is not None]

    async def _readable(self) -> tuple[list[Mark], tuple[str, ...]]:
        """The marks, and one sentence for each cell that something else than a guard has written."""
        keys = [key for key in await self.cells.keys() if key != CONFIG]
        marks, strays = [], []
        for key, (_, blob) in zip(keys, await self._get(keys), strict=True):
            try:
                mark = Cell.unpacked(key, blob).mark
            except Misconfigured:
                name = key.removeprefix("n/")
                strays.append(f"{name} was written without the guard: its mark is gone, nothing is admitted")
                continue
            marks += [] if mark is None else [mark]
        return marks, tuple(strays)

    async def highest(self) -> int:
        await self._config(fresh=True)  # Misconfigured where there is no guard
        return max((mark.token for mark in await self.marks()), default=0)

    async def _get(self, keys: list[str]) -> list[tuple[Any, bytes | None]]:
        if self._many:
            return await cast(ManyCells, self.cells).get_many(keys)
        return [await self.cells.get(key) for key in keys]

    async def _cell(self, name: str) -> tuple[Any, Cell]:
        return read_cell(name, await self.cells.get(key_of(check_name(name))))

    # What was seen before.

    def _remember(self, name: str, version: Any, cell: Cell) -> None:
        if self.remembers and len(cell.value or b"") <= SEEN_BYTES_MAX:
            if len(self._seen) >= SEEN_MAX:
                self._seen.clear()  # the next operations read again
            self._seen[name] = version, cell

    def _learn(self, sent: Mapping[str, tuple[Any, bytes | None]]) -> None:
        for key, cell in sent.items():
            if key == CONFIG:
                self._known = self._configured(*cell)
            else:
                self._remember(key.removeprefix("n/"), *read_cell(key, cell))

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._seen.pop(name, None)

    # For operators.

    def _tell(
        self, notes: list[Decision], stamp: Stamp | None, rose: list[tuple[str, Mark | None, Mark | None]]
    ) -> None:
        """Tell observers of what was refused or let through, and of marks that rose."""
        token = stamp.token if stamp else None
        for note in notes:
            words = note.verdict.value, note.ruling.value
            events.tell_observers(events.GuardDecided(self.url, note.name, token, note.mark, *words))
        for name, before, after in rose:
            tell_raised(self.url, name, before, after)

    def cells_of_decisions(self) -> Cells:
        """Where the decisions are kept: beside the marks, unless those cells hold nothing else."""
        return self.cells

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await work(CellOperator(self))

    async def status(self, quiet_for: float) -> DatabaseStatus:
        """One guard, as it is now."""
        found = await self.figures()
        marks, strays = await self._readable()
        highest = max((mark.token for mark in marks), default=0)
        (guard,) = found.guards
        guard = replace(guard, marks=len(marks), highest=highest, wrong=strays)
        return replace(found, guards=(advised(guard, found.now, quiet_for),))

    async def figures(self) -> DatabaseStatus:
        """The same without its marks, and without advice."""
        config = (await self._config(fresh=True)).config
        now = datetime.fromtimestamp(self._clock(), UTC)
        current = set(config.modes.values())
        counts = [
            DecisionCount(verdict, ruling, mode, count, count if mode in current else 0)
            for (verdict, ruling, mode), count in (await self.decisions.read())[0].items()
        ]
        stages = tuple(Stage(pattern, mode) for pattern, mode in sorted(config.modes.items()))
        found = GuardStatus(
            self.url,
            "{name}",
            config.rule,
            mandatory=any(trait.key == "mandatory" for trait in self.traits),
            epoch=None,
            stages=stages,
            counts=tuple(counts),
        )
        return DatabaseStatus(now, config.realm, (found,))

    async def close(self) -> None:
        await self.decisions.close()
        await self.cells.close()

    def _soon(self, tried: int) -> float:
        return self._runtime.now() + self._runtime.random() * _PAUSE_SECONDS * min(tried, 20)


def read_cell(name: str, cell: tuple[Any, bytes | None]) -> tuple[Any, Cell]:
    version, blob = cell
    return version, Cell.unpacked(name, blob)
