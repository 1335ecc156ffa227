"""HTTP through the proxy: what is passed on, what is refused, and what an end in the middle means."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fenced.cli.proxy import proxy as proxy_command
from fenced.errors import Misconfigured, Misuse
from fenced.http1.heads import request_head
from fenced.proofs import HmacKey
from fenced.proxy import admin
from fenced.proxy.callers import CALLERS_MAX, Caller, CallerRecords
from fenced.proxy.server import FencingProxy, ProxyOptions
from fenced_testkit.servers.certificates import make_certificates
from tests.proxy.harness import OK, Arrived, Stage, proxied, read_body, request, until
from tests.proxy.worlds import stamp_of

CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\nx-t: 1\r\n\r\n"
HOPS = "Connection: x-mine\r\nX-Mine: 1\r\nTE: gzip\r\nX-Kept: 2\r\n"


READ_BYTES_MAX = 262_144
"""How much asyncio reads from a socket at once."""
Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@LOOPS
async def test_requests_pass_as_they_are(loop: Loop) -> None:
    """Bodies, headers and statuses; one connection carries several requests, and so does the one to the upstream."""

    async def behave(arrived: Arrived) -> bytes:
        return {
            "/204": b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n",
            "/304": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
            "/chunks": CHUNKS,
            "/early": b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK,
            "/odd": b"HTTP/1.1 299 Very Odd\r\nconnection: x-hop\r\nx-hop: 1\r\nx-b: 2\r\ncontent-length: 0\r\n\r\n",
        }.get(arrived.target, OK)

    async with proxied(behave) as stage:
        caller = await stage.caller()
        assert (await caller.ask("GET", "/204")).headers == {"x-a": "1"}
        assert (await caller.ask("GET", "/304")).status == 304
        assert (await caller.ask("GET", "/chunks")).body == b"abcde"
        assert (await caller.ask("GET", "/early")).status == 103
        assert (await caller.answer()).body == b"ok"
        odd = await caller.ask("GET", "/odd", headers=HOPS)
        assert odd.status == 299 and "x-hop" not in odd.headers and odd.headers["x-b"] == "2"
        sent = stage.upstream.arrived[-1].headers
        assert sent["x-kept"] == "2" and not {"x-mine", "te", "connection"} & sent.keys()
        assert sent["host"] == "shop" and sent["via"] == "1.1 fenced"
        assert (await caller.ask("POST", "/orders/42", 1, b"x" * 300)).body == b"ok"
        assert stage.upstream.arrived[-1].body == b"x" * 300
        assert stage.upstream.connections == 1
        assert (await caller.ask("HEAD", "/")).headers["content-length"] == "2"
        assert (await caller.ask("GET", "/")).body == b"ok"
        # Two requests in one packet are answered in order, and reach the upstream one after the other.
        caller.writer.write(request("POST", "/orders/42", 1, b"1") + request("POST", "/orders/42", 1, b"2"))
        assert [(await caller.answer()).status, (await caller.answer()).status] == [200, 200]
        assert [arrived.body for arrived in stage.upstream.arrived[-2:]] == [b"1", b"2"]
        # What follows a request and is none is answered after it.
        odd_end = await stage.caller()
        got = await odd_end.raw(request("POST", "/orders/42", 1) + b"\x06\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 400" in got
        # A client that closes its side after the request still gets its answer.
        caller.writer.write(request("GET", "/last") + request("GET", "/204"))
        caller.writer.write_eof()
        assert [(await caller.answer()).status, (await caller.answer()).status] == [200, 204]
        assert await caller.reader.read() == b""
        # A request that comes byte by byte, after an empty line.
        slow = await stage.caller()
        for byte in b"\r\n" + request("POST", "/orders/42", 1, b"slowly"):
            slow.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await slow.answer()).status == 200 and stage.upstream.arrived[-1].body == b"slowly"
        old = await stage.caller()
        assert (await old.raw(b"GET /chunks HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nabcde")


@LOOPS
async def test_bodies_are_streamed_both_ways_with_back_pressure(loop: Loop) -> None:
    sent = 0
    block = b"y" * 65536

    async def behave(arrived: Arrived) -> bytes:
        nonlocal sent
        if arrived.method == "PUT":
            return OK
        arrived.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")  # as long as the connection
        for _ in range(250):
            arrived.writer.write(block)
            await arrived.writer.drain()
            sent += 1
        return b""

    async with proxied(behave) as stage:
        # The answer: the upstream is not read while the client does not read.
        reading = await stage.caller(limit=1024)
        reading.writer.write(request("GET", "/big"))
        await until(lambda: any(connection.held_back for connection in stage.proxy.pool.open))
        assert 0 < sent < 250
        head = await reading.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        async with asyncio.timeout(60):
            body = await read_body(reading.reader, {"transfer-encoding": "chunked"})
        assert body == block * 250
        # The request: the client is not read while the upstream does not read.
        upload = await stage.caller()
        upload.writer.write(
            request("PUT", "/orders/42", 1, headers="Transfer-Encoding: chunked\r\n").replace(
                b"Content-Length: 0\r\n", b""
            )
        )
        for _ in range(50):
            upload.writer.write(b"10000\r\n" + block + b"\r\n")
            await upload.writer.drain()
        upload.writer.write(b"0\r\n\r\n")
        assert (await upload.answer()).status == 200
        assert stage.upstream.arrived[-1].body == block * 50


async def test_expect() -> None:
    async with proxied() as stage:
        caller = await stage.caller()
        head, body = request("PUT", "/orders/42", 2, b"hello", headers="Expect: 100-continue\r\n").split(
            b"hello"
        )
        caller.writer.write(head)
        assert (await caller.answer()).status == 100
        caller.writer.write(b"hello" + body)
        assert (await caller.answer()).status == 200
        assert stage.upstream.arrived[-1].body == b"hello"
        late = await stage.caller()
        late.writer.write(head.replace(str(stamp_of(2, seq=1)).encode(), str(stamp_of(1, seq=1)).encode()))
        assert (await late.answer()).status == 412  # without a 100: the body is never sent


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
BAD = {
    "both lengths": (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400),
    "both, the other way": (
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
        400,
    ),
    "two lengths": (b"Content-Length: 0\r\nContent-Length: 36\r\n\r\n" + SMUGGLED, 400),
    "a list of lengths": (b"Content-Length: 0, 36\r\n\r\n" + SMUGGLED, 400),
    "a signed length": (b"Content-Length: +5\r\n\r\nhello" + SMUGGLED, 400),
    "another coding": (b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (400, 501)),
    "two codings": (
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        (400, 501),
    ),
    "a coding that looks like chunked": (b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", (400, 501)),
    "a space before the colon": (b"Content-Length : 5\r\n\r\nhello", 400),
    "a folded header": (b"X-A: 1\r\n 2\r\n\r\n", 400),
    "a bare line feed": (b"X-A: 1\nX-B: 2\r\n\r\n", 400),
    "a NUL": (b"X-A: \0\r\n\r\n", 400),
    "two hosts": (b"Host: b\r\n\r\n", 400),
    "an upgrade": (b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 501),
    "an expectation": (b"Expect: a wonder\r\n\r\n", 417),
    "a long head": (b"X-A: " + b"a" * 40_000 + b"\r\n\r\n", 431),
    "a head without an end": (b"X-A: " + b"a" * 70_000, 431),
    "a chunk of no size": (b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 400),
}


async def test_an_ambiguous_request_is_refused() -> None:
    async with proxied(unnamed="pass") as stage:
        for what, (rest, wanted) in BAD.items():
            caller = await stage.caller()
            got = await caller.raw(b"POST /x HTTP/1.1\r\nHost: a\r\n" + rest)
            status = int(got.split(b" ")[1]) if got else 0
            assert status in (wanted if isinstance(wanted, tuple) else (wanted,)), (what, got[:200])
        for line, status in (
            (b"POST http://b/x", 400),
            (b"POST x", 400),
            (b"POST *", 400),
            (b"CONNECT a:1", 501),
        ):
            got = await (await stage.caller()).raw(b"%b HTTP/1.1\r\nHost: a\r\n\r\n" % line)
            assert got.startswith(b"HTTP/1.1 %d" % status)
        assert (await (await stage.caller()).raw(b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert stage.upstream.arrived == []
        # A client that offers HTTP/2 gets its answer over HTTP/1.1.
        offers = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        caller = await stage.caller()
        assert (await caller.ask("GET", "/", headers=offers)).status == 200
        assert (await caller.ask("GET", "/")).status == 200
        assert "http2-settings" not in stage.upstream.arrived[0].headers


async def test_writes_need_a_name_and_a_stamp() -> None:
    async with proxied(names=("orders/{path.id}", "carts/{header.x-cart}"), mode="require") as stage:
        ask = stage.ask
        assert (await ask("GET", "/orders/42")).status == 200  # safe, without a stamp
        assert (await ask("PUT", "/orders/42")).problem == "missing"
        assert (await ask("PUT", "/customers/1")).problem == "misuse"  # no cart
        assert (await ask("PUT", "/x/../orders/42")).problem == "misuse"
        assert (
            await ask("GET", "/orders/42", headers="X-HTTP-Method-Override: PUT\r\n")
        ).problem == "missing"
        for other in ("X_HTTP_Method_Override: DELETE", "X_Original_URL: /orders/43"):
            assert (await ask("GET", "/orders/42", headers=f"{other}\r\n")).status == 400
        assert (await ask("PUT", "/orders/42", 5, headers="X-Original-URL: /orders/43\r\n")).status == 400
        for cart in (
            "x_cart: 2\r\nX-Cart: 1",
            "Connection: X-Cart\r\nX-Cart: 1",
        ):
            # The latter is not passed on.
            answer = await ask("PUT", "/buy", 5, headers=f"{cart}\r\n", name="carts/1")
            assert (answer.status, answer.problem) == (400, "misuse")
        assert (await ask("PUT", "/orders/42", headers="Fenced-Stamp: 7\r\n")).problem == "invalid"
        assert (await ask("PUT", "/orders/43", 5)).problem == "uncovered"
        assert (await ask("PUT", "/orders/42", 5, headers='Fenced-Proof: "a"\r\n')).status in (400, 501)
        assert (await ask("PUT", "/orders/42", 5)).status == 200
        assert (await ask("GET", "/orders/42", 6)).status == 200  # a stamped read announces
        assert (await ask("PUT", "/orders/42", 5)).problem == "stale"
        assert (await ask("GET", "/orders/42", 5)).problem == "stale"
        assert (await ask("PUT", "/buy", 7, headers="X-Cart: 1\r\n", name="carts/1")).status == 200
        await stage.proxy.gate.store.set_mode("observe")
        assert (await ask("PUT", "/orders/42", 5)).status == 200
        status = await stage.proxy.gate.store.operate(lambda operator: operator.status())
        counts = {(count.verdict, count.ruling) for count in status.guards[0].counts}
        assert {
            ("stale", "refuse"),
            ("stale", "count"),
            ("missing", "refuse"),
            ("uncovered", "refuse"),
        } <= counts
        assert 'fencing_reject_total{guard="store",kind="stale",source="proxy"} 2' in stage.proxy.metrics()


async def test_with_keys_only_a_proven_stamp_counts(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ab" * 32)
    key, other = HmacKey.read("shop-1", tmp_path / "key"), HmacKey("shop-1", b"c" * 32)
    option = next(one for one in proxy_command.params if one.name == "hmac_keys")
    context = click.Context(proxy_command)
    (read,) = option.process_value(context, [f"shop-1={tmp_path}/key"])
    with pytest.raises(click.BadParameter):
        option.process_value(context, ["key"])

    def proof(signing: HmacKey, token: int) -> str:
        return f'Fenced-Proof: "{signing.sign(stamp_of(token, seq=1)).text}"\r\n'

    async with proxied(keys=(read,), alone=True) as stage:
        ask = stage.ask
        assert (await ask("PUT", "/orders/42", 9)).problem == "forged"
        assert (await ask("PUT", "/orders/42", 5, headers=proof(key, 5))).status == 200
        # The mark is there now, so nothing else than the proof is looked at.
        assert (await ask("PUT", "/orders/42", 5, headers=proof(key, 5))).status == 200
        assert (await ask("PUT", "/orders/42", 5)).problem == "forged"
        assert (await ask("PUT", "/orders/42", 5, headers=proof(other, 5))).problem == "forged"
        assert (await ask("PUT", "/orders/42", 5, headers=proof(key, 6))).problem == "forged"
        assert (await ask("PUT", "/orders/42", 4, headers=proof(key, 4))).problem == "stale"
        assert (await ask("PUT", "/orders/42")).status == 200  # the mode decides
        assert len(stage.upstream.arrived) == 3


@pytest.mark.parametrize("alone", [True, False])
async def test_an_unknown_outcome_holds_newer_tokens_back(alone: bool) -> None:
    """The upstream closes without an answer; the client goes in the middle of its body; nothing is repeated."""
    mood = b""

    async def behave(arrived: Arrived) -> bytes:
        return mood

    async with proxied(behave, alone=alone, wait=0.2) as stage:
        broken = await stage.ask("PUT", "/orders/42", 1)
        assert (broken.status, broken.problem) == (504, "indeterminate")
        assert len(stage.upstream.arrived) == 1  # never sent a second time
        assert b'"retry": "no"' in broken.body
        assert (await stage.ask("GET", "/orders/44", 1, name="orders/44")).status == 504
        mood = OK
        assert (
            await stage.ask("PUT", "/orders/44", 2, name="orders/44")
        ).status == 200  # a read changes nothing
        assert (await stage.ask("PUT", "/orders/42", 1)).status == 200  # the same holder may go on
        held = await stage.ask("PUT", "/orders/42", 2)
        assert (held.problem, held.headers["retry-after"]) == ("contended", "1")
        assert (await stage.ask("PUT", "/orders/42", 1)).problem == "stale"  # the mark has risen
        await stage.proxy.gate.settle("orders/42")  # an operator knows more
        assert (await stage.ask("PUT", "/orders/42", 2)).status == 200

        half = await stage.caller()
        half.writer.write(request("PUT", "/orders/43", 1, b"whole", name="orders/43")[:-2])
        await until(lambda: any(connection.exchange for connection in stage.proxy.pool.open))
        half.writer.close()
        await until(lambda: stage.proxy.gate.unknown == 2)
        assert (await stage.ask("PUT", "/orders/43", 2, name="orders/43")).problem == "contended"
        assert "fenced_proxy_unknown_total 2" in stage.proxy.metrics()


async def test_a_client_that_has_gone_is_waited_for_in_order() -> None:
    release = asyncio.Event()

    async def behave(arrived: Arrived) -> bytes:
        if arrived.token == 1:
            await release.wait()
        return OK

    async with proxied(behave) as stage:
        gone = await stage.caller()
        gone.writer.write(request("PUT", "/orders/42", 1))
        await until(lambda: stage.upstream.arrived)
        gone.writer.close()
        newer = asyncio.create_task(stage.ask("PUT", "/orders/42", 2))
        await until(lambda: stage.proxy.gate.waiting)
        assert len(stage.upstream.arrived) == 1
        release.set()
        assert (await newer).status == 200
        assert stage.proxy.gate.unknown == 0


async def test_a_read_that_never_ends_keeps_nobody_out() -> None:
    async def behave(arrived: Arrived) -> bytes:
        if arrived.method == "PUT":
            return OK
        arrived.writer.write(b"HTTP/1.1 200 OK\r\n\r\nthe beginning")
        return await asyncio.Event().wait() or b""  # type: ignore[return-value]

    async with proxied(behave, grace=0.1) as stage:
        reading = await stage.caller()
        reading.writer.write(request("GET", "/orders/42", 1))
        await reading.reader.readuntil(b"the beginning")
        assert (await stage.ask("PUT", "/orders/42", 2)).status == 200
        assert (await stage.ask("GET", "/orders/42", 1)).problem == "stale"
        assert any(connection.exchange for connection in stage.proxy.pool.open), "it is still being read"


@pytest.mark.parametrize("trickles", ["upload", "answer"])
async def test_a_write_that_trickles_is_given_up_once_a_newer_one_waits(trickles: str) -> None:
    """Something comes all the time, so nothing is silent: a body of many bytes, or an answer without an end."""

    async def behave(arrived: Arrived) -> bytes:
        if trickles == "answer" and arrived.token == 1:
            arrived.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not arrived.writer.is_closing():
                arrived.writer.write(b"x")
                await asyncio.sleep(0.005)
            return b""
        return OK

    async with proxied(behave, overtime=0.1) as stage:
        old = await stage.caller()
        whole = request("PUT", "/orders/42", 1, b"x" * 100_000)
        old.writer.write(whole[:-90_000] if trickles == "upload" else whole)
        await until(lambda: any(connection.exchange for connection in stage.proxy.pool.open))

        async def dripping() -> None:
            while True:
                old.writer.write(b"x")
                await asyncio.sleep(0.005)

        drops = asyncio.create_task(dripping()) if trickles == "upload" else None
        newer = asyncio.create_task(stage.ask("PUT", "/orders/42", 2))
        await until(lambda: stage.proxy.gate.unknown)
        if drops is not None:
            drops.cancel()
            assert (await old.answer()).problem == "indeterminate"
        assert not newer.done(), "what has become of the older one is unknown"
        await until(lambda: b"true" in str(stage.proxy.gate._lines["orders/42"].in_flight.packed()).encode())
        await stage.proxy.gate.settle("orders/42")
        assert (await newer).status == 200


async def test_an_idle_connection_that_the_upstream_closes_costs_no_safe_request() -> None:
    async def behave(arrived: Arrived) -> bytes:
        return b"" if arrived.target == "/close" and len(stage.upstream.arrived) % 2 == 0 else OK

    async with proxied(behave) as stage:
        assert (await stage.ask("GET", "/")).status == 200
        assert (await stage.ask("GET", "/close")).status == 200  # repeated, on a new connection
        assert len(stage.upstream.arrived) == 3


async def test_the_log_says_what_was_refused_and_that_the_upstream_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line for an outage, however many requests fail. Nothing while all is well, and never a stamp."""
    async with proxied() as stage:
        assert (await stage.ask("PUT", "/orders/42", 2)).status == 200
        assert not caplog.records
        assert (await stage.ask("PUT", "/orders/42", 1)).status == 412
        nowhere = f"http://127.0.0.1:{stage.port}"
    async with proxied(upstream_url=nowhere) as stage:
        for _ in range(3):
            assert (await stage.ask("PUT", "/orders/42", 3)).status == 503
    refused, lost = caplog.messages
    assert refused == "refused: orders/42: token 1 is stale: 2 has been seen"
    assert lost.startswith("the upstream cannot be used: ConnectionRefusedError")


