"""`fenced run`: the command runs only while its lease is held, and is otherwise not interfered with."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fenced as library
from fenced.values.model import Stamp

# Scripts get the test's folder as their argument. `ready` is written when signals can come.
READY = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def ready():
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "ready").touch()
"""
SLEEP = READY + "ready(); time.sleep(60)"
NOTE_SIGNALS = (
    READY
    + """
# Blocked signals stay pending until `sigwait`: one that comes just before `signal.pause` would wait for the next.
expected = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
signal.pthread_sigmask(signal.SIG_BLOCK, expected)
ready()
while True:
    number = signal.sigwait(expected)
    with open(folder / "signals", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number == signal.SIGINT:
        sys.exit(7)
"""
)


def pid_of(folder: Path) -> int:
    return int((folder / "pid").read_text())


def test_the_child_knows_its_lease(fenced: Any) -> None:
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'FENCED' in k}))"
    relative = {**fenced.environment, "FENCED_AUTHORITY": "sqlite:///leases.db"}
    tokens = []
    for _ in range(2):
        ended = fenced("run", "orders/é", "--", sys.executable, "-c", code, env=relative, cwd=fenced.folder)
        seen = json.loads(ended.stdout)
        stamp = Stamp.parse(seen["FENCED_STAMP"])
        assert (stamp.names, stamp.token, stamp.seq) == (("orders/é",), int(seen["FENCED_TOKEN"]), None)
        assert (seen["FENCED_NAME"], seen["FENCED_AUTHORITY"]) == ("orders/é", fenced.url)
        tokens.append(stamp.token)
    assert tokens == [1, 2]


@pytest.mark.parametrize(
    "command, status",
    [
        (["sh", "-c", "exit 0"], 0),
        (["sh", "-c", "exit 76"], 76),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["no-such-command"], 127),
        (["/dev/null"], 126),
        (["/"], 126),
    ],
)
def test_the_status_is_the_childs_and_the_lease_is_given_back(
    fenced: Any, command: list[str], status: int
) -> None:
    assert fenced("run", "x", "--", *command).returncode == status
    assert fenced("ls").stdout == ""


def test_arguments_and_open_files_reach_the_child_as_they_are(fenced: Any) -> None:
    read, write = os.pipe()
    os.write(write, b"from the caller")
    os.close(write)
    code = f"import os, sys; print(sys.argv[1:], os.read({read}, 99))"
    command = [sys.executable, "-c", code, "--ttl", "x", "--", "-h"]
    ended = fenced("run", "x", "--", *command, pass_fds=[read])
    os.close(read)
    assert ended.stdout == "['--ttl', 'x', '--', '-h'] b'from the caller'\n"


def test_signals_are_forwarded_to_the_group(fenced: Any) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would stay ignored
    try:
        process = fenced.run_script("x", NOTE_SIGNALS)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    noted = fenced.folder / "signals"
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"):
        process.send_signal(signal.Signals[name])
        fenced.until(lambda name=name: noted.exists() and name in noted.read_text())
    assert process.wait(timeout=90) == 7
    assert noted.read_text().split() == ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"]


