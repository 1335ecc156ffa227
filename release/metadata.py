"""The parts of the package's metadata that depend on where the project lives, for hatchling.

FENCED_REPOSITORY is the address of the repository. With it, the package names it, and the links of its README lead into
it. Without it, the package names no address, and its README keeps the words of those links: none is dead.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<image>!?)\[(?P<words>[^]]*)\]\((?P<path>(?!\w+:|#)[^)\s]+)\)")


class MetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("FENCED_REPOSITORY", "").rstrip("/")
        version = f"v{metadata['version']}"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": linked(text, repository, version),
        }
        if repository:
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/blob/{version}/docs/index.md",
                "Changelog": f"{repository}/blob/{version}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }


def linked(text: str, repository: str, version: str) -> str:
    """The text with its links into the repository made absolute; without a repository, with their words alone."""

    def absolute(link: re.Match[str]) -> str:
        if not repository:
            return "" if link["image"] else link["words"]
        view = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['words']}]({repository}/{view}/{version}/{link['path']})"

    pieces = CODE.split(text)  # every second piece is code
    pieces[::2] = [LINK.sub(absolute, piece) for piece in pieces[::2]]
    return "".join(pieces)