async def test_an_upstream_that_is_not_there_has_not_got_anything() -> None:
    async with proxied() as other:
        nowhere = f"http://127.0.0.1:{other.port}"
    async with proxied(upstream_url=nowhere) as stage:
        down = await stage.ask("PUT", "/orders/42", 1)
        assert (down.status, down.problem) == (503, "unavailable")
        assert json.loads(down.body)["title"] == "The upstream cannot be reached"
        assert (await stage.ask("PUT", "/orders/42", 2)).problem == "unavailable"  # nobody waits
        assert stage.proxy.gate.unknown == 0


async def test_limits_and_times() -> None:
    async def behave(arrived: Arrived) -> bytes:
        if arrived.target == "/never":
            await asyncio.Event().wait()
        return OK

    async with proxied(behave, body_bytes_max=10, idle=0.2, slow=0.2, timeout=0.2, unnamed="pass") as stage:
        assert (await stage.ask("POST", "/", body=b"a" * 11)).status == 413
        chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nb\r\n" + b"a" * 11
        assert (await (await stage.caller()).raw(chunked)).startswith(b"HTTP/1.1 413")
        assert (await (await stage.caller()).raw(b"GET / HT")).startswith(b"HTTP/1.1 408")
        assert await (await stage.caller()).raw(b"") == b""  # idle
        assert (await stage.ask("GET", "/never")).status == 504

    async with proxied(behave, connections_max=4) as stage:
        crowd = [await stage.caller() for _ in range(5)]
        answers = [asyncio.create_task(caller.ask("GET", "/")) for caller in crowd]
        assert sorted([(await answer).status for answer in answers]) == [200, 200, 200, 200, 503]


