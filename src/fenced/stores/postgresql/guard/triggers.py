"""The triggers of a guarded PostgreSQL table.

Statement triggers run after a statement and see all rows that it wrote. If they all have one name, the trigger looks
for that name in a setting; many names are decided in one call. A statement trigger fires only on the table that the
statement names. So it is installed on every partition as well, and `fenced_alone` keeps a guarded table from becoming
an inheritance child. A partition that is created later inherits row triggers instead; on the partitions that have
statement triggers the row triggers are disabled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fenced.guards.spec import Spec, literal

TEXTS = frozenset({"text", "varchar", "bpchar", "name"})
PLAIN = frozenset({"int2", "int4", "int8", "uuid"})
_IDENTIFIER_BYTES_MAX = 63


def guard_of(spec: Spec) -> str:
    """The table with its schema: the key of a guard."""
    return spec.table if "." in spec.table else f"public.{spec.table}"


def quoted(guard: str) -> str:
    return ".".join(f'"{part}"' for part in guard.split("."))


def object_of(guard: str, what: str) -> str:
    """The name of an object in our schema that belongs to one guard."""
    name = f"{guard} {what}"
    if len(name) > _IDENTIFIER_BYTES_MAX:
        name = f"{hashlib.sha256(guard.encode()).hexdigest()[:32]} {what}"
    return f'fenced_guard."{name}"'


@dataclass(frozen=True, slots=True)
class TableShape:
    """The columns, partitions and inheritance of a table, as far as an installation depends on them."""

    kinds: dict[str, str]
    """The type of each column, without domains: a `pg_type.typname`, or `enum`."""
    generated: dict[str, str]
    """The generated columns: `s` for those that are stored, `v` for virtual ones."""
    partitions: tuple[str, ...]
    children: bool = False
    """Whether tables inherit from it (INHERITS); its triggers do not see their rows."""
    partitioned: bool = False
    child: bool = False
    """Whether it inherits from another table (INHERITS): a statement on the parent fires only its row triggers."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A constant piece of a line. A piece that is a plain `str` is an SQL expression."""

    text: str


