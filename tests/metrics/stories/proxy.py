"""The proxy: requests that pass, are refused, have no known outcome, or wait."""

from __future__ import annotations

import ssl
import sys
import threading
import urllib.request
from contextlib import ExitStack, closing, suppress
from http.client import HTTPException, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fenced.drills.relay.ports import free_port
from fenced_testkit.servers.base import Server
from fenced_testkit.worlds.proxy import stamp_of
from tests.metrics.stories.history import History


class Upstream(BaseHTTPRequestHandler):
    """Behind the proxy. One path fails, one gets no answer, one gets it when the test ends."""

    protocol_version = "HTTP/1.1"
    over = threading.Event()
    entered = threading.Event()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/orders/unknown":
            self.close_connection = True
            return
        if self.path == "/orders/slow":
            self.entered.set()
            self.over.wait()
        self.send_response(500 if self.path == "/orders/wrong" else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class names it
        return


class ProxyServer(Server):
    """`fenced proxy` with TLS for its clients, and none on its admin port, which Prometheus reads."""

    name = "proxy"

    def __init__(self, upstream: int, tls: Path) -> None:
        super().__init__()
        self.admin = free_port()
        self._upstream, self._tls = upstream, tls

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "fenced", "proxy", "--upstream", f"http://127.0.0.1:{self._upstream}",
            "--name", "orders/{path.id}", "--store", f"sqlite:///{self.folder}/marks.db", "--mode", "require",
            *(word for time in ("timeout", "settle", "wait", "overtime") for word in (f"--{time}", "600s")),
            "--listen", f"{self.host}:{self.port}", "--admin", f"{self.host}:{self.admin}",
            "--cert", str(self._tls / "server.crt"), "--key", str(self._tls / "server.key"),
        ]  # fmt: skip

    def answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{self.host}:{self.admin}/readyz", timeout=30):
            return True
        return False


class Proxied:
    """Requests through the proxy."""

    def __init__(self, tls: Path, stack: ExitStack) -> None:
        Upstream.over.clear()
        upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        stack.callback(upstream.server_close)
        stack.callback(upstream.shutdown)
        self.server = stack.enter_context(ProxyServer(upstream.server_port, tls))
        stack.callback(Upstream.over.set)
        self._tls = ssl.create_default_context(cafile=str(tls / "ca.crt"))
        self.found = History()

    def put(self, name: str, token: int | None) -> int:
        """The status."""
        link = HTTPSConnection("127.0.0.1", self.server.port, context=self._tls, timeout=120)
        stamp = {} if token is None else {"fenced-stamp": f'"{stamp_of(token, name, 1)}"'}
        with closing(link):
            link.request("PUT", f"/{name}", b"1", stamp)
            return link.getresponse().status

    def through(self, name: str, token: int, status: int) -> None:
        assert self.put(name, token) == status
        self.found.note("proxy_requests_total")
        self.found.note("proxy_upstream_answers_total", **{"class": f"{status // 100}xx"})

    def refused(self, name: str, token: int | None, status: int) -> None:
        assert self.put(name, token) == status
        self.found.note("proxy_requests_total")
        self.found.note("proxy_own_answers_total", status=str(status))

    def play(self) -> History:
        of = {"guard": "store", "source": "proxy"}
        self.through("orders/42", 2, 200)
        self.through("orders/wrong", 2, 500)
        self.refused("orders/42", 1, 412)
        self.found.note("refusals_total", kind="stale", **of)
        self.refused("orders/42", None, 428)
        self.found.note("refusals_total", kind="missing", **of)
        self.found.note("unstamped_total", ruling="refuse", **of)
        self.refused("orders/unknown", 2, 504)
        self.found.note("proxy_unknown_total")
        # One request is at the upstream until the end, and a newer one waits for it.
        for token in (1, 2):
            threading.Thread(target=self._leave, args=(token,), daemon=True).start()
            assert Upstream.entered.wait(60)
        return self.found

    def _leave(self, token: int) -> None:
        with suppress(OSError, HTTPException):
            self.put("orders/slow", token)
