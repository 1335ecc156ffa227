"""A real instance: what it answers, what it holds back, whom it refuses, how it ends."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import fenced
from fenced.cli.serve import serve
from fenced.errors import Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.http.protocol import fence_headers
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.service.bodies import ProblemView
from fenced.service.routes import ROUTES
from fenced.stores.service.address import service_address
from fenced.stores.service.authority.authority import ServiceAuthority
from fenced.stores.service.wire.connection import InstanceRoute
from fenced.testing.kit import asking
from fenced.values.contracts import Runtime
from fenced.values.model import Granted, Waiting
from fenced_testkit.servers import ServiceServer
from fenced_testkit.servers.certificates import make_certificates

pytestmark = pytest.mark.xdist_group("service")
ROOT = Path(__file__).parents[2]
PATIENCE = 100.0


class Answer:
    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status = found.status
        self.media_type = str(found.headers.get_content_type())
        self.body = found.read()

    @property
    def fields(self) -> Any:
        return json.loads(self.body)


class Caller:
    """A program that speaks HTTP, over one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self._namespace = secrets.token_hex(8)
        created = self("POST", "/v1/namespaces", {"namespace": self._namespace})
        assert created.status == 200

    def __call__(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        place = f"{path}{'&' if '?' in path else '?'}namespace={self._namespace}"
        self._connection.request(method, place, data, headers)
        return Answer(self._connection.getresponse())

    def ask(self, attempt: str, *names: str, wait: bool = False, **more: Any) -> dict[str, Any]:
        return {"attempt": attempt, "names": names, "ttl": 60, "wait": wait, **more}

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServiceServer]:
    with ServiceServer() as started:
        yield started


@pytest.fixture
def caller(server: ServiceServer) -> Iterator[Callable[[], Caller]]:
    with contextlib.ExitStack() as stack:

        def make() -> Caller:
            made = Caller(server.port)
            stack.callback(made.close)
            return made

        yield make


def attempt() -> str:
    return secrets.token_hex(16)


def test_the_document_describes_what_is_served(caller: Callable[[], Caller]) -> None:
    """Every route is described, and each answer is one of those that the document names."""
    call = caller()
    document = call("GET", "/openapi.json").fields
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    one, two = attempt(), attempt()
    requests: list[tuple[str, str, object, int]] = [
        ("GET", "/v1", None, 200),
        ("POST", "/v1/leases", call.ask(one, "orders/42"), 200),
        ("POST", "/v1/leases", call.ask(two, "orders/42"), 409),
        ("POST", "/v1/leases", call.ask(two, "orders/42", wait=True), 202),
        ("POST", "/v1/leases/renew", {"attempts": [one, two, attempt()]}, 200),
        ("GET", "/v1/names", None, 200),
        ("GET", "/v1/names?limit=1&after=orders", None, 200),
        ("GET", "/v1/names/orders/42", None, 200),
        ("POST", "/v1/leases/withdraw", {"attempt": two}, 200),
        ("POST", "/v1/leases", call.ask(two, "orders/42", wait=True), 410),
        ("POST", "/v1/names/orders/42/force-release", {"token": 1, "reason": "a test"}, 200),
        ("POST", "/v1/leases/release", {"attempt": one}, 410),
        ("POST", "/v1/leases/release", {"attempt": attempt()}, 404),
        ("POST", "/v1/floor", {"above": 1000}, 200),
        ("POST", "/v1/tidy", {}, 200),
    ]
    kinds = {(route.method, route.path): route.answers for route in ROUTES}
    for method, path, body, status in requests:
        answer = call(method, path, body)
        assert (answer.status, answer.media_type) == (status, "application/json"), (path, answer.body)
        route = path.partition("?")[0].replace("orders/42", "{name}")
        msgspec.json.decode(answer.body, type=kinds[method, route][status])
    for path in ("/healthz", "/readyz", "/metrics"):
        assert call("GET", path).status == 200


def test_a_batch_is_answered_one_by_one(caller: Callable[[], Caller]) -> None:
    batch_is_answered_one_by_one(caller())


