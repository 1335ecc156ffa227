"""The prediction of `fenced tune` against the client that ships, in virtual time: its process pauses as recorded.

`python -m evidence.pauses.replay` prints the table of docs/evidence/pauses.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.diagnosis.tune import DAY, TTLS, expiries
from fenced.events import LeaseEnded
from fenced.leases.rowauthority import Kind, RowAuthority, Work
from fenced.pauses import Recording
from fenced.stores.memory.authority import MemoryStore
from fenced.values.contracts import Authority
from fenced.values.model import Holder, Standing
from fenced_testkit.runtime.simulated import SimulatedRuntime, SimulatedTask
from fenced_testkit.runtime.world import Process, World
from fenced_testkit.worlds.faults import NEVER, Faults, MessageNetwork, MessageServer

T = TypeVar("T")
HERE = Path(__file__).parent
KINDS = ("stops", "starved", "collections", "calls")
ROUND_TRIP = 0.002
REALM = "00000000000000aa"
_NETWORK = Faults(0.0, 0.0, ROUND_TRIP, NEVER, 0.0, NEVER, NEVER, NEVER, NEVER, 0.0, NEVER, NEVER)


@dataclass(frozen=True, slots=True)
class Replay:
    """One ttl: what was predicted, and what happened."""

    ttl: float
    expected: float
    lost: int

    @property
    def ratio(self) -> float:
        return self.lost / self.expected if self.expected else math.nan


class _Remote(RowAuthority):
    """A client's access to a store that is a message away: only the calls that the core makes."""

    traits = ()
    url = "simulated:"

    def __init__(
        self, store: MemoryStore, server: MessageServer, process: Process, runtime: SimulatedRuntime
    ) -> None:
        self._store, self._server, self._process, self._runtime = store, server, process, runtime

    async def _transact(self, work: Work[T], until: float | None, kind: Kind) -> T:
        latest = self._runtime.now() + 5.0
        until = latest if until is None else min(until, latest)
        return await self._server.ask(
            self._process, self._runtime, partial(self._store.transact, work), until
        )

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return Standing(REALM, 0)

    async def next_wakeups(self, until: float) -> list[str]:
        await self._runtime.wait(self._runtime.wakeup(), until)
        return []

    def interrupt(self) -> None:
        return

    async def close(self) -> None:
        return

    def abandon(self) -> None:
        return


def replay(pauses: Sequence[tuple[float, float]], ttl: float, seed: int) -> int:
    """How often a lease was lost that is held all the time. The pauses: when, and for how long."""
    world = World(seed)
    server = MessageServer(world, MessageNetwork(world, _NETWORK), "authority")
    store = MemoryStore(lambda: world.now, realm=REALM)
    process = Process(world, "holder")
    runtime = SimulatedRuntime(process)
    lost: list[LeaseEnded] = []

    def heard(event: object) -> None:
        if isinstance(event, LeaseEnded):
            lost.append(event)

    remote = cast("Authority", _Remote(store, server, process, runtime))
    engine = LeaseEngine(remote, runtime, Holder("h" * 32, "h", "h", 1), emit=heard)

    async def work() -> None:
        while True:
            lease = await engine.acquire(LeaseRequest(("x",), ttl=ttl))
            await lease.wait_lost(None)

    SimulatedTask(process, work, "work")
    for at, length in pauses:
        world.at(at, partial(process.pause, length))
    world.run(pauses[-1][0] + 10)
    return len(lost)


def repeated(recording: Recording, times: int) -> list[tuple[float, float]]:
    """The recorded pauses again and again."""
    return [
        (turn * recording.seconds + start, length)
        for turn in range(times)
        for start, length in recording.pauses
    ]


def compared(recording: Recording, ttl: float, *, events: float, clients: int = 8) -> Replay | None:
    """So long that `events` losses are expected, by clients that renew at different moments; None: no loss is."""
    rate = expiries(recording, ttl, ROUND_TRIP) / DAY * recording.seconds
    if not rate or events / rate > 5000:
        return None
    times = math.ceil(events / rate / clients)
    lost = sum(replay(repeated(recording, times), ttl, seed) for seed in range(clients))
    return Replay(ttl, rate * times * clients, lost)


def main() -> None:
    print("| recorded | ttl | expected | lost in the simulated runtime | ratio |")
    print("|---|---|---|---|---|")
    for kind in KINDS:
        recording = Recording.read(HERE / f"{kind}.jsonl")
        for ttl in TTLS:
            found = compared(recording, ttl, events=200)
            if found is not None:
                print(
                    f"| {kind} | {ttl:g} s | {found.expected:.0f} | {found.lost} | {found.ratio:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
