"""A program: leases that are contended, saved and lost, and decisions of a guard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest

import fenced
from fenced import events
from fenced.drills.relay.proxy import Proxy
from fenced.metrics import Recorder
from fenced_testkit.servers import ServiceServer
from tests.metrics.servers import until
from tests.metrics.stories.history import History

E = TypeVar("E")
KEEPER = events.KeeperFailed("made on purpose")
"""No input makes the renewing loop fail, so the recorder is told that it did."""


def serve(stack: ExitStack, pages: dict[str, Callable[[], bytes]]) -> int:
    """Pages of this process, as a program shows its numbers; returns the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages[self.path]()
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class names it
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return server.server_port


class Program:
    """A program with a Recorder, whose authority is behind a link that can fail."""

    def __init__(self, stack: ExitStack) -> None:
        self.recorder, registry = Recorder(["orders/*"]), CollectorRegistry()
        self.recorder.prometheus(registry)
        self.seen: list[events.Event] = []
        pages = {
            "/metrics": lambda: self.recorder.text().encode(),
            "/collected": lambda: generate_latest(registry),
        }
        self.port = serve(stack, pages)
        service = stack.enter_context(ServiceServer())
        self.link = stack.enter_context(Proxy(service.host, service.port))
        self.client = stack.enter_context(
            fenced.Client(f"http://{self.link.host}:{self.link.port}", on_event=self.hear)
        )
        self.other = stack.enter_context(fenced.Client(service.url()))
        self.stack = stack

    def hear(self, event: events.Event) -> None:
        self.seen.append(event)
        self.recorder(event)

    def heard(self, kind: type[E]) -> list[E]:
        return [event for event in self.seen if isinstance(event, kind)]

    def cut(self) -> None:
        self.link.refuse()
        self.link.reset()

    def play(self) -> History:
        found = History()
        stop = self.recorder.observe_guards()
        self._contend(found)
        stop()  # the other stories are of other processes
        self._lose_the_link(found)
        held = self.client.acquire("orders/held", ttl=600)  # held and waited for until the end
        self._granted(found)
        blocked = self.other.acquire("orders/blocked", ttl=600)
        waiter = threading.Thread(target=lambda: self.client.acquire("orders/blocked").release())
        waiter.start()
        self.stack.callback(waiter.join)
        self.stack.callback(blocked.release)
        self.stack.callback(held.release)
        until(lambda: self.heard(events.AskQueued)[-1].names == ("orders/blocked",))
        found.note("contended_total", pattern="orders/*")
        self.recorder(KEEPER)
        found.note("keeper_failures_total")
        self._from_events(found)
        return found

    def _granted(self, found: History) -> None:
        found.note("grants_total", pattern="orders/*")

    def _contend(self, found: History) -> None:
        """One lease is lost by its own limit; its late write is refused; others are busy, or wait in vain."""
        of = {"pattern": "orders/*"}
        values = self.stack.enter_context(fenced.Values(f"memory://{self.port}"))
        late = self.client.acquire("orders/1", ttl=0.5, max_hold=0.1)
        self._granted(found)
        values.write(late, "orders/1", b"1")  # the first mark: there is no gap
        found.note("admitted_total", guard="memory:")
        assert late.wait_lost(timeout=60)
        found.note("lost_total", **of, reason="max_hold")
        with self.other.hold("orders/1") as taken:
            values.write(taken, "orders/1", b"2")
            found.note("admitted_total", guard="memory:")
            found.observed("token_gap", taken.token - late.token, guard="memory:", source="holder")
            with suppress(fenced.StaleToken):
                values.write(late, "orders/1", b"late")
            found.note("refusals_total", guard="memory:", kind="stale", source="holder")
            found.observed("token_gap", late.token - taken.token, guard="memory:", source="holder")
            with self.client.try_hold("orders/1") as nothing:
                assert nothing is None
            found.note("not_granted_total", **of, why="busy")
            with suppress(fenced.NotGranted):
                self.client.acquire("orders/1", wait=0.05)
            found.note("contended_total", **of)
            found.note("not_granted_total", **of, why="timeout")
        # A guard whose mode lets nothing through without a stamp tells it, too.
        self.recorder(events.GuardDecided("memory:", "orders/1", None, None, "missing", "refuse"))
        found.note("refusals_total", guard="memory:", kind="missing", source="holder")
        found.note("unstamped_total", guard="memory:", ruling="refuse", source="holder")

    def _lose_the_link(self, found: History) -> None:
        """A lease is renewed, in jeopardy, and saved; one expires; a release and an ask get no answer."""
        of = {"pattern": "orders/*"}
        with self.client.hold("orders/2", ttl=6):
            self._granted(found)
            until(lambda: any(each.kept for each in self.heard(events.RenewalRound)))
            self.cut()
            until(lambda: self.heard(events.LeaseInJeopardy))
            found.note("jeopardy_total", **of)
            self.link.heal()
            until(lambda: self.heard(events.LeaseSaved))
            found.note("saved_total", **of)
        lost = self.client.acquire("orders/3", ttl=0.5)
        self._granted(found)
        self.cut()
        assert lost.wait_lost(timeout=60)
        found.note("lost_total", **of, reason="expired")
        found.note("jeopardy_total", len(self.heard(events.LeaseInJeopardy)) - 1, **of)
        self.link.heal()
        with self.client.hold("orders/4", ttl=60):
            self._granted(found)
            self.cut()
        until(lambda: self.heard(events.ReleaseFailed))
        found.note("release_failed_total")
        with suppress(fenced.Unavailable):
            self.client.acquire("orders/5", wait=0)
        (*_, ended) = self.heard(events.AskEnded)
        assert ended.why == "unavailable"
        found.note("not_granted_total", **of, why="unavailable")
        self.link.heal()

    def _from_events(self, found: History) -> None:
        """What depends on times: the recorder's own numbers must be those of the events."""
        of = {"pattern": "orders/*"}
        found.note("connection_failures_total", len(self.heard(events.ConnectionFailed)))
        for each in self.heard(events.RenewalRound):
            for outcome in ("kept", "unknown", "ended"):
                found.note("renewals_total", getattr(each, outcome), outcome=outcome)
            if each.used_ratio is not None:
                found.observed("renewal_used_ratio", each.used_ratio)
        for granted in self.heard(events.LeaseGranted):
            found.observed("acquire_seconds", granted.waited_seconds, **of)
        ends = events.LeaseReleased | events.LeaseEnded | events.ReleaseFailed
        for over in (event for event in self.seen if isinstance(event, ends)):
            found.observed("hold_seconds", over.held_seconds, **of)
        for gone in self.heard(events.LeaseEnded):
            if gone.reason == "expired":
                found.observed("loss_noticed_seconds", gone.late_seconds)
                found.observed("loss_pause_seconds", gone.paused_seconds)
