"""Decision vectors: the decisions of the pure functions, as data with which a guard in any language can be compared.

python -c 'from fenced.testing import vectors; vectors.write()'
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fenced.errors import REFUSALS, AlreadyApplied, FencedError, InvalidStamp
from fenced.http.protocol import (
    HEADER_BYTES_MAX,
    KEY_HEADER,
    PROOF_HEADER,
    STAMP_HEADER,
    fence_headers,
    read_fence,
)
from fenced.net.problems import problem
from fenced.proofs import Proof
from fenced.testing.inputs import BAD_STAMPS, ODD_NAMES
from fenced.values.decision import RULES, Mark, Mode, Rule, Verdict, canary_point, judge, mode_of, rule_on
from fenced.values.model import SEQ_MAX, TOKEN_MAX, Stamp

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
    """Whether the mark becomes that of the stamp: token and grant, seq and operation (0 and none if announced)."""

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
            operations = (None, *OPERATIONS[:1]) if announce else (None, *OPERATIONS)
            for operation in operations if token == 10 else (None,):
                yield _case(mark, token, GRANTS[0], seq, True, REALM, True, REALM, rule, announce, operation)
    same = [(token, GRANTS[0], 1, None) for token in (9, 10, 11)]
    marks: list[tuple[Any, ...]] = [(None,) * 4, *same, (10, GRANTS[1], 1, None)]
    realms = ((REALM, None), (REALM, REALM), (OTHER_REALM, REALM))
    tokens = (0, -1, 1, 10, TOKEN_MAX, TOKEN_MAX + 1)
    for mark, (realm, trusted), token, covered, proven in itertools.product(
        marks, realms, tokens, (True, False), (True, False)
    ):
        yield _case(mark, token, GRANTS[0], 1, covered, realm, proven, trusted, "sequenced", False, None)
    for mark, seq, rule, announce in itertools.product(
        marks, (-1, SEQ_MAX, SEQ_MAX + 1), RULES, (False, True)
    ):
        yield _case(mark, 10, GRANTS[0], seq, True, REALM, True, REALM, rule, announce, None)
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
        "http": {
            "requests": [_request(headers) for headers in _requests()],
            "verdicts": {
                "columns": ["verdict", "status", "type", "retry"],
                "rows": [[verdict.value, *_answered(verdict)] for verdict in Verdict],
            },
        },
    }


def _requests() -> Iterator[list[tuple[str, str]]]:
    """The headers of requests, good ones first."""
    stamp = Stamp(REALM, (NAME,), 10, 1, GRANTS[0])
    hmac, ed25519 = f"key-1:{'ab' * 32}", f"key_2:{'cd' * 64}"
    for good in (
        *(stamp._replace(seq=seq) for seq in (None, 0, 1, 2**53 - 1)),
        _long_stamp(HEADER_BYTES_MAX),
    ):
        yield list(fence_headers(good).items())
        for proof in (hmac, ed25519):
            yield list(fence_headers(Proof(good, proof)).items())
    for name in ODD_NAMES:
        yield list(fence_headers(stamp._replace(names=(name,))).items())
    quoted = f'"{stamp}"'
    yield []
    yield [("Idempotency-Key", '"of another kind"')]
    yield [("fenced-stamp", quoted)]
    yield [(STAMP_HEADER, f"  {quoted}  ")]
    too_long = f'"{_long_stamp(HEADER_BYTES_MAX + 1)}"'
    bad = (
        f"{stamp}",
        f"'{stamp}'",
        quoted + ";a=1",
        f"{quoted}, {quoted}",
        f'"{quoted}"',
        f"({quoted})",
        too_long,
    )
    for value in ("", '"', '""', *bad, quoted[:-1], quoted[1:], quoted.replace("1", "\\1", 1), f":{stamp}:"):
        yield [(STAMP_HEADER, value)]
    for text in filter(_is_bad, BAD_STAMPS):
        if text.isascii():
            yield [(STAMP_HEADER, f'"{text}"')]
    yield [(STAMP_HEADER, quoted), (STAMP_HEADER, quoted)]
    yield [(PROOF_HEADER, f'"{hmac}"')]
    yield [(STAMP_HEADER, quoted), (PROOF_HEADER, f'"{hmac}"'), (PROOF_HEADER, f'"{hmac}"')]
    for proof in (
        "",
        "-",
        hmac[:-1],
        hmac.upper(),
        hmac + ":",
        ed25519 + "cd",
        ":" + hmac,
        "k y:" + hmac[6:],
    ):
        yield [(STAMP_HEADER, quoted), (PROOF_HEADER, f'"{proof}"')]
    yield [(STAMP_HEADER, quoted), (PROOF_HEADER, hmac)]


def _long_stamp(length: int) -> Stamp:
    """A stamp that is, in its quotation marks, `length` bytes long."""
    stamp = Stamp(REALM, tuple(f"{number:02}" + "x" * 190 for number in range(21)), 10, 1, GRANTS[0])
    return stamp._replace(names=(*stamp.names[:-1], "20" + "x" * (length - len(str(stamp)) + 188)))


def _request(headers: list[tuple[str, str]]) -> dict[str, Any]:
    """The headers of a request, and what a receiver finds in them, or its answer if they are wrong."""
    try:
        fence = read_fence(headers)
    except InvalidStamp as error:
        return {"headers": headers, "status": problem(error).status, "type": _type_of(error)}
    stamp, proof = (fence.stamp, fence.text) if isinstance(fence, Proof) else (fence, None)
    found = {"stamp": str(stamp) if stamp else None, "proof": proof}
    return {"headers": headers, **found, "key": fence_headers(stamp).get(KEY_HEADER) if stamp else None}


def _type_of(error: FencedError) -> str:
    return str(json.loads(problem(error).body)["type"])


def _answered(verdict: Verdict) -> tuple[int | None, str | None, str | None]:
    """The answer to a request that is refused or was applied before; nothing for one that goes on to its handler."""
    if verdict is Verdict.ADMIT:
        return None, None, None
    error = AlreadyApplied() if verdict is Verdict.APPLIED else REFUSALS[verdict.value]("")
    return problem(error).status, _type_of(error), error.retry


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
