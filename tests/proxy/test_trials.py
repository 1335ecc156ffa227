"""Why a check before forwarding does not fence, and what does: three trials, twenty times each."""

from __future__ import annotations

import asyncio

from fenced.proxy.server import FencingProxy
from tests.proxy.harness import Arrived, Caller, proxied, request, until, upstream_server

TRIALS = 20


class Slow:
    """An upstream whose request with token 33 takes effect when `release` is set, and all others at once."""

    def __init__(self) -> None:
        self.value = b""
        self.got_old = asyncio.Event()
        self.release = asyncio.Event()
        self.applied = asyncio.Event()

    async def __call__(self, arrived: Arrived) -> bytes:
        if arrived.token == 33:
            self.got_old.set()
            await self.release.wait()
        self.value = arrived.body
        if arrived.token == 33:
            self.applied.set()
        return b"HTTP/1.1 204 No Content\r\n\r\n"


async def check_first(upstream_port: int) -> asyncio.Server:
    """What auth_request, ext_authz and forwardAuth do: a perfect keeper of marks is asked, then it is passed on."""
    mark = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal mark
        data = await reader.read(65536)
        token = int(data.split(b"Fenced-Stamp: ")[1].split(b":")[2])
        if token < mark:
            writer.write(b"HTTP/1.1 412 Precondition Failed\r\ncontent-length: 0\r\n\r\n")
        else:
            mark = token
            back, out = await asyncio.open_connection("127.0.0.1", upstream_port)
            out.write(data)
            writer.write(await back.read(65536))
            out.close()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def old_and_new(port: int, slow: Slow) -> tuple[Caller, Caller]:
    """A holder with token 33 whose request is at the upstream, and one with token 34 that has just sent its own."""
    old = Caller(*await asyncio.open_connection("127.0.0.1", port))
    old.writer.write(request("PUT", "/orders/42", 33, b"old"))
    await asyncio.wait_for(slow.got_old.wait(), 60)
    new = Caller(*await asyncio.open_connection("127.0.0.1", port))
    new.writer.write(request("PUT", "/orders/42", 34, b"new"))
    return old, new


def test_a_check_before_forwarding_loses_every_acknowledged_write() -> None:
    async def trial() -> bytes:
        slow = Slow()
        async with upstream_server(slow) as upstream:
            server = await check_first(upstream.port)
            old, new = await old_and_new(server.sockets[0].getsockname()[1], slow)
            assert (await new.answer()).status == 204  # acknowledged
            slow.release.set()
            assert (await old.answer()).status == 204
            server.close()
            for caller in (old, new):
                await caller.close()
            return slow.value

    async def trials() -> list[bytes]:
        return [await trial() for _ in range(TRIALS)]

    assert asyncio.run(trials()) == [b"old"] * TRIALS


def test_an_order_until_the_upstream_has_answered_loses_none() -> None:
    async def trial(alone: bool) -> bytes:
        slow = Slow()
        async with proxied(slow, alone=alone) as stage:
            old, new = await old_and_new(stage.port, slow)
            await until(lambda: stage.proxy.gate.waiting)
            assert (await stage.ask("PUT", "/orders/42", 33, b"older")).problem == "stale"  # risen at once
            slow.release.set()
            assert (await old.answer()).status == (await new.answer()).status == 204
            for caller in (old, new):
                await caller.close()
            return slow.value

    async def trials() -> list[bytes]:
        return [await trial(alone=number % 2 == 0) for number in range(TRIALS)]

    assert asyncio.run(trials()) == [b"new"] * TRIALS


async def _timed_out(settled: bool) -> bytes:
    """The upstream's time is over before the old request has taken effect, and the proxy goes on, or waits."""
    slow = Slow()
    async with proxied(slow, alone=True) as stage:
        if not settled:
            stage.proxy.gate._settle = 0.0  # no operator can choose this
        old, new = await old_and_new(stage.port, slow)
        await until(lambda: stage.proxy.gate.waiting)
        stage.proxy.pool.sweep(idle=1, timeout=0)  # what the timer does when the time is over
        lost = await old.answer()
        assert (lost.status, lost.problem) == (504, "indeterminate")
        if settled:
            assert stage.proxy.gate.waiting
            slow.release.set()
            await asyncio.wait_for(slow.applied.wait(), 60)
            let_settle(stage.proxy)
            assert (await new.answer()).status == 204
        else:
            assert (await new.answer()).status == 204
            slow.release.set()
            await asyncio.wait_for(slow.applied.wait(), 60)
        assert stage.proxy.gate.unknown == 1
        for caller in (old, new):
            await caller.close()
        return slow.value


def let_settle(proxy: FencingProxy) -> None:
    """As if `settle` had passed."""
    for line in proxy.gate._lines.values():
        line.watch._settle = 0.0


def test_after_a_time_out_a_proxy_that_goes_on_loses_every_one_and_one_that_waits_none() -> None:
    async def trials(settled: bool) -> list[bytes]:
        return [await _timed_out(settled) for _ in range(TRIALS)]

    assert asyncio.run(trials(settled=False)) == [b"old"] * TRIALS
    assert asyncio.run(trials(settled=True)) == [b"new"] * TRIALS
