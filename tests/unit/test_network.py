"""The simulated network behaves as TCP does, and one seed makes one run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fenced.runtime.sockets import Late
from fenced.values.contracts import ByteStream, Runtime
from fenced_testkit.runtime.network import UNREAD_BYTES_MAX, SimulatedConnection, SimulatedNetwork
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World

ECHO = ("echo", 7)


class Echo:
    """Sends back whole frames, each of which ends with a full stop, and notes what happens to it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._partial: dict[SimulatedConnection, bytes] = {}

    def on_open(self, connection: SimulatedConnection) -> None:
        self.notes.append("open")
        self._partial[connection] = b""

    def on_bytes(self, connection: SimulatedConnection, data: bytes) -> None:
        *frames, self._partial[connection] = (self._partial[connection] + data).split(b".")
        for frame in frames:
            if frame == b"bye":
                connection.close()
            else:
                self.notes.append(f"{frame.decode():.10}")
                connection.send(frame + b".")

    def on_close(self, connection: SimulatedConnection) -> None:
        self.notes.append(f"close {self._partial.pop(connection).decode():.10}")


class Scene:
    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.network = SimulatedNetwork(self.world)
        self.server, self.client = Process(self.world, "server"), Process(self.world, "client")
        self.echo = Echo()
        self.network.listen(self.server, ECHO, self.echo)
        self.runtime: Runtime = SimulatedRuntime(self.client, self.network)
        self.result: Any = None

    def play(self, work: Callable[[], Awaitable[Any]], until: float = 60.0) -> Any:
        async def all_of_it() -> None:
            try:
                self.result = await work()
            except OSError as error:
                self.result = error

        self.runtime.spawn(all_of_it, "play")
        self.world.run(until)
        return self.result

    async def connect(self, seconds: float = 5.0) -> ByteStream:
        return self.runtime.stream(await self.runtime.connect(ECHO, self.world.now + seconds))

    async def sleep(self, seconds: float) -> None:
        await self.runtime.wait(self.runtime.wakeup(), self.runtime.now() + seconds)


async def ask(stream: ByteStream, frame: bytes, until: float) -> bytes:
    await stream.send(frame + b".", until)
    got = b""
    while not got.endswith(b"."):
        got += await stream.receive(until)
    return got


def test_a_frame_comes_back_whole_and_in_order_however_it_is_split() -> None:
    scene = Scene()
    scene.network.split = 1.0

    async def work() -> list[bytes]:
        stream = await scene.connect()
        got = [await ask(stream, b"%d" % number * 50, 30.0) for number in range(20)]
        stream.close()
        return got

    assert scene.play(work) == [b"%d" % number * 50 + b"." for number in range(20)]
    assert scene.echo.notes[0] == "open" and scene.echo.notes[-1] == "close "
    assert not scene.network._ends


def test_one_seed_makes_one_run() -> None:
    def run(seed: int) -> tuple[list[str], float]:
        scene = Scene(seed)

        async def work() -> float:
            stream = await scene.connect()
            scene.world.at(0.1, lambda: scene.network.cut_next(scene.client, scene.server))
            for number in range(1000):
                await ask(stream, b"%d" % number, 30.0)
            return 0.0

        with_error = scene.play(work)
        assert isinstance(with_error, ConnectionResetError)
        return scene.echo.notes, scene.world.rng.random()

    assert run(7) == run(7)
    assert len({str(run(seed)) for seed in range(5)}) == 5


def test_a_cut_in_the_middle_of_a_frame_delivers_a_prefix_and_resets_both_ends() -> None:
    seen = set()
    for seed in range(30):
        scene = Scene(seed)

        async def work(scene: Scene = scene) -> bytes:
            stream = await scene.connect()
            scene.network.cut_next(scene.client, scene.server)
            return await ask(stream, b"0123456789", 30.0)

        assert isinstance(scene.play(work), ConnectionResetError)
        opened, closed = scene.echo.notes
        assert opened == "open" and "0123456789".startswith(closed.removeprefix("close "))
        seen.add(closed)
    assert len(seen) > 5


def test_a_second_cut_leaves_no_hole_in_what_arrives() -> None:
    for seed in range(30):
        scene = Scene(seed)

        async def work(scene: Scene = scene) -> bytes:
            stream = await scene.connect()
            scene.network.block(scene.client, scene.server)
            scene.network.cut_next(scene.client, scene.server)
            await stream.send(b"0123456789", 30.0)
            await stream.send(b"abcdefghij", 30.0)
            scene.network.cut(scene.client, scene.server)
            return await stream.receive(30.0)

        assert isinstance(scene.play(work), ConnectionResetError)
        assert "0123456789".startswith(scene.echo.notes[-1].removeprefix("close "))


def test_bytes_sent_before_a_reset_may_arrive_after_it() -> None:
    for seed in range(30):
        scene = Scene(seed)

        async def work(scene: Scene = scene) -> bytes:
            stream = await scene.connect()
            if scene.world.rng.random() < 0.5:
                scene.network.let_go_next(scene.client, scene.server, 7.0)
                await stream.send(b"order.", 30.0)
            else:
                await stream.send(b"order.", 30.0)
                scene.network.let_go(scene.client, scene.server, 7.0)
            scene.world.at(6.9, lambda: scene.echo.notes.append("now"))
            return await stream.receive(30.0)

        assert isinstance(scene.play(work), ConnectionResetError)
        assert scene.echo.notes == ["open", "now", "order", "close "]
        assert not scene.network._ends


