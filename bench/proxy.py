"""What the proxy costs: CPU for each request, and its throughput as a share of the service's own.

The service, the proxy and the load (wrk) share the machine. Each request carries a stamp of one of 64 names, and the
proxy keeps their order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.figures import Figure
from bench.interleaved import Effort
from fenced.model import Stamp
from fenced.testing.servers.base import find_program

CONNECTIONS = 64
NAMES = 64
SECONDS = 3.0
ROUNDS = 5
SHARES = {200: 0.35, 65_536: 0.75}
CPU_MICROSECONDS = 35.0


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(dir=folder) as top:
        here = Path(top)
        with _started("-m", "bench.bare_service") as (_, service):
            options = ["--upstream", f"http://127.0.0.1:{service}", "--name", "orders/{path.id}"]
            options += ["--listen", "127.0.0.1:0", "--store", f"sqlite:///{here}/marks.db"]
            with _started("-m", "fenced", "proxy", *options, "--alone") as (alone, port):
                for size in SHARES:
                    yield from _figures(here, effort, size, service, alone, port, "")
            with _started("-m", "fenced", "proxy", *options) as (shared, port):
                yield from _figures(here, effort, 200, service, shared, port, "_shared")


def _figures(
    here: Path, effort: Effort, size: int, service: int, proxy: subprocess.Popen[str], port: int, suffix: str
) -> Iterator[Figure]:
    script = here / f"load{size}.lua"
    script.write_text(_script(size))
    _load(script, port, 0.5)
    shares, costs, rates = [], [], []
    for _ in range(effort.of(ROUNDS)):
        bare = _load(script, service, SECONDS)
        before = cpu_seconds(proxy.pid)
        ours = _load(script, port, SECONDS)
        costs.append((cpu_seconds(proxy.pid) - before) / (ours * SECONDS) * 1e6)
        shares.append(ours / bare)
        rates.append((ours, bare))
    ours, bare = rates[shares.index(sorted(shares)[len(shares) // 2])]
    which = "several proxies may share the store" if suffix else "alone"
    what = f"POST of {size} bytes through the proxy, {which}"
    detail = (
        f"{ours:,.0f} a second, the service alone {bare:,.0f}; {CONNECTIONS} connections, all on this machine"
    )
    yield Figure(
        f"proxy_share_{size}{suffix}",
        f"{what}: share",
        median(shares),
        "",
        None if suffix else SHARES[size],
        detail,
        "at least",
    )
    target = CPU_MICROSECONDS if size == 200 and not suffix else None
    yield Figure(
        f"proxy_cpu_{size}{suffix}", f"{what}: CPU", median(costs), "µs", target, "of the proxy, a request"
    )


@contextmanager
def _started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
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


def _load(script: Path, port: int, seconds: float) -> float:
    """Requests a second."""
    wrk = find_program("wrk", "wrk")
    arguments = ["-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}", "-s", str(script)]
    done = subprocess.run(
        [wrk, *arguments, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True
    )
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(done.stdout)
    found = re.search(r"Requests/sec:\s+([0-9.]+)", done.stdout)
    assert found is not None
    return float(found[1])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
