"""One instance as a process: signals, the sockets that it listens on, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from fenced.errors import FencedError, Misconfigured
from fenced.http1.limits import HttpLimits
from fenced.http1.server import HttpServer, ListenOptions, fast_loop, listening
from fenced.runtime.supervised import notify
from fenced.service.access import TokenFile, is_loopback
from fenced.service.api import Api
from fenced.service.limits import Limits
from fenced.service.namespaces import MakeAuthority, ServedNamespace
from fenced.values.failures import FileInUse
from fenced.values.model import Standing

STOP_SECONDS = 10
COLLECT_AFTER = 50_000
"""How many more objects than before there are when the collector runs."""
LOOK_SECONDS = 0.1
"""How often it looks whether the store has failed for good."""
STANDBY_SECONDS = 0.1
"""How often a standby tries to open the file."""
DESCRIPTORS_KEPT = 600
"""Descriptors reserved for the store and for refusing surplus connections."""

log = logging.getLogger("fenced.service")


class RunningInstance:
    """An instance that listens. When it is asked to stop, it answers the requests that are held."""

    def __init__(self, api: Api, options: ListenOptions) -> None:
        limits = api.limits
        self.api = api
        api.scheme = "http" if options.certificate is None else "https"
        self.http = HttpServer(
            api,
            options,
            HttpLimits(
                limits.connections,
                request_time=limits.request_time,
                body_time=limits.body_time,
                idle_time=limits.idle_time,
            ),
        )
        api.certificate = self.http.certificate
        self.failure: FencedError | None = None
        """Why the store has ended this instance."""
        self.started, self._stopping, self._forced = (asyncio.Event() for _ in range(3))

    def stop(self) -> None:
        """Answer what is held, accept nothing more, and end when the requests under way are answered."""
        if self._stopping.is_set():
            self._forced.set()  # the second time it does not wait for them
        self._stopping.set()
        notify("STOPPING=1")
        self.api.send_on()

    def reload(self) -> None:
        """Read the tokens and the certificate again. What cannot be used is not: the old ones stay."""
        for what, load in (("file of tokens", self.api.reload_tokens), ("certificate", self.http.reload)):
            try:
                if load():
                    log.info("after SIGHUP the %s was read again", what)
            except (FencedError, OSError) as error:
                log.error("after SIGHUP the old %s stays in use: %s", what, error)
        self.warn_of_dates()

    def warn_of_dates(self) -> None:
        if (why := self.http.why_not_now()) is not None:
            log.warning("%s", why)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`."""
        try:
            with self._signals():
                await self.http.start(sockets)
                notify("READY=1")  # it accepts connections from here on
                self.started.set()
                await self._stopped()
                ending = asyncio.create_task(self.http.stop(STOP_SECONDS))
                forced = asyncio.create_task(self._forced.wait())
                await asyncio.wait([ending, forced], return_when=asyncio.FIRST_COMPLETED)
                for each in (ending, forced):
                    each.cancel()
                await self.http.end()
        finally:
            await self.api.close()

    async def _stopped(self) -> None:
        """Wait for `stop`; or for a store that refuses everything."""
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_SECONDS)
            if self.failure is None and (refusal := self.api.namespaces.refusal) is not None:
                # Nothing heals it here, and as long as this process lives no other one can have the files.
                self.failure = refusal
                log.error(
                    "%s; this instance ends, so that it is started again or a standby takes over", refusal
                )
                self.stop()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)


def serve(
    make: MakeAuthority,
    options: ListenOptions,
    say: Callable[[str], None],
    *,
    best_effort: bool = False,
    tokens: str | None = None,
    values: str | None = None,
    values_beside: str | None = None,
    rate: float | None = None,
    demo: bool = False,
    guards: Sequence[str] = (),
    standby: bool = False,
) -> FencedError | None:
    """Run an instance until it gets SIGTERM or SIGINT, or its store has failed for good; returns how it failed.

    `tokens` is the path of a file of bearer tokens, `values` the address of the guard of the values, which must be
    usable at the start. Without it they are at `values_beside`, which is opened by the first request for a value.
    `rate` is how many requests a second each client may send. `demo`: stop and wake a holder every ten seconds.
    `guards` are the addresses of the guards that the live page shows. `standby`: wait for the file of the store.
    """

    def audit(entry: dict[str, object]) -> None:
        say("audit " + json.dumps({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry}))

    limits = Limits(connections=_connections_max(), rate=rate)
    api = Api(
        make, None if tokens is None else TokenFile(tokens), audit, values or values_beside, limits, guards
    )
    unprotected = tokens is None and options.client_ca is None and not options.any_host
    api.own_host_only = unprotected and options.address is not None and is_loopback(options.address[0])
    server = RunningInstance(api, options)

    async def run() -> None:
        namespace, standing = await _opened(api, say if standby else None)
        where = namespace.leases.url
        if standing.doubts and not best_effort:
            await api.close()
            raise Misconfigured(
                f"{where} cannot promise that tokens never repeat: {'; '.join(standing.doubts)}. "
                "Change that, or accept it: --guarantee best-effort"
            )
        server.warn_of_dates()
        for warning in standing.warnings:
            say(f"warning: {warning}")
        if values is not None:
            await api.values.open()
        _collect_less()
        sockets = listening(options)
        guarantee = "best-effort" if standing.doubts else "strict"
        say(f"listening on {' and '.join(_shown(options, sockets))}, in front of {where} ({guarantee})")
        with _demo(_shown(options, sockets)[0]) if demo else contextlib.nullcontext():
            await server.serve(sockets)

    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(run())
    return server.failure


def _collect_less() -> None:
    """Freeze what is loaded (gc.freeze), and collect less often.

    Requests leave hardly any cycles behind, and the collector took 40 % of the CPU of each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 100)


async def _opened(api: Api, say: Callable[[str], None] | None) -> tuple[ServedNamespace, Standing]:
    """Open the store; with `say`, wait while another process has its file. It does not listen meanwhile."""
    waits = False
    while True:
        try:
            return await api.namespaces.opened("default", create=True)
        except FileInUse as error:
            if say is None:
                raise
            if not waits:
                say(f"standing by: {error}")
            waits = True
            await asyncio.sleep(STANDBY_SECONDS)


@contextlib.contextmanager
def _demo(url: str) -> Iterator[None]:
    """A process that runs the demo at this instance, which listens long before that process has loaded its modules."""
    command = [sys.executable, "-P", "-m", "fenced.drills.demo", str(os.getpid()), url]
    # In a process group of its own: Ctrl-C reaches only this process, which then ends the demo.
    process = subprocess.Popen(command, process_group=0)
    try:
        yield
    finally:
        process.kill()  # the kernel ends its holders with it, also one that is stopped
        process.wait()


def _connections_max() -> int:
    """As many connections as an instance bears, and this process may have descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = Limits().connections + DESCRIPTORS_KEPT
    if soft < wanted and soft != resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
    return max(1, most - DESCRIPTORS_KEPT)


def _shown(options: ListenOptions, sockets: list[socket.socket]) -> list[str]:
    shown = []
    if options.address is not None:
        host, port = sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        shown.append(f"{'https' if options.certificate else 'http'}://{host}:{port}")
    if options.socket is not None:
        shown.append(f"fenced+unix://{os.path.abspath(options.socket)}")
    return shown