class Names:
    """SQL expressions about the names of rows."""

    def __init__(self, spec: Spec, table: TableShape) -> None:
        self.spec = spec
        self.guard = guard_of(spec)
        self._table = table

    def parts(self, row: str) -> list[_Text | str]:
        """The pieces of the name of `row` (NEW or OLD): constant texts and SQL expressions."""
        return self._parts(lambda column: self._text(f'{row}."{column}"', column))

    def _parts(self, text: Callable[[str], str]) -> list[_Text | str]:
        return [
            self._escaped(text(piece), piece) if column else _Text(piece)
            for piece, column in self.spec.pieces
        ]

    def _escaped(self, value: str, column: str) -> str:
        if self._table.kinds[column] in PLAIN:
            return value
        if not self.spec.whole:
            value = f"replace(replace({value}, '%', '%25'), '/', '%2F')"
        # No valid name has a line end. A value that has one must not look like the end of a line of the setting.
        return rf"replace({value}, E'\n', E'\r')"

    def _text(self, value: str, column: str) -> str:
        """A column as text. Not by a cast: the type's owner could define one, and it would run as the guard's owner."""
        if self._table.kinds[column] in PLAIN:
            return value
        text = f'concat({value}) COLLATE "C"'
        return f"rtrim({text})" if self._table.kinds[column] == "bpchar" else text

    def name(self, row: str) -> str:
        return _concat(self.parts(row))

    def closed(self, row: str) -> str:
        """An expression that is true unless a line of the setting admits this row's name."""
        plain = all(self._table.kinds[column] in PLAIN for column in self.spec.columns)
        return _not_carried(_Text(self.opening), *self.parts(row), plain=plain)

    @property
    def opening(self) -> str:
        """The beginning, after the XID, of the line that admits a name."""
        return "/" if self.spec.installs == "retry" else f"|{self.guard}/"

    # Expressions about all rows of a statement: `c0`, `c1` ... are the columns that the name is made of.

    def written(self, transitions: Sequence[str]) -> str:
        """The columns of all rows in these transition tables."""
        values = [self._ordered(self._text(f'"{column}"', column), column) for column in self.spec.columns]
        columns = ", ".join(f"{value} AS c{index}" for index, value in enumerate(values))
        return " UNION ALL ".join(f"SELECT {columns} FROM {rows}" for rows in transitions)

    def _ordered(self, value: str, column: str) -> str:
        """A value that min() and max() accept. They do not accept uuid before PostgreSQL 18."""
        return f'concat({value}) COLLATE "C"' if self._table.kinds[column] == "uuid" else value

    @property
    def only_name(self) -> str:
        """The name, if all rows have the same; NULL otherwise."""
        indices = {column: index for index, column in enumerate(self.spec.columns)}
        alike = " AND ".join(
            f"min(c{index}) = max(c{index}) AND count(c{index}) = count(*)" for index in indices.values()
        )
        return f"CASE WHEN {alike} THEN {_concat(self._parts(lambda column: f'min(c{indices[column]})'))} END"

    @property
    def each_name(self) -> str:
        return _concat(self._parts(lambda column: f"c{self.spec.columns.index(column)}"))

    @property
    def moved(self) -> str:
        changes = []
        for column in self.spec.columns:
            old, new = (self._text(f'{row}."{column}"', column) for row in ("OLD", "NEW"))
            changes.append(f"{old} IS DISTINCT FROM {new}")
        return " OR ".join(changes)

    @property
    def not_free(self) -> str:
        return _not_carried(_Text(f"*{self.guard}"), last=True)

    @property
    def epoch_changed(self) -> str:
        return f'OLD."{self.spec.epoch}" IS DISTINCT FROM NEW."{self.spec.epoch}"'

    @property
    def epoch_unknown(self) -> str:
        """When the epoch trigger has to run: this transaction has admitted a name, and the row does not carry one of
        its tokens yet. Only an admitted write puts a token there."""
        value = f'NEW."{self.spec.epoch}"'
        setting = f"concat('fenced.token', {value} % 16)"
        unknown = [
            self.epoch_changed,
            # The short setting first: the one with all stamps may be long, and the server copies it for every look.
            f"({_not_carried(_Text('@'), value, setting=setting)} AND {self.admits})",
        ]
        return " OR ".join([*unknown, *([self.moved] if self.spec.columns else [])])

    @property
    def admits(self) -> str:
        """Whether this transaction has admitted any name."""
        return r"current_setting('fenced.stamp', true) LIKE concat(E'%\n', pg_current_xact_id(), '/%')"

    def without_known(self, rows: str) -> str:
        """The rows of a transition table, except those that carry a token of this transaction."""
        if not self.by_epoch:
            return rows
        epoch = f'"{self.spec.epoch}"'
        closed = _not_carried(_Text("@"), "e", setting="concat('fenced.token', e % 16)")
        unknown = f"SELECT e FROM (SELECT DISTINCT {epoch} AS e FROM {rows}) AS epochs WHERE {closed}"
        return f"(SELECT * FROM {rows} WHERE {epoch} IS NULL OR {epoch} IN ({unknown})) AS {rows}"

    def conditions(self) -> dict[str, tuple[str, str]]:
        """The row triggers: the event, and the condition under which a row has to be decided. The server parses a
        condition again for every statement, so each is as short as possible."""
        written = f"{self.closed('NEW')} AND {self.not_free}"
        updated = [f"({written})"]
        if self.spec.columns:
            updated.insert(0, self.moved)
        return {
            "insert": ("INSERT", written),
            "update": ("UPDATE", " OR ".join(updated)),
            "delete": ("DELETE", f"{self.closed('OLD')} AND {self.not_free}"),
        }

    @property
    def by_epoch(self) -> bool:
        """Whether a row's epoch can show that its name is admitted."""
        return self.spec.epoch is not None and self.spec.installs == "retry"


def _concat(parts: Sequence[_Text | str]) -> str:
    values = (literal(part.text) if isinstance(part, _Text) else part for part in parts)
    return f'concat({", ".join(values)}) COLLATE "C"'


