"""The hooks of httpx, requests and aiohttp: what leaves, where it goes, and what an answer raises."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import pytest
import requests

import fenced
from fenced.http import operation, operation_id, stamping
from fenced.http.aiohttp import stamping_middleware
from fenced.http.httpx import AsyncStampingTransport, StampingTransport
from fenced.http.requests import StampingAdapter, stamp_calls
from fenced.http.sending import Stamper
from fenced.proofs import HmacKey, Proof, verify
from tests.http.origin import Origin, SeenRequest

Call = Callable[..., Any]
"""`call(method, url, timeout=, headers=)`: the status and the body of the answer."""
SECONDS = 100.0
"""The timeout of every call; leases last longer."""


def _by_httpx(*origins: str) -> Iterator[Call]:
    inner = httpx.HTTPTransport(verify=False)  # reading certificates takes a while
    with httpx.Client(transport=StampingTransport(*origins, inner=inner), follow_redirects=True) as client:

        def call(method: str, url: str, timeout: float | None, headers: dict[str, str]) -> object:
            answer = client.request(method, url, timeout=timeout, headers=headers)
            assert answer.elapsed
            return answer.status_code, answer.content, answer.request.headers

        yield call


def _by_requests(*origins: str) -> Iterator[Call]:
    with requests.Session() as session:
        session.trust_env = False
        stamp_calls(session, *origins)

        def call(method: str, url: str, timeout: float | None, headers: dict[str, str]) -> object:
            answer = session.request(method, url, timeout=timeout, headers=headers)
            return answer.status_code, answer.content, answer.request.headers

        yield call


def _by_async_httpx(*origins: str) -> Iterator[Call]:
    transport = AsyncStampingTransport(*origins, inner=httpx.AsyncHTTPTransport(verify=False))
    client = httpx.AsyncClient(transport=transport, follow_redirects=True)

    async def call(method: str, url: str, timeout: float | None, headers: dict[str, str]) -> object:
        answer = await client.request(method, url, timeout=timeout, headers=headers)
        return answer.status_code, answer.content, answer.request.headers

    yield from _awaited(call, client.aclose)


def _by_aiohttp(*origins: str) -> Iterator[Call]:
    async def call(method: str, url: str, timeout: float | None, headers: dict[str, str]) -> object:
        limit = aiohttp.ClientTimeout(total=timeout)
        middleware = stamping_middleware(*origins)
        async with (
            aiohttp.ClientSession(middlewares=[middleware], timeout=limit) as session,
            session.request(method, url, headers=headers) as answer,
        ):
            return answer.status, await answer.read(), answer.request_info.headers

    yield from _awaited(call)


def _awaited(call: Callable[..., Any], close: Callable[[], Any] | None = None) -> Iterator[Call]:
    with asyncio.Runner() as runner:
        yield lambda *args: runner.run(call(*args), context=contextvars.copy_context())
        if close is not None:
            runner.run(close())


CLIENTS = {
    "httpx": _by_httpx,
    "httpx async": _by_async_httpx,
    "requests": _by_requests,
    "aiohttp": _by_aiohttp,
}


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin() as origin:
        yield origin


@pytest.fixture(params=CLIENTS)
def call(request: pytest.FixtureRequest, origin: Origin) -> Iterator[Call]:
    """A client whose calls to `origin` are stamped."""
    with contextlib.contextmanager(CLIENTS[request.param])(origin.url) as made:

        def call(
            method: str, url: str, timeout: float | None = SECONDS, headers: dict[str, str] | None = None
        ) -> Any:
            status, body, sent = made(method, url, timeout, headers or {})
            assert headers or "Fenced-Stamp" not in sent, (
                "the program sees and may log what it has sent itself"
            )
            return status, body

        yield call


@pytest.fixture
def lease() -> Iterator[fenced.Lease]:
    with (
        contextlib.suppress(fenced.LeaseLost),  # which a test may bring about
        fenced.Client("memory:") as client,
        client.hold("orders/42", ttl=600) as lease,
    ):
        yield lease


def seqs(received: list[SeenRequest]) -> list[int | None]:
    """The seq of each request; -1 if it carries no stamp."""
    texts = [each.headers.get("Fenced-Stamp") for each in received]
    return [-1 if text is None else fenced.Stamp.parse(text.strip('"')).seq for text in texts]


def test_each_call_is_an_operation_and_a_retry_is_the_same_one(
    call: Call, origin: Origin, lease: fenced.Lease
) -> None:
    url = f"{origin.url}/apply/orders/42"
    with stamping(lease):
        assert call("GET", url)[0] == call("POST", url)[0] == call("POST", url)[0] == 200
    assert call("GET", url)[0] == 200
    with pytest.raises(fenced.MissingStamp):
        call("POST", url)
    with operation(lease) as stamp:
        assert call("GET", url)[0] == call("POST", url)[0] == 200
        with pytest.raises(fenced.AlreadyApplied):
            call("POST", url)
    assert seqs(origin.received) == [0, 1, 2, -1, -1, 0, 3, 3]
    keys = [each.headers.get("Idempotency-Key") for each in origin.received]
    assert keys[0] is keys[3] is keys[4] is keys[5] is None
    assert keys[6] == keys[7] == f'"{operation_id(stamp)}"'
    assert len(set(keys)) == 4

    with stamping(stamp), pytest.raises(fenced.AlreadyApplied):  # the same operation, from another block
        call("POST", url, headers={"Idempotency-Key": '"of the caller"'})
    assert origin.received[-1].headers["Idempotency-Key"] == '"of the caller"'


def test_a_refusal_is_the_error_that_the_receiver_raised(
    call: Call, origin: Origin, lease: fenced.Lease, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"{origin.url}/apply/orders/42"
    with stamping(lease.next_stamp()._replace(token=lease.token + 1, grant="f" * 32)):
        call("GET", url)
    with stamping(lease), pytest.raises(fenced.StaleToken) as refused:
        call("POST", url)
    error = refused.value
    assert error.stamp is not None
    assert (error.name, error.mark, error.stamp.token) == ("orders/42", lease.token + 1, lease.token)
    assert "orders/42: stale" in str(error)
    with stamping(lease):
        assert call("POST", f"{origin.url}/other") == (
            418,
            b'{"type": "about:blank", "title": "I\'m a teapot"}',
        )
    for text in (caplog.text, str(error), repr(error)):
        assert lease.grant not in text


def test_a_redirect_takes_no_stamp_to_another_origin(call: Call, origin: Origin, lease: fenced.Lease) -> None:
    with Origin() as stranger, stamping(lease):
        for status in (307, 303):
            call("POST", f"{origin.url}/to/{status}?to={quote(stranger.url + '/apply/orders/42')}")
        own = {
            "Fenced-Stamp": f'"{lease.next_stamp()}"',
            "Fenced-Proof": '"a:b"',
            "Idempotency-Key": '"mine"',
        }
        call("PUT", f"{origin.url}/to/307?to={quote(stranger.url)}", headers=own)
        call("PUT", stranger.url, headers=own)
    assert len(stranger.received) == 4
    for each in stranger.received:
        assert not {"Fenced-Stamp", "Fenced-Proof"} & each.headers.keys()
    assert [each.headers.get("Idempotency-Key") for each in stranger.received] == [
        None,
        None,
        '"mine"',
        '"mine"',
    ]
    assert seqs(origin.received) == [1, 2, 3]


def test_a_redirect_within_the_listed_origins_is_a_new_operation(
    call: Call, origin: Origin, lease: fenced.Lease
) -> None:
    """A receiver that has seen the first stamp before it redirected would take the same one for a repeat."""
    with stamping(lease):
        assert call("POST", f"{origin.url}/to/307?to=/apply/orders/42")[0] == 200
        assert call("POST", f"{origin.url}/to/303?to=/apply/orders/42")[0] == 200
    assert seqs(origin.received) == [1, 2, 3, 0]


def test_nothing_is_sent_without_enough_time(call: Call, origin: Origin, lease: fenced.Lease) -> None:
    url = f"{origin.url}/apply/orders/42"
    with stamping(lease):
        with pytest.raises(fenced.NotEnoughTime, match="a shorter timeout") as late:
            call("POST", url, timeout=1000)
        assert late.value.need == 1000
        with pytest.raises(fenced.Misuse, match="timeout"):
            call("POST", url, timeout=None)
    with operation(lease, need=1000), pytest.raises(fenced.NotEnoughTime):
        call("POST", url)
    with stamping(lease, need=1):
        assert call("POST", url, timeout=None)[0] == 200
    with stamping(lease):
        lease._grant.lose("taken")
        with pytest.raises(fenced.LeaseLost):
            call("POST", url)
    assert len(origin.received) == 1


def test_aiohttp_repeats_a_call_only_under_its_own_stamp(origin: Origin, lease: fenced.Lease) -> None:
    """By itself it repeats a PUT whose connection broke. Under a new stamp that would be a second operation."""
    for call in _by_aiohttp(origin.url):
        with stamping(lease), pytest.raises(aiohttp.ClientConnectionError, match="operation"):
            call("PUT", f"{origin.url}/drop", SECONDS, {})
        assert seqs(origin.received) == [1]
        origin.received.clear()
        with operation(lease):
            assert call("PUT", f"{origin.url}/drop", SECONDS, {})[0] == 200
        assert seqs(origin.received) == [2, 2]


def test_a_key_proves_each_stamp(origin: Origin, lease: fenced.Lease) -> None:
    key = HmacKey("shop-1", b"k" * 32)
    for call in _by_httpx(origin.url):
        with stamping(lease, key=key):
            call("POST", f"{origin.url}/apply/orders/42", SECONDS, {})
        with operation(lease, key=key):
            call("POST", f"{origin.url}/apply/orders/42", SECONDS, {})
    for each in origin.received:
        stamp = fenced.Stamp.parse(each.headers["Fenced-Stamp"].strip('"'))
        verify(Proof(stamp, each.headers["Fenced-Proof"].strip('"')), [key])
    assert seqs(origin.received) == [1, 2]


async def test_a_lease_stamps_the_calls_of_its_own_task_and_thread(origin: Origin) -> None:
    async def ship(client: fenced.AsyncClient, api: httpx.AsyncClient, name: str) -> None:
        async with client.hold(name, ttl=600) as lease:
            with stamping(lease):
                for _ in range(3):
                    await api.post(f"{origin.url}/apply/{name}", timeout=SECONDS)

    transport = AsyncStampingTransport(origin.url)
    async with (
        fenced.AsyncClient("memory:") as client,
        httpx.AsyncClient(transport=transport) as api,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(4):
            tasks.create_task(ship(client, api, f"orders/{number}"))
    for each in origin.received:  # Uncovered, had a task used the stamp of another
        assert fenced.Stamp.parse(each.headers["Fenced-Stamp"].strip('"')).names == (
            each.path.removeprefix("/apply/"),
        )
    assert len(origin.received) == 12

    with fenced.Client("memory:") as leases, leases.hold("orders/42", ttl=600) as lease, stamping(lease):
        for call in _by_requests(origin.url):
            thread = threading.Thread(target=call, args=("GET", f"{origin.url}/apply/orders/42", SECONDS, {}))
            thread.start()
            thread.join()
    assert seqs(origin.received[-1:]) == [-1]


BAD_ORIGINS = (
    "",
    "orders.internal",
    "ftp://a",
    "https://",
    "https://a/b",
    "https://a?b",
    "https://u@a",
    "https://a:x",
)


@pytest.mark.parametrize("bad", [*BAD_ORIGINS, "https://\xe4", 5])
def test_an_origin_is_a_scheme_and_a_host(bad: Any) -> None:
    with pytest.raises(fenced.Misuse):
        StampingTransport(bad)


@pytest.mark.parametrize(
    "origin, due",
    [
        (("https", "a.b", None), True),
        (("https", "A.B", 443), True),
        (("http", "a.b", None), False),
        (("https", "a.b", 444), False),
        (("https", "a.b.c", None), False),
        (("https", None, None), False),
        (("http", "::1", 8080), True),
    ],
)
def test_only_listed_origins_get_stamps(
    origin: tuple[str, str | None, int | None], due: bool, lease: fenced.Lease
) -> None:
    headers: dict[str, str] = {}
    with stamping(lease):
        Stamper(("https://a.b/", "http://[::1]:8080")).stamp(origin, "POST", headers, 1.0)
    assert ("Fenced-Stamp" in headers) == due


def test_a_stamp_of_the_caller_goes_as_it_is(lease: fenced.Lease) -> None:
    """Without the proof and the key of another one."""
    headers = {"Fenced-Stamp": '"of the caller"'}
    with stamping(lease, key=HmacKey("shop-1", b"k" * 32)):
        Stamper(("https://a.b",)).stamp(("https", "a.b", None), "POST", headers, 1.0)
    assert headers == {"Fenced-Stamp": '"of the caller"'}


def test_misuse_is_named(lease: fenced.Lease) -> None:
    with pytest.raises(fenced.Misuse, match="list the origins"):
        StampingAdapter()
    with pytest.raises(fenced.Misuse, match="not 'lease'"), stamping("lease"):  # type: ignore[arg-type]
        pass
    with pytest.raises(fenced.Misuse, match="a stamp is sent as it is"), stamping(lease.next_stamp(), need=1):
        pass
    with pytest.raises(fenced.Misuse, match="belongs to a lease"), operation(lease.next_stamp()):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("block", [stamping, operation])
def test_a_task_that_outlives_the_body_sends_nothing(
    block: Callable[[fenced.Lease], Any], call: Call, origin: Origin, lease: fenced.Lease
) -> None:
    """It has a copy of the context of the body, as `asyncio.create_task` and `asyncio.to_thread` make one."""
    url = f"{origin.url}/apply/orders/42"
    with stamping(lease), block(lease):
        task = contextvars.copy_context()
        assert task.run(call, "POST", url)[0] == 200, "in the body it is stamped"
    for method in ("POST", "GET"):
        with pytest.raises(fenced.Misuse, match="the body has ended"):
            task.run(call, method, url)
    assert len(origin.received) == 1


async def test_an_asyncio_task_that_outlives_the_body_sends_nothing(
    origin: Origin, lease: fenced.Lease
) -> None:
    ended = asyncio.Event()

    async def late() -> None:
        await ended.wait()
        await client.post(f"{origin.url}/apply/orders/42", timeout=SECONDS)

    async with httpx.AsyncClient(transport=AsyncStampingTransport(origin.url)) as client:
        with stamping(lease):
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
        ended.set()
        with pytest.raises(fenced.Misuse, match="the body has ended"):
            await task
    assert not origin.received