def batch_is_answered_one_by_one(call: Caller) -> None:
    one, two, three = attempt(), attempt(), attempt()
    assert call("POST", "/v1/leases", call.ask(one, "a")).status == 200
    batch = [
        {"ask": call.ask(two, "b")},
        {"renew": one},
        {"release": {"attempt": attempt()}},
        {"withdraw": {"attempt": three}},
        {"ask": call.ask(attempt(), "..")},
        {},
    ]
    answers = call("POST", "/v1/batch", {"do": batch}).fields["answers"]
    assert [each["answer"] for each in answers] == ["granted", "kept", "gone", "released", "failed", "failed"]
    assert answers[4]["problem"]["type"] == "urn:fenced:problem:misuse"
    assert call("POST", "/v1/leases", call.ask(three, "c")).status == 410, "withdrawn before it came"


def test_wrong_requests_are_problems(caller: Callable[[], Caller]) -> None:
    """Each is answered by a problem document, and none contains the secret."""
    call, secret = caller(), attempt()
    right = call.ask(secret, "orders")
    wrong: list[tuple[str, str, object, int]] = [
        ("POST", "/v1/leases", b"", 400),
        ("POST", "/v1/leases", b"[" * 60_000, 400),
        ("POST", "/v1/leases", b'{"attempt":"\xff"}', 400),
        ("POST", "/v1/leases", {**right, "attempt": secret + "\n"}, 400),
        ("POST", "/v1/leases", {**right, "ttl": 0}, 400),
        ("POST", "/v1/leases", {**right, "names": ["a/../b"]}, 400),
        ("POST", "/v1/leases", {**right, "names": []}, 400),
        ("POST", "/v1/leases", {**right, "lockdelay": 1}, 400),
        ("POST", "/v1/leases", {**right, "holder": {"label": "x" * 70_000}}, 413),
        ("POST", "/v1/floor", {"above": 2**53}, 400),
        ("GET", "/v1/names?limit=null", None, 400),
        ("GET", "/v1/names/a%0Ab", None, 400),
        ("GET", "/v1/leases", None, 405),
        ("GET", "/v2", None, 404),
        ("GET", "/v1?realm=0123456789abcdef", None, 200),  # says which one it has
        ("GET", "/v1/names?realm=0123456789abcdef", None, 421),
    ]
    for method, path, body, status in wrong:
        answer = call(method, path, body)
        assert answer.status == status, (path, answer.body)
        if status != 200:
            assert answer.media_type == "application/problem+json"
            assert msgspec.json.decode(answer.body, type=ProblemView).status == status
        assert secret.encode() not in answer.body
    other_site = call("POST", "/v1/leases", right, Origin="https://evil.example")
    assert other_site.status == 403
    rebound = call("POST", "/v1/leases", right, Host="evil.example", Origin="http://evil.example")
    assert rebound.status == 403, "a name that leads to loopback is still another site's"
    for host in ("evil.example", "127.0.0.1.evil.example", "[", ""):
        assert call("GET", "/", Host=host).status in (400, 403)
    assert call("GET", "/v1/names").fields == {"names": []}, "nothing happened"


def test_a_held_answer_comes_with_the_turn(caller: Callable[[], Caller]) -> None:
    """Both forms end at the release; the grant is the answer to a new request."""
    call, waiter = caller(), caller()
    waiter._namespace = call._namespace
    for lines in (False, True):
        holder, waiting = attempt(), attempt()
        assert call("POST", "/v1/leases", call.ask(holder, "orders")).status == 200
        headers = {"Prefer": "wait=30", "Accept": "application/x-ndjson" if lines else "*/*"}
        found: list[Answer] = []
        ask = waiter.ask(waiting, "orders", wait=True, keeps=True)

        def wait(ask: object = ask, headers: dict[str, str] = headers, found: list[Answer] = found) -> None:
            found.append(waiter("POST", "/v1/leases", ask, **headers))

        thread = threading.Thread(target=wait)
        thread.start()
        limit = time.monotonic() + PATIENCE
        while not call("GET", "/v1/names/orders").fields["waiters"]:
            assert time.monotonic() < limit
        assert call("POST", "/v1/leases/release", {"attempt": holder}).status == 200
        thread.join(PATIENCE)
        (answer,) = found
        first, *second = answer.body.decode().splitlines()
        assert answer.status == 202 and json.loads(first)["answer"] == "waiting"
        assert second == (['{"turn":true}'] if lines else [])
        assert lines or answer.fields["check_in"] == 0
        assert waiter("POST", "/v1/leases", ask).status == 200
        assert call("POST", "/v1/leases/release", {"attempt": waiting}).status == 200


