"""The service: leases, values and problems, request by request."""

from __future__ import annotations

import hashlib
import json
import secrets
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from fenced_testkit.servers import ServiceServer
from fenced_testkit.servers.certificates import make_certificates
from tests.metrics.servers import until
from tests.metrics.stories.history import History


class Service:
    """`fenced serve` with TLS and tokens; every request is made here, and noted."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        make_certificates(folder / "tls")
        self.folder, self.stack, self.found = folder, stack, History()
        self.token = folder / "token"
        self.token.write_text("secret")
        digest = hashlib.sha256(b"secret").hexdigest()
        rights = '["lease", "guard", "observe"]'
        (folder / "tokens.toml").write_text(
            f'[[token]]\nid = "test"\nsha256 = "{digest}"\nrights = {rights}\n'
        )
        options = (
            "--tokens",
            str(folder / "tokens.toml"),
            "--cert",
            str(folder / "tls/server.crt"),
            "--key",
            str(folder / "tls/server.key"),
        )
        self.server = stack.enter_context(ServiceServer(options=options))
        self._tls = ssl.create_default_context(cafile=str(folder / "tls/ca.crt"))

    def call(
        self, method: str, path: str, body: object = None, route: str = "", **headers: str
    ) -> tuple[int, Any]:
        """One request; its status and what came. `route`: as the table of routes writes it."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.server.port}{path}", data, method=method,
            headers={"authorization": "Bearer secret", **headers},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=120, context=self._tls) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        self.found.note("requests_total", route=route or path, status=str(status))
        return status, json.loads(text) if text[:1] in (b"{", b"[") else text

    def ask(self, name: str, expected: str, **more: object) -> dict[str, Any]:
        body = {"attempt": secrets.token_hex(16), "names": [name], "ttl": 600, **more}
        _, answer = self.call("POST", "/v1/leases", body, prefer="wait=0")
        assert answer["answer"] == expected, answer
        self.found.note("answers_total", answer=expected)
        if expected == "granted":
            self.found.note("grants_total")
            for metric in ("acquire_seconds", "store_seconds"):
                self.found.note(f"{metric}_count")
        elif expected == "waiting":
            self.found.note("contended_total")
        return {**body, **answer}

    def fail(self, kind: str, status: int, *request: Any, **headers: str) -> None:
        got, answer = self.call(*request, **headers)
        assert (got, answer["type"].rpartition(":")[2]) == (status, kind), answer
        self.found.note("errors_total", type=kind)

    def play(self) -> History:
        found, refused = self.found, {"guard": "values", "source": "service"}
        first, brief = self.ask("a", "granted"), self.ask("b", "granted", ttl=0.3)
        self.ask("a", "busy")
        waiting = self.ask("a", "waiting", wait=True)
        _, answer = self.call("POST", "/v1/leases/withdraw", {"attempt": waiting["attempt"]})
        found.note("answers_total", answer=answer["answer"])
        self.fail("misuse", 400, "POST", "/v1/leases", {"attempt": "x"})
        until(lambda: self.call("GET", "/v1/names/b", route="/v1/names/{name}")[1].get("held_by") is None)
        self.call("POST", "/v1/leases/renew", {"attempts": [brief["attempt"]]})  # it comes too late
        found.note("lost_total", reason="expired")
        value = "PUT", "/v1/values/a", b"1", "/v1/values/{name}"
        assert self.call(*value, **{"fenced-stamp": f'"{first["stamp"]}"'})[0] == 200
        _, answer = self.call("POST", "/v1/leases/release", {"attempt": first["attempt"]})
        found.note("answers_total", answer=answer["answer"])
        second = self.ask("a", "granted")
        assert self.call(*value, **{"fenced-stamp": f'"{second["stamp"]}"'})[0] == 200
        found.observed("token_gap", second["token"] - first["token"], **refused)
        self.fail("stale", 412, *value, **{"fenced-stamp": f'"{first["stamp"]}"'})
        found.observed("token_gap", first["token"] - second["token"], **refused)
        self.fail("missing", 428, *value)
        for kind in ("stale", "missing"):
            found.note("refusals_total", kind=kind, **refused)
        found.note("unstamped_total", ruling="refuse", **refused)
        self.hold_a_request()
        return found

    def text(self) -> str:
        """Its numbers, as Prometheus reads them."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.server.port}/metrics", headers={"authorization": "Bearer secret"}
        )
        with urllib.request.urlopen(request, timeout=60, context=self._tls) as answer:
            return str(answer.read().decode())

    def hold_a_request(self) -> None:
        """A waiter. Its request is held; when it is answered, because nothing came for a while, it asks again."""
        body = {"attempt": secrets.token_hex(16), "names": ["a"], "ttl": 600, "wait": True}

        def wait() -> None:
            with suppress(OSError):  # until the service stops
                while True:
                    status, answer = self.call("POST", "/v1/leases", body, prefer="wait=30")
                    assert status == 202
                    self.found.note("answers_total", answer=answer["answer"])

        threading.Thread(target=wait, daemon=True).start()
        self.found.note("contended_total")
