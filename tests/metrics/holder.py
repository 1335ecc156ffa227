"""A program with a Recorder: it holds a name again and again, writes under it, and shows its numbers.

Its arguments: the authority, the guard of its values, the name, and how long it holds. It prints its port.
"""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fenced
from fenced import events
from fenced.metrics import Recorder

recorder = Recorder()
recorder.observe_guards()


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/keeper":  # what a bug in the keeper would tell
            recorder(events.KeeperFailed("made on purpose"))
        body = recorder.text().encode()
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class names it
        return


def main(authority: str, guard: str, name: str, hold: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    values = fenced.Values(guard)
    with fenced.Client(authority, on_event=recorder, label=f"holder of {name}") as client:
        while True:
            try:
                with client.hold(name, ttl=0.6) as lease:
                    time.sleep(float(hold))
                    values.write(lease, name, b"1")
            except (fenced.Overtaken, fenced.Contended, fenced.NotGranted):
                pass
            time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
