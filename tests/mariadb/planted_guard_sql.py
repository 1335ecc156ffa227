"""Planted bugs of the MariaDB guard: mistakes that somebody made or would make, as changes to the real procedures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fenced.stores.mariadb.guard import schema


@dataclass(frozen=True)
class Bug:
    """A mistake: what of which procedure reads how instead, and the stories that find it, by which sign."""

    name: str
    who: str
    sign: str
    found_by: tuple[str, ...]
    changes: tuple[tuple[str, str, str], ...]

    def statements(self, product: str) -> list[str]:
        """That replace the procedures by the wrong ones."""
        wrong: dict[str, str] = {}
        for procedure, right, instead in self.changes:
            text = wrong.get(procedure) or _procedure(product, procedure)
            assert text.count(right) == 1, f"{self.name}: {right!r} is there {text.count(right)} times"
            wrong[procedure] = text.replace(right, instead)
        return [part for name, text in wrong.items() for part in replacing(name, text)]

    def repair(self, product: str) -> list[str]:
        names = dict.fromkeys(procedure for procedure, _, _ in self.changes)
        return [part for name in names for part in replacing(name, _procedure(product, name))]


def replacing(name: str, text: str) -> list[str]:
    return [f"DROP PROCEDURE fenced_guard.{name}", text.replace("CREATE OR REPLACE", "CREATE", 1)]


def _procedure(product: str, name: str) -> str:
    pattern = re.compile(rf"CREATE (OR REPLACE )?PROCEDURE fenced_guard\.{name}\(")
    (found,) = (text for text in schema.routines(product) if pattern.match(text))
    return found


PLAIN_MARK = (
    "SELECT token INTO v_token FROM fenced_guard.mark WHERE scope = p_scope AND name = SUBSTRING(p_names, 3)"
)
BUGS = (
    Bug(
        "a plain read before the lock",
        "an announcement that looks at the mark first opens the snapshot: at REPEATABLE READ the newer one reads what "
        "was before the last holder's write, and loses it",
        "an update was lost",
        ("old and new, no mark", "old and new, the mark is below both"),
        (("enter", "  CALL fenced_guard.announce(", f"  {PLAIN_MARK};\n  CALL fenced_guard.announce("),),
    ),
    Bug(
        "a decision that locks the mark exclusively",
        "as it would if it called anything that writes marks: the older holder's second lock of its mark deadlocks "
        "with the newer one, who waits for the first",
        "1213",
        ("old again and new",),
        (("decide", "AND name = v_name LOCK IN SHARE MODE", "AND name = v_name FOR UPDATE"),),
    ),
    Bug(
        "the variables are trusted",
        "a stamp that is left over from an earlier transaction admits a stale write",
        "a stale write was admitted",
        ("a stamp that is left over",),
        (
            (
                "decide",
                "IF LOCATE(CONCAT(v_key, m_token, x'09', m_grant, x'09'), @fenced_lines) = v_at THEN",
                "IF TRUE THEN",
            ),
        ),
    ),
    Bug(
        "marks are looked at without a lock",
        "a newer holder announces between the look of the older one and its write",
        "a stale write was admitted|an update was lost",
        ("old again and new",),
        (
            ("enter", "m.name = v_name LOCK IN SHARE MODE", "m.name = v_name"),
            ("decide", "AND name = v_name LOCK IN SHARE MODE", "AND name = v_name"),
        ),
    ),
    Bug(
        "the end of the transaction is not noticed",
        "the program's own COMMIT inside the block goes unnoticed, and what follows it is committed in parts",
        "an ended transaction was not noticed",
        ("a transaction that the program ends",),
        (("finish", "  RELEASE SAVEPOINT fenced_guard;", "  DO 0;"),),
    ),
    Bug(
        "the operation is forgotten",
        "under rule once the second statement of a transaction is taken for a second operation",
        "an honest writer was refused",
        ("rule once, two statements",),
        (("decide_counted", "operation = @fenced_operation\n", "operation = NULL\n"),),
    ),
    Bug(
        "a second operation is let in",
        "the seq of a grant is not written down, so its second operation under rule once is taken for the first",
        "rule once let two in",
        ("rule once, two connections",),
        (("decide_counted", "SET seq = fenced_guard.part(v_line, 4), operation", "SET seq = 0, operation"),),
    ),
)
