"""Claims on rows of the program's own tables: what an engine does, and how a row carries its claim.

The row is the mark, and the lease of a worker shows that the worker is alive. Columns of a table with claims:

    claim_token     the token of the last claim; NULL: never claimed. It is the mark of the row, and never falls
    claim_write     how a statement carries its stamp: the token, and the number of the write under this claim
    claim_holder    the worker that has the row; NULL: nobody
    claim_attempts  how often it was claimed since it was made or revived
    claim_at        claimed: since when; ready: not before
    claim_busy      where no index can be partial: 0 if the row may be claimed, else 1
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fenced.errors import Misuse
from fenced.values.model import TOKEN_MAX

if TYPE_CHECKING:
    from fenced.guards.spec import Spec

COLUMNS = ("claim_token", "claim_write", "claim_holder", "claim_attempts", "claim_at", "claim_busy")
WRITE_BITS = 20
CLOSED = (1 << WRITE_BITS) - 1024
"""The number of a write from which on only operators write under a claim: its worker's own writes come too late."""
TOKEN_LIMIT = 1 << (63 - WRITE_BITS)
"""Tokens from here on leave no room for the number of a write."""
GIVEN_BACK_AT_ONCE = 1000

Constant = str | int | bool | None
Columns = tuple[tuple[str, Constant], ...]


