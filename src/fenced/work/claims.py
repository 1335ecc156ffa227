"""What a table with claims is, for both colours: its spec, and what installs and reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fenced.errors import Misuse, shown
from fenced.guards.claims import Claiming, ClaimTable, Constant
from fenced.guards.engine import TableGuard
from fenced.guards.spec import Spec, check_constants, check_identifier
from fenced.sql.engines import on
from fenced.values.contracts import Colour


class ClaimsBase:
    """Which table, which rows, in which order, and what becomes of a row that is claimed or given back."""

    _colour: ClassVar[Colour]

    def __init__(
        self,
        *,
        table: str | None = None,
        name: str,
        ready: str,
        order: str | None = None,
        key: str | None = None,
        taken: Mapping[str, Constant] | None = None,
        back: Mapping[str, Constant] | None = None,
        dead: Mapping[str, Constant] | None = None,
        max_attempts: int = 5,
        backoff: tuple[float, float] = (10.0, 3600.0),
        error: str | None = None,
        mint: bool | None = None,
        model: Any = None,
    ) -> None:
        """`ready` is a condition over the row's own columns, without the time: `claim_at` holds a row back.

        `model`: Django's model of the table, instead of `table`; then calls need no connection. `mint`: whether the
        database mints the tokens itself. By default it does if the authority is in the same database.
        """
        if (table is None) == (model is None):
            raise Misuse("name the table, or give Django's model of it")
        if table is None:
            table = str(model._meta.db_table)
            key = key or str(model._meta.pk.column)
        for text, what in ((ready, "ready"), (order or "x", "order")):
            if not isinstance(text, str) or not text.strip() or ";" in text or "--" in text:
                raise Misuse(f"{what} is one SQL expression, not {shown(text)}")
        if (
            isinstance(max_attempts, bool)
            or not isinstance(max_attempts, int)
            or not 1 <= max_attempts <= 32_000
        ):
            raise Misuse(f"max_attempts is from 1 to 32000, not {shown(max_attempts)}")
        first, longest = backoff
        if not 0 <= first <= longest:
            raise Misuse(f"backoff is the first pause and the longest one, in seconds, not {shown(backoff)}")
        columns = Spec(table, name).columns
        if key is None and len(columns) != 1:
            raise Misuse(f"which column identifies a row? Name it: key='id'. The name is {shown(name)}")
        key = check_identifier(key or columns[0], "key")
        claiming = Claiming(
            key,
            ready,
            order or f'"{key}"',
            check_constants(taken, "taken"),
            check_constants(back, "back"),
            check_constants(dead, "dead"),
            max_attempts,
            mint,
        )
        self._spec = Spec(table, name, claims=claiming)
        self._mandatory = True
        self._backoff = (float(first), float(longest))
        self._error = None if error is None else check_identifier(error, "error")
        self._model = model

    @property
    def table(self) -> str:
        """The table whose rows are claimed."""
        return self._spec.table

    def name_for(self, **values: object) -> str:
        """The name of the row with these values of the template's columns."""
        return self._spec.name_for(**values)

    def _connection(self, db: Any) -> Any:
        if db is not None:
            return db
        if self._model is None:
            raise Misuse("give it a connection of the database")
        from django.db import connections, router

        return connections[router.db_for_write(self._model)]

    def _guard(self, db: Any) -> TableGuard:
        return on(self._connection(db), self._colour).table(self._spec, True)

    def _table(self, db: Any) -> ClaimTable:
        return on(self._connection(db), self._colour).claims(self._spec)
