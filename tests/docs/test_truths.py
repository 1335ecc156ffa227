"""What several pages say in one sentence, so that no two of them can differ."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
ABOUT_STAMPS = (
    "A stamp lets its reader write under the lease's names until a newer holder does. "
    "Treat it like a session cookie; the token may be logged."
)


def test_the_pages_agree_on_who_may_see_a_stamp() -> None:
    pages = ("faq.md", "protocol.md", "reference/api.md", "explain/fencing.md")
    assert [page for page in pages if ABOUT_STAMPS not in " ".join((DOCS / page).read_text().split())] == []
    for page in DOCS.rglob("*.md"):
        text = " ".join(page.read_text().split()).lower()
        assert not any(
            wrong in text
            for wrong in (
                "stamp is not a secret",
                "stamp is no secret",
                "stamp is a password",
                "log stamps? yes",
            )
        ), page
