"""A store that fails under an instance: what its log says, who takes over, and what still answers meanwhile."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fenced.drills.relay.ports import free_port
from fenced.http1.server import ListenOptions, listening
from fenced.service.api import Api
from fenced.service.server import RunningInstance
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.ledger.authority.journal import FileJournal
from fenced_testkit.servers import PostgresqlServer, ServiceServer

pytestmark = pytest.mark.xdist_group("service")
PATIENCE = 100.0


def ask(name: str = "", ttl: float = 600) -> dict[str, Any]:
    return {"attempt": secrets.token_hex(16), "names": [name or secrets.token_hex(4)], "ttl": ttl}


def batch(client: httpx.Client, asks: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = client.post("/v1/batch", json={"do": [{"ask": each} for each in asks]}).json()
    return found


class Serving:
    """`fenced serve` as a process whose end can be awaited."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"log-{self.port}"
        store = f"ledger:///{folder / 'leases.ledger'}"
        command = [sys.executable, "-m", "fenced", "serve", "--store", store, *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--listen", f"127.0.0.1:{self.port}"], stderr=log, cwd=folder
            )

    def says(self, text: str) -> None:
        """Return when its log has this."""
        waiting = threading.Event()
        for _ in range(round(PATIENCE / 0.02)):
            if text in self.log.read_text():
                return
            assert self.process.poll() is None or text in self.log.read_text(), self.log.read_text()
            waiting.wait(0.02)
        raise AssertionError(self.log.read_text())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Serving]:
    made = Serving(tmp_path)
    yield made
    made.close()


def test_an_instance_whose_ledger_has_failed_ends(first: Serving, tmp_path: Path) -> None:
    """With a line and status 74. Its standby takes over, and knows everything that was acknowledged."""
    first.says("listening")
    standby = Serving(tmp_path, "--standby")
    try:
        standby.says("standing by")
        with httpx.Client(base_url=first.url, timeout=PATIENCE) as client:
            held = batch(client, [ask(f"held/{number}") for number in range(30)])["answers"]
            assert {each["answer"] for each in held} == {"granted"}
            # From now on the kernel fails writes behind this place, as it does on a full disk.
            most = max(file.stat().st_size for file in tmp_path.glob("leases.ledger*")) + 1000
            resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE, (most, most))
            while (found := batch(client, [ask() for _ in range(100)])).get("status") is None:
                pass
            assert found["status"] in (503, 504)
        assert first.process.wait(PATIENCE) == 74
        (line,) = (line for line in first.log.read_text().splitlines() if "error:" in line)
        assert "a write failed" in line and "a standby takes over" in line
        standby.says("listening")
        with httpx.Client(base_url=standby.url, timeout=PATIENCE) as client:
            (again,) = batch(client, [ask("next")])["answers"]
            assert again["token"] > max(each["token"] for each in held)
            shown = client.get("/v1/names/held/29").json()
            assert shown["held_by"]["token"] == held[29]["token"]
    finally:
        standby.close()


async def test_a_disk_that_hangs_holds_up_only_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/healthz` is answered meanwhile, and so are reads. What was waiting is answered when the disk is back."""
    hangs, goes_on = threading.Event(), threading.Event()
    append = FileJournal.append

    def slow(journal: FileJournal, *arguments: Any) -> Any:
        if hangs.is_set():
            goes_on.wait(PATIENCE / 10)
        return append(journal, *arguments)

    monkeypatch.setattr(FileJournal, "append", slow)
    api = Api(lambda runtime, name: LedgerAuthority(tmp_path / "leases.db", runtime, namespace=name))
    server, sockets = RunningInstance(api, ListenOptions()), listening(ListenOptions(("127.0.0.1", 0)))
    await api.namespaces.opened("default", create=True)
    serving = asyncio.create_task(server.serve(sockets))
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        assert (await client.post("/v1/leases", json=ask())).status_code == 200
        hangs.set()
        waiting = [asyncio.create_task(client.post("/v1/leases", json=ask())) for _ in range(5)]
        while not api._running:
            await asyncio.sleep(0.001)
        for path in ("/healthz", "/metrics"):
            assert (await client.get(path)).status_code == 200
        assert not any(each.done() for each in waiting) and not goes_on.is_set()
        hangs.clear()
        goes_on.set()
        assert [(await each).status_code for each in waiting] == [200] * 5
    server.stop()
    await serving


def test_the_log_says_when_the_store_is_lost_and_back(tmp_path: Path) -> None:
    """And refusals and reloads, and nothing of a service that works; never a secret."""
    hashed = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of "test"
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[token]]\nid = "a"\nsha256 = "{hashed}"\nrights = ["lease", "guard"]\n')
    values = f"sqlite:///{tmp_path / 'values.db'}"
    with PostgresqlServer() as database:
        options = ("--values", values, "--tokens", str(tokens))
        with ServiceServer(store=database.url(), options=options) as server:
            http = httpx.Client(
                base_url=server.url(), headers={"authorization": "Bearer test"}, timeout=PATIENCE
            )

            def lines() -> list[str]:
                return [line.removeprefix("fenced: ") for line in server.log.read_text().splitlines()][1:]

            def wait_for(text: str) -> str:
                server.wait_until(lambda: any(text in line for line in lines()), f"says {text}")
                (found,) = (line for line in lines() if text in line)
                return found

            first = ask("a")
            old = http.post("/v1/leases", json=first).json()["stamp"]
            assert http.post("/v1/leases/release", json={"attempt": first["attempt"]}).status_code == 200
            granted = http.post("/v1/leases", json=ask("a")).json()
            assert granted["answer"] == "granted" and lines() == [], "quiet while all is well"
            for stamp, status in ((granted["stamp"], 200), (old, 412)):
                headers = {"fenced-stamp": f'"{stamp}"'}
                assert http.put("/v1/values/a", content="x", headers=headers).status_code == status
            assert "is stale" in wait_for("warning: refused by the guard of the values")
            os.kill(server.pid, signal.SIGHUP)
            wait_for("file of tokens was read again")
            database.stop()
            assert http.get("/readyz").status_code in (503, 504)
            wait_for("warning: the store cannot be used")
            database.start()
            server.wait_until(lambda: http.get("/readyz").status_code == 200, "is ready again")
            server.wait_until(
                lambda: (
                    http.get("/readyz").status_code == 200 and any("works again" in each for each in lines())
                ),
                "says that it is back",
            )
            assert len(lines()) == 4, lines()
            whole = server.log.read_text()
            assert not [each for each in (old, granted["stamp"], first["attempt"], "Bearer") if each in whole]
            http.close()
