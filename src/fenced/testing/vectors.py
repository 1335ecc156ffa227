"""Decision vectors: the decisions of the pure functions, as data with which a guard in any language can be compared.

python -c 'from fenced.testing import vectors; vectors.write()'
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fenced.decision import RULES, Mark, Mode, Rule, Verdict, canary_point, judge, mode_of, rule_on
from fenced.errors import InvalidStamp
from fenced.model import TOKEN_MAX, Stamp
from fenced.testing.inputs import BAD_STAMPS, ODD_NAMES

PATH = Path(__file__).parents[1] / "vectors.json"
REALM, OTHER_REALM = "00000000000000aa", "00000000000000bb"
GRANTS = ("1" * 32, "2" * 32)
OPERATIONS = ("op-1", "op-2")
SHORT = {REALM: "R", OTHER_REALM: "S", GRANTS[0]: "A", GRANTS[1]: "B"}
"""How realms and grants are written in the rows."""
NAME = "orders/42"
MODES = ("observe", "shadow", "canary(0%)", "canary(50%)", "canary(100%)", "enforce", "require")
CANARY_NAMES = (NAME, "orders", "a", *(f"orders/{number}" for number in range(30)), *ODD_NAMES)
PATTERNS: tuple[dict[str, str], ...] = (
    {},
    {"*": "enforce"},
    {"*": "enforce", "old/*": "observe", "old/paid/*": "require"},
    {"*": "observe", "a*": "shadow", "*b": "enforce", "a*b*": "require", "a/b": "canary(50%)"},
    {"*_*": "shadow", "%": "enforce", "a\\*": "require", "odd[x]?": "observe", "**": "canary(5%)"},
)
PATTERN_NAMES = ("a", "b", "a/b", "aXbX", "old", "old/1", "old/paid/1", "x_y", "xzy", "%", "a\\b", "odd[x]?")


class Case(NamedTuple):
    """One question to `judge`, and its answer. A stamp's token of null: the operation carries none."""

    mark_token: int | None
    mark_grant: str | None
    mark_seq: int | None
    mark_operation: str | None
    token: int | None
    grant: str | None
    seq: int | None
    covered: bool
    stamp_realm: str | None
    proven: bool
    guard_realm: str | None
    rule: Rule
    announce: bool
    operation: str | None
    verdict: str = ""
    rises: bool = False
    """Whether the mark becomes that of the stamp: its token and grant, its seq (0 if announced), the operation."""

    @property
    def mark(self) -> Mark | None:
        if self.mark_token is None:
            return None
        return Mark(self.mark_token, self.mark_grant or "", self.mark_seq or 0, self.mark_operation)

    @property
    def stamp(self) -> Stamp | None:
        if self.token is None:
            return None
        names = (NAME,) if self.covered else ("another",)
        return Stamp(self.stamp_realm or "", names, self.token, self.seq, self.grant or "")

    def answered(self) -> Case:
        judged = judge(
            self.mark,
            self.stamp,
            name=NAME,
            rule=self.rule,
            realm=self.guard_realm,
            announce=self.announce,
            operation=self.operation,
            proven=self.proven,
        )
        return self._replace(verdict=judged.verdict.value, rises=judged.mark != self.mark)


def _marks(token: int) -> Iterator[tuple[Any, ...]]:
    yield None, None, None, None
    for seq, operation in itertools.product((0, 1, 2), (None, "op-1")):
        yield token - 1, GRANTS[1], seq, operation
        yield token + 1, GRANTS[1], seq, operation
        for grant in GRANTS:
            yield token, grant, seq, operation


def _cases() -> Iterator[Case]:
    """Every order of tokens with every seq; then every way a stamp can be bad, before each kind of mark."""
    for token in (10, TOKEN_MAX - 1):  # 9 and 10 as texts, and neighbours that a float cannot tell apart
        for mark, seq, rule, announce in itertools.product(
            _marks(token), (None, 0, 1, 2), RULES, (False, True)
        ):
            for operation in (None,) if announce or token > 10 else (None, *OPERATIONS):
                yield _case(mark, token, GRANTS[0], seq, True, REALM, True, REALM, rule, announce, operation)
    same = [(token, GRANTS[0], 1, None) for token in (9, 10, 11)]
    marks: list[tuple[Any, ...]] = [(None,) * 4, *same, (10, GRANTS[1], 1, None)]
    realms = ((REALM, None), (REALM, REALM), (OTHER_REALM, REALM))
    tokens = (0, -1, 1, 10, TOKEN_MAX, TOKEN_MAX + 1)
    for mark, (realm, trusted), token, covered, proven in itertools.product(
        marks, realms, tokens, (True, False), (True, False)
    ):
        yield _case(mark, token, GRANTS[0], 1, covered, realm, proven, trusted, "sequenced", False, None)
    for mark, trusted, rule in itertools.product(marks, (None, REALM), RULES):
        yield _case(mark, None, None, None, False, None, True, trusted, rule, False, None)


def _case(mark: tuple[Any, ...], *rest: Any) -> Case:
    return Case(*mark, *rest)


def made() -> dict[str, Any]:
    """All vectors, from the pure functions."""
    cases = [case.answered() for case in dict.fromkeys(_cases())]
    names = sorted(set(CANARY_NAMES))
    return {
        "format": 1,
        "name": NAME,
        "texts": {short: text for text, short in SHORT.items()},
        "judge": {
            "columns": list(Case._fields),
            "rows": [[SHORT.get(str(value), value) for value in case] for case in cases],
        },
        "rule_on": {
            "columns": ["verdict", "mode", "name", "ruling"],
            "rows": [
                [verdict.value, mode, name, rule_on(verdict, Mode.parse(mode), name).value]
                for verdict, mode, name in itertools.product(Verdict, MODES, ("orders/1", "orders/2"))
            ],
        },
        "canary": {"columns": ["name", "point"], "rows": [[name, canary_point(name)] for name in names]},
        "mode_of": [
            {
                "modes": modes,
                "names": {
                    name: str(mode_of(name, [(p, Mode.parse(m)) for p, m in modes.items()]))
                    for name in PATTERN_NAMES
                },
            }
            for modes in PATTERNS
        ],
        "stamps": {"good": [_good(name) for name in ODD_NAMES], "bad": [*filter(_is_bad, BAD_STAMPS)]},
    }


def _good(name: str) -> dict[str, Any]:
    stamp = Stamp(REALM, (name,), 10, 1, GRANTS[0])
    return {"text": str(stamp), **stamp._asdict()}


def _is_bad(text: object) -> bool:
    if not isinstance(text, str) or not text.isprintable():
        return False
    try:
        Stamp.parse(text)
    except InvalidStamp:
        return True
    return False


def packed(vectors: dict[str, Any]) -> str:
    """The file's text: one row on each line, so that a change can be read."""
    text = json.dumps(vectors, separators=(",", ":"))
    return text.replace("],[", "],\n[").replace('},"', '},\n"') + "\n"


def cases() -> list[Case]:
    """The questions to `judge` in the shipped file, with their answers."""
    shipped = json.loads(PATH.read_text())
    texts: dict[object, Any] = shipped["texts"]
    return [Case(*(texts.get(value, value) for value in row)) for row in shipped["judge"]["rows"]]


def write() -> None:
    """Write the file again, after an intended change of the decision."""
    PATH.write_text(packed(made()))
