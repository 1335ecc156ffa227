"""Drills with real processes: what they show, what they say, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from fenced import Values
from fenced.drills.catalog import DRILLS
from fenced.drills.command import drill
from fenced.drills.processes import descendants
from fenced.drills.programs import NotShown, relay_to
from fenced.drills.stage import without_secrets

pytestmark = pytest.mark.xdist_group("drills")

TTL = "0.5"
STORM = ("storm", "--seconds", "4", "--holders", "3", "--names", "1")


def _workers(parent: int) -> list[int]:
    """The holder processes that the drill with this pid has started and that are still there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"fenced.drills.worker" in words and str(parent).encode() in words:
            found.append(int(entry.name))
    return found


def _eventually(truth: Callable[[], bool], seconds: float = 90.0) -> bool:
    until = time.monotonic() + seconds
    while not truth():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _drill(*words: str) -> Result:
    result = CliRunner().invoke(drill, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert _workers(os.getpid()) == []
    return result


def _json(*words: str, status: int) -> dict[str, Any]:
    result = _drill(*words, "--json")
    if result.exit_code == 2 and words[0] in (
        "storm",
        "set",
    ):
        # A busy machine: nobody was overtaken in that time.
        result = _drill(*words, "--seconds", "40", "--json")
    assert result.exit_code == status, result.output + result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(autouse=True)
def _temporary_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_the_paused_holder_is_refused(tmp_path: Path) -> None:
    found = _json("--ttl", TTL, status=0)
    assert (found["drill"], found["verdict"]) == ("sigstop", "held")
    assert (found["acknowledged"], found["refused"]) == (1, 1)
    assert (found["stale_admitted"], found["lost_updates"]) == (0, 0)
    assert [(each["holder"], each["name"]) for each in found["grants"]] == [("A", "stock"), ("B", "stock")]
    first, second = (each["token"] for each in found["grants"])
    assert (first, second) == (33, 34)
    late = found["operations"][-1]
    assert (late["holder"], late["kind"], late["decision"], late["why"]) == ("A", "write", "refused", "stale")
    assert late["mark"] == second
    assert f":{first}:1:" in late["stamp"]
    assert found["finals"] == {"stock": ["B1"]}
    (pause,) = found["pauses"]
    assert pause["ended"] - pause["began"] > float(TTL) * 0.9
    assert list((tmp_path / "tmp").iterdir()) == []


def test_without_the_guard_the_late_write_lands() -> None:
    found = _json("--guard", "none", "--ttl", TTL, status=1)
    assert (found["guard"], found["verdict"]) == ("none", "broken")
    assert (found["stale_admitted"], found["lost_updates"], found["refused"]) == (1, 1, 0)
    assert found["finals"] == {"stock": ["A1"]}


def test_a_guard_that_only_observes_is_caught(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'values.db'}"
    guard = Values(url)
    guard.set_mode("observe")
    guard.close()
    authority = f"sqlite:///{tmp_path / 'leases.db'}"
    found = _json("--authority", authority, "--guard", url, "--ttl", TTL, status=1)
    assert (found["authority"], found["guard"]) == (authority, url)
    assert (found["stale_admitted"], found["lost_updates"]) == (1, 1)


def test_a_guard_of_another_authority_is_left_alone(tmp_path: Path) -> None:
    """A storm was refused thousands of times, and each refusal was recorded in the guard's audit."""
    url = f"sqlite:///{tmp_path / 'values.db'}"
    with Values(url) as values:
        values.adopt("0123456789abcdef")
    result = _drill(*STORM, "--guard", url)
    assert result.exit_code == 2
    assert "could not run: the guard trusts realm 0123456789abcdef" in result.stderr
    assert "acknowledged" not in result.stdout


def test_a_storm_loses_nothing_behind_the_guard() -> None:
    found = _json(*STORM, "--seed", "7", status=0)
    assert (found["stale_admitted"], found["lost_updates"], found["tokens_fallen"]) == (0, 0, 0)
    assert found["acknowledged"] > 0
    assert found["pauses"]
    assert found["overtaken"] > 0
    assert found["refused"] >= found["overtaken"]
    assert sum(map(len, found["finals"].values())) == found["acknowledged"]
    assert found["seed"] == 7


def test_a_storm_loses_updates_without_the_guard() -> None:
    found = _json(*STORM, "--guard", "none", status=1)
    assert found["stale_admitted"] > 0
    assert found["lost_updates"] > 0


def test_a_set_loses_no_element_behind_the_guard_and_some_without() -> None:
    words = ("set", "--seconds", "4", "--holders", "3")
    found = _json(*words, status=0)
    assert found["drill"] == "set"
    (elements,) = found["finals"].values()
    assert len(elements) == len(set(elements)) == found["acknowledged"]
    assert (found["lost_updates"], found["doubled_updates"]) == (0, 0)
    assert _json(*words, "--guard", "none", status=1)["lost_updates"] > 0


def test_the_times_of_the_literature_are_run_unscaled(tmp_path: Path) -> None:
    """Java's story has the shortest: 5 s. Here only what is planned is looked at; a run is as long as it says."""
    assert _drill("storm", "--real-time").exit_code == 2
    assert _drill("sigstop", "--real-time", "--ttl", "1").exit_code == 2
    with _start("sigstop", "--real-time") as process:
        _read_until(process, "ttl 10 s")
        _read_until(process, "as told")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)


