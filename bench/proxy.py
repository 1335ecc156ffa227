"""What the proxy costs: CPU for each request, and its throughput as a share of the service's own.

The service, the proxy and the load (wrk) share the machine. Each request carries a stamp of one of 64 names, and the
proxy keeps their order. Two services stand behind it in turn: an ASGI program under uvicorn, which has the targets, and
a bare one that does nothing with what it gets, so that no share can be smaller. nginx in front of the same service, if
it is installed, shows what a proxy costs that does not fence.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.figures import Figure
from bench.interleaved import Effort
from fenced.drills.relay.ports import free_port
from fenced.values.model import Stamp
from fenced_testkit.servers.base import MissingProgram, find_program

CONNECTIONS = 64
NAMES = 64
SECONDS = 2.0
ROUNDS = 5
SIZES = (200, 65_536)
SHARES = {200: 0.35, 65_536: 0.75}
CPU_MICROSECONDS = {200: 35.0}
SERVICES = {"uvicorn": "bench.asgi_service", "bare": "bench.bare_service"}
TARGETED = "uvicorn"
DESCRIBED = {
    "uvicorn": "an ASGI program",
    "bare": "a service that does nothing",
    "shared": "an ASGI program, where several proxies may share the store",
}

NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_body_buffer_size 128k; keepalive_requests 100000000;
  upstream service {{ server 127.0.0.1:{service}; keepalive 64; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://service; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""


@dataclass
class Way:
    """A way to the service: its port, and the process whose CPU is counted."""

    port: int
    pid: int = 0
    rates: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def run(self, script: Path, seconds: float) -> None:
        before = cpu_seconds(self.pid) if self.pid else 0.0
        rate, requests = load(script, self.port, seconds)
        self.rates.append(rate)
        if self.pid:
            self.costs.append((cpu_seconds(self.pid) - before) / requests * 1e6)

    def share(self, direct: Way) -> float:
        return median(ours / theirs for ours, theirs in zip(self.rates, direct.rates, strict=True))


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    find_program("wrk", "wrk")
    with tempfile.TemporaryDirectory(dir=folder) as top:
        here = Path(top)
        for kind, module in SERVICES.items():
            with ExitStack() as stack:
                _, service = stack.enter_context(started("-m", module))
                proxy = Path(tempfile.mkdtemp(dir=here))
                alone, port = stack.enter_context(_proxy(proxy, service, "--alone"))
                nginx = stack.enter_context(_nginx(proxy, service))
                for size in SIZES[: effort.size(len(SIZES))]:
                    ways = [Way(service), Way(port, alone.pid), *([Way(*nginx)] if nginx else [])]
                    yield from _figures(here, effort, size, kind, ways)
        with started("-m", SERVICES[TARGETED]) as (_, service), _proxy(here, service) as (shared, port):
            ways = [Way(service), Way(port, shared.pid)]
            yield from _figures(here, effort, 200, "shared", ways)


def _figures(here: Path, effort: Effort, size: int, kind: str, ways: list[Way]) -> Iterator[Figure]:
    (script := here / f"load{size}.lua").write_text(_script(size))
    for way in ways if effort.sizes == 1 else ():
        load(script, way.port, 0.5)
    for _ in range(effort.of(ROUNDS)):
        for way in ways:
            way.run(script, effort.seconds(SECONDS))
    direct, ours, *nginx = ways
    what = f"POST of {size} bytes through the proxy to {DESCRIBED[kind]}"
    rates = f"{median(ours.rates):,.0f} a second, the service alone {median(direct.rates):,.0f}"
    other = (
        f"; nginx, which does not fence: {nginx[0].share(direct):.2f}, {median(nginx[0].costs):.0f} µs"
        if nginx
        else ""
    )
    targeted = kind == TARGETED
    share, cpu = SHARES[size] if targeted else None, CPU_MICROSECONDS.get(size) if targeted else None
    key = f"{size}_{kind}"
    yield Figure(
        f"proxy_share_{key}", f"{what}: share", ours.share(direct), "", share, rates + other, "at least"
    )
    yield Figure(f"proxy_cpu_{key}", f"{what}: CPU", median(ours.costs), "µs", cpu, "of the proxy, a request")


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program that says on which port it listens."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    found = re.search(r"listening on 127.0.0.1:(\d+)", process.stdout.readline())
    assert found is not None, process.stdout.read()
    try:
        yield process, int(found[1])
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def _proxy(folder: Path, service: int, *more: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    options = ["--upstream", f"http://127.0.0.1:{service}", "--name", "orders/{path.id}", *more]
    options += ["--listen", "127.0.0.1:0", "--store", f"sqlite:///{folder}/marks.db"]
    with started("-m", "fenced", "proxy", *options) as found:
        yield found


@contextmanager
def _nginx(folder: Path, service: int) -> Iterator[tuple[int, int] | None]:
    """Its port and its process, or None if it is not installed."""
    try:
        program = find_program("nginx", "nginx-light")
    except MissingProgram:
        yield None
        return
    port = free_port()
    (file := folder / "nginx.conf").write_text(
        NGINX.format(folder=folder.resolve(), service=service, port=port)
    )
    process = subprocess.Popen([program, "-c", str(file.resolve())], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def _script(size: int) -> str:
    """Requests for wrk, each connection going round the names."""
    realm, grant = "00000000000000aa", f"{7:032x}"
    lines = [
        f'wrk.format("POST", "/orders/{n}", {{["Fenced-Stamp"] = \'"{Stamp(realm, (f"orders/{n}",), 7, 1, grant)}"\', '
        f'["Content-Type"] = "application/json", ["User-Agent"] = "bench"}}, body)'
        for n in range(NAMES)
    ]
    return (
        f'local body = string.rep("x", {size})\nlocal requests, at = {{}}, 0\n'
        f"init = function() requests = {{{', '.join(lines)}}} end\n"
        f"request = function() at = at % {NAMES} + 1 return requests[at] end\n"
    )


def load(script: Path, port: int, seconds: float) -> tuple[float, int]:
    """Requests a second, and requests."""
    wrk = find_program("wrk", "wrk")
    arguments = ["-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}", "-s", str(script)]
    done = subprocess.run(
        [wrk, *arguments, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True
    )
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(done.stdout)
    found = re.search(r"(\d+) requests in .*Requests/sec:\s+([0-9.]+)", done.stdout, re.DOTALL)
    assert found is not None
    return float(found[2]), int(found[1])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