async def test_a_stop_finishes_what_is_in_flight() -> None:
    release = asyncio.Event()

    async def behave(arrived: Arrived) -> bytes:
        await release.wait()
        return OK

    async with proxied(behave, alone=True) as stage:
        caller, idle = await stage.caller(), await stage.caller()
        caller.writer.write(request("PUT", "/orders/42", 1))
        await until(lambda: stage.upstream.arrived)
        stopping = asyncio.create_task(stage.proxy.stop())
        await until(lambda: stage.proxy.stopping)
        assert await stage.proxy.ready() == "stopping"
        assert await asyncio.wait_for(idle.reader.read(), 60) == b""
        release.set()
        answer = await caller.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        await stopping
        with pytest.raises(ConnectionRefusedError):
            await stage.caller()
        # The permit was given back, so the next proxy on this store does not wait.
        value = await stage.proxy.gate.store.peek("orders/42")
        assert value.value is not None and value.value.endswith(b",[]]")


@LOOPS
async def test_tls_on_both_sides(tmp_path: Path, loop: Loop) -> None:
    make_certificates(folder := tmp_path / "tls")
    ours, trusted = (str(folder / "server.crt"), str(folder / "server.key")), str(folder / "ca.crt")
    context = ssl.create_default_context(cafile=trusted)
    async with (
        proxied(certificate=ours) as inner,
        proxied(
            certificate=ours, upstream_ca=trusted, upstream_url=f"https://localhost:{inner.port}"
        ) as outer,
    ):
        caller = await outer.caller(ssl=context, server_hostname="localhost")
        assert (await caller.ask("PUT", "/orders/42", 1, b"x" * 100_000)).status == 200
        assert inner.upstream.arrived[0].body == b"x" * 100_000
        assert (await caller.ask("PUT", "/orders/42", 2)).status == 200
        late = await outer.caller(ssl=context, server_hostname="localhost")
        assert (await late.ask("PUT", "/orders/42", 1, b"x" * 100_000)).problem == "stale"


