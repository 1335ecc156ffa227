"""Seeded worlds of the gate alone: proxies share a store, are stopped and die, before an upstream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fenced.errors import Contended, Indeterminate, Refused, Unavailable
from fenced.proxy.gate import Gate
from fenced.stores.memory.guard import MemoryCells, MemoryValues
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World
from fenced_testkit.worlds.proxy import NAME as NAME
from fenced_testkit.worlds.proxy import SETTLE as SETTLE
from fenced_testkit.worlds.proxy import FaultyCells
from fenced_testkit.worlds.proxy import stamp_of as stamp_of


@dataclass
class Outcome:
    """What came of a world."""

    stale: list[str]
    """Requests that reached the upstream although a newer one had, or while an older one ran."""
    arrived: int = 0
    refused: int = 0
    unknown: int = 0
    final: bool = False
    """The last holder got through."""


class GateWorld:
    """Some proxies, a store, an upstream, and holders that come one after the other."""

    def __init__(self, seed: int, *, alone: bool = False, faults: float = 0.03) -> None:
        self.world = World(f"proxy {seed}")
        self.alone = alone
        self.faults = faults
        self.cells = MemoryCells()
        self.outcome = Outcome([])
        self._running: dict[int, tuple[int, float]] = {}
        """At the upstream, by number: the token, and when it ends."""
        self._highest = 0
        self._number = 0
        self._proxies = [self._proxy(f"p{i}") for i in range(1 if alone else 3)]

    def _proxy(self, name: str) -> tuple[Process, SimulatedRuntime, Gate]:
        rng = self.world.rng
        process = Process(self.world, name, rate=rng.uniform(0.999, 1.001), offset=rng.random() * 1000)
        runtime = SimulatedRuntime(process)
        cells: Any = FaultyCells(self.cells, runtime, self.world, self.faults)
        guard = MemoryValues(cells=cells, runtime=runtime)
        return process, runtime, Gate(guard, runtime, settle=SETTLE, alone=self.alone)

    def run(self) -> Outcome:
        rng = self.world.rng
        at = 0.1
        for token in range(1, 9):
            for _ in range(rng.randint(1, 6)):
                self.world.at(at + rng.random() * 2, lambda token=token: self._send(token))  # type: ignore[misc]
            at += rng.choice((0.01, 0.3, 2.0))
        for _ in range(rng.randint(0, 3)):
            self.world.at(rng.random() * at, self._trouble)
        # The last holder comes when all that went wrong must have settled, and nothing else goes wrong.
        self.world.at(at + 40, lambda: self._send(100, last=True))
        self.world.run(at + 80)
        return self.outcome

    def _trouble(self) -> None:
        rng = self.world.rng
        at = rng.randrange(len(self._proxies))
        process = self._proxies[at][0]
        if rng.random() < 0.5:
            process.pause(rng.choice((0.5, 2.5, 12.0)))
        else:
            process.crash()
            self._proxies[at] = self._proxy(f"{process.name}'")

    def _send(self, token: int, *, last: bool = False) -> None:
        if last:
            self.faults = 0.0
            for _, _, gate in self._proxies:
                gate.store.cells.faults = 0.0  # type: ignore[attr-defined]
        process, runtime, gate = self.world.rng.choice(self._proxies)
        runtime.spawn(lambda: self._request(process, runtime, gate, token, last), f"request {token}")

    async def _request(
        self, process: Process, runtime: SimulatedRuntime, gate: Gate, token: int, last: bool
    ) -> None:
        rng = self.world.rng
        stamp = stamp_of(token)
        entered = gate.enter_by_text(NAME, (b"fenced-stamp", f'"{stamp}"'.encode()))
        line = entered and entered[0]
        try:
            if line is None:
                line = await gate.enter(NAME, stamp, runtime.now() + 30)
        except Refused:
            self.outcome.refused += 1
            return
        except (Contended, Unavailable, Indeterminate):
            return
        assert line is not None, "the mode is enforce, so nothing bad is let through"
        if rng.random() < 0.05 and not last:
            process.pause(12.0)  # for so long that the others take it for dead
        await self._sleep(runtime, rng.choice((0.01, 0.01, 0.1)))  # connecting
        if not gate.may_send(line, token):
            gate.answered(line, token)
            return
        number, ends = self._arrive(process, token)
        self.outcome.final |= last
        if rng.random() < 0.15:  # a time-out
            await self._sleep(runtime, (ends - self.world.now) * rng.random())
            self.outcome.unknown += 1
            gate.doubt(line, token)
            return
        while number in self._running and self._running[number][1] > self.world.now:
            await self._sleep(runtime, 0.05)
        gate.answered(line, token)

    async def _sleep(self, runtime: SimulatedRuntime, seconds: float) -> None:
        if seconds:
            await runtime.wait(runtime.wakeup(), runtime.now() + seconds)

    def _arrive(self, process: Process, token: int) -> tuple[int, float]:
        """A request reaches the upstream, which works on it for less than SETTLE, whatever becomes of the proxy."""
        now, rng = self.world.now, self.world.rng
        self._running = {n: (t, end) for n, (t, end) in self._running.items() if end > now}
        others = sorted({running for running, _ in self._running.values()} - {token})
        if others or token < self._highest:
            self.outcome.stale.append(
                f"{now:.3f} {process.name}: {token} while {others} ran, after {self._highest}"
            )
        self._highest = max(self._highest, token)
        self._number += 1
        ends = now + rng.choice((0.01, 0.1, 1.5, SETTLE * 0.99)) * rng.random()
        self._running[self._number] = token, ends
        self.outcome.arrived += 1
        return self._number, ends
