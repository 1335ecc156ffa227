"""`make build` publishes the whole package, and what it checks can fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fenced.client.registry import BUILT_IN
from release.check import PROJECT, VERSION, wrong
from release.metadata import LINK, linked

ROOT = Path(__file__).parents[2]
HOME = "https://forge.invalid/fenced"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    for project in (ROOT, ROOT / "testkit"):
        subprocess.run(build, cwd=project, env={"FENCED_REPOSITORY": HOME}, check=True, capture_output=True)
    return folder


def metadata_in(folder: Path) -> str:
    (path,) = folder.glob("fenced-*.whl")
    with zipfile.ZipFile(path) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        return wheel.read(name).decode()


def test_the_package_is_whole_and_knows_its_home(built: Path) -> None:
    assert list(wrong(built, f"v{VERSION}")) == []
    metadata = metadata_in(built)
    assert f"Project-URL: Repository, {HOME}\n" in metadata
    assert f"[tutorial]({HOME}/blob/v{VERSION}/docs/tutorial.md)" in metadata
    assert f"]({HOME}/raw/v{VERSION}/docs/img/drill.svg)" in metadata


def test_the_check_finds_what_is_missing_and_what_is_too_much(built: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "dist"))
    (path,) = folder.glob("fenced-*.whl")
    with zipfile.ZipFile(path) as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w") as broken:
        for name, content in entries.items():
            if name not in ("fenced/vectors.json", "fenced/py.typed"):
                dead = b"[a link](docs/tutorial.md)" if name.endswith("/METADATA") else b""
                broken.writestr(name, content + dead)
        broken.writestr("tests/__init__.py", "")
    assert list(wrong(folder, "v0.0.1")) == [
        f"{path.name} lacks fenced/py.typed",
        f"{path.name} lacks fenced/vectors.json",
        f"{path.name} should not contain tests/__init__.py",
        f"{path.name}: a link of its README leads nowhere: docs/tutorial.md",
        f"the tag v0.0.1 is not v{VERSION}, which pyproject.toml says",
    ]
    path.unlink()
    assert "nothing else" in next(wrong(folder))


def test_without_a_home_the_readme_has_no_dead_links() -> None:
    readme = (ROOT / "README.md").read_text()
    assert LINK.search(readme)
    alone = linked(readme, "", f"v{VERSION}")
    assert not LINK.search(alone)
    assert "Start with the tutorial, or" in " ".join(alone.split())


def test_people_who_search_for_a_store_find_the_package() -> None:
    """Every store that grants leases is a keyword, and every Python that is tested is in the classifiers."""
    stores = {kind.split(".")[2].split(":")[0] for kind in BUILT_IN["fenced.authorities"].values()}
    assert stores - {"memory", "ledger", "service"} <= set(PROJECT["keywords"])
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in PROJECT["classifiers"]


def test_nobody_is_asked_to_install_the_bare_name() -> None:
    """It has not been claimed: pip would install what somebody else has published under it."""
    bare = re.compile(r"pip install (-\S+ )*['\"]?fenced\b(?!/)")
    assert bare.search("pip install 'fenced[etcd]'") and not bare.search("pip install './fenced[etcd]'")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = [*pages, *(ROOT / "src").rglob("*.py")]
    found = [path for path in texts if bare.search(path.read_text())]
    assert found == [ROOT / "docs/decisions/0052-installing.md"]