async def test_operators_port() -> None:
    async with proxied() as stage:
        server = admin.AdminPort(stage.proxy, "127.0.0.1", 0).server
        (listening,) = await server.start()
        operators = Stage(stage.proxy, stage.upstream, listening.getsockname()[1], [])
        assert (await stage.ask("PUT", "/orders/42", 1)).status == 200
        for host in ("127.0.0.1", "localhost:8933", "[::1]:8933"):
            operators.host = host
            assert (await operators.ask("GET", "/healthz")).body == b"alive\n", host
        assert (await (await operators.caller()).raw(b"GET /healthz HTTP/1.0\r\n\r\n")).endswith(b"alive\n")
        by_name = request_head(b"GET /healthz HTTP/1.1\r\nHost: Operators.internal:8933\r\n\r\n")
        for host, status in (("operators.internal", 200), ("others.internal", 403)):
            assert (await admin.answer(stage.proxy, by_name, host))[0] == status
        assert (await operators.ask("GET", "/readyz")).body == b"ready\n"
        metrics = (await operators.ask("GET", "/metrics")).body.decode()
        assert 'fenced_proxy_upstream_answers_total{class="2xx"} 1\n' in metrics
        # A page in an operator's browser: of another site, or of a name that leads here.
        for headers in ("Origin: http://evil.example\r\n", "Origin: null\r\n"):
            settle = await operators.ask("POST", "/settle?name=a", headers=headers + "Fenced-Operator: x\r\n")
            assert settle.status == 403
        for host in (
            "evil.example",
            "127.0.0.1.evil.example:8933",
            "localhost.evil.example",
            "[::1",
            "",
            "::1",
        ):
            other = Stage(stage.proxy, stage.upstream, operators.port, [], host=host)
            for method, path in (("GET", "/metrics"), ("POST", "/settle?name=a")):
                assert (await other.ask(method, path, headers="Fenced-Operator: x\r\n")).status == 403, host
            operators.callers += other.callers
        assert (await operators.ask("GET", "/x")).status == 404
        assert (await operators.ask("PUT", "/healthz")).status == 405
        assert (await (await operators.caller()).raw(b"GET /healthz HTTP/1.1\r\n\r\n")).startswith(
            b"HTTP/1.1 400"
        )
        by = "Fenced-Operator: eve\r\n"
        assert (await operators.ask("GET", "/settle?name=orders/42", headers=by)).status == 405
        assert (await operators.ask("POST", "/settle?name=orders/42")).status == 400
        assert (await operators.ask("POST", "/settle?name=a&name=b", headers=by)).status == 400
        assert (await operators.ask("POST", "/settle?name=%00", headers=by)).status == 400
        assert stage.reports == []
        done = await operators.ask("POST", "/settle?name=orders%2F42", headers=by)
        assert done.body == b"orders/42: 0 settled\n"
        assert json.loads(stage.reports[0].removeprefix("audit "))["by"] == "eve"
        for caller in operators.callers:
            await caller.close()
        await server.stop(0)


