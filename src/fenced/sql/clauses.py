"""Guarding without triggers: the token in the program's own UPDATE."""

from __future__ import annotations

from collections.abc import Sequence

from fenced.errors import Unsupported
from fenced.guards.answers import error_for
from fenced.guards.spec import Spec, check_identifier
from fenced.runtime.blocking import step
from fenced.sql.engines import OnConnection
from fenced.values.decision import Mark, Verdict
from fenced.values.model import Credential


class _ClauseBase:
    """Fragments for the program's own UPDATE: `SET ..., {assign} WHERE ... AND {where}`.

    They compare tokens, not grants, and fence no reads: announce first, or use `transaction`. No installed guard is
    asked, so the rule is the one that the program names, or `retry`.
    """

    def __init__(self, found: OnConnection, spec: Spec, credential: Credential, column: str) -> None:
        if spec.rule == "sequenced":
            raise Unsupported("a clause has only the token; rule sequenced needs transaction()")
        if credential.proofs or len(credential.stamps) != 1:
            raise Unsupported("a clause carries the token of one lease and no proof; use transaction()")
        (self._stamp,) = credential.stamps
        self._spec = spec
        self._table = found.table(spec, False)
        quote, below = found.engine.quote, "<" if spec.rule == "once" else "<="
        named = f"{quote}{check_identifier(column, 'column')}{quote}"
        table = ".".join(f"{quote}{part}{quote}" for part in spec.table.split("."))
        self.assign = f"{named} = {self._stamp.token}"
        self.where = f"coalesce({named}, 0) {below} {self._stamp.token}"
        self._select = f"SELECT {named} FROM {table} WHERE "

    async def _admitted(self, rowcount: int, row: str, parameters: Sequence[object]) -> bool:
        if rowcount > 0:
            return True
        rows = await self._table.run(self._select + row, parameters)
        if not rows:
            return False
        mark = Mark(int(rows[0][0]), "", 0) if rows[0][0] else None
        if mark is None or mark.token < self._stamp.token + (self._spec.rule != "once"):
            return False  # another condition of the WHERE excluded the row
        verdict = Verdict.STALE if mark.token > self._stamp.token else Verdict.DUPLICATE
        raise error_for(verdict, name=None, stamp=self._stamp, mark=mark, table=self._spec.table)


class AsyncClause(_ClauseBase):
    __doc__ = _ClauseBase.__doc__

    async def admitted(self, rowcount: int, row: str, parameters: Sequence[object] = ()) -> bool:
        """True if the row was changed, False if there is no such row; StaleToken if a newer holder has written it.

        `row` is the condition that selects the row, without the clause. Call it in the same transaction, for a
        statement that selects one row. After RETURNING, fetch the rows before you read the rowcount.
        """
        return await self._admitted(rowcount, row, parameters)


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Clause(_ClauseBase):
    __doc__ = _ClauseBase.__doc__

    def admitted(self, rowcount: int, row: str, parameters: Sequence[object] = ()) -> bool:
        """True if the row was changed, False if there is no such row; StaleToken if a newer holder has written it.

        `row` is the condition that selects the row, without the clause. Call it in the same transaction, for a
        statement that selects one row. After RETURNING, fetch the rows before you read the rowcount.
        """
        return step(self._admitted(rowcount, row, parameters))


# end
