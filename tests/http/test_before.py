"""Before: the door, its order within the process, its modes, proofs and kept replies; within this process."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fenced
from fenced.http import Before, Receiver, WsgiBefore, WsgiReceiver
from fenced.http.bodies import BODY_BYTES_MAX
from fenced.http.kept import REPLY_BYTES_MAX, KeptReply
from fenced.http.running import RunningRequest, RunningRequests
from fenced.net.problems import PROBLEM_TYPES, TYPE_PREFIX, problem
from fenced.proofs import HmacKey
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World
from tests.http.calling import Pairs, call_asgi, call_wsgi, environ_of, pairs_of
from tests.http.serving import Reply, stamp

NAMES = {"/orders/{id:int}": "orders/{id}", "/open/{x}": None, "/{kind}/{id}": "{kind}/{id}"}
STORES = itertools.count()
Call = Callable[..., Reply]


def new_store(mode: str = "enforce") -> str:
    return f"memory:before-{next(STORES)}?mode={mode}"


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with as many bytes as the path says, in one piece or streamed; 204 for 0."""
    size = int(scope["path"].rpartition("/")[2])
    streams = scope["path"].startswith("/streamed")
    headers = [] if streams or not size else [(b"content-length", b"%d" % size)]
    start = {
        "status": 201 if size else 204,
        "headers": [*headers, (b"set-cookie", b"secret"), (b"x-own", b"kept")],
    }
    await send({"type": "http.response.start", **start})
    if streams:
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body", "body": b"x" * size})


def wsgi_app(environ: Any, start_response: Any) -> Any:
    size = int(environ["PATH_INFO"].rpartition("/")[2])
    streams = environ["PATH_INFO"].startswith("/streamed")
    headers = [] if streams or not size else [("Content-Length", str(size))]
    start_response(
        "201 Created" if size else "204 No Content", [*headers, ("Set-Cookie", "secret"), ("X-Own", "kept")]
    )
    return iter([b"x", b"x" * size]) if streams else [b"x" * size]


class Asgi:
    """A receiver for ASGI, called from blocking code. Each call has an event loop of its own, as in test clients."""

    def __init__(self, **options: Any) -> None:
        self.app = Before(asgi_app, **{"names": NAMES, **options})

    def __call__(self, method: str, path: str, headers: Pairs = (), body: bytes = b"") -> Reply:
        return asyncio.run(call_asgi(self.app, method, path, headers, body=body))


class Wsgi:
    def __init__(self, **options: Any) -> None:
        self.app = WsgiBefore(wsgi_app, **{"names": NAMES, **options})

    def __call__(self, method: str, path: str, headers: Pairs = (), body: bytes = b"") -> Reply:
        return call_wsgi(self.app, method, path, headers, body)


both = pytest.mark.parametrize("receiver", [Asgi, Wsgi])


@both
def test_a_mode_that_does_not_refuse_counts(receiver: Any) -> None:
    url = new_store("observe")
    call = receiver(store=url)
    current, late = pairs_of(stamp(2, 1, "orders/1")), pairs_of(stamp(1, 1, "orders/1"))
    requests = [
        ("/orders/1", current),
        ("/orders/1", late),
        ("/orders/1", []),
        ("/orders/1", [(b"fenced-stamp", b"nonsense")]),
        ("/nowhere/else/1", current),
    ]
    assert [call("POST", path, headers).status for path, headers in requests] == [201] * 5
    counted = sorted(verdict for verdict, *_ in call.app.door.counted)
    assert counted == ["invalid", "missing", "uncovered"], "the stale one was counted by the store"
    fenced.Values(url).set_mode("shadow")
    call = receiver(store=url)
    assert call("POST", "/orders/1").status == 201
    (record,) = call.app.door.records
    assert (record.name, record.verdict, record.ruling) == ("orders/1", "missing", "record")
    fenced.Values(url).set_mode("require")
    call = receiver(store=url)
    assert [call("POST", path, headers).status for path, headers in requests] == [201, 412, 428, 400, 403]