async def test_unstamped_writers_are_recorded() -> None:
    async with proxied() as stage:
        agent = "User-Agent: legacy-cron/1.0 \xe9" + "x" * 1000
        for path in ("/orders/1", "/orders/2"):
            assert (await stage.ask("PUT", path, headers=f"{agent}\r\n")).status == 200
        assert (await stage.ask("PUT", "/orders/42", 2)).status == 200
        assert (await stage.ask("PUT", "/orders/42", 1)).problem == "stale"
        unstamped, stale = map(json.loads, stage.proxy.callers.lines())
        assert (unstamped["kind"], unstamped["ruling"], unstamped["count"]) == ("missing", "pass", 2)
        assert unstamped["agent"].startswith("legacy-cron/1.0") and len(unstamped["agent"]) == 200
        assert (unstamped["address"], unstamped["name"]) == ("127.0.0.1", "orders/2")
        assert (stale["kind"], stale["ruling"], stale["agent"]) == ("stale", "refuse", "")
        records = request_head(b"GET /records HTTP/1.0\r\n\r\n")
        assert (await admin.answer(stage.proxy, records, ""))[1].count("\n") == 2


def test_records_of_callers_are_bounded() -> None:
    records, now = CallerRecords(), datetime.now(UTC)
    for number in range(CALLERS_MAX + 5):
        records.note(Caller("10.0.0.1", f"program {number}"), "missing", "pass", "a", now)
    lines = list(records.lines())
    assert len(lines) == CALLERS_MAX and json.loads(lines[-1])["agent"] == f"program {CALLERS_MAX + 4}"


