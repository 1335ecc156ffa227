"""The faults of a world: the mix that a seed draws, and a network of single messages.

The resource and the memory authority answer over these messages. Authorities that speak a wire protocol run over
simulated streams instead, which keep order and lose bytes only by a cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World

T = TypeVar("T")

NEVER = 1e9


@dataclass
class Faults:
    """The mix of one world: each seed draws its own."""

    loss: float
    double: float
    delay_max: float
    pause_every: float
    pause_aimed: float  # the chance of a pause between a read and its write
    crash_every: float
    server_fault_every: float
    stream_fault_every: float
    interrupt_every: float  # a task is cancelled, or its program interrupted
    cut_off_aimed: float  # the chance that a holder loses all its servers before it writes
    block_every: float  # the event loop of a client is blocked, and its keeper is not
    jump_at: float  # when everything stands still for minutes

    @classmethod
    def drawn(cls, world: World) -> Faults:
        """In a quarter of the worlds no client stops: those show that no client depends on an expiry."""
        rng = world.rng
        stops = rng.random() < 0.75
        return cls(
            loss=rng.choice((0.0, 0.02, 0.15)),
            double=rng.choice((0.0, 0.05, 0.2)),
            delay_max=rng.choice((0.002, 0.05, 0.6, 4.0)),
            pause_every=rng.choice((1.5, 4.0, NEVER)) if stops else NEVER,
            pause_aimed=rng.choice((0.0, 0.1, 0.4)) if stops else 0.0,
            crash_every=rng.choice((6.0, NEVER)) if stops else NEVER,
            server_fault_every=rng.choice((4.0, NEVER)),
            stream_fault_every=rng.choice((0.7, 3.0, NEVER)),
            interrupt_every=rng.choice((1.0, 4.0, NEVER, NEVER)),
            cut_off_aimed=rng.choice((0.0, 0.0, 0.3)),
            block_every=rng.choice((2.0, 6.0, NEVER, NEVER)) if stops else NEVER,
            jump_at=rng.choice((NEVER, NEVER, NEVER, NEVER, rng.uniform(1.5, 6.0))),
        )

    @property
    def stop_nobody(self) -> bool:
        """Whether no client crashes or pauses. Servers may, and messages may be lost."""
        never = self.pause_every == self.crash_every == self.block_every == NEVER
        return never and not self.pause_aimed


class MessageNetwork:
    """Messages between processes: lost, delayed, duplicated, reordered."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self._faults = faults
        self._dropped = 0
        self.healed = False

    def drop_all(self) -> None:
        """Lose all messages under way."""
        self._dropped += 1

    def send(self, to: Process, deliver: Callable[[], None]) -> None:
        rng, faults = self._world.rng, self._faults
        copies = 1
        if not self.healed:
            if rng.random() < faults.loss:
                return
            copies = 2 if rng.random() < faults.double else 1
        dropped = self._dropped

        def arrive() -> None:
            if dropped == self._dropped:
                to.deliver(deliver)

        for _ in range(copies):
            self._world.after(self.delay(), arrive)

    def delay(self) -> float:
        """How long the next message takes. Streams use it for their packets, too."""
        return 0.0005 + self._world.rng.random() ** 3 * (0.002 if self.healed else self._faults.delay_max)


class MessageServer:
    """A process that answers requests; its state is on a disk that survives a crash."""

    def __init__(self, world: World, network: MessageNetwork, name: str) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.process = Process(world, name)
        self._cut_off: dict[Process, float] = {}

    def cut_off(self, client: Process, seconds: float) -> None:
        """Lose all messages to and from a client for a while."""
        self._cut_off[client] = self.world.now + seconds

    def _reaches(self, client: Process) -> bool:
        return self.network.healed or self._cut_off.get(client, 0.0) <= self.world.now

    def restart(self, down: float) -> None:
        """Crash, and come back after a while with the data on the disk."""
        self.process.crash()
        self.world.after(down, self._start)

    def _start(self) -> None:
        self.process = Process(self.world, self.name)

    async def ask(
        self, client: Process, runtime: SimulatedRuntime, handle: Callable[[], T], until: float
    ) -> T:
        """Send a request and wait for its reply; Indeterminate if none comes in time."""
        if not self.process.alive and not self.network.healed:
            raise Unavailable(f"{self.name} is down")
        answered = runtime.wakeup()
        box: list[Any] = []

        def serve() -> None:
            self._serve(handle, reply)

        def reply(result: Any) -> None:
            if self._reaches(client):
                self.network.send(client, lambda: receive(result))

        def receive(result: Any) -> None:
            if not box:
                box.append(result)
                answered.set()

        if self._reaches(client):
            self.network.send(self.process, serve)
        if not await runtime.wait(answered, until):
            raise Indeterminate(f"{self.name} did not answer")
        if isinstance(box[0], FencedError):
            raise box[0]
        result: T = box[0]
        return result

    def _serve(self, handle: Callable[[], Any], reply: Callable[[Any], None]) -> None:
        """Run a request, and reply with its result or its error."""
        try:
            result = handle()
        except FencedError as error:
            result = error
        reply(result)