def test_a_cut_that_nobody_has_met_can_be_forgotten() -> None:
    scene = Scene()

    async def work() -> bytes:
        stream = await scene.connect()
        scene.network.cut_next(scene.client, scene.server)
        scene.network.let_go_next(scene.client, scene.server, 1.0)
        scene.network.cut_no_more()
        return await ask(stream, b"order", 30.0)

    assert scene.play(work) == b"order."


def test_a_cut_reply_leaves_it_unknown_what_was_done() -> None:
    scene = Scene()

    async def work() -> bytes:
        stream = await scene.connect()
        scene.network.cut_next(scene.server, scene.client)
        return await ask(stream, b"order", 30.0)

    assert isinstance(scene.play(work), ConnectionResetError)
    assert scene.echo.notes == ["open", "order", "close "]


def test_a_cut_between_frames_ends_all_connections_of_the_pair() -> None:
    scene = Scene()

    async def work() -> bytes:
        one, other = await scene.connect(), await scene.connect()
        await ask(one, b"a", 30.0)
        scene.network.cut(scene.server, scene.client)
        with pytest.raises(ConnectionResetError):
            await other.receive(30.0)
        return await ask(await scene.connect(), b"b", 30.0)

    assert scene.play(work) == b"b."
    assert scene.echo.notes == ["open", "open", "a", "close ", "close ", "open", "b"]


def test_the_sockets_of_a_paused_server_keep_what_arrives() -> None:
    scene = Scene()

    async def work() -> bytes:
        scene.server.pause(10.0)
        stream = await scene.connect()  # the kernel accepts
        await stream.send(b"first.", 30.0)
        with pytest.raises(Late):
            await stream.receive(5.0)
        assert scene.echo.notes == []
        await stream.send(b"bye.", 30.0)
        return await stream.receive(30.0)

    assert scene.play(work) == b"first."
    assert scene.echo.notes == ["open", "first", "close "]


def test_a_request_is_carried_out_though_its_client_has_left_a_paused_server() -> None:
    scene = Scene()

    async def work() -> None:
        stream = await scene.connect()
        scene.server.pause(10.0)
        await stream.send(b"late.", 30.0)
        stream.close()

    scene.play(work)
    assert scene.echo.notes == ["open", "late", "close "]


def test_a_paused_client_finds_the_reply_that_came_meanwhile_after_its_deadline() -> None:
    scene = Scene()

    async def work() -> bytes:
        stream = await scene.connect()
        await stream.send(b"a.", 3.0)
        scene.client.pause(10.0)
        return await stream.receive(3.0)

    assert scene.play(work) == b"a."


def test_a_blocked_direction_stalls_and_loses_nothing() -> None:
    scene = Scene()

    async def work() -> bytes:
        stream = await scene.connect()
        scene.network.block(scene.server, scene.client)
        with pytest.raises(Late):
            await ask(stream, b"a", 5.0)
        assert scene.echo.notes == ["open", "a"], "only the way back is blocked"
        scene.network.unblock(scene.server, scene.client)
        return await stream.receive(30.0)

    assert scene.play(work) == b"a."


def test_a_black_hole_answers_nobody_until_it_ends() -> None:
    scene = Scene()

    async def work() -> bytes:
        scene.network.stall(scene.client, scene.server, 10.0)
        with pytest.raises(Late):
            await scene.connect(5.0)
        await scene.sleep(6.0)
        return await ask(await scene.connect(), b"a", 30.0)

    assert scene.play(work) == b"a."
    assert scene.echo.notes[:2] == ["open", "close "], "the first attempt arrives late"


def test_a_crashed_server_resets_and_refuses_and_another_takes_its_place() -> None:
    scene = Scene()

    async def work() -> bytes:
        stream = await scene.connect()
        scene.server.crash()
        with pytest.raises(ConnectionResetError):
            await stream.receive(30.0)
        with pytest.raises(ConnectionRefusedError):
            await scene.connect()
        with pytest.raises(OSError, match="no such host"):
            await scene.runtime.connect(("nowhere", 1), 30.0)
        scene.network.listen(Process(scene.world, "next"), ECHO, scene.echo)
        return await ask(await scene.connect(), b"a", 30.0)

    assert scene.play(work) == b"a."


def test_a_server_that_does_not_read_makes_its_client_wait() -> None:
    scene = Scene()

    async def work() -> int:
        stream = await scene.connect()
        scene.server.pause(10.0)
        with pytest.raises(Late):
            await stream.send(bytes(2 * UNREAD_BYTES_MAX), 5.0)
        await stream.send(bytes(UNREAD_BYTES_MAX), 30.0)
        return 1

    assert scene.play(work) == 1


def test_a_selector_waits_for_links_and_can_be_woken_and_closed() -> None:
    scene = Scene()

    async def work() -> list[object]:
        selector, stream = scene.runtime.selector(), await scene.connect()
        scene.world.after(1.0, lambda: selector.add(stream.link, "it"))
        await stream.send(b"a.", 30.0)
        seen: list[object] = [await selector.wait(0.5), await selector.wait(30.0)]
        assert await stream.receive(30.0) == b"a."
        scene.world.after(1.0, selector.wake)
        seen += [await selector.wait(30.0)]
        selector.remove(stream.link)
        stream.interrupt()
        seen += [await selector.wait(scene.runtime.now() + 1)]
        scene.world.after(1.0, selector.close)
        with pytest.raises(ValueError, match="closed"):
            await selector.wait(60.0)
        return seen

    assert scene.play(work) == [None, ["it"], [], None]