@both
def test_a_store_that_cannot_be_reached(receiver: Any) -> None:
    reply = receiver(store="redis://127.0.0.1:1")("POST", "/orders/1", pairs_of(stamp(1, 1, "orders/1")))
    assert (reply.kind, reply.headers["retry-after"]) == ("unavailable", "1")


@both
def test_two_stamps_are_none(receiver: Any) -> None:
    twice = [*pairs_of(stamp(1, 1, "orders/1")), *pairs_of(stamp(1, 1, "orders/1"))]
    assert receiver(store=new_store())("POST", "/orders/1", twice).kind == "invalid"


@both
def test_names_come_from_the_path_and_never_from_the_stamp(receiver: Any) -> None:
    call = receiver(store=new_store("require"))
    for path in ("/orders/01", "/orders/1/", "/orders//1", "/other"):
        reply = call("POST", path, pairs_of(stamp(1, 1, "orders/1")))
        assert reply.kind == "uncovered", path
    assert call("POST", "/open/1").status == 201, "a route without a name"
    assert call("GET", "/other/1/1").status == 201, "a safe method needs no stamp"

    by_function = receiver(store=new_store("require"), names=lambda request: ("orders/1", "orders/2"))
    assert by_function("POST", "/1", pairs_of(stamp(1, 1, "orders/1"))).kind == "uncovered"
    assert by_function("POST", "/1", pairs_of(stamp(1, 1, "orders/1", "orders/2"))).status == 201


@pytest.mark.parametrize(
    "names", [{}, None, {"orders": "x"}, {"/{a}": "{b}"}, {"/{a}": ""}, {"/{a": "x"}, {"/{a}/{a}": "{a}"}]
)
def test_wrong_names_are_refused_at_the_start(names: Any) -> None:
    with pytest.raises(fenced.Misuse):
        Before(asgi_app, store="memory:", names=names)


@both
def test_a_safe_request_with_a_stamp_announces(receiver: Any) -> None:
    call = receiver(store=new_store(), rule="sequenced")
    assert call("GET", "/orders/1", pairs_of(stamp(5, 0, "orders/1"))).status == 201
    assert call("POST", "/orders/1", pairs_of(stamp(4, 1, "orders/1"))).kind == "stale"
    assert call("GET", "/orders/1", pairs_of(stamp(4, 0, "orders/1"))).kind == "stale"
    assert call("POST", "/orders/1", pairs_of(stamp(5, 1, "orders/1"))).status == 201


@both
def test_stamps_need_proofs_if_there_are_keys(receiver: Any) -> None:
    key, other = HmacKey("ours", b"k" * 32), HmacKey("ours", b"o" * 32)
    call = receiver(store=new_store(), keys=[key])
    mine = stamp(1, 1, "orders/1")
    assert call("POST", "/orders/1", pairs_of(key.sign(mine))).status == 201
    assert call("POST", "/orders/1", pairs_of(other.sign(mine))).kind == "forged"
    assert call("POST", "/orders/1", pairs_of(mine)).kind == "forged"
    assert receiver(store=new_store())("POST", "/orders/1", pairs_of(key.sign(mine))).kind == "unsupported"


@both
def test_small_complete_replies_are_kept(receiver: Any) -> None:
    call = receiver(store=new_store(), rule="sequenced")
    for kind, size, again in (
        ("orders", REPLY_BYTES_MAX, "replayed"),
        ("orders", REPLY_BYTES_MAX + 1, "applied"),
        ("streamed", 9, "applied"),
        ("nothing", 0, "replayed"),
    ):
        path, mine = f"/{kind}/{size}", pairs_of(stamp(1, 1, f"{kind}/{size}"))
        first, second = call("POST", path, mine), call("POST", path, mine)
        assert first.status in (201, 204) and not first.replayed
        assert ("replayed" if second.replayed else second.kind) == again
        assert second.headers.get("x-own") == ("kept" if again == "replayed" else None)
        assert "set-cookie" not in second.headers, "cookies are secrets"
        assert call("PUT", path, mine).kind == "invalid", "the same stamp with another request"