def test_the_list_has_every_drill_in_80_columns() -> None:
    lines = _drill("list").stdout.splitlines()
    assert {line.partition(" ")[0] for line in lines if not line.startswith(" ")} == DRILLS.keys()
    assert max(map(len, lines)) <= 80


def test_an_interrupted_run_of_all_leaves_nothing_behind(tmp_path: Path) -> None:
    with _start("all", "--ttl", "30", "--jobs", "3") as process:
        _read_until(process, "verdict")
        assert _eventually(lambda: len(descendants(process.pid)) >= 6)  # three drills with a holder each
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 130
    assert said == "drill: interrupted; its processes are ended\n"
    assert _eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    assert _eventually(lambda: not list((tmp_path / "tmp").iterdir()))


@pytest.mark.parametrize(
    "url",
    [
        "etcds://h:2379",
        "etcd://h1:2379,h2:2379",
        "postgresql:///shop",
        "unix:///run/redis.sock",
        "s3://bucket/x",
        "https://h",
    ],
)
def test_where_no_relay_can_stand_in_front_nothing_is_shown(url: str) -> None:
    with pytest.raises(NotShown, match="one host without TLS"):
        relay_to(url)


def test_a_relay_keeps_the_rest_of_the_address() -> None:
    address, relay = relay_to("postgresql://me:secret@127.0.0.1/shop?sslmode=disable")
    relay.stop()
    assert address == f"postgresql://me:secret@127.0.0.1:{relay.port}/shop?sslmode=disable"


def test_without_a_program_that_it_needs_a_drill_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    result = _drill("java-gc")
    assert result.exit_code == 2
    assert "INCONCLUSIVE  This shows nothing: this drill needs a JDK" in result.stdout


