"""The pool of connections: a limit, turns in order, and nothing left behind by who gives up."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fenced.errors import Indeterminate, Misconfigured, Unavailable
from fenced.net.pool import ConnectionBroken, Pool
from fenced.runtime.aio import AioRuntime


async def nothing() -> None:
    await asyncio.sleep(0)


class Connection:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Story:
    """A pool of two connections under asyncio, and requests that end when they are told to."""

    def __init__(self) -> None:
        self.runtime = AioRuntime()
        self.made: list[Connection] = []
        self.refuse = False
        self.order: list[str] = []
        self.pool: Pool[Connection] = Pool(self.runtime, self._connect, limit=2, where="here")

    async def _connect(self, until: float) -> Connection:
        if self.refuse:
            raise Unavailable("nobody there")
        self.made.append(Connection())
        return self.made[-1]

    def request(
        self, name: str, end: Callable[[], Awaitable[object]], seconds: float = 5.0
    ) -> asyncio.Task[object]:
        async def work(connection: Connection) -> object:
            self.order.append(name)
            return await end()

        return asyncio.ensure_future(self.pool.request(work, self.runtime.now() + seconds, repeatable=False))


def story(play: Callable[[Story], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Story()
        try:
            await play(scene)
        finally:
            scene.runtime.close()

    asyncio.run(main())


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_turns_are_taken_in_order_and_passed_on_by_who_gives_up() -> None:
    async def play(scene: Story) -> None:
        go = asyncio.Event()
        busy = [scene.request(name, go.wait) for name in "ab"]
        await _settle()
        waiting = [scene.request(name, nothing) for name in "cde"]
        await _settle()
        assert scene.order == ["a", "b"] and len(scene.made) == 2
        waiting[0].cancel()
        go.set()
        await asyncio.gather(*busy, *waiting, return_exceptions=True)
        assert scene.order == ["a", "b", "d", "e"] and len(scene.made) == 2

    story(play)


def test_a_caller_that_waits_too_long_leaves_its_turn() -> None:
    async def play(scene: Story) -> None:
        go = asyncio.Event()
        busy = [scene.request(name, go.wait) for name in "ab"]
        await _settle()
        with pytest.raises(Unavailable, match="busy"):
            await scene.request("c", nothing, seconds=0.05)
        go.set()
        await asyncio.gather(*busy)
        together = [scene.request(name, _settle) for name in "de"]
        await _settle()
        assert scene.order == ["a", "b", "d", "e"], "neither connection went to the one who has left"
        await asyncio.gather(*together)

    story(play)


def test_a_connection_with_a_request_cut_short_is_not_used_again() -> None:
    async def play(scene: Story) -> None:
        cut = scene.request("a", asyncio.Event().wait)
        await _settle()
        cut.cancel()
        await _settle()
        assert scene.made[0].closed

        async def breaks() -> None:
            raise ConnectionBroken("reset")

        with pytest.raises(Indeterminate, match="reset"):
            await scene.request("b", breaks)
        assert scene.made[1].closed
        await scene.request("c", nothing)
        await scene.request("d", nothing)
        assert len(scene.made) == 3 and not scene.made[2].closed

    story(play)


def test_a_definite_no_after_a_doubt_is_a_doubt() -> None:
    """What broke may have been carried out; that the repetition was refused says nothing about it."""

    async def play(scene: Story) -> None:
        errors = [ConnectionBroken("lost"), Misconfigured("forbidden by now")]

        async def work(connection: Connection) -> None:
            raise errors.pop(0)

        with pytest.raises(Indeterminate, match="lost; then: forbidden"):
            await scene.pool.request(work, scene.runtime.now() + 5)

    story(play)


def test_nobody_starves_behind_those_who_come_back() -> None:
    """A connection goes to who has waited longest, not to the one who gave it back and asks again."""

    async def play(scene: Story) -> None:
        served: list[str] = []

        async def again_and_again(name: str) -> None:
            for _ in range(20):
                await scene.request(name, nothing)
                served.append(name)

        await asyncio.gather(*(again_and_again(name) for name in "abc"))
        assert set(served[:9]) == set("abc")

    story(play)


def test_a_failed_connect_takes_no_room() -> None:
    async def play(scene: Story) -> None:
        scene.refuse = True
        for _ in range(5):
            with pytest.raises(Unavailable, match="nobody"):
                await scene.request("a", nothing)
        scene.refuse = False
        await scene.request("b", nothing)

    story(play)


def test_closing_closes_what_is_in_use_when_it_comes_back() -> None:
    async def play(scene: Story) -> None:
        go = asyncio.Event()
        busy = scene.request("a", go.wait)
        await scene.request("b", nothing)
        scene.pool.close()
        assert [connection.closed for connection in scene.made] == [False, True]
        go.set()
        await busy
        assert scene.made[0].closed

    story(play)


def test_a_definite_no_leaves_the_connection_to_the_next_request() -> None:
    async def play(scene: Story) -> None:
        async def no() -> None:
            raise Misconfigured("forbidden")

        for _ in range(5):
            with pytest.raises(Misconfigured):
                await scene.request("a", no)
        assert len(scene.made) == 1 and not scene.made[0].closed and scene.pool.broken == 0

    story(play)


@pytest.mark.parametrize("hops", range(8))
def test_a_connection_that_is_handed_to_a_cancelled_caller_is_passed_on(hops: int) -> None:
    """At whatever step: else the pool would have one connection less for ever."""

    async def play(scene: Story) -> None:
        first, go = asyncio.Event(), asyncio.Event()
        busy = scene.request("a", first.wait), scene.request("b", go.wait)
        await _settle()
        cancelled = scene.request("c", nothing)
        await _settle()
        first.set()
        for _ in range(hops):
            await asyncio.sleep(0)
        cancelled.cancel()
        await _settle()
        later = scene.request("d", go.wait)
        await _settle()
        assert scene.order[-1] == "d", "a connection is free while another one is used"
        go.set()
        await asyncio.gather(*busy, later, cancelled, return_exceptions=True)

    story(play)


def test_a_break_closes_the_idle_connections_too_and_is_counted() -> None:
    async def play(scene: Story) -> None:
        await asyncio.gather(scene.request("a", nothing), scene.request("b", nothing))
        errors = [ConnectionBroken("reset")]

        async def work(connection: Connection) -> None:
            if errors:
                raise errors.pop()

        await scene.pool.request(work, scene.runtime.now() + 5)
        assert [each.closed for each in scene.made] == [True, True, False] and scene.pool.broken == 1
        # Both left room: two requests at once find it.
        await asyncio.gather(scene.request("c", _settle), scene.request("d", _settle))
        assert len(scene.made) == 4

    story(play)


def test_an_abandoned_pool_closes_what_is_idle_and_what_comes_back() -> None:
    async def play(scene: Story) -> None:
        go = asyncio.Event()
        busy = scene.request("a", go.wait)
        await scene.request("b", nothing)
        scene.pool.abandon()
        go.set()
        await busy
        assert [each.closed for each in scene.made] == [True, True]

    story(play)
