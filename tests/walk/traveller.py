"""A user who has a clone of this repository, the packages that pip may install, and nothing else.

If the tests run as root, the traveller is `nobody`, with a home of its own. No package of the tests' environment is
visible to it, and pip finds only the wheels that `make test` has downloaded. No network is used.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = Path(sys.prefix, "wheels")
UV = str(Path(sys.prefix, "bin", "uv"))
NOT_CLONED = shutil.ignore_patterns(".*", "__pycache__", "dist", "bench", "evidence", "tests")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


class Traveller:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.user, self.python = _user_and_python()
        self._wheels: dict[str, Path] = {}
        self._environments: dict[str, Path] = {}
        assert WHEELS.is_dir(), "`make test` downloads the wheels"
        home.chmod(0o755)
        self._give(home)
        shutil.copytree(WHEELS, home / "wheels")

    def _give(self, path: Path) -> None:
        if self.user is not None:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)

    def folder(self) -> Path:
        """A new folder of the traveller's."""
        folder = Path(tempfile.mkdtemp(dir=self.home))
        folder.chmod(0o755)
        self._give(folder)
        return folder

    def clone_into(self, folder: Path) -> None:
        """What `git clone` would make, without the tests and the benchmarks."""
        clone = shutil.copytree(ROOT, folder / "fenced", ignore=NOT_CLONED)
        for path in (clone, *clone.rglob("*")):
            self._give(path)

    def wheel(self, project: str) -> Path:
        """The wheel of a project of this repository, built once."""
        if project not in self._wheels:
            target = self.folder()
            build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
            subprocess.run([*build, target], cwd=ROOT / project, check=True, capture_output=True)
            (self._wheels[project],) = target.glob("*.whl")
        return self._wheels[project]

    def _wanted(self, word: str) -> str:
        """A word of a `pip install` line, with the wheel that its folder builds."""
        if word == "./fenced/testkit":
            return f"fenced-testkit @ {self.wheel('testkit').as_uri()}"
        if word.startswith("./fenced"):
            return f"{word.removeprefix('./')} @ {self.wheel('.').as_uri()}"
        return word

    def environment(self, packages: str) -> Path:
        """An environment with what `pip install PACKAGES` would install: the clone's wheel for `./fenced`."""
        if packages not in self._environments:
            found = self._environments[packages] = self.folder() / "venv"
            offline = ("--quiet", "--offline", "--no-config", "--cache-dir", str(self.home / "uv"))
            subprocess.run([UV, "venv", *offline, "--python", self.python, found], check=True)
            wanted = [self._wanted(word) for word in shlex.split(packages)]
            install = [UV, "pip", "install", *offline, "--no-index", "--find-links", str(WHEELS)]
            subprocess.run([*install, "--python", found / "bin/python", *wanted], check=True)
            for folder, _, _ in os.walk(found):
                self._give(Path(folder))  # so that Python can store what it has compiled
        return self._environments[packages]

    def run(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path,
        environment: Path | None = None,
        variables: Mapping[str, str] | None = None,
        given: str = "",
        timeout: float = 100,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the traveller; with an environment, as if it were activated."""
        first = Path(self.python).parent if environment is None else environment / "bin"
        clean = {
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PATH": f"{first}:{SYSTEM_PATH}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_FIND_LINKS": str(self.home / "wheels"),
            "PIP_NO_COMPILE": "1",  # Python compiles what it imports
            "PIP_NO_INDEX": "1",
        }
        with subprocess.Popen(
            command,
            cwd=cwd,
            env={**clean, **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            user=self.user and self.user.pw_uid,
            group=self.user and self.user.pw_gid,
            extra_groups=self.user and (),
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(given, timeout)
            finally:
                # A page that fails in the middle must not leave its servers behind.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _user_and_python() -> tuple[pwd.struct_passwd | None, str]:
    """Who travels, and with which interpreter: the wheels are for one version of Python.

    Not `nobody` if the tests are not root's, or if `nobody` may run no such interpreter.
    """
    own: str = getattr(sys, "_base_executable", sys.executable)
    if os.geteuid() != 0:
        return None, own
    nobody = pwd.getpwnam("nobody")
    version = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    for python in (own, "/usr/bin/python3"):
        try:
            subprocess.run([python, "-c", version], user=nobody.pw_uid, cwd="/", check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return nobody, python
    return None, own
