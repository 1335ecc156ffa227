"""The rows of the lease algorithm as tables of MariaDB or MySQL. One object serves one run of the algorithm.

The rows of names are the locks. An attempt that has a row is changed by whoever has locked one of its names, and by its
owner only with all of them locked. Which names that are is not known before its row was read: `NotLocked` names them,
and the transaction begins again with their locks. So nobody waits for a lock out of the order of the names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from fenced.errors import FencedError
from fenced.leases.rows import SWEEP_AT_GRANT, AttemptRow, new_row
from fenced.leases.rules import tokens_used_up
from fenced.stores.mariadb.authority.journal import StatementJournal
from fenced.stores.mariadb.wire.connection import Row, literal
from fenced.values import sqlfile
from fenced.values.model import TOKEN_MAX, Granted

HERE = Path(__file__).parent
SQL = sqlfile.load(HERE / "queries.sql")
LAST = 2**62
"""Greater than every ticket, as in the algorithm."""
PAGE = 500
"""How many attempts one transaction deletes at most."""
KEEP_NUMBERS = 1000
"""How many of the newest numbers keep their rows. Only the last one matters; older ones may still be in use."""


class NotLocked(Exception):
    """These names must be locked, too, and before the clock is read."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)


def listed(values: Iterable[str]) -> str:
    return ", ".join(map(literal, values))


def attempts_query(ids: Sequence[str]) -> str:
    return SQL["attempts"].format(ids=listed(ids))


def claim_query(namespace: int, name: str) -> str:
    return SQL["claim"].format(namespace=namespace, name=literal(name))


def before_query(namespace: int, name: str, ticket: int = LAST) -> str:
    return SQL["before"].format(namespace=namespace, name=literal(name), ticket=ticket)


def ahead_query(namespace: int, name: str, ticket: int = LAST) -> str:
    return SQL["ahead"].format(namespace=namespace, name=literal(name), ticket=ticket)


def queue_query(namespace: int, name: str) -> str:
    return SQL["queue"].format(namespace=namespace, name=literal(name))


def lock_query(namespace: int, names: Iterable[str]) -> str:
    return SQL["lock"].format(rows=", ".join(f"({namespace}, {literal(name)})" for name in names))


def attempt_row(values: Row) -> AttemptRow:
    public, namespace, state, names, *numbers, holder = values
    texts = (public.decode(), namespace, state.decode(), names.decode())
    return new_row((*texts, *numbers, "", holder.decode()))