class CountedRoute(InstanceRoute):
    connected = 0

    async def connect(self, until: float) -> Any:
        self.connected += 1
        return await super().connect(until)


class CountedClient(ServiceAuthority):
    route_type = CountedRoute


async def test_a_notified_waiter_asks_again_on_the_same_connection(
    runtime: Runtime, server: ServiceServer
) -> None:
    """The holder and the waiter have one connection each, however often they hand over."""
    door = CountedClient(service_address(server.url()), runtime, secrets.token_hex(8))
    await door.open()
    held = asking(runtime, "orders", ttl=600)
    assert isinstance(await door.ask(held), Granted)
    for _ in range(3):
        waiting = asking(runtime, "orders", ttl=600, wait=True)
        assert isinstance(await door.ask(waiting), Waiting)
        await door.release(held.secret)
        limit = runtime.now() + PATIENCE
        while not (woken := await door.next_wakeups(runtime.now() + 1)):
            assert runtime.now() < limit
        assert woken == [fenced.values.model.grant_id(waiting.secret)]
        assert isinstance(await door.ask(waiting), Granted)
        held = waiting
    assert isinstance(door._route, CountedRoute) and door._route.connected == 2
    await door.close()


def test_a_stop_sends_the_waiters_on(tmp_path: Path) -> None:
    """SIGTERM: what is held is answered at once, the status is 0, and the lease outlives the instance.

    On a Unix socket, for its owner alone; and over the ledger, which carries a batch out in one write.
    """
    path = tmp_path / "leases.sock"
    with ServiceServer(store=f"ledger://{tmp_path}/ledger", options=("--socket", str(path))) as server:
        made = [path, *tmp_path.glob("ledger*")]
        assert len(made) > 2 and {file.stat().st_mode & 0o777 for file in made} == {0o600}
        with contextlib.closing(Caller(server.port)) as caller:
            batch_is_answered_one_by_one(caller)
        runtime = BlockingRuntime()
        door = ServiceAuthority(service_address(f"fenced+unix://{path}"), runtime)
        step(door.open())
        held, waiting = asking(runtime, "orders", ttl=600), asking(runtime, "orders", ttl=600, wait=True)
        grant = step(door.ask(held))
        assert isinstance(grant, Granted) and isinstance(step(door.ask(waiting)), Waiting)
        os.kill(server.pid, signal.SIGTERM)
        limit = runtime.now() + PATIENCE
        while not (woken := step(door.next_wakeups(runtime.now() + 1))):
            assert runtime.now() < limit
        assert woken == [fenced.values.model.grant_id(waiting.secret)]
        server.wait_until(lambda: not server.running, "has ended")
        with pytest.raises(Unavailable):
            step(door.ask(waiting))
        server.start()
        again = step(door.ask(held))
        assert isinstance(again, Granted) and again.token == grant.token
        step(door.close())


def test_another_store_is_noticed(tmp_path: Path, server: ServiceServer) -> None:
    """Two instances before different stores: the client is refused, whichever it reaches."""
    runtime = BlockingRuntime()
    door = ServiceAuthority(service_address(server.url()), runtime, secrets.token_hex(8))
    step(door.open())
    door._realm, door._query = "0" * 16, door._query.replace(door._realm, "0" * 16)
    for call in (door.open(), door.ask(asking(runtime, "orders"))):
        with pytest.raises(Misconfigured, match="another"):
            step(call)
    step(door.close())


