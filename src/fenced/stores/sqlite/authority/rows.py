"""The rows of the lease algorithm as tables of an SQLite file. One object serves one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fenced.errors import InvariantBroken
from fenced.leases.rows import AttemptRow
from fenced.leases.rules import tokens_used_up
from fenced.stores.sqlite.authority.floor import Floor
from fenced.values import sqlfile

HERE = Path(__file__).parent
SQL = sqlfile.load(HERE / "queries.sql")


class SqliteRows:
    """Statements on the connection of a transaction, which holds the file's lock."""

    __slots__ = ("_db", "_floor", "namespace")

    def __init__(self, db: sqlite3.Connection, namespace: int, floor: Floor) -> None:
        self._db = db
        self._floor = floor
        self.namespace = namespace

    def mint(self) -> int:
        row = self._db.execute(SQL["mint"], (self.namespace,)).fetchone()
        if row is None:
            raise tokens_used_up()
        self._floor.refuse_known(row[0])
        return int(row[0])

    def next_ticket(self) -> int:
        return self._number(SQL["next_ticket"], (self.namespace,))

    def raise_floor(self, above: int) -> int:
        """Also above the last token that the floor file records."""
        return self._number(SQL["raise_floor"], (max(above, self._floor.read()), self.namespace))

    def attempt(self, public: str) -> AttemptRow | None:
        return self._one(SQL["attempt"], (public,))

    def attempts(self, ids: Sequence[str]) -> dict[str, AttemptRow]:
        if len(ids) == 1:
            row = self.attempt(ids[0])
            return {} if row is None else {row.id: row}
        rows = self._all(SQL["attempts"], (json.dumps(ids),))
        return {row.id: row for row in rows}

    def put(self, row: AttemptRow) -> None:
        self._db.execute(SQL["put"], tuple(row))  # sqlite3 binds an exact tuple faster

    def update(self, ids: Sequence[str], state: str, expires: int, forget: int) -> None:
        if len(ids) == 1:
            self._db.execute(SQL["update"], (state, expires, forget, ids[0]))
        else:
            self._db.execute(SQL["update_all"], (state, expires, forget, json.dumps(ids)))

    def end(self, row: AttemptRow, state: str, forget: int) -> None:
        self.update((row.id,), state, row.expires, forget)
        self.free(row)

    def forget(self, row: AttemptRow) -> None:
        self._db.execute(SQL["forget"], (row.id,))

    def overdue(self, now: int, near: str = "", limit: int = 0) -> list[AttemptRow]:
        if limit:
            return self._all(SQL["overdue_near"], (near, limit, now))
        return self._all(SQL["overdue"], (now,))

    def claim(self, name: str) -> AttemptRow | None:
        return self._one(SQL["claim"], (self.namespace, name))

    def grant(self, row: AttemptRow) -> None:
        self.put(row)
        for name in row.names:
            self._db.execute(SQL["take"], (row.namespace, name, row.id))

    def free(self, row: AttemptRow) -> None:
        for name in row.names:
            self._db.execute(SQL["free"], (row.namespace, name, row.id))

    def enqueue(self, row: AttemptRow) -> None:
        for name in row.names:
            self._db.execute(SQL["enqueue"], (row.namespace, name, row.ticket, row.id))

    def dequeue(self, row: AttemptRow) -> None:
        for name in row.names:
            self._db.execute(SQL["dequeue"], (row.namespace, name, row.ticket))

    def before(self, name: str, ticket: int) -> AttemptRow | None:
        return self._one(SQL["before"], (self.namespace, name, ticket))

    def ahead(self, name: str, ticket: int) -> int:
        return self._number(SQL["ahead"], (self.namespace, name, ticket))

    def head(self, name: str, now: int) -> AttemptRow | None:
        return self._one(SQL["head"], (self.namespace, name, now))

    def queue(self, name: str) -> list[AttemptRow]:
        return self._all(SQL["queue"], (self.namespace, name))

    def naming(self, name: str) -> list[AttemptRow]:
        return self._all(SQL["naming"], (self.namespace, name))

    def names(self, after: str, limit: int) -> list[str]:
        page = {"namespace": self.namespace, "after": after, "limit": limit}
        return [row[0] for row in self._db.execute(SQL["names"], page)]

    def _one(self, statement: str, parameters: tuple[Any, ...]) -> AttemptRow | None:
        row = self._db.execute(statement, parameters).fetchone()
        return None if row is None else AttemptRow._make(row)

    def _all(self, statement: str, parameters: tuple[Any, ...]) -> list[AttemptRow]:
        return list(map(AttemptRow._make, self._db.execute(statement, parameters)))

    def _number(self, statement: str, parameters: tuple[Any, ...]) -> int:
        row = self._db.execute(statement, parameters).fetchone()
        if row is None:
            raise InvariantBroken("a row that must be there is missing")
        return int(row[0])