async def test_a_body_in_tiny_chunks_costs_little_memory_while_it_waits() -> None:
    """The request waits at the gate; each of its chunks has one byte."""
    release = asyncio.Event()

    async def behave(arrived: Arrived) -> bytes:
        if arrived.token == 1:
            await release.wait()
        return OK

    async with proxied(behave) as stage:
        older = asyncio.create_task(stage.ask("PUT", "/orders/42", 1))
        await until(lambda: stage.upstream.arrived)
        newer = await stage.caller()
        head = request("PUT", "/orders/42", 2, headers="Transfer-Encoding: chunked\r\n")
        newer.writer.write(head.replace(b"Content-Length: 0\r\n", b"") + b"1\r\nx\r\n" * 100_000)
        newer.writer.write(b"0\r\n\r\n")

        def waiting() -> Any:
            found: Any = [each for each in stage.proxy.server.connections if "gate" in each._why_paused]
            return found[0]._exchange._take.__self__ if found else None

        await until(waiting)
        parts = waiting()._body
        assert sum(map(sys.getsizeof, parts)) + sys.getsizeof(parts) < 2 * READ_BYTES_MAX
        release.set()
        assert (await newer.answer()).status == 200
        assert stage.upstream.arrived[-1].body == b"x" * 100_000
        assert (await older).status == 200