def test_tls_and_a_second_address(tmp_path: Path) -> None:
    """Both sides verify the certificate of the other; the client goes on at the next address if one does not answer."""
    folder = tmp_path / "tls"
    make_certificates(folder, clients=("app",))
    files = ("--cert", str(folder / "server.crt"), "--key", str(folder / "server.key"))
    with ServiceServer(options=(*files, "--client-ca", str(folder / "ca.crt"))) as server:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            hosts = f"127.0.0.1:{nobody.getsockname()[1]},127.0.0.1:{server.port}"
            trusted = f"https://{hosts}?ssl_ca_certs={folder}/ca.crt"
            own = f"&ssl_certfile={folder}/app.crt&ssl_keyfile={folder}/app.key"
            with fenced.Client(trusted + own) as client, client.hold("orders") as lease:
                assert lease.token == 1
            with pytest.raises((Unavailable, Indeterminate)), fenced.Client(trusted) as client:
                client.acquire("orders")
        with (
            pytest.raises(Misconfigured, match="not trusted"),
            fenced.Client(f"https://127.0.0.1:{server.port}") as client,
        ):
            client.acquire("orders")


def test_tokens_have_scopes(tmp_path: Path) -> None:
    """Only their hashes are in the file; SIGHUP reads it again; what operators do is in the audit."""
    file, bearer, namespace = tmp_path / "tokens.toml", tmp_path / "bearer", "default"
    entries = {
        "cron": 'rights = ["lease"]\nnames = ["nightly"]',
        "page": 'rights = ["observe"]\nnames = ["nightly"]',
        "ops": 'rights = ["observe", "operate", "lease"]\nnamespaces = ["default"]',
    }

    def write(*names: str) -> None:
        file.write_text(
            "".join(
                f'[[token]]\nid = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{entries[name]}\n'
                for name in names
            )
        )

    write(*entries)
    with ServiceServer(options=("--tokens", str(file))) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)

        def call(who: str, method: str, path: str, body: object = None) -> Answer:
            headers = {"Authorization": f"Bearer {who}"} if who else {}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return Answer(connection.getresponse())

        def ask(name: str) -> dict[str, object]:
            return {"attempt": attempt(), "names": [name], "ttl": 600}

        expected: list[tuple[str, str, str, object, int]] = [
            ("", "POST", "/v1/leases", ask("nightly"), 401),
            ("nobody", "POST", "/v1/leases", ask("nightly"), 401),
            ("", "GET", "/healthz", None, 200),
            ("cron", "POST", "/v1/leases", ask("nightly/1"), 200),
            ("cron", "POST", "/v1/leases", ask("nightlyreport"), 403),
            ("cron", "POST", "/v1/batch", {"do": [{"ask": ask("nightly")}, {"ask": ask("other")}]}, 403),
            ("cron", "GET", "/v1/names", None, 403),
            ("cron", "POST", "/v1/floor", {"above": 100}, 403),
            ("ops", "POST", "/v1/leases", ask("other"), 200),
            ("ops", "POST", "/v1/namespaces", {"namespace": "another"}, 403),
            ("page", "GET", "/v1/names/other", None, 403),
            ("page", "POST", "/v1/names/nightly/1/force-release", {"token": 1}, 403),
            ("ops", "POST", "/v1/names/nightly/1/force-release", {"token": 1, "reason": "stuck"}, 200),
        ]
        for who, method, path, body, status in expected:
            assert call(who, method, path, body).status == status, (who, path)
        assert call("page", "GET", "/v1/names").fields == {"names": []}, "the other name is not shown"
        assert [view["name"] for view in call("ops", "GET", "/v1/names").fields["names"]] == ["other"]
        server.wait_until(lambda: "audit" in server.log.read_text(), "the audit is written")
        (entry,) = re.findall(r"audit (\{.*\})", server.log.read_text())
        assert {"by": "ops", "action": "force-release", "reason": "stuck"}.items() <= json.loads(
            entry
        ).items()

        write("cron")
        os.kill(server.pid, signal.SIGHUP)
        server.wait_until(lambda: call("ops", "GET", "/v1").status == 401, "the file was read again")
        bearer.write_text("cron\n")
        with fenced.Client(f"{server.url()}?bearer_file={bearer}", namespace=namespace) as client:
            assert client.acquire("nightly/2").token > 1
            with pytest.raises(Misconfigured, match="403"):
                client.acquire("other/2")
        connection.close()


