"""Bytes that ordinary clients do not send, over raw sockets to a real `fenced serve`. Any server has to pass this."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

from fenced_testkit.servers import ServiceServer

pytestmark = pytest.mark.xdist_group("service")
PATIENCE = 100.0
H2C = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
}
"""What Java's HttpClient and `curl --http2` send with their first request."""


EMPTY: Mapping[str, str] = MappingProxyType({})


class RawAnswer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class RawPeer:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._link = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._left = b""

    def send(self, data: bytes) -> None:
        self._link.sendall(data)

    def answer(self) -> RawAnswer:
        head, _, self._left = self._until(b"\r\n\r\n").partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers["content-length"])
        while len(self._left) < length:
            self._left += self._more()
        body, self._left = self._left[:length], self._left[length:]
        return RawAnswer(int(first.split()[1]), headers, body)

    def ends(self) -> bool:
        """Nothing more comes before the connection ends."""
        try:
            return not self._left and self._link.recv(1) == b""
        except ConnectionResetError:
            return True

    def _until(self, end: bytes) -> bytes:
        while end not in self._left:
            self._left += self._more()
        return self._left

    def _more(self) -> bytes:
        piece = self._link.recv(65536)
        assert piece, f"the connection ended after {self._left!r}"
        return piece

    def close(self) -> None:
        self._link.close()


def request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = EMPTY) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{k}: {v}" for k, v in headers.items())]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


def ask(name: str) -> bytes:
    return json.dumps({"attempt": secrets.token_hex(16), "names": [name], "ttl": 60}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[ServiceServer]:
    with ServiceServer() as made:
        yield made


@pytest.fixture
def peers(server: ServiceServer) -> Iterator[list[RawPeer]]:
    made = [RawPeer(server.port) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def has_been_read(other: RawPeer) -> None:
    """What was sent before on another connection was read by the time that this one is answered."""
    other.send(request("GET", "/healthz"))
    assert other.answer().status == 200


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "nonsense"])
def test_the_body_of_an_upgrade_is_no_request(peers: list[RawPeer], protocol: str) -> None:
    """In one write with its head or in a second one. An Upgrade is ignored, as HTTP allows."""
    peer, other = peers
    hidden = request("POST", "/v1/leases", ask(f"hidden/{protocol}"))
    upgrade = {"Connection": "Upgrade", "Upgrade": protocol}
    for path in ("/v1/leases", "/v1/names", "/"):
        whole = request("POST", path, hidden, upgrade)
        head = whole.removesuffix(hidden)
        peer.send(head)
        has_been_read(other)
        peer.send(hidden)
        assert peer.answer().status in (400, 405), "its body is not JSON, or there is no such method"
        peer.send(whole + whole + request("GET", "/healthz"))
        assert [peer.answer().status in (400, 405) for _ in range(2)] == [True, True]
        assert peer.answer().body == b"alive\n", "in order, and nothing in between"
    peer.send(request("GET", f"/v1/names/hidden/{protocol}"))
    assert json.loads(peer.answer().body)["held_by"] is None, "nobody asked for it"


def test_a_client_that_offers_http2_is_answered(peers: list[RawPeer]) -> None:
    """As if it had offered nothing: in HTTP/1.1, with its body, whole or in pieces, and the connection goes on."""
    peer, other = peers
    for number in range(3):
        whole = request("POST", "/v1/leases", ask(f"h2c/{number}"), H2C)
        if number == 1:
            peer.send(whole[:-10])
            has_been_read(other)
            whole = whole[-10:]
        peer.send(whole)
        answer = peer.answer()
        assert (answer.status, json.loads(answer.body)["answer"]) == (200, "granted")
        assert "upgrade" not in answer.headers
    peer.send(request("GET", "/healthz", headers=H2C) + request("GET", "/healthz"))
    assert [peer.answer().body for _ in range(2)] == [b"alive\n"] * 2
    chunk = ask("h2c/chunked")
    head = request("POST", "/v1/leases", headers={**H2C, "Transfer-Encoding": "chunked"})
    peer.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk))
    assert peer.answer().status == 200


def test_a_tunnel_is_refused(peers: list[RawPeer]) -> None:
    peer, _ = peers
    peer.send(b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: x\r\n\r\n" + request("GET", "/healthz"))
    assert peer.answer().status == 400 and peer.ends()


@pytest.mark.parametrize("ended", [True, False], ids=["whole", "without an end"])
@pytest.mark.parametrize(
    "lines",
    [
        b"X: " + b"x" * 33_000,
        b"".join(b"X%d: %b\r\n" % (number, b"x" * 1000) for number in range(40)),
        b"".join(b"X%d: y\r\n" % number for number in range(110)),
    ],
    ids=["one long header", "many bytes", "many headers"],
)
def test_heads_are_bounded(peers: list[RawPeer], lines: bytes, ended: bool) -> None:
    """32 KiB and 100 headers, without any credential. What is less is served."""
    peer, other = peers
    peer.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + lines + b"\r\n\r\n" * ended)
    answer = peer.answer()
    assert answer.status == 431 and json.loads(answer.body)["status"] == 431
    assert peer.ends()
    many = {f"X{number}": "x" * 300 for number in range(99)}
    other.send(request("GET", "/healthz", headers=many))
    assert other.answer().status == 200


def test_a_long_path_and_long_trailers_count(peers: list[RawPeer]) -> None:
    peer, other = peers
    peer.send(request("GET", "/v1/names/" + "x" * 33_000))
    assert peer.answer().status in (414, 431) and peer.ends()
    other.send(
        request("POST", "/v1/leases", headers={"Transfer-Encoding": "chunked"}) + b"2\r\n{}\r\n0\r\nX: "
    )
    try:
        for _ in range(64):
            other.send(b"x" * 4096)
        status = other.answer().status
    except ConnectionError:  # a reset before the answer
        status = 0
    assert status in (0, 400, 413, 431)


@pytest.mark.parametrize(
    "path", ["/healthz/", "/v1/", "/v1/leases/", "/login/", "//v1", "/live.js/", "/v1//"]
)
def test_nobody_is_sent_elsewhere(peers: list[RawPeer], path: str) -> None:
    """A redirect would lead to http://, and to the host that the request names."""
    peer, _ = peers
    peer.send(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    answer = peer.answer()
    assert answer.status == 404 and "location" not in answer.headers
