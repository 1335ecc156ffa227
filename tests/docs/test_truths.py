"""What several pages say in one sentence, so that no two of them can differ."""

from __future__ import annotations

import re
from pathlib import Path

from fenced.client.registry import BUILT_IN

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


def test_every_guard_and_authority_is_linked_where_newcomers_look() -> None:
    """The pages that say what there is have a link to the page of every registered guard and authority."""
    packages = {target.split(".")[2].split(":")[0] for target in BUILT_IN["fenced.guards"].values()} - {
        "memory"
    }
    guards = {f"guards/{package}.md" for package in packages}
    for page, prefix in ((DOCS.parent / "README.md", "docs/"), (DOCS / "coming-from.md", "")):
        assert [guard for guard in sorted(guards) if f"({prefix}{guard})" not in page.read_text()] == []
    stores = {target.split(".")[2].split(":")[0] for target in BUILT_IN["fenced.authorities"].values()}
    readme = (DOCS.parent / "README.md").read_text()
    named = {store for store in stores - {"memory", "service"} if f"(docs/authorities/{store}.md)" in readme}
    assert named == stores - {"memory", "service"} and "(docs/service.md)" in readme


def test_the_functions_of_the_architecture_page_are_where_it_says() -> None:
    """A link of a function's name leads to the file that has it."""
    text = (DOCS / "architecture.md").read_text()
    links = re.findall(r"\[`(\w+)`\]\(\.\./([\w/.]+\.(?:py|sql))\)", text)
    assert len(links) > 10
    wrong = [
        (name, path)
        for name, path in links
        if not re.search(rf"(?:def |FUNCTION fenced_guard\.){name}\b", (DOCS.parent / path).read_text())
    ]
    assert wrong == []
