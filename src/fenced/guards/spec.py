"""Which table a guard protects, and which name covers a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

from fenced.errors import Misuse, shown
from fenced.guards.answers import DEFAULT_RULE, check_rule
from fenced.guards.claims import COLUMNS, Claiming, Columns, Constant
from fenced.values.decision import Rule
from fenced.values.model import check_name

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)
_FIELD = re.compile(r"\{([^{}]*)\}")

FAILS = "SELECT fenced_guard_is_missing_here()"
"""A statement that fails on every engine, for a place in a script where the statements of a guard are missing."""


def check_identifier(name: object, what: str) -> str:
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise Misuse(f"{what} is a plain SQL identifier, not {shown(name)}")
    return name


def check_constants(columns: Mapping[str, Constant] | None, what: str) -> Columns:
    """Columns and constants that a statement sets."""
    found = []
    for name, value in (columns or {}).items():
        check_identifier(name, f"a column in {what}")
        if name in COLUMNS:
            raise Misuse(f"{what} sets columns of the program, and {name} is the guard's")
        if not (value is None or isinstance(value, str | int)):
            raise Misuse(f"{what} sets columns to a str, an int, a bool or None, not to {shown(value)}")
        found.append((name, value))
    return tuple(found)


@dataclass(frozen=True)
class Spec:
    """What a guard protects: a table, the name that covers a row, and the rule.

    `name` is a constant (`orders`), a template in which some segments are columns (`orders/{id}`), or one column
    that holds the whole name (`{name}`). In a template a value's `%` and `/` are escaped, so that two rows never
    share a name by accident. `epoch` is a column in which the guard keeps the token of a row's last write.
    `rule` None: a program takes the rule of the installed guard, whatever it is; an installation takes `retry`.
    """

    table: str
    name: str
    rule: Rule | None = None
    epoch: str | None = None
    claims: Claiming | None = None
    """The rows themselves are claimed, and are the marks."""

    def __post_init__(self) -> None:
        if not isinstance(self.table, str):
            raise Misuse(f"table is a plain SQL identifier, not {shown(self.table)}")
        for part in self.table.split(".", 1):
            check_identifier(part, "table")
        if self.rule is not None:
            check_rule(self.rule)
        if self.epoch is not None:
            check_identifier(self.epoch, "epoch")
        if not isinstance(self.name, str) or len(self.name) > 200:
            raise Misuse(f"name is a name or a template such as 'orders/{{id}}', not {shown(self.name)}")
        for column in self.columns:
            check_identifier(column, "a column in the name template")
        for segment in self.name.split("/"):
            if ("{" in segment or "}" in segment) and not _FIELD.fullmatch(segment):
                raise Misuse(
                    f"a column is a whole segment of the name, as in 'orders/{{id}}': {shown(self.name)}"
                )
        check_name(_FIELD.sub("x", self.name))
        if "$" in self.name:
            raise Misuse(f"a template holds no dollar sign: {shown(self.name)}")
        if self.claims is not None and check_identifier(self.claims.key, "key") not in self.columns:
            raise Misuse(f"the name of a claimed row holds its key, as in 'runs/{{id}}': {shown(self.name)}")

    @property
    def installs(self) -> Rule:
        """The rule of an installation."""
        return self.rule or DEFAULT_RULE

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_FIELD.findall(self.name)))

    @property
    def whole(self) -> bool:
        """Whether one column holds the whole name."""
        return len(self.columns) == 1 and self.name == f"{{{self.columns[0]}}}"

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The template in order: texts, and columns (True)."""
        found = enumerate(_FIELD.split(self.name))
        return [(piece, index % 2 == 1) for index, piece in found if piece]

    def name_for(self, **values: object) -> str:
        """The name that covers the row with these column values."""
        if set(values) != set(self.columns):
            raise Misuse(f"the name {self.name!r} takes {', '.join(self.columns) or 'no values'}")
        for value in values.values():
            if isinstance(value, bool) or not isinstance(value, str | int | UUID):
                raise Misuse(
                    f"a name is made of str, int and UUID, as the database writes them, not of {shown(value)}"
                )
        escape = (lambda text: text) if self.whole else _escape
        texts = {column: escape(str(value)) for column, value in values.items()}
        return check_name(_FIELD.sub(lambda found: texts[found[1]], self.name))


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("/", "%2F")


def literal(text: str) -> str:
    """The text as SQL writes it; the texts of a Spec hold no backslash."""
    return "'" + text.replace("'", "''") + "'"


def described(spec: Spec, mandatory: bool) -> str:
    """What an installed guard stores about its table, for a message."""
    epoch = f", epoch column {spec.epoch}" if spec.epoch else ""
    claims = f", claims where {spec.claims.ready} by {spec.claims.order}" if spec.claims else ""
    return f"{spec.name}, rule {spec.installs}{epoch}{claims}{'' if mandatory else ', without triggers'}"


def asks_for(spec: Spec, mandatory: bool) -> str:
    """The second half of the message that refuses to change an installed guard."""
    return (
        f"this installation asks for {described(spec, mandatory)}, by which all writers would be judged at once. "
        "If that is meant, pass replace=True (--replace)"
    )


def as_script(statements: Sequence[str], *, transaction: bool, comments: Sequence[str] = ()) -> str:
    """The statements as the text of a migration; `transaction`: with BEGIN and COMMIT."""
    lines = [f"{line.rstrip().rstrip(';')};" for line in statements]
    if transaction:
        lines = ["BEGIN;", *lines, "COMMIT;"]
    return "".join(f"-- {line}\n" for line in comments) + "\n\n".join(lines) + "\n"


def may_meet(one: str, other: str) -> bool:
    """Whether two name templates may make the same name. They cannot if their constant beginnings differ."""
    own, others = one.partition("{")[0], other.partition("{")[0]
    return own.startswith(others) or others.startswith(own)
