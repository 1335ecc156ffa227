"""Real processes and real signals: fork, SIGKILL, SIGSTOP, interpreter exit, and many at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fenced
from fenced.runtime.blocking import step
from tests.forking import inherits_no_lease


@pytest.fixture
def client(tmp_path: Path) -> Iterator[fenced.Client]:
    with fenced.Client(f"sqlite:///{tmp_path}/leases.db") as opened:
        opened.acquire("warm-up").release()
        yield opened


HOLDER = """
import sys, time
import fenced
lease = fenced.Client(sys.argv[1]).acquire(*sys.argv[3:], ttl=float(sys.argv[2]))
print(lease.token, flush=True)
sys.stdin.readline()
print(lease.state, lease.lost_reason, flush=True)
"""


class Other:
    """Another process that takes a lease, tells its token, and then its state when asked."""

    def __init__(self, url: str, ttl: float, *names: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, url, str(ttl), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_killed_holder_is_followed_within_its_ttl(client: fenced.Client) -> None:
    """L1: the waiter is in within ttl + 1 s, though dead waiters stand before it."""
    holder = Other(client.url, 1.0, "a")
    token = int(holder.line())
    dead = [Other(client.url, 1.0, "a") for _ in range(3)]
    while len(step(client._authority.observe("a")).waiters) < 3:
        time.sleep(0.01)
    for process in (holder, *dead):
        process.end()
    began = time.monotonic()
    lease = client.acquire("a", ttl=1.0, wait=10)
    assert time.monotonic() - began < 3.5, "less than if the dead waiters were waited for one after the other"
    assert lease.token > token
    lease.release()


def test_a_stopped_holder_wakes_up_and_knows(client: fenced.Client) -> None:
    holder = Other(client.url, 0.5, "a")
    token = int(holder.line())
    os.kill(holder.process.pid, signal.SIGSTOP)
    lease = client.acquire("a", ttl=5, wait=10)
    assert lease.token > token
    os.kill(holder.process.pid, signal.SIGCONT)
    assert holder.ask() == "lost expired"
    lease.release()
    holder.end()


# proves authority sqlite: pushed
def test_a_release_reaches_a_waiter_of_another_process(client: fenced.Client) -> None:
    """Pushed, not polled: far sooner than any fall-back look."""
    lease = client.acquire("a", ttl=60)
    waiter = Other(client.url, 60, "a")
    while not step(client._authority.observe("a")).waiters:
        time.sleep(0.01)
    began = time.monotonic()
    lease.release()
    assert int(waiter.line()) > lease.token
    assert time.monotonic() - began < 2.5
    waiter.end()


def test_a_forked_child_inherits_no_lease(client: fenced.Client) -> None:
    inherits_no_lease(client)


FORKING = """
import os, subprocess, sys
import fenced
url = sys.argv[1]
client = fenced.Client(url)
client.acquire("before").release()
reader, writer = os.pipe()
child = os.fork()
mine = client if sys.argv[2] == "inherited" or child else fenced.Client(url)
if child:
    client.close()
    os.write(writer, b"x")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.read(reader, 1)
tokens = [mine.acquire(f"child/{n}").token for n in range(3)]
third = "import fenced, sys; print(fenced.Client(sys.argv[1]).acquire('third').token)"
other = int(subprocess.run([sys.executable, "-c", third, url], capture_output=True, text=True).stdout)
last = mine.acquire("last").token
os._exit(0 if tokens[-1] < other < last else 1)
"""


@pytest.mark.parametrize("whose", ["inherited", "its own"])
def test_tokens_do_not_repeat_after_a_fork(tmp_path: Path, whose: str) -> None:
    """SQLite's locks are the process's: what the parent holds, a child must not believe to hold."""
    url = f"sqlite:///{tmp_path}/leases.db"
    ended = subprocess.run(
        [sys.executable, "-c", FORKING, url, whose], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_sockets_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """A client that waits binds a socket. A process that dies leaves it; the next client that waits removes it."""
    url, folder = f"sqlite:///{tmp_path}/leases.db", tmp_path / "leases.db-wake"
    script = """
import fenced, os, sys
try:
    fenced.Client(sys.argv[1]).acquire("a", wait=0.05)
except fenced.NotGranted:
    os._exit(7)
"""
    with fenced.Client(url) as holder, holder.hold("a"):
        for _ in range(3):
            waiter = subprocess.run([sys.executable, "-c", script, url], check=False, timeout=30)
            assert (waiter.returncode, len(list(folder.iterdir()))) == (7, 1), "its own is left"
        left = set(folder.iterdir())
        with fenced.Client(url) as last:
            with pytest.raises(fenced.NotGranted):
                last.acquire("a", wait=0.05)
            assert len(list(folder.iterdir())) == 1 and not left & set(folder.iterdir())
    assert list(folder.iterdir()) == []


def test_an_exit_with_a_live_keeper_is_quiet_and_releases_nothing(client: fenced.Client) -> None:
    script = "import fenced, sys; lease = fenced.Client(sys.argv[1]).acquire('a', ttl=30)"
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script, client.url], capture_output=True, text=True, timeout=30
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    with client.try_hold("a") as mine:
        assert mine is None


def test_optimised_python_is_as_strict(client: fenced.Client) -> None:
    """No safety hangs on an assert statement."""
    script = """
import sys, fenced
from fenced.stores.memory.guard import MemoryValues
from fenced.values.model import Credential
from fenced.runtime.blocking import step
from fenced.testing.kit import stamp
guard = MemoryValues()
step(guard.write(Credential((stamp(5),)), 'orders/42', b'A'))
try:
    step(guard.write(Credential((stamp(4),)), 'orders/42', b'B'))
except fenced.StaleToken:
    print('refused')
with fenced.Client(sys.argv[1]).hold('a') as lease:
    print(lease.state)
"""
    ended = subprocess.run(
        [sys.executable, "-OO", "-c", script, client.url], capture_output=True, text=True, timeout=30
    )
    assert ended.stdout == "refused\nheld\n", ended.stderr


OPENER = """
import sys
import fenced
print(fenced.Client(sys.argv[1]).acquire(sys.argv[2]).token)
"""


def test_many_processes_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Nobody is told a lie about a database that others are just creating; tokens are all different."""
    url = f"sqlite:///{tmp_path}/new.db"
    openers = [
        subprocess.Popen([sys.executable, "-c", OPENER, url, f"n{i}"], stdout=subprocess.PIPE, text=True)
        for i in range(8)
    ]
    tokens = [int(opener.communicate(timeout=60)[0]) for opener in openers]
    assert sorted(tokens) == list(range(1, 9))


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_a_ctrl_c_while_waiting_leaves_no_place_behind(client: fenced.Client, colour: str) -> None:
    scripts = {
        "blocking": "fenced.Client(sys.argv[1]).acquire('a')",
        "asyncio": "asyncio.run(fenced.AsyncClient(sys.argv[1]).acquire('a'))",
    }
    lease = client.acquire("a", ttl=30)
    waiter = subprocess.Popen(
        [sys.executable, "-c", f"import asyncio, fenced, sys; {scripts[colour]}", client.url],
        stderr=subprocess.DEVNULL,
    )
    while not step(client._authority.observe("a")).waiters:
        time.sleep(0.01)
    waiter.send_signal(signal.SIGINT)
    assert waiter.wait(10) != 0
    assert step(client._authority.observe("a")).waiters == ()
    lease.release()