def test_the_timeline_tells_the_story_in_80_columns(tmp_path: Path) -> None:
    result = _drill("--ttl", TTL, "--guard", f"sqlite:///{tmp_path / 'values.db'}")
    lines = [line for line in result.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    assert len(result.stdout.splitlines()) <= 24
    assert "\x1b" not in result.stdout
    told = [re.sub(r"^ *\d+\.\d\d s +", "", line) for line in lines if re.match(r" *\d+\.\d\d s ", line)]
    assert [line.split()[0] for line in told].count("A") == 5
    assert told[-2] == "database   REFUSED: token 33 is stale, token 34 has been seen"
    assert told[-1] == "database   holds stock 7, as B left it"
    assert lines[-1] == "See it without the guard:  the same command with --guard none"


def test_a_storm_in_which_nobody_is_overtaken_is_inconclusive() -> None:
    """It ends before a lease could expire, with a guard and without one."""
    for guard in ([], ["--guard", "none"]):
        result = _drill("storm", "--seconds", "0.6", "--ttl", "20", "--holders", "2", "--names", "1", *guard)
        assert result.exit_code == 2, result.stderr
        assert re.search(r"^  acknowledged updates +\d+$", result.stdout, re.MULTILINE)
        assert re.search(r"^  overtaken holders +0 ", result.stdout, re.MULTILINE)
        assert re.search(r"^INCONCLUSIVE  Nobody was overtaken", result.stdout, re.MULTILINE)
        assert "--seconds 100" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "words,says",
    [
        (["--authority", "memory:"], "works within one process only"),
        (["--guard", "memory:"], "works within one process only"),
        (["--authority", "sqlite:////nowhere/at/all.db"], "does not exist"),
        (["--guard", "sqlite:////nowhere/at/all.db"], "cannot be written"),
        (["--authority", "nosuch://user:hunter2@host/x"], "nosuch"),
        (["--authority", "sqlite://user:hunter2@host/x"], "an SQLite address"),
        (["--authority", "leases.db"], "an address looks like"),
        (["--guard", ""], "--guard"),
        (["--report", "/nowhere/at/all.html", "--ttl", "1000"], "/nowhere/at/all.html: No such file"),
        (["--report", "drill.pdf", "--ttl", "1000"], "page (.html) or the picture alone (.svg)"),
    ],
)
def test_a_drill_that_cannot_run_says_why_in_one_line(words: list[str], says: str) -> None:
    result = _drill(*words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "hunter2" not in result.output + result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        "sigstop --holders 3",
        "all --seconds 60",
        "partition --control",
        "storm --jobs 2",
        "sigstop --table orders",
        "sigstop --holder ./worker --report page.html",
        "set --takes-lease",
    ],
)
def test_an_option_that_would_be_ignored_is_refused(words: str) -> None:
    result = _drill(*words.split())
    assert result.exit_code == 2
    assert re.search(r"--(holders|seconds|control|jobs|table|report|takes-lease) belongs to ", result.stderr)


def _start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fenced.drills", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"the drill never said {words!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drill_clears_everything_away(number: signal.Signals, tmp_path: Path) -> None:
    with _start("--ttl", "30") as process:
        _read_until(process, "is stopped")
        assert len(_workers(process.pid)) == 2
        process.send_signal(number)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 130
    assert said == "drill: interrupted; its processes are ended\n"
    assert _workers(process.pid) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_drill_that_is_killed_leaves_no_stopped_process_behind() -> None:
    with _start("--ttl", "30") as process:
        _read_until(process, "is stopped")
        process.kill()
        process.communicate(timeout=90)
    assert _eventually(lambda: not _workers(process.pid))


def test_a_holder_that_dies_ends_the_drill() -> None:
    with _start("--ttl", "30") as process:
        _read_until(process, "waits in line")
        for worker in _workers(process.pid):
            os.kill(worker, signal.SIGKILL)
        _, said = process.communicate(timeout=45)
    assert process.returncode == 2
    assert "ended by itself" in said


def test_the_report_needs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert _drill("--ttl", "0.2", "--report", str(file)).exit_code == 0
    html = file.read_text()
    assert "HELD" in html
    assert "refused: token 33 &lt; mark 34" in html
    assert "prefers-color-scheme: dark" in html
    addresses = set(re.findall(r"https?://[^\"'\s<]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a format; nothing is fetched
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", html)


def test_the_picture_alone_is_well_formed(tmp_path: Path) -> None:
    file = tmp_path / "drill.svg"
    assert _drill("--ttl", "0.2", "--guard", "none", "--report", str(file)).exit_code == 1
    root = ElementTree.parse(file).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert any("gone" in (each.text or "") for each in root.iter())


@pytest.mark.parametrize(
    "text,shown",
    [
        ("sqlite:////var/lib/x.db", "sqlite:////var/lib/x.db"),
        ("postgresql://me:hunter2@db/x", "postgresql://***db/x"),
        ("redis://db/0?password=hunter2&x=1", "redis://db/0?password=***&x=1"),
    ],
)
def test_addresses_are_shown_without_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