@both
def test_only_a_5xx_leaves_the_operation_unknown_to_a_repeat(receiver: Any) -> None:
    """An answer below 500, or one that asks for a repeat, takes the operation back. Any other one leaves it unknown."""
    call, name = receiver(store=new_store(), rule="sequenced"), "orders/1"
    run, call.app._app = call.app._app, None

    def failing(error: fenced.FencedError, answers: bool) -> Any:
        def answer_it(environ: Any, start_response: Any) -> Any:  # as Flask and Django do
            if not answers:
                raise error
            status, headers, body = problem(error)
            start_response(f"{status} x", headers)
            return [body]

        async def answer_it_async(scope: Any, receive: Any, send: Any) -> None:
            if not answers:
                raise error
            status, headers, body = problem(error)
            pairs = [(key.lower().encode(), value.encode()) for key, value in headers]
            await send({"type": "http.response.start", "status": status, "headers": pairs})
            await send({"type": "http.response.body", "body": body})

        return answer_it_async if receiver is Asgi else answer_it

    def post(seq: int, app: Any) -> Reply:
        call.app._app = app
        reply: Reply = call("POST", "/orders/1", pairs_of(stamp(1, seq, name)))
        return reply

    assert post(1, failing(fenced.Unavailable("x"), False)).kind == "unavailable", "nothing came before"
    assert post(1, run).status == 201
    seq = 2
    for answers in (False, True):
        for error in (fenced.Contended("x"), fenced.Conflict("x"), fenced.Unavailable("x")):
            assert post(seq, failing(error, answers)).kind == problem_kind(error)
            assert post(seq - 1, run).replayed, "the operation before is the last one again"
            assert post(seq, run).status == 201, "it runs"
            assert post(seq, run).replayed
            seq += 1
        unknown = fenced.Indeterminate("x")
        assert post(seq, failing(unknown, answers)).kind == post(seq, run).kind == "indeterminate"
        seq += 1
        for refused in (fenced.StaleToken("x"), fenced.LeaseLost("x", reason="y")):
            assert post(seq, failing(refused, answers)).kind == problem_kind(refused)
            assert post(seq, run).status == 201
            seq += 1
    with pytest.raises(ZeroDivisionError):
        post(seq, lambda *_: 1 / 0)
    assert post(seq, run).kind == "indeterminate"


