"""Bad and odd inputs, shared by the kits. Each bad one is refused with a typed error before any effect."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

BAD_NAMES: tuple[Any, ...] = (
    "", " ", ".", "..", "a/../b", "../../etc/passwd", "/a", "a//b", "a/", "a/ ", " a", "a\x00b",
    "a\r\nX-Evil: 1", "a\x7fb", "a\u2028b", "a\u202eb", "\ufeffa", "\ud800", "x" * 201, "é" * 101, "x" * 2**20,
    0, 1, None, True, b"a", ["a"], ("a",), 1.5,
)  # fmt: skip
"""Never names."""

ODD_NAMES: tuple[str, ...] = (
    "orders", "orders/42", "Orders", "orders/4", "orders/42/1", "orders\\42", "orders%2F42", "%00", "%2e%2e%2f",
    "'; DROP TABLE locks;--", '"', "*", "?", "{a}", "a,b", "a:b", "a;b", "a b", "caf\u00e9", "cafe\u0301",
    "\u0430", "a", "x" * 200, "\U0001f512", "~", "a.b", "-", "...", "a'b", "$1", "[a]", "(a)", "#", "@",
)  # fmt: skip
"""Names that look dangerous or alike, all different from each other."""

BAD_TTLS: tuple[Any, ...] = (
    0, -1, -0.0, 1e-9, 0.0999, float("nan"), float("inf"), float("-inf"), 1e999, 2**63, 10**400, 86_400.1,
    "10", True, None, b"1", [], timedelta(0), timedelta(days=2),
)  # fmt: skip

BAD_WAITS: tuple[Any, ...] = (-1, -1e-9, float("nan"), float("inf"), 1e18, "1", True, [], timedelta(-1))

BAD_FLOORS: tuple[Any, ...] = (-1, 2**53 - 1, 2**53, 2**63, 10**5000, 1.0, float("nan"), "5", None, True)

_GRANT = "0" * 31 + "1"
_REALM = "00000000000000aa"


def _text(token: str = "5", seq: str = "1", names: str = "orders/42", **other: str) -> str:
    realm, grant = other.get("realm", _REALM), other.get("grant", _GRANT)
    return f"{other.get('version', '1')}:{realm}:{token}:{seq}:{grant}:{names}"


BAD_STAMPS: tuple[Any, ...] = (
    None, 5, b"", "", "5", [], {}, _text() + " ", " " + _text(), _text() + "\n", _text(version="2"),
    *(_text(token=token) for token in (
        "-1", "0", "00005", "05", str(2**53), str(2**53 + 1), str(2**63 - 1), str(2**63), str(2**64), "9" * 5000,
        "1.0", "1e3", "nan", "inf", "True", "5 ", "+5", "0x10", "1_0", "\u0661\u0662", "\u00b2", "", "null",
    )),
    *(_text(seq=seq) for seq in ("", "-1", "00", "01", "1.0", str(2**53), "9" * 5000, "\u0661")),
    *(_text(realm=realm) for realm in ("", "AA" * 8, "a" * 15, "a" * 17, "g" * 16)),
    *(_text(grant=grant) for grant in ("", "A" * 32, "a" * 31, "a" * 33, "z" * 32)),
    *(_text(names=names) for names in (
        "", "/", "a//b", "a/", "..", "b,a", "a,a", "a,", ",a", "a b", "%61", "%e9", "%C3%A", "%c3%a9", "a%00b",
        "caf\u00e9", "a:b", "%ED%A0%80", ",".join(f"n{i:03}" for i in range(65)),
    )),
    _text() + ":x", _text().replace(":", ";"), "\ud800",
)  # fmt: skip
"""Never stamps: each must be InvalidStamp."""
