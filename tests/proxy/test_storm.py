"""A storm: two `fenced proxy` processes on one store, and an upstream that is frozen and killed in the middle."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.proxy.harness import Answer, Caller, request, until

WANTED = 60


class Storm:
    """Holders that take over from each other too early, and write what they have read, plus one."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.tokens = {name: itertools.count(1) for name in (f"orders/{n}" for n in range(9))}
        self.outcomes: Counter[str] = Counter()
        self.acknowledged: list[tuple[str, int]] = []
        self.over = False

    async def holder(self) -> None:
        while not self.over:
            name = random.choice(list(self.tokens))
            token = next(self.tokens[name])
            read = await self.ask("GET", name, token)
            if read.status != 200:
                self.outcomes[f"read {read.status}"] += 1
                continue
            await asyncio.sleep(random.choice((0.0, 0.0, 0.03)))  # long enough to be overtaken
            written = await self.ask("PUT", name, token, str(int(read.body) + 1).encode())
            self.outcomes[str(written.status)] += 1
            if written.status == 204:
                self.acknowledged.append((name, token))
                late = await self.ask("PUT", name, token - 1, b"999") if token > 1 else written
                self.outcomes[f"late {late.status}"] += 1

    async def ask(self, method: str, name: str, token: int, body: bytes = b"") -> Answer:
        caller = Caller(*await asyncio.open_connection("127.0.0.1", random.choice(self.ports)))
        try:
            caller.writer.write(request(method, f"/{name}", token, body, name=name))
            return await caller.answer()
        finally:
            await caller.close()


def started(folder: Path, arguments: list[str], pattern: str) -> tuple[subprocess.Popen[str], int]:
    """A process whose output goes to a file: a pipe that nobody reads would stop it."""
    output = folder / f"output-{len(list(folder.iterdir()))}"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT, text=True
        )
    while process.poll() is None:
        if found := re.search(pattern, output.read_text(), re.MULTILINE):
            return process, int(found[1])
        time.sleep(0.01)
    raise AssertionError(f"{arguments} ended with {process.returncode}: {output.read_text()}")


def test_two_proxies_and_an_upstream_that_knows_nothing(tmp_path: Path) -> None:
    folder = Path(os.environ.get("FENCED_SERVERS_FOLDER") or tmp_path) / f"storm-{os.getpid()}"
    folder.mkdir()
    journal, store = folder / "journal", f"sqlite:///{folder}/marks.db"
    counter = [str(Path(__file__).with_name("counter.py"))]
    upstream, port = started(folder, [*counter, "0", str(journal)], r"^(\d+)$")
    options = ["--upstream", f"http://127.0.0.1:{port}", "--name", "orders/{path.id}", "--store", store]
    options += ["--listen", "127.0.0.1:0", "--timeout", "2", "--settle", "30", "--wait", "0.3"]
    proxies = [
        started(folder, ["-m", "fenced", "proxy", *options], r"listening on 127.0.0.1:(\d+)")
        for _ in range(2)
    ]
    storm = Storm([port for _, port in proxies])

    async def killed() -> None:
        nonlocal upstream
        upstream.kill()
        upstream.wait()
        upstream, _ = started(folder, [*counter, str(port), str(journal)], r"^(\d+)$")

    async def story() -> None:
        holders = [asyncio.create_task(storm.holder()) for _ in range(6)]
        await until(lambda: len(storm.acknowledged) > WANTED / 3)
        upstream.send_signal(signal.SIGSTOP)
        await until(lambda: storm.outcomes["504"] + storm.outcomes["read 504"])
        await killed()
        await until(lambda: len(storm.acknowledged) > WANTED * 2 / 3)
        await killed()
        await until(lambda: len(storm.acknowledged) > WANTED)
        storm.over = True
        await asyncio.gather(*holders)

    try:
        asyncio.run(story())
        for proxy, _ in proxies:
            proxy.send_signal(signal.SIGTERM)
        assert [proxy.wait(60) for proxy, _ in proxies] == [0, 0]
        check(storm, journal)
    finally:
        for process in (upstream, *(proxy for proxy, _ in proxies)):
            process.kill()
            process.wait()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def check(storm: Storm, journal: Path) -> None:
    applied: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for line in journal.read_text().splitlines():
        target, token, value = line.split(" ")
        applied[target.removeprefix("/")].append((int(token), int(value)))
    for name, writes in applied.items():
        tokens = [token for token, _ in writes]
        assert tokens == sorted(tokens), f"{name}: something stale has reached the upstream: {tokens}"
        assert [value for _, value in writes] == list(range(1, len(writes) + 1)), (
            f"{name}: an update was lost"
        )
    written = {(name, token) for name, writes in applied.items() for token, _ in writes}
    assert set(storm.acknowledged) <= written
    assert len(written) <= len(storm.acknowledged) + storm.outcomes["504"]
    assert storm.outcomes["late 412"] > WANTED / 3, storm.outcomes
    assert not {"late 200", "500", "read 500"} & storm.outcomes.keys()