def test_a_signal_that_the_caller_ignores_stays_ignored(fenced: Any) -> None:
    code = "import os, signal; os.kill(os.getppid(), 1); print(signal.getsignal(1) is signal.SIG_IGN)"
    ended = subprocess.run(
        ["nohup", sys.executable, "-m", "fenced", "run", "x", "--", sys.executable, "-c", code],
        env=fenced.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (ended.returncode, ended.stdout) == (0, "True\n")


def test_without_a_grant_nothing_is_started(fenced: Any) -> None:
    fenced.run_script("x", SLEEP)
    started = fenced.folder / "started"
    began = time.monotonic()
    ended = fenced("run", "x", "--wait", "0", "--", "touch", str(started))
    assert (ended.returncode, started.exists()) == (75, False)
    assert "held by" in ended.stderr
    assert time.monotonic() - began < 5


def test_a_signal_while_waiting_leaves_the_queue(fenced: Any) -> None:
    fenced.run_script("x", SLEEP)
    waiter = fenced.start("run", "x", "--", "touch", str(fenced.folder / "started"))
    fenced.until(lambda: json.loads(fenced("ls", "--json").stdout)[0]["waiting"] == 1)
    waiter.terminate()
    assert waiter.wait(timeout=90) == 128 + signal.SIGTERM
    assert json.loads(fenced("ls", "--json").stdout)[0]["waiting"] == 0
    assert not (fenced.folder / "started").exists()


def test_a_waiter_is_started_when_its_turn_comes(fenced: Any) -> None:
    holder = fenced.run_script("x", SLEEP)
    waiter = fenced.start("run", "x", "--", "printenv", "FENCED_TOKEN")
    fenced.until(lambda: json.loads(fenced("ls", "--json").stdout)[0]["waiting"] == 1)
    holder.terminate()
    assert waiter.communicate(timeout=90)[0] == "2\n"


def test_unrenewed_it_is_told_and_then_killed_before_the_deadline(
    fenced: Any, alive: Callable[[int], bool]
) -> None:
    # The margin before the deadline grows with the ttl: 0.13 s for this test and `fenced run` on a busy machine.
    process = fenced.run_script("x", NOTE_SIGNALS, "--ttl", "12", "--grace", "0.4")
    child = pid_of(fenced.folder)
    blocker = sqlite3.connect(fenced.database, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # from now on no renewal comes through
    blocked = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    fenced.until(lambda: not alive(child))
    died = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    (expires,) = blocker.execute("SELECT expires FROM attempt").fetchone()
    assert blocked < died < expires
    assert process.wait(timeout=90) == 76
    assert (fenced.folder / "signals").read_text() == "SIGTERM\n"
    assert "lease of x (token 1) is lost" in process.stderr.read()
    blocker.close()


def test_processes_left_by_a_terminated_child_are_killed(fenced: Any, alive: Callable[[int], bool]) -> None:
    orphaning = (
        READY
        + """
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    time.sleep(60)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pause()
"""
    )
    process = fenced.run_script("x", orphaning, "--ttl", "1")
    with sqlite3.connect(fenced.database, isolation_level=None) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        assert process.wait(timeout=90) == 76
        assert not alive(pid_of(fenced.folder))
        blocker.execute("ROLLBACK")
    blocker.close()


def test_a_lease_that_is_taken_away_ends_the_child_at_once(fenced: Any, alive: Callable[[int], bool]) -> None:
    process = fenced.run_script("x", NOTE_SIGNALS, "--ttl", "1.5")
    taken = json.loads(fenced("release", "x", "--force", "1", "--json").stdout)
    assert taken == {"name": "x", "released": True, "token": 2}
    assert process.wait(timeout=90) == 76
    assert not alive(pid_of(fenced.folder))
    assert not (fenced.folder / "signals").exists()
    assert "revoked" in process.stderr.read()


def test_a_child_that_hangs_is_stopped_at_max_hold(fenced: Any) -> None:
    began = time.monotonic()
    ended = fenced("run", "x", "--ttl", "0.6", "--max-hold", "1", "--", "sleep", "30")
    assert (ended.returncode, "max_hold" in ended.stderr) == (76, True), ended.stderr
    assert time.monotonic() - began < 5


def test_a_waiting_run_names_the_holder(fenced: Any) -> None:
    holder = library.Client(fenced.url, label="the nightly job")
    lease = holder.acquire("x")
    waiting = fenced.start("run", "x", "--", "true")
    assert waiting.stderr.readline().startswith("fenced: waiting for x, held by the nightly job (pid ")
    lease.release()
    assert waiting.wait(90) == 0
    holder.close()


def test_a_job_runs_once_in_a_period(fenced: Any) -> None:
    """After success the name stays taken, although `fenced` has ended; after a failure anybody may try again."""
    once = ("run", "x", "--wait", "0", "--at-least-for", "1h30m", "--")
    assert fenced(*once, "false").returncode == 1
    assert fenced(*once, "true").returncode == 0
    ended = fenced(*once, "touch", str(fenced.folder / "twice"))
    assert (ended.returncode, (fenced.folder / "twice").exists()) == (75, False)
    assert "not free yet" in ended.stderr
    assert fenced("show", "x").stdout.startswith("x is not held (free in 5")


def test_the_child_dies_with_fenced(fenced: Any, alive: Callable[[int], bool]) -> None:
    process = fenced.run_script("x", NOTE_SIGNALS)
    process.kill()
    fenced.until(lambda: not alive(pid_of(fenced.folder)))


def test_a_stopped_fenced_does_not_leave_the_child_running(fenced: Any, alive: Callable[[int], bool]) -> None:
    # In the session of the tests, as a job of a shell: else the kernel would not stop it.
    process = fenced.run_script("x", NOTE_SIGNALS, "--ttl", "0.5", start_new_session=False, process_group=0)
    child = pid_of(fenced.folder)
    process.send_signal(signal.SIGTSTP)
    fenced.until(lambda: state(child) == state(process.pid) == "T")
    with sqlite3.connect(fenced.database) as db:
        (expires,) = db.execute("SELECT expires FROM attempt").fetchone()
    db.close()
    fenced.until(lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) > expires)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=90) == 76
    assert not alive(child)
    assert not (fenced.folder / "signals").exists()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Terminal:
    """A terminal of its own, with a program that leads its session."""

    def __init__(self, environment: dict[str, str], *program: str) -> None:
        self._ours, theirs = pty.openpty()
        take = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execvp(sys.argv[1], sys.argv[1:])"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", take, *program],
            env={**environment, "TERM": "dumb"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str) -> None:
        """Read on until behind `text`."""
        while text not in self._seen:
            assert select.select([self._ours], [], [], 10)[0], f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._ours, 1000).decode()
        self._seen = self._seen.partition(text)[2]

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._ours)  # hangs up
        self._process.wait(timeout=90)


def test_the_terminal_is_the_childs_while_it_runs(fenced: Any) -> None:
    whose = "import os; print('mine' if os.tcgetpgrp(0) == os.getpgrp() else 'not mine', {})"
    script = f"""
import subprocess, sys
asking = [sys.executable, "-c", {whose.format("input()")!r}]
for command in (asking, ["no-such-command"], ["cat"]):
    status = subprocess.run([sys.executable, "-m", "fenced", "run", "x", "--", *command]).returncode
    {whose.format("status")}
"""
    with Terminal(fenced.environment, sys.executable, "-c", script) as terminal:
        terminal.type("hello\n")
        terminal.expect("\nmine hello")
        terminal.expect("\nmine 0")
        terminal.expect("\nmine 127\r\n")
        terminal.type("begun\n")
        terminal.expect("begun\r\nbegun\r\n")
        terminal.type("\x03")
        terminal.expect("^Cmine 130")


def test_ctrl_z_gives_the_shell_back(fenced: Any) -> None:
    with Terminal(fenced.environment, "bash", "--norc", "--noprofile", "-i") as terminal:
        terminal.type(f"{sys.executable} -m fenced run x -- sh -c 'echo begun; read line; echo got-$line'\n")
        terminal.expect("\nbegun")
        terminal.type("\x1a")
        terminal.expect("Stopped")
        terminal.type("fg\n")
        terminal.expect("fenced run x")
        terminal.type("more\n")
        terminal.expect("\ngot-more")
        terminal.type("echo status-$?; exit\n")
        terminal.expect("\nstatus-0")
