"""`fenced run` under a service manager that kills the unit when `WATCHDOG=1` stays away, as systemd does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fenced.cli.run import Watchdog
from fenced.client.leases import Lease
from fenced.errors import Misuse


class Manager:
    """The part of systemd that listens at NOTIFY_SOCKET."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "notify")
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.link.bind(self.path)
        self.link.settimeout(60)

    def heard(self) -> str:
        return self.link.recv(100).decode()

    def is_silent(self) -> bool:
        self.link.settimeout(0)
        try:
            self.link.recv(100)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    manager = Manager(tmp_path)
    monkeypatch.setenv("NOTIFY_SOCKET", manager.path)
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    yield manager
    manager.link.close()


def lease_with(remaining: float, ttl: float = 30.0) -> Lease:
    return cast(Lease, SimpleNamespace(remaining=lambda: remaining, ttl=ttl))


def test_a_sign_of_life_only_while_the_lease_outlasts_the_watchdog(manager: Manager) -> None:
    assert Watchdog.of(lease_with(2.1)).beat(60.0) == pytest.approx(2 / 3)
    assert [manager.heard(), manager.heard()] == ["READY=1", "WATCHDOG=1"]
    assert Watchdog.of(lease_with(2.0)).beat(60.0) == pytest.approx(2 / 3)
    assert manager.heard() == "READY=1"
    assert manager.is_silent()


def test_a_watchdog_that_is_too_slow_for_the_ttl_is_refused(manager: Manager) -> None:
    with pytest.raises(Misuse, match="at most half the ttl"):
        Watchdog.of(lease_with(3.0, ttl=3.0))


def test_a_watchdog_of_another_process_is_not_ours(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert Watchdog.of(lease_with(30.0)).beat(60.0) == 60.0


def test_a_stopped_process_falls_silent(manager: Manager, tmp_path: Path) -> None:
    """Then the service manager kills its control group, the command in it."""
    command = [sys.executable, "-m", "fenced", "run", "job", "--ttl", "30", "--", "sleep", "60"]
    environment = {**os.environ, "FENCED_AUTHORITY": f"sqlite:///{tmp_path}/leases.db"}
    environment["WATCHDOG_USEC"] = "300000"
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            assert [manager.heard() for _ in range(4)] == ["READY=1", *["WATCHDOG=1"] * 3]
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            while not manager.is_silent():  # what it sent before it was stopped
                pass
            assert manager.is_silent()
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