def test_the_readmes_line(server: ServiceServer) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"tests/service runs it -->\n```sh\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        ["bash", "-c", block], env={**os.environ, "URL": server.url()}, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answer"] == "granted"


def test_the_javascript_of_the_page(server: ServiceServer, tmp_path: Path) -> None:
    """It waits in the queue, is granted after the release, writes and releases. One that is overtaken is refused."""
    text = (ROOT / "docs/service.md").read_text()
    programs = dict(re.findall(r"<!-- (\w+.mjs) -->\n```text\n(.*?)```", text, re.DOTALL))
    assert len(programs["lease.mjs"].splitlines()) == 20
    for name, program in programs.items():
        (tmp_path / name).write_text(program)

    def node() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["node", str(tmp_path / "report.mjs")],
            env={**os.environ, "URL": server.url(), "TTL": "600"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with fenced.Client(server.url()) as client:
        held = client.acquire("nightly", ttl=600)
        door = ServiceAuthority(service_address(server.url()), BlockingRuntime())
        step(door.open())
        waiting = node()
        server.wait_until(lambda: bool(step(door.observe("nightly")).waiters), "the program waits")
        held.release()
        output, _ = waiting.communicate(timeout=PATIENCE)
        assert waiting.returncode == 0
        assert output == f"working under token {held.token + 1}\nwritten: version 1\n"
        assert step(door.observe("nightly")).held_by is None

        overtaken = node()
        assert overtaken.stdout is not None
        token = int(overtaken.stdout.readline().rpartition(" ")[2])
        step(door.force_release("nightly", token))
        newer = client.acquire("nightly", ttl=600)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("PUT", "/v1/values/nightly", b"newer", fence_headers(newer.next_stamp()))
        assert connection.getresponse().status == 200
        connection.close()
        output, _ = overtaken.communicate(timeout=PATIENCE)
        assert output == f"refused: nightly: token {token} is stale: {newer.token} has been seen\n"
        newer.release()
        step(door.close())


def test_the_demo(tmp_path: Path) -> None:
    """Over the ledger: a stopped process is refused, and the processes of the demo end with the service."""
    with ServiceServer(store=f"ledger://{tmp_path}/ledger", options=("--demo",)) as server:
        server.wait_until(lambda: "late write was" in server.log.read_text(), "one round is over")
        (line,) = re.findall("demo: (.*)", server.log.read_text())
        assert line.startswith("demo/stock: A was stopped with token 2") and line.endswith("refused (stale)")
        (demo,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(server.pid, signal.SIGTERM)
        server.wait_until(lambda: not server.running, "has ended")
        assert not Path(f"/proc/{demo}").exists()


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--listen", "0.0.0.0:0"], "--no-credentials"),
        (["--listen", "nonsense"], "HOST:PORT"),
        (["--cert", "x"], "go together"),
        (["--tokens", "x", "--demo"], "without TLS and tokens"),
    ],
)
def test_unusable_options_are_refused(arguments: list[str], error: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(serve, ["--store", f"sqlite://{tmp_path}/leases.db", *arguments])
    assert error in result.output + str(result.exception)


@pytest.mark.parametrize(
    "url", ["http://", "http://a/?x=1", "http://u:p@host", "https://a,a", "fenced+unix://relative"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(Misuse):
        service_address(url)


def test_default_ports() -> None:
    assert service_address("http://a").endpoints == [(("a", 80), "a:80")]
    assert service_address("https://a/leases/").base == "/leases"
    assert service_address("https://a,b:1").endpoints == [(("a", 443), "a:443"), (("b", 1), "b:1")]
