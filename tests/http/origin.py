"""A real HTTP server for the tests: a receiver of stamps, redirects, and connections that break."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from fenced.errors import REFUSALS, AlreadyApplied, FencedError
from fenced.http.protocol import SAFE_METHODS, read_fence
from fenced.net.problems import problem
from fenced.proofs import Proof
from fenced.values.decision import Mark, Verdict, judge

Answer = tuple[int, list[tuple[str, str]], bytes]


class SeenRequest(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]


class Origin:
    """Serves on a free port of the loopback, from `with` on. `received` are its requests so far.

    /apply/NAME     rule `sequenced` on NAME, in mode `require`
    /to/STATUS?URL  a redirect
    /drop           breaks the connection of the first request, after it was received
    /other          a problem document of somebody else
    """

    def __init__(self) -> None:
        self.received: list[SeenRequest] = []
        self.marks: dict[str, Mark] = {}
        self.lock = threading.Lock()
        origin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # an answer is one packet

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                origin.received.append(SeenRequest(self.command, self.path, dict(self.headers.items())))
                answer = origin.answered(self.command, self.path, list(self.headers.items()))
                if answer is None:
                    self.close_connection = True
                    return
                status, headers, body = answer
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = answer  # noqa: N815 (names of http.server)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Origin:
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def answered(self, method: str, path: str, headers: list[tuple[str, str]]) -> Answer | None:
        route, _, rest = path[1:].partition("/")
        if route == "apply":
            try:
                return self.applied(method, rest, headers)
            except FencedError as error:
                return problem(error)
        if route == "to":
            status, query = int(rest.partition("?")[0]), parse_qs(urlsplit(path).query)
            return status, [("Location", query["to"][0]), ("Content-Length", "0")], b""
        if path == "/drop" and [each.path for each in self.received].count("/drop") == 1:
            return None
        if path == "/other":
            status, _, body = _json({"type": "about:blank", "title": "I'm a teapot"})
            return (
                418,
                [("Content-Type", "application/problem+json"), ("Content-Length", str(len(body)))],
                body,
            )
        return _json({})

    def applied(self, method: str, name: str, headers: list[tuple[str, str]]) -> Answer:
        fence = read_fence(headers)
        stamp = fence.stamp if isinstance(fence, Proof) else fence
        announce = method in SAFE_METHODS
        if announce and stamp is None:
            return _json({})
        with self.lock:  # the judgement and the mark are one step
            judged = judge(
                self.marks.get(name), stamp, name=name, rule="sequenced", realm=None, announce=announce
            )
            if judged.mark is not None:
                self.marks[name] = judged.mark
        if judged.verdict is Verdict.ADMIT:
            return _json({"name": name})
        if judged.verdict is Verdict.APPLIED:
            raise AlreadyApplied(f"{name}: applied before")
        mark = judged.mark.token if judged.mark else None
        raise REFUSALS[judged.verdict.value](
            f"{name}: {judged.verdict} ({stamp})", name=name, mark=mark, stamp=stamp
        )


def _json(value: object) -> Answer:
    body = json.dumps(value).encode()
    return 200, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))], body
