"""The live page in a real browser: screenshots at three widths in both themes, and how soon it shows a refusal."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fenced
import fenced.sql
from fenced_testkit.servers import ServiceServer

CHROMIUM = os.environ.get("FENCED_CHROMIUM", "/usr/bin/chromium")
WIDTHS = {390: 760, 1024: 768, 1280: 720, 1600: 900, 3840: 2160}
DOCS = Path(__file__).parents[1] / "docs" / "img"
REFUSALS = 20
NAMES = 1000


class Cast:
    """Programs on several machines, as they would look on the page."""

    def __init__(self, url: str, namespace: str = "default", token: str = "") -> None:
        self._url = url
        self.namespace = namespace
        self._query = f"?namespace={namespace}"
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._attempts: list[str] = []
        self.post("/v1/namespaces", {"namespace": namespace})

    def post(self, path: str, body: object) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path + self._query, data, self._headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def write(self, name: str, granted: dict[str, Any]) -> None:
        """A value under this name, with the stamp of a grant."""
        headers = {**self._headers, "fenced-stamp": f'"{granted["stamp"]}"'}
        request = urllib.request.Request(f"{self._url}/v1/values/{name}", b"1", headers, method="PUT")
        urllib.request.urlopen(request, timeout=60).close()

    def asking(self, name: str, label: str, *, ttl: float = 600, wait: bool = False) -> dict[str, Any]:
        """The ask of a program whose label may name its host: worker@web-1."""
        attempt = secrets.token_hex(16)
        self._attempts.append(attempt)
        who, _, host = label.partition("@")
        holder = {"label": who, "host": host or "web-1", "pid": 1000 + len(self._attempts)}
        return {"attempt": attempt, "names": [name], "ttl": ttl, "wait": wait, "holder": holder}

    def ask(self, name: str, label: str, *, ttl: float = 600, wait: bool = False) -> dict[str, Any]:
        return self.post("/v1/leases", self.asking(name, label, ttl=ttl, wait=wait))

    def ask_many(self, names: Sequence[str], label: str) -> None:
        self.post("/v1/batch", {"do": [{"ask": self.asking(name, label)} for name in names]})

    def renew(self) -> None:
        self.post("/v1/leases/renew", {"attempts": self._attempts[-1000:]})

    @contextlib.contextmanager
    def waiting(self, name: str, label: str) -> Iterator[None]:
        """A waiter that keeps its place, however slow this machine is."""
        ask, end = self.asking(name, label, wait=True), threading.Event()
        self.post("/v1/leases", ask)

        def keep() -> None:
            while not end.wait(2):
                self.post("/v1/leases", ask)

        thread = threading.Thread(target=keep)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def overtake(self, name: str, late: str, newer: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The grants of a holder that was overtaken, and of its successor."""
        old = self.ask(name, late)
        self.post(f"/v1/names/{name}/force-release", {"token": old["token"], "reason": "it did not answer"})
        return old, self.ask(name, newer)


