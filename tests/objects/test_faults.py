"""The guard over objects when the store fails: unknown is told from refused, and nothing happens twice."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fenced.drills.relay import Fault, Proxy
from fenced.errors import AlreadyApplied, FencedError, Indeterminate, Misconfigured, StaleToken, Unavailable
from fenced.guards import cellguard
from fenced.guards.cells import KEPT
from fenced.objects import ObjectGuard
from fenced.runtime.blocking import step
from fenced.stores.objects.guard import contents
from fenced_testkit.servers import SeaweedServer
from fenced_testkit.servers.seaweedfs import BUCKET
from tests.bound import Bound
from tests.guard_outage_harness import GuardedHarness
from tests.objects.test_objects import NAME, _prefixes, boto_client, s3_store, stamp

pytestmark = pytest.mark.xdist_group("objects")
BODY = GuardedHarness.word
"""boto3 sends the head of a PUT first, and its body when the server asks for it: a reply to the head means nothing."""
CLIENTS: dict[str, tuple[str | None, Callable[[str], Any]]] = {
    "boto3": (BUCKET, boto_client),
    "boto3, one try": (BUCKET, lambda endpoint: boto_client(endpoint, retries={"total_max_attempts": 1})),
    "obstore": (None, lambda endpoint: s3_store(endpoint, 0)),
    "obstore, retries": (None, lambda endpoint: s3_store(endpoint, 3)),
}


def guard_by(kind: str, endpoint: str, prefix: str) -> Bound:
    bucket, client = CLIENTS[kind]
    return Bound(ObjectGuard(bucket, prefix=prefix, rule="sequenced"), client(endpoint))


@pytest.fixture
def proxy(seaweed_server: SeaweedServer) -> Iterator[Proxy]:
    with Proxy(seaweed_server.host, seaweed_server.port) as proxy:
        yield proxy


def through(proxy: Proxy) -> str:
    return f"http://{proxy.host}:{proxy.port}"


def version(guard: Bound) -> int:
    return int(step(guard._of().marks.peek(NAME)).version)


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.CUT_BEFORE, Fault.CUT_AFTER], ids=lambda f: f.name)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_cut_write_happens_once(
    client: str, fault: Fault, proxy: Proxy, seaweed_server: SeaweedServer
) -> None:
    """Whatever the client retries by itself: a 412 about its own success is not taken for a refusal."""
    prefix = next(_prefixes)
    guard = guard_by(client, through(proxy), prefix)
    guard.write(stamp(5), NAME, b"one")
    trigger = proxy.on(BODY, fault)
    guard.write(stamp(5, 2), NAME, b"two")
    trigger.wait()
    assert guard.peek(NAME) == b"two" and version(guard) == 2
    trigger = proxy.on(BODY, fault)
    with guard.change(stamp(6), NAME) as report:
        report.body = b"three"
    trigger.wait()
    assert guard.peek(NAME) == b"three" and version(guard) == 3


@pytest.mark.parametrize("client", ["boto3, one try", "obstore"])
def test_an_outcome_that_cannot_be_found_out_is_unknown(
    client: str, proxy: Proxy, seaweed_server: SeaweedServer
) -> None:
    """The store cannot be reached after a write that it has got: unknown. A repeat of the same stamp settles it."""
    guard = guard_by(client, through(proxy), next(_prefixes))
    guard.write(stamp(5), NAME, b"one")
    trigger = proxy.on(b"PUT /", Fault.SWALLOW_REPLY)
    lost: list[FencedError] = []

    def write() -> None:
        try:
            guard.write(stamp(5, 2), NAME, b"two")
        except FencedError as error:
            lost.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    trigger.wait()
    proxy.refuse()
    proxy.reset()
    thread.join()
    assert [type(error) for error in lost] == [Indeterminate]
    with pytest.raises(Unavailable):
        guard.announce(stamp(6), NAME)
    proxy.heal()
    with contextlib.suppress(AlreadyApplied):  # boto3 waits for "100 Continue" before it sends the body
        guard.write(stamp(5, 2), NAME, b"two")
    assert guard.peek(NAME) == b"two" and version(guard) == 2
    guard.announce(stamp(6), NAME)
    with pytest.raises(StaleToken):
        guard.write(stamp(5, 3), NAME, b"late")


class RepeatingGateway(http.server.BaseHTTPRequestHandler):
    """Sends each PUT of a cell to the store twice, and the second answer to the client.

    nginx does that by default, if the store has not answered the first one in time.
    """

    protocol_version = "HTTP/1.1"
    store: tuple[str, int]
    between: list[Callable[[], None]]
    """What happens before the next repeats."""
    repeated: list[int]
    """The second answers."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command == "PUT" and "/n/" in self.path:
            self._forward(body)
            if self.between:
                self.between.pop()()
            status, headers, answer = self._forward(body)
            self.repeated.append(status)
        else:
            status, headers, answer = self._forward(body)
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        self.do_PUT()

    def do_DELETE(self) -> None:
        self.do_PUT()

    def do_POST(self) -> None:
        self.do_PUT()

    def _forward(self, body: bytes) -> tuple[int, Any, bytes]:
        with contextlib.closing(http.client.HTTPConnection(*self.store, timeout=30)) as store:
            sent = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            store.request(self.command, self.path, body, sent)
            answer = store.getresponse()
            return answer.status, answer.headers, answer.read()

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture
def gateway(seaweed_server: SeaweedServer) -> Iterator[tuple[str, type[RepeatingGateway]]]:
    store = seaweed_server.host, seaweed_server.port
    handler = type("Handler", (RepeatingGateway,), {"store": store, "between": [], "repeated": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_put_that_a_middlebox_repeats_happened_once(
    client: str, gateway: tuple[str, type[RepeatingGateway]], seaweed_server: SeaweedServer
) -> None:
    """Neither Conflict nor StaleToken: the operation's id is in the cell, also after the cell has gone on."""
    (through, repeating), prefix = gateway, next(_prefixes)
    guard, other = guard_by(client, through, prefix), guard_by(client, seaweed_server.endpoint(), prefix)
    large = b"x" * 2 * contents.SMALL_BYTES
    guard.write(stamp(5), NAME, b"one")
    for seq, body in ((2, b"two"), (3, large)):
        with guard.change(stamp(5, seq), NAME) as report:
            report.body = body
        assert other.peek(NAME) == body and version(other) == seq
    repeating.between.append(lambda: other.write(stamp(6), NAME, b"of the next holder"))
    guard.write(stamp(5, 4), NAME, b"four")
    assert other.peek(NAME) == b"of the next holder" and version(other) == 5
    with pytest.raises(StaleToken):
        guard.write(stamp(5, 5), NAME, b"late")
    assert set(repeating.repeated) == {412}, "every write was repeated, and every repeat refused"


def test_many_writes_of_others_leave_nothing_unknown(seaweed_server: SeaweedServer) -> None:
    """With a client that retries, every refusal counts as unknown; the cell is read first, so there is none."""
    prefix = next(_prefixes)
    one, other = (Bound(ObjectGuard(prefix=prefix), s3_store(seaweed_server.endpoint(), 3)) for _ in range(2))
    one.write(stamp(5), NAME, b"one")
    for number in range(KEPT + 1):
        other.write(stamp(5), NAME, b"other %d" % number)
    one.write(stamp(5), NAME, b"two")
    assert other.peek(NAME) == b"two" and version(other) == KEPT + 3


class CarelessStore(http.server.BaseHTTPRequestHandler):
    """A store that ignores a condition."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    ignored: str
    conflicts: list[int]
    """One for each write of a cell that is answered by 409."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.conflicts and "/n/" in self.path:
            self._answer(self.conflicts.pop(), b"", "")
            return
        before = self.objects.get(self.path)
        wanted = self.headers.get("If-Match")
        refused = self.headers.get("If-None-Match") == "*" and before is not None
        refused = refused and self.ignored != "If-None-Match"
        refused = refused or (wanted is not None and wanted != tag(before) and self.ignored != "If-Match")
        if not refused:
            self.objects[self.path] = body
        self._answer(412 if refused else 200, b"", tag(body))

    def do_GET(self) -> None:
        body = self.objects.get(self.path)
        self._answer(404 if body is None else 200, body or b"", tag(body))

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self._answer(204, b"", "")

    def do_POST(self) -> None:
        """Delete several: what obstore sends for one, too."""
        for key in re.findall(rb"<Key>(.*?)</Key>", self.rfile.read(int(self.headers["Content-Length"]))):
            self.objects.pop(f"/{BUCKET}/{key.decode()}", None)
        self._answer(200, b"<DeleteResult></DeleteResult>", "")

    def _answer(self, status: int, body: bytes, etag: str) -> None:
        self.send_response(status)
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Mon, 16 Nov 2026 10:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        return


def tag(body: bytes | None) -> str:
    return f'"{hash(body)}"'


@contextlib.contextmanager
def careless(
    client: str, ignored: str = "nothing", conflicts: int = 0
) -> Iterator[tuple[Bound, type[CarelessStore]]]:
    handler = type(
        "Handler", (CarelessStore,), {"objects": {}, "ignored": ignored, "conflicts": [409] * conflicts}
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield guard_by(client, f"http://127.0.0.1:{server.server_address[1]}", "x"), handler
        server.shutdown()


# proves guard s3: conditions-proven
@pytest.mark.parametrize("client", ["boto3", "obstore"])
@pytest.mark.parametrize("ignored", ["If-Match", "If-None-Match"])
def test_a_store_that_ignores_conditions_is_refused(client: str, ignored: str) -> None:
    with careless(client, ignored) as (guard, store):
        with pytest.raises(Misconfigured, match=f"ignores {ignored}"):
            guard.write(stamp(5), NAME, b"one")
        assert not store.objects, "the probe is removed, and nothing was written"


@pytest.mark.parametrize("client", ["boto3", "obstore"])
def test_a_conflict_is_retried(client: str) -> None:
    with careless(client, conflicts=3) as (guard, store):
        guard.write(stamp(5), NAME, b"one")
        assert guard.peek(NAME) == b"one" and not store.conflicts
        guard.announce(stamp(6), NAME)
        store.conflicts += [409] * 3
        with pytest.raises(StaleToken):
            guard.write(stamp(5, 2), NAME, b"late")
        guard.write(stamp(6), NAME, b"two")
        assert guard.peek(NAME) == b"two" and not store.conflicts


def test_wrong_buckets(seaweed_server: SeaweedServer) -> None:
    guard = Bound(ObjectGuard("no-such-bucket"), boto_client(seaweed_server.endpoint()))
    with pytest.raises(Misconfigured):
        guard.write(stamp(5), NAME, b"")


def _nothing_happened(operation: str, this: object) -> bool:
    """The id of the operation in the cell is not looked for."""
    return False


def test_the_checks_can_fail(
    proxy: Proxy,
    gateway: tuple[str, type[RepeatingGateway]],
    seaweed_server: SeaweedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cellguard, "_happened", _nothing_happened)
    monkeypatch.setattr(cellguard, "TRIES", 3)
    with pytest.raises((AssertionError, FencedError)):
        test_a_cut_write_happens_once("boto3", Fault.LOSE_REPLY, proxy, seaweed_server)
    with pytest.raises((AssertionError, FencedError)):
        test_a_put_that_a_middlebox_repeats_happened_once("boto3", gateway, seaweed_server)