async def test_options_that_cannot_work() -> None:
    good = {"upstream": "http://127.0.0.1:1", "names": ("a",), "store": "memory:"}
    for change in (
        {"upstream": "ftp://a"},
        {"upstream": "http://a/path"},
        {"upstream": "http://a:x"},
        {"names": ()},
        {"settle": 1.0, "timeout": 2.0},
        {"upstream": "https://a", "upstream_ca": "/nowhere"},
    ):
        with pytest.raises((Misuse, Misconfigured)):
            FencingProxy(ProxyOptions(**{**good, **change}))  # type: ignore[arg-type]
    with pytest.raises(Misconfigured, match="retry"):
        await FencingProxy(ProxyOptions(**{**good, "store": "memory:x?rule=sequenced"})).start()  # type: ignore[arg-type]


STAMP = str(stamp_of(7, seq=1)).encode()
PIECES = st.sampled_from(
    [
        b"PUT ", b"GET ", b"/orders/42", b"/", b" HTTP/1.1\r\n", b"Host: a\r\n", b"\r\n", b"\r\n\r\n", b"\0", b":",
        b"Content-Length: 3\r\n", b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n",
        b"3\r\nabc\r\n", b"0\r\n\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"abc",
        b'Fenced-Stamp: "' + STAMP + b'"\r\n', b"Fenced-Stamp: " + STAMP + b"\r\n", b"Upgrade: h2c\r\n",
        b"PUT /orders/42 HTTP/1.1\r\nHost: a\r\n",
    ]
)  # fmt: skip


def test_any_bytes_get_an_answer_or_an_end() -> None:
    """No hang, no 500, no stamp in a report, and everything that reaches the upstream is one whole request."""

    async def story(requests: list[bytes]) -> None:
        async with proxied(slow=0.1, idle=0.1, unnamed="pass") as stage:
            callers = [await stage.caller() for _ in requests]
            answers = (caller.raw(data) for caller, data in zip(callers, requests, strict=True))
            for got in await asyncio.gather(*answers):
                assert b"HTTP/1.1 500" not in got, got
            assert not any(STAMP.decode() in report for report in stage.reports)
            assert all(re.fullmatch("[A-Z-]+", arrived.method) for arrived in stage.upstream.arrived)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(
            st.lists(PIECES | st.binary(max_size=8), max_size=12).map(b"".join), min_size=10, max_size=10
        )
    )
    def fuzz(requests: list[bytes]) -> None:
        asyncio.run(story(requests))

    fuzz()
