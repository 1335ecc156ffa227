"""A ledger belongs to one instance. A standby waits until that instance has ended, and then serves the same leases."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fenced
from fenced.drills.relay.ports import free_port
from fenced.http1.server import ListenOptions, listening
from fenced_testkit.servers import ServiceServer

pytestmark = pytest.mark.xdist_group("service")


def test_a_standby_takes_over(tmp_path: Path) -> None:
    store, port = f"ledger:///{tmp_path}/leases.ledger", free_port()
    options = ["--store", store, "--listen", f"127.0.0.1:{port}", "--standby"]
    command = [sys.executable, "-m", "fenced", "serve", *options]
    with (
        ServiceServer(store=store) as active,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as standby,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(standby.kill)
        assert standby.stderr is not None
        assert "standing by" in standby.stderr.readline()
        with fenced.Client(f"http://127.0.0.1:{active.port},127.0.0.1:{port}") as client:
            lease = client.acquire("orders/1", ttl=300)
            active.freeze()
            with (
                fenced.Client(store) as intruder,
                pytest.raises(fenced.Misconfigured, match="another process"),
            ):
                # An instance that is stopped still has its lock; SIGKILL ends it.
                intruder.acquire("orders/2")
            active.kill()
            assert "listening on" in standby.stderr.readline()
            late = fenced.Client(f"http://127.0.0.1:{port}", patience=60)
            with late as other, pytest.raises(fenced.NotGranted):
                other.acquire("orders/1", wait=0)  # the standby knows the lease
            lease.release()
            assert client.acquire("orders/1").token > lease.token
        standby.terminate()
        assert standby.wait(60) == 0


def test_connections_are_accepted_as_soon_as_it_says_that_it_listens() -> None:
    (listener,) = listening(ListenOptions(("127.0.0.1", 0)))
    with listener:
        socket.create_connection(listener.getsockname(), timeout=100).close()
