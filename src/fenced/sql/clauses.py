"""The cooperative form: the token in the program's own UPDATE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fenced.decision import Mark, Rule, Verdict
from fenced.guards.shared.answers import error_for
from fenced.guards.shared.spec import Spec
from fenced.model import Stamp
from fenced.runtime.blocking import step
from fenced.sql.engines import BLOCKING, SUSPENDING, TableGuard, table_on


class Clause:
    """Fragments for the program's own UPDATE: `SET ..., {assign} WHERE ... AND {where}`.

    Compares tokens, not grants, and fences no reads: announce first, or use `transaction`.
    """

    def __init__(self, stamp: Stamp, spec: Spec, column: str) -> None:
        below = "<" if spec.rule == "once" else "<="
        table = ".".join(f'"{part}"' for part in spec.table.split("."))
        self.assign = f'"{column}" = {stamp.token}'
        self.where = f'coalesce("{column}", 0) {below} {stamp.token}'
        self._stamp = stamp
        self._rule: Rule = spec.rule
        self._spec = spec
        self._select = f'SELECT "{column}" FROM {table} WHERE '

    async def _admitted(
        self, table: TableGuard, rowcount: int, row: str, parameters: Sequence[object]
    ) -> bool:
        if rowcount > 0:
            return True
        rows = await table.run(self._select + row, parameters)
        if not rows:
            return False
        mark = Mark(int(rows[0][0]), "", 0) if rows[0][0] else None
        if mark is None or mark.token < self._stamp.token + (self._rule != "once"):
            return False  # something else in the WHERE kept the row out
        verdict = Verdict.STALE if mark.token > self._stamp.token else Verdict.DUPLICATE
        raise error_for(verdict, name=None, stamp=self._stamp, mark=mark, table=self._spec.table)


class PlainClause(Clause):
    def admitted(self, connection: Any, rowcount: int, row: str, parameters: Sequence[object] = ()) -> bool:
        """What a rowcount means: True changed, False no such row; StaleToken when a newer holder was there.

        `row` is the condition that picks the row, without the clause. Call it in the same transaction, for a
        statement that picks one row; after RETURNING, fetch before you read the rowcount.
        """
        table = table_on(connection, self._spec, False, BLOCKING)
        return step(self._admitted(table, rowcount, row, parameters))


class AsyncClause(Clause):
    async def admitted(
        self, connection: Any, rowcount: int, row: str, parameters: Sequence[object] = ()
    ) -> bool:
        """What a rowcount means: True changed, False no such row; StaleToken when a newer holder was there.

        `row` is the condition that picks the row, without the clause. Call it in the same transaction, for a
        statement that picks one row; after RETURNING, fetch before you read the rowcount.
        """
        table = table_on(connection, self._spec, False, SUSPENDING)
        return await self._admitted(table, rowcount, row, parameters)
