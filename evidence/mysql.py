"""MySQL, which Debian 12 does not have: its packages of Debian's unstable, unpacked into `.mysql`, and what runs on it.

The kits of authority and guard in both colours, the tests of MariaDB and of claims, and what a guarded write costs.
Nothing is installed: the server runs with the libraries that its packages came with.

    python -m evidence.mysql    # only unpacks, and prints the folder
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fenced_testkit.servers.mysql import LOADER, MYSQL_VARIABLE, MysqlServer

ROOT = Path(__file__).parents[1]
UNPACKED = ROOT / ".mysql"
SUITE = "unstable"
PACKAGE = "mysql-server-core"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
KITS = {
    "authority_kit": ["tests/conformance/authorities/test_mariadb.py"],
    "guard_kit": ["tests/conformance/guards/test_mariadb.py"],
    "tests": ["tests/mariadb"],
    "claims": ["tests/work/test_mariadb.py", "tests/work/test_interleavings_on_mariadb.py"],
}
BENCH = "guards_mariadb"


class NotToBeHad(RuntimeError):
    """MySQL cannot be had on this machine; the message says why."""


def unpack(folder: Path = UNPACKED) -> Path:
    """Download MySQL and everything that it needs by the machine's own apt, and unpack it; at once if it is there."""
    if (folder / LOADER).exists():
        return folder
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise NotToBeHad(f"{program} is not here")
    with tempfile.TemporaryDirectory(prefix="fenced-apt-") as place, tempfile.TemporaryDirectory() as fresh:
        for package in _download(Path(place)):
            _run("dpkg-deb", "-x", str(package), fresh)
        shutil.copytree(fresh, folder, symlinks=True, dirs_exist_ok=True)
    return folder


def _download(place: Path) -> list[Path]:
    """The packages of SUITE from the mirror that apt uses here. apt's own lists and packages are not touched."""
    mirrors = _run(
        "apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Label: Debian"
    ).split()
    if not mirrors:
        raise NotToBeHad("apt knows no mirror of Debian; `apt-get update` tells it")
    sources = place / "sources.list"
    sources.write_text(f"deb [signed-by={KEYS}] {mirrors[0]} {SUITE} main\n")
    status = place / "status"
    status.touch()  # as if nothing were installed, so that the libraries come, too
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (place / folder).mkdir(parents=True)
    own = {
        "Dir::State": place / "state",
        "Dir::State::status": status,
        "Dir::Cache": place / "cache",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Acquire::Check-Valid-Until": "false",  # a frozen mirror is good enough; the signature is checked
        "Acquire::Languages": "none",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
    }
    options = [part for name, value in own.items() for part in ("-o", f"{name}={value}")]
    _run("apt-get", *options, "update")
    _run("apt-get", *options, "--yes", "--download-only", "install", PACKAGE)
    return sorted((place / "cache/archives").glob("*.deb"))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotToBeHad(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def run() -> dict[str, Any]:
    """What passed on it, what did not, and what it costs; or why it cannot be had."""
    try:
        root = unpack()
    except NotToBeHad as why:
        return {"not_run": str(why)}
    with MysqlServer(root) as server:
        ((version,),) = server.execute("SELECT version()")
    kits = {name: _kit(root, paths) for name, paths in KITS.items()}
    return {"version": version, **kits, "costs": _costs(root)}


def _kit(root: Path, paths: list[str]) -> dict[str, Any]:
    """How many checks passed, and the names of those that did not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *paths, f"--junit-xml={report}"]
        subprocess.run(command, cwd=ROOT, env=_on(root), stdout=subprocess.DEVNULL, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    left_out = [case for case in cases if case.find("skipped") is not None]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"checks": len(cases) - len(left_out), "not_of_mysql": len(left_out), "failed": failed}


def _costs(root: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        report = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "bench", BENCH, "--json", str(report), "--folder", folder]
        subprocess.run(command, cwd=ROOT, env=_on(root), stdout=subprocess.DEVNULL, check=True)
        figures = json.loads(report.read_text())["figures"]
    keys = ("key", "what", "value", "target", "verdict", "detail")
    return [{key: figure[key] for key in keys} for figure in figures]


def _on(root: Path) -> dict[str, str]:
    return {**os.environ, MYSQL_VARIABLE: str(root)}


if __name__ == "__main__":
    print(unpack())
