"""A random search for two holders of one name on a real ZooKeeper: two names, three clients, two tasks each.

One step after another, each a call of one task, drawn from the seed of the round. What another client has done reaches
a client with the replies to its own requests, so the seed decides the order of events, too. After every grant the
search knows who holds what: no name has two holders, and tokens of a name rise. In the end every task that still waits
is granted.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.values.model import Ask, Busy, Ended, Granted, Holder, Kept, Released, Waiting
from fenced_testkit.servers import ZooKeeperServer

ROUNDS = 1_000
STEPS = 40
NAMES = ("orders", "stock")
CLIENTS = 3
TASKS = 2
TTL = 10.0
SETTLED = 200
"""After so many further calls of every task, one that still waits will never be granted."""


class BrokenPromise(AssertionError):
    """What the search is for."""


@dataclass
class Task:
    """One task of a client: idle, waiting or holding."""

    name: str
    authority: ZooKeeperAuthority
    ask: Ask | None = None
    held: bool = False


class Round:
    """One round: its tasks, who holds which name, and what has happened."""

    def __init__(self, url: str, seed: int, kind: type[ZooKeeperAuthority], counts: Counter[str]) -> None:
        self.counts = counts
        self._runtime = BlockingRuntime()
        self._rng = random.Random(seed)
        self._seed = seed
        self._history: list[str] = []
        self._holders: dict[str, Task] = {}
        self._last: dict[str, int] = {}
        namespace = secrets.token_hex(8)
        self._clients = [kind.at(url, self._runtime, namespace) for _ in range(CLIENTS)]
        self._tasks = [
            Task(f"client {number}, task {task}", client)
            for number, client in enumerate(self._clients)
            for task in range(TASKS)
        ]

    def run(self) -> None:
        try:
            for client in self._clients:
                step(client.open())
            for _ in range(STEPS):
                self._act(self._rng.choice(self._tasks))
            self._finish()
        finally:
            for client in self._clients:
                step(client.close())

    def _act(self, task: Task) -> None:
        if task.ask is None:
            names = self._rng.choice((NAMES[:1], NAMES[1:], NAMES))
            secret = f"{self._rng.getrandbits(128):032x}"
            holder = Holder(secret[::-1], task.name, "host", 1)
            task.ask = Ask(secret, names, TTL, holder, wait=self._rng.random() < 0.8)
            self._ask(task)
        elif task.held:
            self._rng.choice((self._renew, self._release, self._release))(task)
        else:
            calls = (self._ask, self._ask, self._told, self._renew, self._withdraw)
            self._rng.choices(calls, (3, 3, 3, 2, 1))[0](task)

    def _finish(self) -> None:
        """Release everything, again and again, until every task that waits was granted."""
        for _ in range(SETTLED):
            for task in self._tasks:
                if task.ask is not None:
                    (self._release if task.held else self._ask)(task)
            if not any(task.ask for task in self._tasks):
                return
        self._broken("a task waits for ever: nobody holds what it waits for")

    # Calls.

    def _ask(self, task: Task) -> None:
        assert task.ask is not None
        answer = step(task.authority.ask(task.ask))
        self._say(task, f"ask {task.ask.names}", answer)
        match answer:
            case Granted():
                self._granted(task, task.ask, answer.token)
            case Waiting():
                self.counts["waits"] += 1
            case Busy():
                self.counts["busy"] += 1
                task.ask = None
            case _:
                self._broken(f"{task.name} lost its place: {answer}")

    def _granted(self, task: Task, ask: Ask, token: int) -> None:
        for name in ask.names:
            if self._holders.get(name, task) is not task:
                self._broken(f"{task.name} and {self._holders[name].name} hold {name} at the same time")
            if token <= self._last.get(name, 0):
                self._broken(f"{name}: token {token} after {self._last[name]}")
        self._holders |= dict.fromkeys(ask.names, task)
        self._last |= dict.fromkeys(ask.names, token)
        task.held = True
        self.counts["grants"] += 1

    def _told(self, task: Task) -> None:
        """Let everything that the server has sent arrive: it answers a client in order."""
        step(task.authority.observe(NAMES[0]))
        self._say(task, "reads events", None)

    def _renew(self, task: Task) -> None:
        assert task.ask is not None
        (answer,) = step(task.authority.renew([task.ask.secret]))
        self._say(task, "renew", answer)
        if not isinstance(answer, Kept if task.held else Waiting):
            self._broken(f"{task.name} renewed: {answer}")

    def _release(self, task: Task) -> None:
        self._end(task, "release")

    def _withdraw(self, task: Task) -> None:
        self._end(task, "withdraw")

    def _end(self, task: Task, how: str) -> None:
        assert task.ask is not None
        answer = step(getattr(task.authority, how)(task.ask.secret))
        self._say(task, how, answer)
        if answer != Released():
            self._broken(f"{task.name}: {how} was answered {answer}")
        for name in [name for name, holder in self._holders.items() if holder is task]:
            del self._holders[name]
        task.ask, task.held = None, False

    # What has happened.

    def _say(self, task: Task, what: str, answer: Any) -> None:
        self._history.append(
            f"{task.name}: {what} -> {answer if isinstance(answer, Ended) else type(answer).__name__}"
        )

    def _broken(self, why: str) -> None:
        raise BrokenPromise("\n".join([*self._history, f"seed {self._seed}: {why}"]))


def search(
    url: str, rounds: int, kind: type[ZooKeeperAuthority] = ZooKeeperAuthority, *, first: int = 0
) -> dict[str, int]:
    """Raises BrokenPromise with the history of the round; else what was done."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + rounds):
        Round(url, seed, kind, counts).run()
    return {"rounds": rounds, **dict(sorted(counts.items()))}


def run() -> dict[str, Any]:
    with ZooKeeperServer() as server:
        return {**search(server.url(), ROUNDS), "two_holders": 0, "seeds": f"0-{ROUNDS - 1}"}