class MariadbRows:
    """Verbs on the rows of a transaction that has locked the rows of `locked`."""

    def __init__(
        self,
        journal: StatementJournal,
        namespace: int,
        locked: frozenset[str] | None,
        floor: int = 0,
        lineage: str = "",
        stopped: FencedError | None = None,
        near: str = "",
    ) -> None:
        self.namespace = namespace
        self._journal = journal
        self._locked = locked
        """None: this transaction only reads, from a snapshot."""
        self.floor = floor
        self._lineage = lineage
        self._stopped = stopped
        """Why this server may not mint."""
        self._near = near
        self._asked: AttemptRow | None = None
        self._known: set[str] = set()
        """The attempts that have a row."""
        self._soon: dict[str, None] = {}
        """What the algorithm will ask for after the first claim, and has not asked for yet."""

    def _rows(self, statement: str, ahead: Iterable[str] = ()) -> list[AttemptRow]:
        return list(map(attempt_row, self._journal.read(statement, ahead).rows))

    def _row(self, statement: str) -> AttemptRow | None:
        self._soon.pop(statement, None)
        rows = self._rows(statement, self._soon)
        self._known.update(row.id for row in rows)
        return rows[0] if rows else None

    def _texts(self, statement: str) -> set[str]:
        return {text.decode() for (text,) in self._journal.read(statement).rows}

    def _write(self, name: str, **values: object) -> None:
        self._journal.write(SQL[name].format(namespace=self.namespace, **values))

    def _need(self, rows: Iterable[AttemptRow]) -> None:
        """All names of these attempts are locked, or the transaction begins again."""
        names = {name for row in rows if row.namespace == self.namespace for name in row.names}
        if self._locked is not None and not names <= self._locked:
            raise NotLocked(names)

    # Counters.

    def mint(self) -> int:
        if self._stopped is not None:
            raise self._stopped
        token = self.floor + self.next_ticket()
        if token > TOKEN_MAX:
            raise tokens_used_up()
        return token

    def next_ticket(self) -> int:
        """Tokens and tickets are drawn from the same numbers."""
        return self._journal.read(SQL["number"], once=True).insert_id

    def raise_floor(self, above: int) -> int:
        """Its lock waits for all grants that have read the old floor; those that come later have greater numbers."""
        number = self.next_ticket()
        self.floor = max(self.floor, above - number)
        self._write("raise_floor", floor=self.floor, lineage=literal(self._lineage))
        return self.floor + number

    # Attempts.

    def attempt(self, public: str) -> AttemptRow | None:
        self._asked = self.attempts([public]).get(public)
        return self._asked

    def settle(self, answer: object) -> None:
        """A grant that is told again is committed again, with the number that was drawn for it in vain.

        The server shows what another session has committed before it has synced it, or before a replica has it. This
        commit waits for both, also for what was committed before.
        """
        if isinstance(answer, Granted) and not self._journal.changes and self._asked is not None:
            self._write("take", id=literal(self._asked.id), names=listed(self._asked.names))

    def attempts(self, ids: Sequence[str]) -> dict[str, AttemptRow]:
        if not ids:
            return {}
        rows = self._rows(attempts_query(ids))
        self._need(rows)
        self._known.update(row.id for row in rows)
        for row in rows:
            if row.state == "waiting":
                for name in row.names:
                    self._soon[claim_query(self.namespace, name)] = None
                    self._soon[before_query(self.namespace, name, row.ticket)] = None
        return {row.id: row for row in rows}

    def put(self, row: AttemptRow) -> None:
        values = {
            "id": literal(row.id),
            "state": literal(row.state),
            "ticket": row.ticket,
            "token": row.token,
            "expires": row.expires,
            "forget": row.forget,
        }
        if row.id in self._known:
            self._write("replace", **values)
        else:
            texts = {"names": literal(row.names_json), "holder": literal(row.holder)}
            self._write("insert", **values, **texts, ttl=row.ttl, lock_delay=row.lock_delay)
            self._known.add(row.id)

    def update(self, ids: Sequence[str], state: str, expires: int, forget: int) -> None:
        self._write("update", ids=listed(ids), state=literal(state), expires=expires, forget=forget)

    def grant(self, row: AttemptRow) -> None:
        self.put(row)
        self._write("take", id=literal(row.id), names=listed(row.names))

    def end(self, row: AttemptRow, state: str, forget: int) -> None:
        self._need([row])
        self.update((row.id,), state, row.expires, forget)
        if row.names:
            self._write("give", id=literal(row.id), names=listed(row.names))

    def free(self, row: AttemptRow) -> None:
        """Called for attempts that are forgotten: with its last attempt a name goes, too."""
        if row.names:
            self._write("drop_names", id=literal(row.id), names=listed(row.names))

    def forget(self, row: AttemptRow) -> None:
        self._write("forget", id=literal(row.id))

    def overdue(self, now: int, near: str = "", limit: int = 0) -> list[AttemptRow]:
        """Those whose names nobody has locked; the others are left to a later call. Nobody is waited for."""
        if not near and self._near:
            near, limit = self._near, SWEEP_AT_GRANT
        if limit in (0, SWEEP_AT_GRANT):
            self._drop_numbers()
        found = SQL["overdue_near" if near else "overdue"]
        rows = self._rows(
            found.format(namespace=self.namespace, now=now, near=literal(near), limit=limit or PAGE)
        )
        names = sorted({name for row in rows for name in row.names} - (self._locked or frozenset()))
        busy: set[str] = set()
        if names:
            these = {"namespace": self.namespace, "names": listed(names)}
            unlocked = self._texts(SQL["unlocked"].format(**these))
            busy = self._texts(SQL["known"].format(**these)) - unlocked
            self._locked = (self._locked or frozenset()) | unlocked
        return [row for row in rows if busy.isdisjoint(row.names)]

    def _drop_numbers(self) -> None:
        last = self._journal.read("SELECT MAX(id) FROM fenced_number").rows[0][0] or 0
        spent = SQL["spent"].format(before=last - KEEP_NUMBERS, limit=PAGE)
        if ids := [str(number) for (number,) in self._journal.read(spent).rows]:
            self._write("drop_numbers", ids=", ".join(ids))

    # Claims.

    def claim(self, name: str) -> AttemptRow | None:
        return self._row(claim_query(self.namespace, name))

    # Queues.

    def enqueue(self, row: AttemptRow) -> None:
        place = f"{row.ticket}, {literal(row.id)}"
        self._write(
            "enqueue", rows=", ".join(f"({self.namespace}, {literal(name)}, {place})" for name in row.names)
        )

    def dequeue(self, row: AttemptRow) -> None:
        self._write("dequeue", names=listed(row.names), ticket=row.ticket)

    def before(self, name: str, ticket: int) -> AttemptRow | None:
        return self._row(before_query(self.namespace, name, ticket))

    def ahead(self, name: str, ticket: int) -> int:
        ((count,),) = self._journal.read(ahead_query(self.namespace, name, ticket)).rows
        return int(count)

    def head(self, name: str, now: int) -> AttemptRow | None:
        """Nobody is notified: waiters look themselves whether it is their turn."""
        return None

    def queue(self, name: str) -> list[AttemptRow]:
        return self._rows(queue_query(self.namespace, name))

    def naming(self, name: str) -> list[AttemptRow]:
        text = literal(json.dumps(name, ensure_ascii=False))
        rows = self._rows(SQL["naming"].format(namespace=self.namespace, name=text))
        return [row for row in rows if name in row.names]

    def names(self, after: str, limit: int) -> list[str]:
        found = SQL["names"].format(namespace=self.namespace, after=literal(after), limit=limit)
        names = [name.decode() for (name,) in self._journal.read(found).rows]
        pairs = [(claim_query(self.namespace, name), queue_query(self.namespace, name)) for name in names]
        self._soon = dict.fromkeys(query for pair in pairs for query in pair)
        return names