def _not_carried(
    *line: _Text | str, setting: str = "'fenced.stamp'", plain: bool = True, last: bool = False
) -> str:
    """An expression that is true unless the setting has this line; `last`: as its last line.

    LIKE is the cheapest search, and is used where no value can contain a pattern character.
    """
    parts: list[_Text | str] = [_Text("\n"), "pg_current_xact_id()", *line, _Text("\n")]
    if plain:
        parts = [_Text("%"), *(_escaped(part) for part in parts), _Text("" if last else "%")]
    looked_for = f"concat({', '.join(_merged(parts))})"
    carried = f"current_setting({setting}, true)"
    return (
        f"({carried} LIKE {looked_for}) IS NOT TRUE"
        if plain
        else f"(strpos({carried}, {looked_for}) > 0) IS NOT TRUE"
    )


def _escaped(part: _Text | str) -> _Text | str:
    return _Text(re.sub(r"([\\%_])", r"\\\1", part.text)) if isinstance(part, _Text) else part


def _merged(parts: Sequence[_Text | str]) -> list[str]:
    """As SQL, with adjacent texts joined: the server parses a condition again for every statement."""
    found: list[str] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, _Text)):
        if is_text:
            whole = "".join(part.text for part in group if isinstance(part, _Text))
            found.append("E'" + whole.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n") + "'")
        else:
            found += [part for part in group if isinstance(part, str)]
    return found


EVENTS = {"insert": ("new_rows",), "update": ("new_rows", "old_rows"), "delete": ("old_rows",)}
"""The events, each with its transition tables: the rows after the statement, and the rows before it."""
_TRANSITIONS = {"new_rows": "NEW TABLE AS new_rows", "old_rows": "OLD TABLE AS old_rows"}


def triggers(names: Names, table: TableShape, proof: bool) -> list[str]:
    """The statements that create the triggers. With `proof` they do not trust the setting: the function checks it
    against the tables."""
    guard, spec = names.guard, names.spec
    whole, epoch = (object_of(guard, what) for what in ("truncate", "epoch"))
    everything = literal(spec.name) if not spec.columns else "NULL"
    statements = [
        function_of(whole, f"PERFORM fenced_guard.decide({literal(guard)}, {everything});\n  RETURN NULL;"),
        *_row_triggers(names, table, proof),
        *([] if table.child else _statement_triggers(names, table, proof)),
    ]
    statements += [
        f"CREATE OR REPLACE TRIGGER fenced_truncate BEFORE TRUNCATE ON {quoted(target)} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {whole}()"
        for target in (guard, *table.partitions)
    ]
    return [*statements, *_epoch_triggers(names, epoch, proof)]


def _statement_triggers(names: Names, table: TableShape, proof: bool) -> list[str]:
    """The statement triggers, on the table and on each partition: one fires only if the statement names its table."""
    guard = names.guard
    statements = []
    for event, transitions in EVENTS.items():
        function = object_of(guard, event)
        statements.append(
            function_of(function, _judged(names, event, table, proof), "v_name text; v_count bigint;")
        )
        referencing = " ".join(_TRANSITIONS[rows] for rows in transitions)
        statements += [
            f"CREATE OR REPLACE TRIGGER fenced_{event} AFTER {event.upper()} ON {quoted(target)} "
            f"REFERENCING {referencing} FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
            for target in (guard, *table.partitions)
        ]
    return statements


def _judged(names: Names, event: str, table: TableShape, proof: bool) -> str:
    """The body of a statement trigger: return if the setting admits the one name, else decide about all names."""
    guard, spec = literal(names.guard), names.spec
    transitions = EVENTS[event]
    line = f"concat(E'\\n', pg_current_xact_id(), {literal(names.opening)}, v_name, E'\\n')"
    quick = (
        f"  IF strpos(current_setting('fenced.stamp', true), {line}) > 0 THEN RETURN NULL; END IF;\n"
        f"  IF NOT ({names.not_free}) THEN RETURN NULL; END IF;\n"
    )
    quick = "" if proof else quick
    if not spec.columns:
        return (
            f"IF NOT EXISTS (SELECT 1 FROM {transitions[0]}) THEN RETURN NULL; END IF;\n"
            f"  v_name := {literal(spec.name)};\n{quick}"
            f"  PERFORM fenced_guard.decide({guard}, v_name);\n  RETURN NULL;"
        )
    # A row whose old epoch is a token of this transaction is admitted. A statement trigger cannot match old rows with
    # new ones. So the row trigger `fenced_moved` decides about both names of a row whose name changed, and for other
    # rows the old row gives the name. `fenced_moved` does not fire when a row moves between partitions, so on a
    # partitioned table all new names are decided too.
    looks: list[str] = [*transitions]
    if names.by_epoch and not proof and event != "insert":
        looks = [names.without_known("old_rows")]
        if table.partitioned and event == "update":
            looks.append("new_rows")
    found = _without_known_rows(
        names, looks, "SELECT {one}, count(*) INTO v_name, v_count FROM ({written}) AS written;"
    )
    decided = _without_known_rows(
        names,
        looks,
        f"PERFORM fenced_guard.decide_all({guard}, ARRAY(SELECT {{each}} FROM ({{distinct}}) AS written));",
    )
    return (
        f"{found}\n  IF v_count = 0 THEN RETURN NULL; END IF;\n{quick}"
        f"  IF v_name IS NOT NULL THEN PERFORM fenced_guard.decide({guard}, v_name); RETURN NULL; END IF;\n"
        f"  {decided}\n  RETURN NULL;"
    )


def _without_known_rows(names: Names, looks: Sequence[str], statement: str) -> str:
    """The statement over the rows of these tables. If this transaction has admitted no name, no row can carry one of
    its tokens, and the statement runs over all rows without looking at epochs, which is quicker."""

    def about(rows: Sequence[str]) -> str:
        written = names.written(rows)
        several = f"SELECT DISTINCT * FROM ({written}) AS rows"
        return statement.format(one=names.only_name, each=names.each_name, written=written, distinct=several)

    plain = [each.rpartition(" ")[2] for each in looks]
    if plain == list(looks):
        return about(looks)
    return f"IF {names.admits} THEN {about(looks)} ELSE {about(plain)} END IF;"


def _row_triggers(names: Names, table: TableShape, proof: bool) -> list[str]:
    """For rows that no statement trigger sees: those of partitions created later, and of an inheritance child."""
    guard, spec, row = names.guard, names.spec, object_of(names.guard, "row")
    left = (
        f"TG_OP = 'DELETE' OR (TG_OP = 'UPDATE' AND ({names.moved}))" if spec.columns else "TG_OP = 'DELETE'"
    )
    statements = [
        function_of(
            row,
            f"IF TG_OP <> 'DELETE' THEN PERFORM fenced_guard.decide({literal(guard)}, {names.name('NEW')}); END IF;\n"
            f"  IF {left} THEN PERFORM fenced_guard.decide({literal(guard)}, {names.name('OLD')}); END IF;\n"
            "  RETURN NULL;",
        )
    ]

    def trigger(name: str, event: str, when: str) -> str:
        return (
            f"CREATE OR REPLACE TRIGGER {name} AFTER {event} ON {quoted(guard)} "
            f"FOR EACH ROW {when}EXECUTE FUNCTION {row}()"
        )

    if names.by_epoch and spec.columns and not table.child:
        statements.append(trigger("fenced_moved", "UPDATE", f"WHEN ({names.moved}) "))
    else:
        statements.append(f"DROP TRIGGER IF EXISTS fenced_moved ON {quoted(guard)}")
    if not table.partitioned and not table.child:
        # This trigger is disabled and never fires. While it exists, the server refuses to make the table an inheritance
        # child, where a statement on the parent would fire none of our triggers. The server also refuses to drop a
        # column of the name, because the condition mentions it.
        columns = (*spec.columns, *([spec.epoch] if spec.epoch else []))
        never = " AND ".join(["false", *(f'NEW."{column}" IS NULL' for column in columns)])
        alone = (
            f"CREATE OR REPLACE TRIGGER fenced_alone AFTER UPDATE ON {quoted(guard)} "
            f"REFERENCING NEW TABLE AS new_rows FOR EACH ROW WHEN ({never}) EXECUTE FUNCTION {row}()"
        )
        return [*statements, alone, f"ALTER TABLE {quoted(guard)} DISABLE TRIGGER fenced_alone"]
    for name, (event, condition) in names.conditions().items():
        statements.append(trigger(f"fenced_row_{name}", event, "" if proof else f"WHEN ({condition}) "))
        statements += [
            f"ALTER TABLE ONLY {quoted(partition)} DISABLE TRIGGER fenced_row_{name}"
            for partition in table.partitions
        ]
    return statements


def _epoch_triggers(names: Names, function: str, proof: bool) -> list[str]:
    guard, spec = names.guard, names.spec
    if spec.epoch is None:
        return [
            f"DROP TRIGGER IF EXISTS fenced_epoch_insert ON {quoted(guard)}",
            f"DROP TRIGGER IF EXISTS fenced_epoch_update ON {quoted(guard)}",
        ]
    # A write that is only let through keeps the epoch. If it changes the name, the epoch becomes 0: the old token would
    # admit the new name.
    moved = f" AND NOT ({names.moved})" if spec.columns else ""
    kept = f"CASE WHEN TG_OP = 'UPDATE'{moved} THEN OLD.\"{spec.epoch}\" ELSE 0 END"
    decided = ""
    if names.by_epoch:
        decided = (
            f"IF TG_OP = 'UPDATE' THEN PERFORM fenced_guard.decide({literal(guard)}, {names.name('OLD')}); END IF;\n"
            f"  PERFORM fenced_guard.decide({literal(guard)}, {names.name('NEW')});\n  "
        )
    body = (
        f'{decided}NEW."{spec.epoch}" := coalesce(fenced_guard.token_for({names.name("NEW")}), {kept});\n'
        "  RETURN NEW;"
    )
    changed = "" if proof else f"WHEN ({names.epoch_unknown}) "
    made = "" if proof else f'WHEN (NEW."{spec.epoch}" IS DISTINCT FROM 0 OR {names.admits}) '
    head = "CREATE OR REPLACE TRIGGER fenced_epoch_{} BEFORE {} ON " + quoted(guard) + " FOR EACH ROW "
    return [
        function_of(function, body),
        head.format("insert", "INSERT") + f"{made}EXECUTE FUNCTION {function}()",
        head.format("update", "UPDATE") + f"{changed}EXECUTE FUNCTION {function}()",
    ]


def function_of(name: str, body: str, variables: str = "") -> str:
    declared = f"DECLARE\n  {variables}\n" if variables else ""
    return (
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger\n"
        "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fenced$\n"
        f"{declared}BEGIN\n  {body}\nEND $fenced$;\n"
        f"REVOKE ALL ON FUNCTION {name}() FROM PUBLIC"  # or any role could use it in a trigger on its own table
    )


def without_triggers(guard: str) -> list[str]:
    """Drop the functions; CASCADE drops their triggers on every table, detached partitions included."""
    return [
        f"DROP FUNCTION IF EXISTS {object_of(guard, what)}() CASCADE"
        for what in ("row", "truncate", "epoch", "notify", *EVENTS)
    ]


def _digest() -> str:
    """A digest of the statements that create a table's triggers. If it differs, an installation would change them."""
    kinds = {"id": "int8", "name": "text", "epoch": "int8"}
    tables = [TableShape(kinds, {}, ("public.t1",), partitioned=parted) for parted in (False, True)]
    specs = [
        Spec("t", "t/{id}/{name}"),
        Spec("t", "t/{name}", "sequenced", "epoch"),
        Spec("t", "t", "retry", "epoch"),
    ]
    made = [
        triggers(Names(spec, table), table, proof)
        for spec in specs
        for table in tables
        for proof in (False, True)
    ]
    return hashlib.sha256(repr(made).encode()).hexdigest()[:16]


DIGEST = _digest()