def guarding_asgi(runs: list[bytes]) -> Any:
    """An app that reads the body, and answers 401 without the password."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        known = dict(scope["headers"]).get(b"authorization") == b"owner"
        runs.extend([body] if known else [])
        answer = b"secret of the owner" if known else b"who are you"
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 201 if known else 401, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


def guarding_wsgi(runs: list[bytes]) -> Any:
    def app(environ: Any, start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0))
        known = environ.get("HTTP_AUTHORIZATION") == "owner"
        runs.extend([body] if known else [])
        answer = b"secret of the owner" if known else b"who are you"
        start_response("201 Created" if known else "401 X", [("Content-Length", str(len(answer)))])
        return [answer]

    return app


@both
@pytest.mark.parametrize("rule", ["once", "sequenced"])
def test_a_kept_reply_goes_to_its_caller_alone(receiver: Any, rule: Any) -> None:
    """A stamp is made of public parts, so a stranger can send it, first or afterwards."""
    call, runs = receiver(store=new_store(), rule=rule), list[bytes]()
    call.app._app = (guarding_asgi if receiver is Asgi else guarding_wsgi)(runs)
    mine, owner = pairs_of(stamp(1, 1, "orders/1")), [(b"authorization", b"owner")]

    def post(headers: Any, path: str = "/orders/1?a=1", body: bytes = b"sell one") -> Reply:
        reply: Reply = call("POST", path, [*mine, *headers], body)
        return reply

    assert post([]).status == 401
    assert post(owner).status == 201, "what a stranger was answered is not the answer of the owner"
    assert post(owner).replayed and post(owner).body == b"secret of the owner"
    for stranger in (
        [],
        [(b"authorization", b"other")],
        [*owner, (b"cookie", b"a=1")],
        [(b"cookie", b"owner")],
    ):
        reply = post(stranger)
        assert (reply.status, reply.kind, reply.replayed) == (200, "applied", False)
        assert b"secret" not in reply.body
    changed = [post(owner, "/orders/1?a=2"), post(owner, "/orders/1")]
    changed += [post(owner, body=body) for body in (b"sell two", b"", b"x" * BODY_BYTES_MAX * 2)]
    for other in changed:
        assert (other.status, other.kind) == (400, "invalid"), "another request"
    assert runs == [b"sell one"]


@both
def test_a_reply_to_a_long_request_is_not_kept(receiver: Any) -> None:
    call, runs = receiver(store=new_store(), rule="sequenced"), list[bytes]()
    call.app._app = (guarding_asgi if receiver is Asgi else guarding_wsgi)(runs)
    for seq, (size, again) in enumerate(((BODY_BYTES_MAX, True), (BODY_BYTES_MAX + 1, False)), 1):
        headers = [*pairs_of(stamp(1, seq, "orders/1")), (b"authorization", b"owner")]
        first, second = (call("POST", "/orders/1", headers, b"x" * size) for _ in range(2))
        assert (first.status, second.replayed, second.kind) == (201, again, None if again else "applied")
    assert len(runs) == 2


def test_long_headers_of_a_reply_are_not_kept() -> None:
    assert KeptReply.of(200, [("X", "y" * REPLY_BYTES_MAX)], b"") is None
    assert KeptReply.of(200, [("Set-Cookie", "y" * REPLY_BYTES_MAX)], b"") is not None


def problem_kind(error: fenced.FencedError) -> str:
    document = json.loads(problem(error).body)
    return str(document["type"]).removeprefix(TYPE_PREFIX)


def test_a_store_whose_own_rule_would_interfere_is_refused() -> None:
    call = Wsgi(store="memory:own-rule?rule=once", rule="once")
    with pytest.raises(fenced.Misconfigured, match="rule retry"):
        call("POST", "/orders/1")


class Blind(RunningRequests):
    """Planted: a newer request does not wait for older ones."""

    async def wait_for_older(self, request: RunningRequest, patience: float) -> None:
        return


class Late(RunningRequests):
    """Planted: a request enters the order after the store has judged it."""

    def begin(self, names: tuple[str, ...], token: int, **options: Any) -> RunningRequest:
        found = super().begin(names, token, **options)
        for name in names:
            self._by_name[name].remove(found)
        return found

    async def wait_for_older(self, request: RunningRequest, patience: float) -> None:
        for name in request.names:
            self._by_name.setdefault(name, []).append(request)
        await super().wait_for_older(request, patience)


STORY = [
    ("old begins", "old ends", "new begins", "new ends"),
    ("old begins", "new begins", "new ends", "old ends"),
]


@pytest.mark.parametrize("planted", [False, True])
def test_a_newer_request_waits_for_an_older_one_in_asyncio(planted: bool) -> None:
    log: list[str] = []

    async def story() -> None:
        release = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            who = dict(scope["headers"])[b"x-who"].decode()
            log.append(f"{who} begins")
            if who == "old":
                await release.wait()
            log.append(f"{who} ends")
            await asgi_app(scope, receive, send)

        before = Before(app, store=new_store(), names=NAMES)
        door = await before._doorway.open()
        if planted:
            door.running = Blind(door._runtime)

        async def post(who: str, token: int) -> Reply:
            headers = [*pairs_of(stamp(token, 1, "orders/1")), (b"x-who", who.encode())]
            return await call_asgi(before, "POST", "/orders/1", headers)

        old = asyncio.create_task(post("old", 1))
        while log != ["old begins"]:
            await asyncio.sleep(0)
        (running,) = door.running._by_name["orders/1"]
        new = asyncio.create_task(post("new", 2))
        while running.ended is None and "new ends" not in log:  # until it waits, or does not
            await asyncio.sleep(0)
        assert (await post("late", 1)).kind == "stale", "nothing older enters any more"
        release.set()
        assert [(await task).status for task in (old, new)] == [201, 201]
        assert len(door.running) == 0, "nothing is remembered of names that nobody uses"

    asyncio.run(story())
    assert tuple(log) == STORY[planted]


@pytest.mark.parametrize("planted", [False, True])
def test_a_request_that_the_store_has_judged_is_waited_for(planted: bool) -> None:
    """The answer of the store to the older request comes late: after the newer one was judged."""
    log: list[str] = []

    async def story() -> None:
        judged, release = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            log.append(dict(scope["headers"])[b"x-who"].decode())
            await asgi_app(scope, receive, send)

        before = Before(app, store=new_store(), names=NAMES)
        door = await before._doorway.open()
        if planted:
            door.running = Late(door._runtime)
        announce = door.store.announce

        async def slow(credential: Any) -> None:
            await announce(credential)
            if credential.stamps[0].token == 1:
                judged.set()
                await release.wait()

        door.store.announce = slow  # type: ignore[method-assign]

        async def post(who: str, token: int) -> Reply:
            headers = [*pairs_of(stamp(token, 1, "orders/1")), (b"x-who", who.encode())]
            return await call_asgi(before, "POST", "/orders/1", headers)

        old = asyncio.create_task(post("old", 1))
        await judged.wait()
        new = asyncio.create_task(post("new", 2))
        while not new.done() and not any(
            request.ended for waiting in door.running._by_name.values() for request in waiting
        ):
            await asyncio.sleep(0)  # until it waits, or does not
        release.set()
        assert [(await task).status for task in (old, new)] == [201, 201]

    asyncio.run(story())
    assert log == (["new", "old"] if planted else ["old", "new"])


class Hasty(WsgiBefore):
    """Planted: a request ends before its streamed body."""

    def _run(self, responding: Any, environ: Any) -> Any:
        found = super()._run(responding, environ)
        responding.leave()
        return found


@pytest.mark.parametrize("kind, meanwhile", [(WsgiBefore, "contended"), (Hasty, None)])
def test_a_request_runs_until_its_streamed_body_has_ended(kind: Any, meanwhile: str | None) -> None:
    before = kind(wsgi_app, store=new_store(), names=NAMES, patience=0)
    body = before(environ_of("POST", "/streamed/1", pairs_of(stamp(1, 1, "streamed/1"))), lambda *_: None)
    parts = iter(body)
    assert next(parts) == b"x"
    newer = pairs_of(stamp(2, 1, "streamed/1"))
    assert call_wsgi(before, "POST", "/streamed/1", newer).kind == meanwhile
    assert list(parts) == [b"x"]
    body.close()
    assert call_wsgi(before, "POST", "/streamed/1", newer).status == 201


@both
def test_a_read_holds_nobody_back(receiver: Any) -> None:
    call = receiver(store=new_store(), patience=0)
    assert call("POST", "/orders/1", pairs_of(stamp(1, 1, "orders/1"))).status == 201
    call.app.door.running.begin(("orders/1",), 1, reads=True)  # a read that never ends
    assert call("POST", "/orders/1", pairs_of(stamp(1, 2, "orders/1"))).status == 201
    assert call("POST", "/orders/1", pairs_of(stamp(2, 1, "orders/1"))).status == 201


def test_an_older_request_is_cut_off_once_a_newer_one_has_waited() -> None:
    """By the clock of a world. The limit begins when a newer token waits, and when the older request has begun."""
    world = World("overtime")
    runtime = SimulatedRuntime(Process(world, "p"))
    running = RunningRequests(runtime, overtime=10.0)
    log: list[tuple[float, str]] = []

    def begin(token: int) -> RunningRequest:
        def cut() -> bool:
            log.append((round(world.now, 3), f"cut {token}"))
            return token == 1 and world.now > 115  # at first it did not wait for its client

        return running.begin(("a",), token, cut=cut)

    def start(token: int, patience: float) -> None:
        request = begin(token)

        async def enter() -> None:
            try:
                await running.wait_for_older(request, patience)
            except fenced.Contended:
                running.end(request)
                log.append((round(world.now, 3), f"{token} gives up"))
            else:
                log.append((round(world.now, 3), f"{token} begins"))

        runtime.spawn(enter, f"request {token}")

    world.at(1, lambda: start(1, 30.0))
    world.at(100, lambda: start(2, 5.0))
    world.at(106, lambda: start(3, 60.0))
    world.at(107, lambda: start(4, 60.0))
    world.run(200)
    assert log == [
        (1, "1 begins"), (105, "2 gives up"), (110, "cut 1"), (120, "cut 1"), (120, "3 begins"),
        (130, "cut 3"), (140, "cut 3"), (150, "cut 3"), (160, "cut 3"), (167, "4 gives up"),
    ]  # fmt: skip


async def uploading(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    return body


@pytest.mark.parametrize("stuck", ["upload", "answer"])
async def test_a_client_that_is_stuck_is_cut_off_in_asyncio(stuck: str) -> None:
    """An upload that stops in the middle, and a client that does not read: the newer request goes on."""
    at_the_client, ended = asyncio.Event(), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await uploading(receive)
            await asgi_app(scope, receive, send)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    before = Before(app, store=new_store(), names=NAMES, overtime=0.01)
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b"a", "more_body": stuck == "upload"}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        at_the_client.set()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if stuck == "answer" and "body" in message:
            at_the_client.set()
            await asyncio.Event().wait()
        sent.append(message)

    headers = pairs_of(stamp(1, 1, "orders/1"))
    scope = {"type": "http", "method": "POST", "path": "/orders/1", "headers": headers, "query_string": b""}
    old = asyncio.create_task(before(scope, receive, send))
    await at_the_client.wait()
    new = await call_asgi(before, "POST", "/orders/1", pairs_of(stamp(2, 1, "orders/1")))
    assert new.status == 201 and ended, "the older program has ended before the newer one began"
    if stuck == "upload":
        await old
        assert (ended, sent[0]["status"]) == (["Indeterminate"], 504)
    else:
        with pytest.raises(ConnectionAbortedError):
            await old
    # Whoever else cancels the program is not taken for the cut.
    at_the_client.clear()
    messages.append({"type": "http.request", "body": b"a", "more_body": True})
    scope["headers"] = pairs_of(stamp(3, 1, "orders/1"))
    cancelled = asyncio.create_task(before(dict(scope), receive, send))
    await at_the_client.wait()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled


@pytest.mark.parametrize("stuck", ["upload", "answer"])
def test_a_client_that_is_stuck_is_cut_off_in_threads(stuck: str) -> None:
    """The thread cannot be woken; when it goes on, its program gets an error instead of what it waited for."""
    reads, release, log = threading.Event(), threading.Event(), list[str]()

    class Slow:
        def read(self, size: int = -1) -> bytes:
            reads.set()
            assert release.wait(100)
            return b"a"

    def app(environ: Any, start_response: Any) -> Any:
        environ["wsgi.input"].read(1)
        start_response("201 Created", [])
        log.append("first part")
        yield b"a"
        log.append("goes on")
        yield b"b"

    before = WsgiBefore(app, store=new_store(), names=NAMES, overtime=0.01)

    def first() -> list[bytes]:
        environ = environ_of("POST", "/orders/1", pairs_of(stamp(1, 1, "orders/1")), b"a")
        environ["wsgi.input"] = Slow() if stuck == "upload" else environ["wsgi.input"]
        got = []
        for part in before(environ, lambda *_: lambda _: None):
            got.append(part)
            reads.set()
            assert release.wait(100)
        return got

    with ThreadPoolExecutor(1) as threads:
        old = threads.submit(first)
        assert reads.wait(100)
        assert call_wsgi(before, "POST", "/orders/1", pairs_of(stamp(2, 1, "orders/1")), b"a").status == 201
        expected = ["first part", "goes on"]
        assert log == (expected if stuck == "upload" else ["first part", *expected])
        release.set()
        with pytest.raises(fenced.Indeterminate, match="cut off"):
            old.result()
    assert log == (expected if stuck == "upload" else ["first part", *expected]), "it did not go on"
    assert before.door is not None and len(before.door.running) == 0


@pytest.mark.parametrize("extensions", [{}, {"websocket.http.response": {}}])
async def test_a_websocket_on_a_guarded_path_is_refused(extensions: Any) -> None:
    accepted: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        accepted.append(scope["path"])

    before = Before(app, store=new_store(), names=NAMES)

    async def connect(path: str) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = pairs_of(stamp(1, 1, "orders/1"))
        await before(
            {"type": "websocket", "path": path, "headers": headers, "extensions": extensions}, receive, send
        )
        return sent

    for path in ("/orders/1", "/not/listed/1"):
        refused = await connect(path)
        if extensions:
            assert (refused[0]["type"], refused[0]["status"]) == ("websocket.http.response.start", 403)
            assert json.loads(refused[1]["body"])["type"].endswith("uncovered")
        else:
            assert refused == [{"type": "websocket.close"}]
    assert await connect("/open/1") == [] and accepted == ["/open/1"]
    assert before.door is not None
    await before.door.store.set_mode("observe")
    before.door._modes = None
    assert await connect("/orders/1") == [] and accepted == ["/open/1", "/orders/1"]
    assert before.door.counted["uncovered", "count", "observe"] == 1


def test_an_upgrade_in_wsgi_is_refused() -> None:
    """Some servers hand the socket over to the program."""
    call = Wsgi(store=new_store())
    for headers in ([], pairs_of(stamp(1, 1, "orders/1"))):
        reply = call("GET", "/orders/1", [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), *headers])
        assert (reply.status, reply.kind) == (403, "uncovered")
    assert call("GET", "/open/1", [(b"upgrade", b"websocket")]).status == 201
    assert call("GET", "/orders/1", [(b"upgrade", b"h2c")]).status == 201


@pytest.mark.parametrize("rule", ["retry", "sequenced"])
def test_a_newer_request_waits_for_an_older_one_in_threads(rule: Any) -> None:
    log: list[str] = []
    begun, release = threading.Event(), threading.Event()

    def app(environ: Any, start_response: Any) -> Any:
        who = environ["HTTP_X_WHO"]
        log.append(f"{who} begins")
        if who == "old":
            begun.set()
            assert release.wait(100)
        log.append(f"{who} ends")
        return wsgi_app(environ, start_response)

    before = WsgiBefore(app, store=new_store(), names=NAMES, rule=rule)

    def post(who: str, token: int, seq: int = 1) -> Reply:
        headers = [*pairs_of(stamp(token, seq, "orders/1")), (b"x-who", who.encode())]
        return call_wsgi(before, "POST", "/orders/1", headers)

    with ThreadPoolExecutor(3) as threads:
        old = threads.submit(post, "old", 1)
        assert begun.wait(100)
        assert before.door is not None
        (running,) = before.door.running._by_name["orders/1"]
        new = threads.submit(post, "new", 2)
        repeat = threads.submit(post, "old", 1) if rule == "sequenced" else None
        while running.ended is None and not new.done():
            threading.Event().wait(0.005)
        release.set()
        assert [old.result().status, new.result().status] == [201, 201]
        if repeat is not None:
            # It waited for the answer and got it again, or came after the newer request.
            assert repeat.result().replayed or repeat.result().kind == "stale"
    assert tuple(log) == STORY[0]


def test_patience_is_bounded() -> None:
    before = WsgiBefore(wsgi_app, store=new_store(), names=NAMES, patience=0.01)
    call_wsgi(before, "POST", "/orders/1", pairs_of(stamp(1, 1, "orders/1")))
    assert before.door is not None
    before.door.running.begin(("orders/1",), 1)  # a request that never ends
    reply = call_wsgi(before, "POST", "/orders/1", pairs_of(stamp(2, 1, "orders/1")))
    assert (reply.kind, reply.headers["retry-after"]) == ("contended", "1")


MINE = stamp(3, 1, "orders/1")
TEXT = f'"{MINE}"'.encode()
VALUES = st.one_of(
    st.just(TEXT),
    st.binary(max_size=60),
    st.builds(
        lambda at, byte: TEXT[:at] + byte + TEXT[at + 1 :], st.integers(0, len(TEXT)), st.binary(max_size=2)
    ),
    st.sampled_from([b'""', b'"', TEXT + b"," + TEXT, TEXT[1:-1], b'"k:' + b"0" * 64 + b'"', b"x" * 5000]),
)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"fenced-stamp", b"fenced-proof", b"idempotency-key", b"content-length", b"x", b""]),
        VALUES,
    ),
    max_size=4,
)
PATHS = st.one_of(
    st.sampled_from(
        ["/orders/1", "/orders/01", "/open/1", "/", "//", "/orders/%31", "/orders/\u202e1", "/ /\x00"]
    ),
    st.text(max_size=20).map(lambda text: "/" + text),
)
METHODS = st.sampled_from(["POST", "GET", "DELETE", "post", "QUERY", ""])
STATUSES = {201, *(row.status for row in PROBLEM_TYPES)} - {500}


async def constant_asgi(scope: Any, receive: Any, send: Any) -> None:
    await asgi_app({**scope, "path": "/1"}, receive, send)


def constant_wsgi(environ: Any, start_response: Any) -> Any:
    return wsgi_app({**environ, "PATH_INFO": "/1"}, start_response)


@pytest.fixture(scope="module")
def asgi_receivers() -> dict[str, Any]:
    key = HmacKey("k", b"k" * 32)
    return {
        "receiver": Receiver(constant_asgi),
        **{
            rule: Before(constant_asgi, store=new_store(), names=NAMES, rule=rule)
            for rule in ("retry", "once")
        },
        "proven": Before(constant_asgi, store=new_store("require"), names=NAMES, keys=[key]),
    }


@pytest.fixture(scope="module")
def wsgi_receivers() -> dict[str, Any]:
    return {
        "receiver": WsgiReceiver(constant_wsgi),
        "sequenced": WsgiBefore(constant_wsgi, store=new_store("require"), names=NAMES, rule="sequenced"),
    }


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.tuples(METHODS, PATHS, HEADERS), min_size=1, max_size=6))
def test_every_request_is_answered(
    asgi_receivers: dict[str, Any], wsgi_receivers: dict[str, Any], requests: list[Any]
) -> None:
    """No error page, no hang, and no stamp in a log or an answer."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        replies = [call_wsgi(app, *one) for app in wsgi_receivers.values() for one in requests]

        async def call_all() -> list[Reply]:
            return [await call_asgi(app, *one) for app in asgi_receivers.values() for one in requests]

        replies += asyncio.run(call_all())
    finally:
        logging.getLogger().removeHandler(handler)
    for reply in replies:
        assert reply.status in STATUSES, reply
        assert MINE.grant.encode() not in reply.body
        assert reply.status == 201 or reply.kind is not None
    assert not logged
