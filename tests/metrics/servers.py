"""Prometheus and Alertmanager as Debian builds them, unpacked by `make test` and started here alone."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from fenced_testkit.servers.base import Server

T = TypeVar("T")
UNPACKED = Path(__file__).parents[2] / ".monitoring"
PATIENCE_SECONDS = 90.0


def until(condition: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T:
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {seconds} s in vain"
        time.sleep(0.05)
    return value


def promtool(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(
        [str(UNPACKED / "usr/bin/promtool"), *arguments], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


class _Started(Server):
    config: Path

    def answers(self) -> bool:
        try:
            return bool(get(f"http://{self.host}:{self.port}/-/ready"))
        except OSError:
            return False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Prometheus(_Started):
    name = "prometheus"

    def __init__(self, config: Callable[[Path], str]) -> None:
        super().__init__()
        (self.folder / "prometheus.yml").write_text(config(self.folder))

    def command(self) -> list[str]:
        return [
            str(UNPACKED / "usr/bin/prometheus"),
            f"--config.file={self.folder}/prometheus.yml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address={self.host}:{self.port}",
        ]

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = json.loads(get(f"{self.url}/api/v1/query?{urlencode({'query': expression})}"))
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, expression: str) -> float | None:
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        alerts = json.loads(get(f"{self.url}/api/v1/alerts"))["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


class Alertmanager(_Started):
    """Its templates are at a path that was compiled in, so it sees the unpacked folder there, in a mount namespace."""

    name = "alertmanager"

    def __init__(self, config: str) -> None:
        super().__init__()
        (self.folder / "alertmanager.yml").write_text(config)

    def command(self) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        lower = f"lowerdir={UNPACKED}/usr/share:/usr/share"
        run = (
            f"/bin/mount -t overlay overlay -o '{lower}' /usr/share && exec {UNPACKED}/usr/bin/prometheus-alertmanager "
            f"--config.file={self.folder}/alertmanager.yml --storage.path={self.folder}/data "
            f"--web.listen-address={self.host}:{self.port} --cluster.listen-address="
        )
        return ["/usr/bin/unshare", *user, "--mount", "/bin/sh", "-c", run]


class Hook:
    """What Alertmanager tells."""

    def __init__(self, stack: ExitStack) -> None:
        self.told: list[dict[str, Any]] = []
        told = self.told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class names it
                return

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        self.receiver = (
            "route: {receiver: w, group_by: [alertname], group_wait: 1s, group_interval: 1s, repeat_interval: 1h}\n"
            f"receivers: [{{name: w, webhook_configs: [{{url: 'http://127.0.0.1:{server.server_port}/'}}]}}]\n"
        )

    def alert(self, name: str) -> dict[str, Any] | None:
        return next((each for each in self.told if each["labels"]["alertname"] == name), None)
