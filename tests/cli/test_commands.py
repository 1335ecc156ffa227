"""Every command but `run`: what it prints, for people and programs, and how it ends when it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import fenced as library
from fenced import errors
from fenced.cli import app, exits
from fenced.values.durations import duration

PAUSES = Path(__file__).parents[2] / "evidence" / "pauses" / "stops.jsonl"


def waiting(fenced: Any, count: int) -> Callable[[], bool]:
    return lambda: json.loads(fenced("show", "orders/42", "--json").stdout)["waiting"] == count


@pytest.fixture
def held(fenced: Any) -> Any:
    """A database where `deploy` and `orders/42` are held, the latter with somebody waiting."""
    ready = fenced.folder / "ready"
    for name in ("orders/42", "deploy"):
        code = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
        fenced.start("run", name, "--label", f"of {name}", "--", sys.executable, "-c", code)
        fenced.until(ready.exists)
        ready.unlink()
    fenced.start("run", "orders/42", "--label", "next\x1b[31m", "--", "true")
    fenced.until(waiting(fenced, 1))
    return fenced


def test_looking_for_people(held: Any) -> None:
    lines = held("ls").stdout.splitlines()
    assert lines[0].split() == ["NAME", "HOLDER", "HOST", "PID", "TOKEN", "REMAINING", "WAITERS"]
    assert [line.split()[0] for line in lines[1:]] == ["deploy", "orders/42"]
    assert lines[2].split()[-3] == "1"
    assert len({len(line) for line in lines}) == 1
    hot = held("top").stdout.splitlines()
    assert [line.split()[:2] for line in hot] == [["WAITED", "FOR"], ["-", "orders/42"]]
    shown = held("show", "orders/42").stdout
    assert "by         of orders/42 (pid " in shown
    assert "1.   next\\x1b[31m (pid " in shown
    assert held("show", "orders").stdout == "orders is not held\n"


def test_looking_for_programs(held: Any) -> None:
    deploy, orders = json.loads(held("ls", "--json").stdout)
    assert orders["held_by"].keys() == {"id", "label", "host", "pid", "token", "grant", "remaining"}
    assert (orders["name"], orders["held_by"]["label"], orders["waiting"]) == ("orders/42", "of orders/42", 1)
    assert 0 < orders["held_by"]["remaining"] <= 30
    assert (deploy["name"], deploy["held_by"]["token"], deploy["waiting"]) == ("deploy", 2, 0)
    shown = json.loads(held("show", "orders/42", "--json").stdout)
    assert orders.keys() <= shown.keys()
    assert [waiter["label"] for waiter in shown["waiters"]] == ["next\x1b[31m"]
    assert (shown["names"], shown["ttl"]) == (["orders/42"], 30.0)
    mistyped = held("ls", "--namespace", "other")
    assert (mistyped.returncode, "has no namespace 'other'" in mistyped.stderr) == (78, True)


def test_release_takes_only_by_force_and_only_from_the_holder_that_was_seen(held: Any) -> None:
    refused = held("release", "orders/42")
    assert refused.returncode == 64
    assert "is held by of orders/42 on" in refused.stderr
    assert "take the name away: fenced release orders/42 --force 1" in refused.stderr
    spared = held("release", "orders/42", "--force", "7")
    assert (spared.returncode, "with token 1; nothing was done" in spared.stdout) == (0, True)
    taken = held("release", "orders/42", "--force", "1")
    assert (taken.returncode, "token 3 was minted above" in taken.stdout) == (0, True)
    again = held("release", "orders", "--force", "1", "--json")
    assert json.loads(again.stdout) == {"name": "orders", "released": False, "token": None}


def test_an_authority_is_an_argument_or_an_option(fenced: Any, tmp_path: Path) -> None:
    """Of each command that operates one; the argument comes before FENCED_AUTHORITY."""
    here = f"sqlite:///{tmp_path}/other.db"
    for command in (["install"], ["show"], ["raise", "--above", "7"]):
        for way in ([here], ["--authority", here]):
            done = fenced("authority", *command, *way)
            assert done.returncode == 0, done.stderr
    assert "last token  7" in fenced("authority", "show", here).stdout
    both = fenced("authority", "show", here, "--authority", here)
    assert both.returncode == 64 and "pass one of them" in both.stderr


def test_raising_the_floor(fenced: Any) -> None:
    raised = fenced("authority", "raise", "--above", "41", "--json")
    assert json.loads(raised.stdout) == {"above": 41, "floor": 41, "namespace": "default"}
    assert fenced("run", "x", "--", "printenv", "FENCED_TOKEN").stdout == "42\n"
    lower = fenced("authority", "raise", "--above", "7")
    assert lower.stdout == "the floor is 42: every later token is greater\n"

    # A guard that has seen more than the authority knows of.
    old = library.Client(f"sqlite:///{fenced.folder}/old.db")
    seen = old.acquire("x").announcement()._replace(token=1000)
    old.close()
    url = f"sqlite:///{fenced.folder}/guarded data.db"
    guard = library.Values(url)
    guard.announce(seen)
    guard.close()
    ended = fenced("authority", "raise", "--above-guards", url, "--json")
    assert json.loads(ended.stdout)["floor"] == 1000


@pytest.mark.parametrize(
    "args, status, message",
    [
        (["ls", "--bogus"], 64, "No such option"),
        (["bogus"], 64, "No such command"),
        (["gaurd"], 64, "Did you mean 'guard'?"),
        ([], 64, "Usage: fenced"),
        (["show"], 64, "Missing argument"),
        (["show", "a//b"], 64, "segments of a name"),
        (["run", "x", "--ttl", "nan", "--", "true"], 64, "a time is 30 (seconds), 30s, 5m, 2h or 1h30m"),
        (["run", "x", "--guarantee", "some", "--", "true"], 64, "'strict', 'best-effort'"),
        (["run", "x", "--grace", "20", "--", "true"], 64, "grace is 0 to half the ttl"),
        (["run", "x", "ls", "-l"], 64, "goes after --"),
        (["authority", "raise"], 64, "--above N"),
        (["authority", "raise", "--above", "1_0"], 64, "in digits"),
        (["authority", "raise", "--above", "9007199254740991"], 64, "floor"),
        (["authority", "raise", "--above-guards", "sqlite:///{folder}/none.db"], 78, "cannot be read"),
        (["ls", "--authority", "gopher://x"], 78, "no authority for 'gopher'"),
        (["run", "x", "--authority", "memory:", "--", "true"], 78, "one process"),
        (
            ["tune", "--from", str(PAUSES), "--html", "/nowhere/x"],
            78,
            "/nowhere/x cannot be written: No such file",
        ),
        (["doctor", "sqlite:///x.db", "--guard", "memory:x"], 78, "no other process can look"),
        (["exporter", "--guard", "shop=memory:x"], 78, "no other process can look"),
        (["exporter", "--authority", "memory:x"], 78, "no other process can look"),
        (["audit", "memory:x"], 78, "no other process can look"),
        (
            ["explain", "a", "--authority", "sqlite:///x.db", "--guard", "memory:x"],
            78,
            "no other process can look",
        ),
        (["run", "x", "--authority", "sqlite:///{folder}/none/x.db", "--", "true"], 78, "does not exist"),
        (["ls", "--authority", "sqlite:///{folder}/mistyped.db"], 78, "no file"),
        (["run", "x", "--authority", "sqlite:///{folder}/damaged.db", "--", "true"], 78, "damaged"),
        (["ls", "--authority", "sqlite:///{folder}/damaged.db"], 78, "damaged"),
    ],
)
def test_an_impossible_command_is_refused_in_one_line(
    fenced: Any, args: list[str], status: int, message: str
) -> None:
    library.Client(fenced.url).acquire("x").release()
    (fenced.folder / "damaged.db").write_bytes(b"no database" * 500)
    ended = fenced(*(arg.format(folder=fenced.folder) for arg in args))
    assert ended.returncode == status, ended.stderr
    assert message in ended.stderr
    assert not args or ended.stderr.startswith("fenced: ")
    assert not args or ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["run", "x", "--wait", "-1", "--", "true"],
        ["run", "x", "--ttl", "0", "--", "true"],
        ["run", "x", "--ttl", "25h", "--", "true"],
        ["run", "x", "--max-hold", "0s", "--", "true"],
        ["run", "x", "--at-least-for", "2d", "--", "true"],
        ["run", "x", "--lock-delay", "61m", "--", "true"],
        ["drill", "--ttl", "0.01s"],
        ["drill", "storm", "--seconds", "2h"],
        ["guard", "mode", "enforce", "--wait", "-1"],
        ["guard", "mode", "canary"],
        ["guard", "install", "--table", "t", "--name", "n", "--mode", "bogus"],
        ["guard", "status", "--quiet-for", "-1s"],
        ["guard", "override", "--names", "*", "--for", "0.5s", "--why", "x"],
        ["guard", "trust", "--patience", "2d"],
        ["authority", "raise", "--above", "9007199254740991"],
        ["release", "a//b", "--force", "1"],
        ["release", "a", "--force", "1_000"],
    ],
)
def test_options_are_checked_before_anything_is_opened(args: list[str], tmp_path: Path) -> None:
    """In this process: nothing may be connected to, so no file appears."""
    address = f"sqlite:///{tmp_path}/new.db"
    found = CliRunner(env={"FENCED_AUTHORITY": address, "FENCED_GUARD": address}).invoke(app, args)
    # Click's own status.
    assert isinstance(found.exception, errors.Misuse) or found.exit_code == 2, found.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("30", 30),
        ("0.5", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1d2h3m4s", 93784),
    ],
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert duration(0.0, 100_000.0)(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "m", "1x", "1 m", "1_0", "1.2.3", "30s5m", "1h30", "nan", "inf", "٣"]
)
def test_a_malformed_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="a time is 30"):
        duration(0.0, 100_000.0)(text)


def test_help_of_a_command_in_a_group_and_completion_of_modes(fenced: Any) -> None:
    runner = CliRunner()
    assert "Set the stage of a rollout" in runner.invoke(app, ["help", "guard", "mode"]).output
    assert "has no commands" in runner.invoke(app, ["help", "run", "x"]).output
    words = {"COMP_WORDS": "fenced guard mode can", "COMP_CWORD": "3", "_FENCED_COMPLETE": "bash_complete"}
    assert "canary(5%)" in fenced(env={**fenced.environment, **words}).stdout


def test_commands_on_a_server(fenced: Any, postgresql_url: str) -> None:
    """The same commands on PostgreSQL: nothing is there until it is installed, and raising works by the URL alone."""
    there = ("--authority", postgresql_url)
    ended = fenced("ls", *there)
    assert ended.returncode == 78 and "no schema fenced" in ended.stderr
    installed = json.loads(fenced("authority", "install", "--json", *there).stdout)
    assert (installed["guarantee"], installed["doubts"], installed["last_token"]) == ("strict", [], 0)
    assert "guarantee   strict\n" in fenced("authority", "install", *there).stdout
    ended = fenced("run", "orders", *there, "--", "sh", "-c", "echo $FENCED_TOKEN")
    assert (ended.returncode, ended.stdout) == (0, "1\n")
    assert "the floor is 5000" in fenced("authority", "raise", "--above", "5000", *there).stdout
    assert fenced("run", "orders", *there, "--", "sh", "-c", "echo $FENCED_TOKEN").stdout == "5001\n"


def test_without_an_authority_both_ways_to_name_one_are_told(fenced: Any) -> None:
    environment = {key: value for key, value in fenced.environment.items() if key != "FENCED_AUTHORITY"}
    ended = fenced("ls", env=environment)
    assert ended.returncode == 64
    assert "--authority URL" in ended.stderr
    assert "FENCED_AUTHORITY" in ended.stderr


def test_a_closed_pipe_is_quiet(fenced: Any) -> None:
    read, write = os.pipe()
    os.close(read)
    ended = fenced("help", "exits", stdout=write)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_every_error_has_its_status() -> None:
    def below(kind: type[errors.FencedError]) -> set[type[errors.FencedError]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    rows = tuple(kind for row in exits.TABLE for kind in row.errors)
    assert [
        kind for kind in below(errors.FencedError) - {errors.FencedError} if not issubclass(kind, rows)
    ] == []
    assert exits.code_of(errors.StaleToken("x")) == exits.REFUSED
    assert exits.code_of(errors.LeaseLost("x", reason="expired")) == exits.LOST
    assert exits.code_of(errors.Indeterminate("x")) == exits.UNAVAILABLE


def test_help_is_fast_and_complete(fenced: Any) -> None:
    heavy = "sqlite3 asyncio ssl json fenced.client.faces fenced.drills.command".split()
    code = f"""
import sys
from fenced.cli import main
try:
    main(["--help"])
except SystemExit:
    print([name for name in {heavy!r} if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert ended.stdout.splitlines()[-1] == "[]"
    for name in ("run", "ls", "show", "release", "authority", "guard", "drill", "help"):
        assert f"\n  {name} " in ended.stdout
        if name != "drill":
            assert "Example" in fenced("help", name).stdout
    table = fenced("help", "exits").stdout
    assert all(f" {row.code} " in table for row in exits.TABLE if row.code)
    assert fenced("--version").stdout == f"fenced {library.__version__}\n"