class GuardedOrders:
    """A guarded table, and a late write that it refuses."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite://{path}"
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
        self._db.execute("INSERT INTO orders VALUES (42, 10)")
        self._guard = fenced.sql.Guard(table="orders", name="orders/{id}")
        self._guard.install(self._db, mode="enforce")

    def write(self, granted: dict[str, Any]) -> bool:
        """Whether the guard admitted it."""
        stamp = fenced.Stamp.parse(granted["stamp"])
        try:
            with self._guard.transaction(self._db, stamp) as tx:
                tx.execute("UPDATE orders SET qty = qty - 1 WHERE id = 42")
        except fenced.StaleToken:
            return False
        return True

    def write_unstamped(self) -> None:
        """As a program that knows nothing of leases."""
        self._db.execute("UPDATE orders SET qty = qty - 1 WHERE id = 42")


@contextlib.contextmanager
def _service() -> Iterator[tuple[str, Cast, GuardedOrders]]:
    with tempfile.TemporaryDirectory() as folder:
        orders = GuardedOrders(Path(folder) / "shop.db")
        with ServiceServer(options=("--guard", orders.url)) as server:
            yield server.url(), Cast(server.url()), orders


def _refuse(cast: Cast, orders: GuardedOrders, number: int = 0) -> None:
    """A holder is overtaken, and writes late."""
    late, newer = cast.overtake("orders/42", f"worker-{3 + number}@web-1", f"worker-{7 + number}@web-3")
    if not orders.write(newer) or orders.write(late):
        raise RuntimeError("the guard did not decide as it should")
    cast.post("/v1/names/orders/42/force-release", {"token": newer["token"], "reason": "the next round"})


def _populate(cast: Cast, orders: GuardedOrders) -> None:
    late = cast.ask("orders/42", "worker-3@web-1", ttl=2)
    time.sleep(2.5)
    newer = cast.ask("orders/42", "worker-7@web-3", ttl=30)
    time.sleep(1)
    if not orders.write(newer) or orders.write(late):
        raise RuntimeError("the guard did not decide as it should")
    for label in ("worker-9@web-1", "worker-2@web-2", "worker-5@web-2"):
        cast.ask("orders/42", label, wait=True)
    cast.ask("nightly-report", "cron@ops-1", ttl=120)
    cast.ask("billing/close-of-month", "ledger-close@batch-4", ttl=300)
    for shard in range(12):
        cast.ask(f"index/shard-{shard:02}", f"indexer-{shard % 4}@search-{shard % 4 + 1}", ttl=60)
    cast.ask("index/shard-03", "indexer-9@search-2", wait=True)
    cast.ask("mail/outbox", "relay@mx-1", ttl=45)
    cast.ask("mail/outbox", "relay@mx-2", ttl=45, wait=True)
    orders.write_unstamped()


def screens(folder: Path) -> None:
    """Full pages in both themes; one with a name chosen at the middle width, an empty one, and a thousand rows."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, _service() as (url, cast, orders):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def shot(name: str, width: int, scheme: Any, place: str = "") -> None:
            page = browser.new_page(
                viewport={"width": width, "height": WIDTHS[width]},
                color_scheme=scheme,
                reduced_motion="reduce",
            )
            page.goto(f"{url}/{place}")
            page.locator("#live.on").wait_for()
            cast.renew()
            page.wait_for_timeout(2500)  # some looks, for the lines of the numbers
            page.screenshot(path=folder / f"{name}.png")
            page.close()

        shot("live-empty", 1280, "light")
        watcher = browser.new_page()  # while somebody looks, the service sees how leases end
        watcher.goto(url)
        watcher.locator("#live.on").wait_for()
        _populate(cast, orders)
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                shot(f"live-{width}-{scheme}", width, scheme, "#orders/42")
        shot("live-390-names", 390, "light")
        cast.ask_many([f"jobs/{number:04}" for number in range(NAMES)], "worker@node-4")
        shot("live-thousand", 1280, "dark")
        browser.close()


def main(folder: Path) -> None:
    """`python -m evidence.live_page FOLDER`: all screenshots into the folder, and three of them into the docs."""
    screens(folder)
    chosen = {"live-1280-light": "live", "live-390-dark": "live-phone", "live-thousand": "live-thousand"}
    for shown, name in chosen.items():
        shutil.copy(folder / f"{shown}.png", DOCS / f"{name}.png")


def run() -> dict[str, Any]:
    """From the guard's refusal to the row on the page, a second's look in between; and the cost of a thousand rows."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, _service() as (url, cast, orders):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(url)
        page.locator("#live.on").wait_for()
        seconds = []
        for number in range(REFUSALS):
            _refuse(cast, orders, number)
            began = time.monotonic()
            page.locator("#feed li.refused").nth(number).wait_for()
            seconds.append(time.monotonic() - began)
        cast.ask_many([f"jobs/{number:04}" for number in range(NAMES)], "worker@node-4")
        page.locator("#rows tr").nth(NAMES - 1).wait_for()
        frames = page.evaluate(_FRAMES)
        browser.close()
    return {
        "refusals": REFUSALS,
        "shown_after_ms": {
            "median": round(statistics.median(seconds) * 1000),
            "longest": round(max(seconds) * 1000),
        },
        "thousand_rows": {"longest_frame_ms": frames},
    }


_FRAMES = """() => new Promise((done) => {
  let last = performance.now(), longest = 0, end = last + 5000;
  const frame = (at) => {
    longest = Math.max(longest, at - last); last = at;
    at < end ? requestAnimationFrame(frame) : done(Math.round(longest));
  };
  requestAnimationFrame(frame);
})"""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