@dataclass(frozen=True)
class Claiming:
    """How the rows of a table are claimed: the part of a guard's Spec that makes it one of claims."""

    key: str
    """The column that identifies a row."""
    ready: str
    """A condition over the row's own columns: what may be claimed."""
    order: str
    taken: Columns = ()
    """What a claim sets; `back` what giving it back sets, `dead` what is set when its attempts are used up."""
    back: Columns = ()
    dead: Columns = ()
    max_attempts: int = 5
    minted: bool | None = None
    """Whether the database mints the tokens; None: if the authority is in the same database, with the same owner."""

    @classmethod
    def parse(cls, text: str) -> Claiming:
        """As an installed guard stores it."""
        found = json.loads(text)
        for columns in ("taken", "back", "dead"):
            found[columns] = tuple((name, value) for name, value in found[columns])
        return cls(**found)

    def __str__(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """Eight characters that differ if the rows that may be claimed, or their order, differ."""
        return hashlib.sha256(repr((self.key, self.ready, self.order)).encode()).hexdigest()[:8]


def assigned(constant: Callable[[Constant], str], columns: Columns, quote: str = '"') -> list[str]:
    """What an UPDATE sets. `constant` writes a value as the engine's SQL."""
    return [f"{quote}{name}{quote} = {constant(value)}" for name, value in columns]


def given_back(constant: Callable[[Constant], str], claiming: Claiming, quote: str = '"') -> list[str]:
    """What giving a row back sets: `dead` if its attempts are used up, else `back`. The column gives the type."""
    back, dead = dict(claiming.back), dict(claiming.dead)
    used = f"claim_attempts >= {claiming.max_attempts}"
    found = []
    for name in dict.fromkeys((*back, *dead)):
        cases = [f"WHEN {used} THEN {constant(dead[name])}"] if name in dead else []
        cases += [f"WHEN NOT {used} THEN {constant(back[name])}"] if name in back else []
        column = f"{quote}{name}{quote}"
        found.append(f"{column} = CASE {' '.join(cases)} ELSE {column} END")
    return found


def write_number(token: int, count: int) -> int:
    """What `claim_write` is after this many writes under a claim."""
    if not 0 <= count < CLOSED:
        raise Misuse(f"a claim has at most {CLOSED - 1} writes of single statements; use transaction()")
    return (token << WRITE_BITS) + count


def claim_grant(realm: str, token: int, name: str) -> str:
    """The grant id in the stamps of a claim: the same in every process that knows the claim, another for each claim."""
    return hashlib.sha256(f"claim {realm} {token} {name}".encode()).hexdigest()[:32]


def check_token(token: int) -> int:
    if token >= min(TOKEN_LIMIT, TOKEN_MAX):
        raise Misuse(f"token {token} is too large for a claim: {TOKEN_LIMIT - 1} is the last one")
    return token


class ClaimTerms(NamedTuple):
    """What a worker claims with."""

    holder: str
    """32 hexadecimal digits: the worker."""
    token: int | None
    """None: the database mints one for each row."""
    realm: str


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClaimView:
    """A claimed row, for operators."""

    name: str
    holder: str
    """The worker, as `claim_holder` has it."""
    since: datetime
    attempt: int
    who: str | None = None
    """The holder of the worker's lease as the authority stores it, where that is in the same database."""

    @property
    def worker(self) -> str:
        """Label, host and process of the worker; else the id in `claim_holder`."""
        if self.who is None:
            return self.holder
        who = json.loads(self.who)
        parts = who if isinstance(who, list) else list(who.values())
        return " ".join(str(part) for part in parts[1:])


@dataclass(frozen=True, slots=True)
class WorkStatus:
    """The rows of a table with claims, for operators."""

    table: str
    ready: int
    later: int
    """Ready, but not before a time that has not come."""
    claimed: int
    dead: int
    oldest: str | None
    """The name of the row that would be claimed next."""
    claims: tuple[ClaimView, ...]
    """The oldest claims."""


class ClaimTable(Protocol):
    """Claims on one table, over one of the program's connections. Errors are typed.

    Outside a transaction each method is one; in the program's own transaction it is a part of that.
    """

    def is_on(self, connection: object) -> bool:
        """Whether it uses this very connection, and not one that a framework has lent for a while."""

    async def begin_work(self, realm: str) -> bool:
        """Whether the database mints tokens for claims. Misconfigured without an installed guard, ForeignStamp for a
        worker of another realm than the trusted one."""

    async def claim(self, terms: ClaimTerms, limit: int, where: Mapping[str, object] | None) -> list[Row]:
        """Claim up to `limit` rows, in order; with `where` these rows, ready or not. StaleToken if the terms' token
        is not above that of a row."""

    async def holders(self) -> list[str]:
        """The workers that have rows."""

    async def give_back(self, over: Sequence[str] | None) -> int:
        """Give back the rows of these workers, whose leases are over. None: the database finds out itself."""

    async def write(
        self, row: ClaimedKey, count: int, columns: Mapping[str, object], ends: Ends | None, *, repeat: bool
    ) -> None:
        """Write the columns under a claim. `repeat`: an earlier try of the same write may have been applied."""

    async def enter(self, row: ClaimedKey) -> None:
        """Begin a transaction, lock the row and compare its token."""

    async def leave(self, error: BaseException | None) -> None:
        """Commit, or roll back after an error; raises a refusal as its typed form."""

    async def revoke(self, key: object) -> bool:
        """Take a row from its worker: its later writes are refused. False if nobody had it."""

    async def revive(self, where: Mapping[str, object]) -> int:
        """Make dead letters ready again, with no attempts; returns how many."""

    async def status(self, limit: int) -> WorkStatus: ...

    async def wait_for_rows(self, seconds: float) -> bool | None:
        """Wait until the database notifies about a new row, at most so long. None at once if it cannot."""


class ClaimedKey:
    """A claimed row: its key, the name that other guards know it by, its token, and the realm of the token."""

    def __init__(self, spec: Spec, row: Mapping[str, Any], realm: str) -> None:
        assert spec.claims is not None
        self._spec = spec
        self._row = row
        self.key: object = row[spec.claims.key]
        self.token: int = row["claim_token"]
        self.realm = realm

    @cached_property
    def name(self) -> str:
        """Made when it is needed: for a stamp, or for a message."""
        return self._spec.name_for(**{column: self._row[column] for column in self._spec.columns})


class Ends(NamedTuple):
    """How a write ends a claim: finished (`after` None), or given back for a time not before `after` seconds."""

    after: float | None = None
    dead: bool = False
    held_by: str | None = None
    """Only if this worker still has the row; otherwise nothing is written."""
