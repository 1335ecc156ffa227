"""The live page in a real browser: what people see, what they can do, and what a stranger's words cannot."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

import fenced
from evidence.live_page import CHROMIUM, Cast, GuardedOrders
from fenced.client.reaching import operate
from fenced.work import Claims
from fenced_testkit.servers import RedisServer, ServiceServer

pytestmark = pytest.mark.xdist_group("page")
PATIENCE_MS = 90_000
RIGHTS = {
    "ops": ("lease", "observe", "operate"), "reader": ("observe",), "scoped": ("observe",), "tenant": ("observe",),
}  # fmt: skip
SCOPES = {"scoped": 'names = ["mine"]\n', "tenant": 'namespaces = ["tenant/1"]\n'}
SECRETS = {user: secrets.token_hex(16) for user in RIGHTS}
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
JOBS = Claims(
    table="jobs",
    name="jobs/{id}",
    ready="status = 'pending'",
    taken={"status": "running"},
    back={"status": "pending"},
    dead={"status": "failed"},
    max_attempts=2,
)
BEST_EFFORT = ("--guarantee", "best-effort")
HOSTILE = '<img src=x onerror="document.title=1">'


class Site:
    """One instance with tokens and a guard, and the log-ins of its users."""

    def __init__(self, server: ServiceServer, orders: GuardedOrders) -> None:
        self.server = server
        self.orders = orders

    def cast(self) -> Cast:
        """In a namespace of its own."""
        return Cast(self.server.url(), secrets.token_hex(4), SECRETS["ops"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("page")
    lines = [
        f'[[token]]\nid = "{user}"\nsha256 = "{hashlib.sha256(SECRETS[user].encode()).hexdigest()}"\n'
        f"rights = {json.dumps(rights)}\n{SCOPES.get(user, '')}"
        for user, rights in RIGHTS.items()
    ]
    (folder / "tokens.toml").write_text("".join(lines))
    orders = GuardedOrders(folder / "shop.db")
    missing = f"sqlite://{folder}/missing.db"
    options = ("--tokens", str(folder / "tokens.toml"), "--guard", orders.url, "--guard", missing)
    with ServiceServer(options=options) as server:
        yield Site(server, orders)


def asked(site: Site, cast: Cast, user: str, method: str = "GET") -> Any:
    url = f"{site.server.url()}/v1/events?namespace={cast.namespace}"
    headers = {"authorization": f"Bearer {SECRETS[user]}"}
    return urllib.request.urlopen(
        urllib.request.Request(url, headers=headers, method=method), timeout=PATIENCE_MS / 1000
    )


def events_of(site: Site, cast: Cast, user: str) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """The stream of a page, without a browser."""
    with asked(site, cast, user) as stream:
        while line := stream.readline():
            kind, data, _ = line.decode(), stream.readline().decode(), stream.readline()
            yield kind.removeprefix("event: ").strip(), json.loads(data.removeprefix("data: "))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For this module only: while it runs, no other test of this process can have an event loop."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


NewPage = Callable[..., Page]
Opened = Callable[..., Page]


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    """An empty tab. Nothing may be wrong in the browser's console at the end: no breach of the CSP."""
    wrong: list[str] = []
    pages: list[Page] = []

    def make(url: str, **options: object) -> Page:
        context = browser.new_context(base_url=url, **options)  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on(
            "console",
            lambda line: wrong.append(f"{line.text} {line.location}") if line.type == "error" else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        pages.append(page)
        return page

    expect.set_options(timeout=PATIENCE_MS)
    yield make
    for page in pages:
        page.context.close()
    # The first page asks for a token, one test stops the instance, and one asks for a namespace that is not there.
    assert [line for line in wrong if not re.search(r"401 \(|net::ERR|namespace=nowhere", line)] == []


@pytest.fixture
def opened(new_page: NewPage, site: Site) -> Opened:
    """Opens the page of a user."""

    def open_page(cast: Cast, user: str = "ops", *, name: str = "", **options: object) -> Page:
        page = new_page(site.server.url(), **options)
        page.goto(f"/?namespace={cast.namespace}")
        page.get_by_label("Token").fill(SECRETS[user])
        page.get_by_role("button", name="Open the page").click()
        loaded = "as it was" if options.get("java_script_enabled") is False else "live"
        expect(page.locator("#live")).to_contain_text(loaded)  # the rows are there before the script is
        if name:
            page.goto(f"/?namespace={cast.namespace}#{name}")
        return page

    return open_page


def test_a_refusal_is_seen_with_both_holders(opened: Opened, site: Site, tmp_path: Path) -> None:
    """And explained, with the name's history; a drill opens in the same picture."""
    cast = site.cast()
    page = opened(cast)
    late, newer = cast.overtake("orders/42", HOSTILE, "worker-7@web-3")
    assert site.orders.write(newer) and not site.orders.write(late)
    refusal = page.locator("#feed li.refused")
    expect(refusal).to_contain_text(f"{HOSTILE} on web-1 with token 1, because worker-7 on web-3 has 3")
    expect(refusal).to_contain_text("enforce")
    expect(page.locator("#said")).to_contain_text("Refused")
    expect(page.locator("#guards")).to_contain_text("● enforce")
    expect(page.locator("#guards .warn")).to_contain_text("missing.db")
    page.locator("#rows").get_by_role("button", name="orders/42").click()
    detail = page.locator("#detail")
    expect(detail).to_contain_text("worker-7 on web-3 holds it under token 3")
    expect(detail).to_contain_text("did not know that its lease had ended")
    expect(detail.locator("svg path.cross")).to_have_count(1)
    assert page.locator("img").count() == 0 and page.title() != "1", "a label is text"
    drill = {
        "drill": "sigstop", "verdict": "held", "refused": 1, "lost_updates": 0, "seconds": 2.5, "names": ["stock"],
        "authority": "sqlite:", "guard": "sqlite:",
        "grants": [{"name": "stock", "token": token, "holder": "AB"[token - 1], "time": token} for token in (1, 2)],
        "operations": [{"name": "stock", "kind": "write", "token": 1, "time": 2.4, "decision": "refused"}],
        "pauses": [{"token": 1, "began": 1.1, "ended": 2.3}],
    }  # fmt: skip
    (tmp_path / "drill.json").write_text(json.dumps(drill))
    page.locator("#drill input").set_input_files(tmp_path / "drill.json")
    expect(detail).to_contain_text("HELD: 1 operation refused, 0 acknowledged updates lost")
    expect(detail.locator("svg path.cross")).to_have_count(1)
    detail.get_by_role("button", name="Close").click()
    expect(detail).to_be_hidden()


def test_the_stream_has_the_state_and_then_what_changes(site: Site) -> None:
    """Of the names that the reader may see. Time alone is no change."""
    cast = site.cast()
    cast.ask("mine/1", "worker")
    cast.ask("theirs", "worker")
    whole, scoped = events_of(site, cast, "ops"), events_of(site, cast, "scoped")
    states = [next(stream) for stream in (whole, scoped)]
    assert [kind for kind, _ in states] == ["state", "state"]
    assert [[each["name"] for each in state["names"]] for _, state in states] == [
        ["mine/1", "theirs"],
        ["mine/1"],
    ]
    assert [state["may_operate"] for _, state in states] == [True, False]
    assert [len(state["guards"]) for _, state in states] == [2, 0], "guards hold the names of all"
    quiet = [next(whole), next(whole)]
    assert [change.keys() & {"names", "gone", "events"} for _, change in quiet] == [set(), set()]
    with asked(site, cast, "ops", "HEAD") as head:
        assert head.read() == b"", "and it ends"
    cast.ask("theirs/too", "worker")
    cast.ask("mine/2", "worker")
    for stream, names in ((whole, {"theirs/too", "mine/2"}), (scoped, {"mine/2"})):
        seen: set[str] = set()
        granted: set[str] = set()
        while "mine/2" not in seen & granted:
            _, change = next(stream)
            seen |= {each["name"] for each in change.get("names", [])}
            granted |= {name for event in change.get("events", []) for name in event["names"]}
        assert seen == granted == names
    for stream in (whole, scoped):
        stream.close()


SHORT = """async () => {
  const { lanesOf } = await import("./lanes.js");
  const end = Date.now() / 1000, events = [];
  for (let token = 1; token <= 20; token++) {
    const at = end - 10 * (21 - token);
    events.push({ kind: "granted", token, at }, { kind: "released", token, at: at + 2 });
  }
  const found = lanesOf(null, events, 0);
  return [found.to - found.from, found.lanes.map((lane) => lane.token)];
}"""


def test_a_thousand_names(opened: Opened, site: Site) -> None:
    """Also: the window of lanes fits the last four tokens. Two seconds of forty can be seen, two of 300 cannot."""
    cast = site.cast()
    cast.ask_many([f"jobs/{number:04}" for number in range(1000)], "worker")
    page = opened(cast)
    expect(page.locator("#rows tr")).to_have_count(1000)
    expect(page.locator("#count")).to_have_text("1,000 names")
    page.get_by_text("waited for", exact=True).click()
    waiting = cast.waiting
    with waiting("jobs/0500", "patient"), waiting("jobs/0700", "one"), waiting("jobs/0700", "two"):
        expect(page.locator("#rows tr td.name")).to_have_text(["jobs/0700", "jobs/0500"])
        expect(page.locator("#rows")).to_contain_text("patient")
    page.locator("#search").fill("jobs/0501")
    expect(page.locator("#count")).to_have_text("None of 1,000 names matches.")
    seconds, tokens = page.evaluate(SHORT)
    assert seconds == pytest.approx(40, abs=1) and tokens == [17, 18, 19, 20]


def test_a_dropped_connection_comes_back(opened: Opened, site: Site) -> None:
    cast = site.cast()
    cast.ask("before", "worker")
    page = opened(cast)
    expect(page.locator("#rows")).to_contain_text("before")
    page.evaluate(HIDE, True)
    expect(page.locator("#live")).to_have_text("paused while the tab is hidden")
    cast.ask("meanwhile", "worker")
    page.evaluate(HIDE, False)
    expect(page.locator("#rows tr")).to_have_count(2)
    expect(page.locator("#live")).to_have_text("live")
    site.server.stop()  # an open stream does not hold it up
    expect(page.locator("#live")).to_have_text("connection lost, retrying")
    expect(page.locator("#notices")).to_contain_text("This instance does not answer (since ")
    site.server.start()
    cast.ask("after", "worker")
    expect(page.locator("#live")).to_have_text("live")
    expect(page.locator("#notices")).not_to_contain_text("This instance")
    expect(page.locator("#rows tr")).to_have_count(3)
    expect(page.locator("#rows")).to_contain_text("after")


def test_sorting_and_ages(opened: Opened, site: Site) -> None:
    """Held since, the oldest waiter, and the hot names: each name is first in one order."""
    cast = site.cast()
    cast.ask("a", "zoe")
    cast.ask("b", "yan")
    cast.ask("c", "adam")
    page = opened(cast)
    rows, names = page.locator("#rows tr"), page.locator("#rows td.name")
    order = page.get_by_label("Sort by")
    with cast.waiting("c", "first"), cast.waiting("b", "second"), cast.waiting("b", "third"):
        expect(rows.nth(1).locator(".line")).to_contain_text("2 waiting")
        expect(rows.nth(1).locator(".line")).to_contain_text(re.compile(r"oldest for \d+\ss"))
        expect(rows.nth(0).locator(".since")).to_have_text(re.compile(r"^\d+\ss$"))
        for value, found in {
            "name": "abc", "holder": "cba", "token": "cba", "held": "abc", "queue": "bca", "oldest": "cba",
        }.items():  # fmt: skip
            order.select_option(value)
            expect(names).to_have_text(list(found))
        page.get_by_text("waited for", exact=True).click()
        expect(order).to_have_value("queue")
        expect(page.locator("#hot button")).to_have_text(["b", "c"])
        expect(page.locator("#hot")).to_contain_text("waited for 2 times")
    page.locator("#hot").get_by_role("button", name="b").click()
    expect(page.locator("#detail h2")).to_have_text("b")


def test_the_title_counts_while_nobody_looks(new_page: NewPage, tmp_path: Path) -> None:
    """A hidden tab looks now and then. Refusals that were on the page before do not count."""
    orders = GuardedOrders(tmp_path / "shop.db")
    with ServiceServer(options=("--guard", orders.url)) as server:
        cast, page = Cast(server.url()), new_page(server.url())
        late, newer = cast.overtake("orders/42", "late", "newer")
        assert orders.write(newer) and not orders.write(late)
        page.clock.install()
        page.goto("/")
        expect(page.locator("#feed li.refused")).to_have_count(1)  # from before it was opened
        expect(page.locator("#hour-section li.refused")).to_contain_text("1refused")
        expect(page.locator("#hour-section li.granted")).to_contain_text("2grants")
        title = page.title()
        page.evaluate(HIDE, True)
        assert not orders.write(late) and not orders.write(late)
        page.clock.fast_forward(30_000)
        expect(page).to_have_title(f"(2) {title}")
        page.clock.fast_forward(3_000)
        expect(page.locator("#live")).to_have_text("paused while the tab is hidden")
        page.evaluate(HIDE, False)
        expect(page).to_have_title(title)
        expect(page.locator("#live")).to_have_text("live")


def test_names_that_need_attention_are_shown(opened: Opened, site: Site) -> None:
    """A guard that does not answer, and writers without a stamp: who they are, and that axe finds nothing."""
    site.orders.write_unstamped()
    page = opened(site.cast())
    notices = page.get_by_role("region", name="What needs attention")
    expect(notices).to_contain_text("missing.db does not answer")
    expect(notices).to_contain_text(re.compile(r"orders: \d+ writes? without a stamp"))
    expect(page.locator("#guards .unstamped li")).to_contain_text("somebody: 1 write")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


NOTICES = """async (events) => {
  const { notices } = await import("/watch.js"), now = Date.now() / 1000;
  const holder = { label: "worker", host: "", pid: 0 }, of = (name, since, waiting_since) =>
    ({ name, held_by: { holder }, waiting: 1, since: now - since, waiting_since: now - waiting_since });
  const guards = [{ url: "g", realm: "r", tables: [{ guard: "orders", wrong: [], highest: 9 }] }];
  const say = (lastToken) => notices({ problem: "", alerts: [], guards, events, realm: "r", lastToken, views:
    [of("a", 900, 601), of("b", 599, 900), of("c", 900, 599), of("d", 4000, 5000), of("e", 700, 700), of("f", 800, 800)]
  });
  const first = say(8), real = Date.now;
  Date.now = () => real() + 11_000;
  const later = say(8), caughtUp = say(9);
  Date.now = real;
  return [first, later, caughtUp];
}"""


def test_lasting_problems_need_attention(opened: Opened, site: Site) -> None:
    """A queue that has not moved for ten minutes, a mark above the last token, a token of two grants."""
    page = opened(site.cast())
    first, later, caught_up = page.evaluate(NOTICES, [])
    assert [each.partition(" ")[0] for each in first] == ["d", "f", "e", "1"], (
        "the longest three, and one more"
    )
    assert first[0].endswith("has not changed for 67\xa0min: worker")
    assert later[0].startswith(
        "orders has seen token 9, and the last one is 8: the authority has lost its history"
    )
    assert not [each for each in caught_up if each.startswith("orders")]
    twice = {"kind": "refused", "why": "reused", "token": 7, "names": ["orders/42"], "at": time.time()}
    assert page.evaluate(NOTICES, [twice])[0][0].startswith("orders/42: token 7 was used by two grants")
    assert not [each for each in page.evaluate(NOTICES, [{**twice, "at": 1.0}])[0] if "two grants" in each]


def test_from_one_namespace_to_another_by_keyboard(opened: Opened, site: Site) -> None:
    """As they come into use. The address names the namespace, and a reader sees those of its token."""
    cast = site.cast()
    page = opened(cast, viewport={"width": 390, "height": 800})
    tenant = Cast(site.server.url(), "tenant/1", SECRETS["ops"])
    tenant.ask("invoices", "worker-1")
    links = page.locator("#namespaces")
    expect(links).to_contain_text("tenant/1")
    _tab_to(page, f"Namespace: {cast.namespace}")
    page.keyboard.press("Enter")
    expect(links.get_by_role("link", name=cast.namespace)).to_have_attribute("aria-current", "page")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") == 390, (
        "the list is not wider than the window"
    )
    page.keyboard.press("Escape")
    expect(links).to_be_hidden()
    page.keyboard.press("Enter")
    _tab_to(page, "tenant/1")
    page.keyboard.press("Enter")
    expect(page.locator("#rows")).to_contain_text("invoices")
    expect(page).to_have_url(re.compile("namespace=tenant%2F1$"))
    page.go_back()
    expect(page.locator("summary")).to_contain_text(cast.namespace)
    other = opened(cast, "tenant")
    expect(other.locator("#rows")).to_contain_text("invoices")  # the log-in leads to its own
    expect(other.locator("#namespaces li")).to_have_text(["tenant/1"])
    for namespace in (cast.namespace, "default"):
        assert other.request.get(f"/v1/events?namespace={namespace}").status == 403


def test_force_release_by_keyboard(opened: Opened, site: Site) -> None:
    """It names the holder and its token, wants a reason, and is audited. A reader has no such button."""
    cast = site.cast()
    token = cast.ask("orders/7", "worker-7@web-3")["token"]
    page = opened(cast)
    expect(page.locator("#rows")).to_contain_text("orders/7")
    press = page.keyboard.press
    press("/")
    page.keyboard.type("worker-7")
    _tab_to(page, "orders/7")
    press("Enter")
    _tab_to(page, "Take it away…")
    press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Take orders/7 away from worker-7?")
    expect(dialog).to_contain_text(f"worker-7 (web-3, pid 1001) holds it under token {token}")
    _tab_to(page, "Take it away")
    press("Enter")
    expect(page.locator("#reason")).to_be_focused()  # without a reason nothing is sent
    page.keyboard.type("stuck since noon")
    _tab_to(page, "Take it away")
    press("Enter")
    expect(dialog).to_be_hidden()
    taken = page.locator("#feed li.taken")
    expect(taken).to_contain_text("by ops: stuck since noon")
    expect(taken.locator("strong")).to_have_text("Taken away")
    expect(taken.locator("strong svg.sign path")).to_have_count(1)  # drawn: a font may lack the symbol
    expect(page.locator("#rows tr")).to_have_count(0)
    expect(page.locator("#lately button")).to_have_text(["orders/7"])
    site.server.wait_until(lambda: "stuck since noon" in site.server.log.read_text(), "the audit is written")
    (entry,) = re.findall(r"audit (\{.*stuck since noon.*\})", site.server.log.read_text())
    assert (json.loads(entry)["token"], json.loads(entry)["by"]) == (token, "ops")
    cast.ask("orders/8", "worker-8")
    reader = opened(cast, "reader", name="orders/8")
    expect(reader.locator("#detail")).to_contain_text("worker-8 on web-1 holds it")
    expect(reader.get_by_role("button", name="Take it away")).to_have_count(0)


def _tab_to(page: Page, text: str) -> None:
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == text:
            return
    raise AssertionError(f"the keyboard does not reach {text!r}")


def test_everybody_can_read_it(opened: Opened, site: Site) -> None:
    """axe finds nothing in either theme, on a telephone and on a desk."""
    cast = site.cast()
    cast.ask("orders/42", "worker-7@web-3")
    page = opened(cast, name="orders/42", color_scheme="light", reduced_motion="reduce")
    for scheme, width in (("light", 390), ("dark", 1280)):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        with cast.waiting("orders/42", "worker-9@web-1"):
            expect(page.locator("#detail")).to_contain_text("1 waiter in line")
            found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing is wider"
        page_color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", page_color))) < 200) == (scheme == "dark")


def test_without_a_script_and_without_a_token(opened: Opened, site: Site) -> None:
    cast = site.cast()
    cast.ask("orders/42", HOSTILE)
    page = opened(cast, java_script_enabled=False)
    expect(page.locator("#rows")).to_contain_text(f"{HOSTILE} on web-1")
    cookie = page.context.cookies()[0]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and not cookie["secure"]
    by_gateway = {"x-forwarded-proto": "https"}
    log_in = page.request.post("/login", form={"token": SECRETS["ops"]}, headers=by_gateway, max_redirects=0)
    assert "; Secure" in log_in.headers["set-cookie"], "a gateway has terminated TLS"
    release = f"/v1/names/orders/42/force-release?namespace={cast.namespace}"
    for headers, status in (({}, 403), ({"fenced-operator": "page", "origin": "https://evil.example"}, 403)):
        answer = page.request.post(
            release, data={"token": 1, "reason": "a form of another site"}, headers=headers
        )
        assert answer.status == status
    assert SECRETS["ops"] not in page.content() + page.url + site.server.log.read_text()
    page.goto("/?namespace=nowhere")
    expect(page.get_by_role("alert")).to_contain_text("nowhere")
    page.goto("/")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    page.get_by_label("Token").fill("guessed")
    page.get_by_role("button", name="Open the page").click()
    expect(page.get_by_role("alert")).to_have_text("This token is not known.")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        Cast(site.server.url())


def test_over_a_server(new_page: NewPage, postgresql_url: str) -> None:
    """The leases and the values are in that server: rows, a refusal, force-release, and an instance that comes back."""
    name, options = "orders/42", ("--values", postgresql_url, "--guard", postgresql_url)
    with ServiceServer(store=postgresql_url, options=options) as server:
        page, cast = new_page(server.url()), Cast(server.url())
        page.goto("/")
        row = page.locator("#rows tr", has_text=name)
        late, newer = cast.overtake(name, "worker-3", "worker-7")
        expect(row).to_contain_text(f"{newer['token']:,}")
        cast.write(name, newer)
        with pytest.raises(urllib.error.HTTPError, match="412"):
            cast.write(name, late)
        refusal = page.locator("#feed li.refused", has_text=name)
        expect(refusal).to_have_count(1)  # although the guard's records are read too
        expect(refusal).to_contain_text(
            f"worker-3 on web-1 with token {late['token']:,}, because worker-7 on web-1 has {newer['token']:,}"
        )
        operate(
            postgresql_url,
            lambda operator: operator.override("fenced_guard.value", "orders/4*", 600.0, "to see it"),
        )
        notices = page.get_by_role("region", name="What needs attention")
        expect(notices).to_contain_text(
            re.compile(r"an override lets orders/4\* through until \d.*, by .*: to see it")
        )
        server.restart()
        with cast.waiting(name, "patient"):
            expect(row).to_contain_text("patient")
            row.click()
            page.get_by_role("button", name="Take it away…").click()
            page.get_by_label("Reason").fill("stuck since noon")
            page.get_by_role("button", name="Take it away", exact=True).click()
            expect(page.locator("#feed li.taken")).to_contain_text("stuck since noon")
            expect(row.locator(".holder")).to_contain_text("patient")


def test_a_store_that_does_not_answer(new_page: NewPage) -> None:
    """The page says so above everything else, and since when; no longer when the store is back."""
    with RedisServer() as store, ServiceServer(store=store.url(), options=BEST_EFFORT) as server:
        cast, page = Cast(server.url()), new_page(server.url())
        cast.ask("orders/42", "worker-7")
        page.goto("/")
        expect(page.locator("#rows")).to_contain_text("worker-7")
        notices = page.get_by_role("region", name="What needs attention")
        expect(notices).to_be_hidden()
        store.freeze()
        expect(notices).to_contain_text(re.compile(r"The store does not answer: .*\(since \d"))
        store.thaw()
        expect(page.locator("#live")).to_have_text("live")
        expect(notices).to_be_hidden()


def test_claimed_rows_are_shown_with_their_workers(
    new_page: NewPage, postgresql_url: str, tmp_path: Path
) -> None:
    """Claims in PostgreSQL and in SQLite: a dead letter, a row that has come back, and a worker with its row."""
    where = f"sqlite://{tmp_path}/jobs.db"
    options = ("--guard", postgresql_url, "--guard", where)
    with (
        ServiceServer(store=postgresql_url, options=options) as server,
        fenced.Client(postgresql_url, label="reporter") as client,
        psycopg.connect(postgresql_url, autocommit=True) as one,
        contextlib.closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other,
    ):
        client.acquire("first").release()
        for db, key in ((one, "bigint"), (other, "INTEGER")):
            db.execute(f"CREATE TABLE jobs (id {key} PRIMARY KEY, status text NOT NULL DEFAULT 'pending')")
            JOBS.install(db, mode="require")
            db.execute("INSERT INTO jobs (id) VALUES (1), (2), (3), (4)")
        with JOBS.worker(client) as worker, JOBS.worker(client) as second:
            for db, by in ((one, worker), (other, second)):
                taken = by.claim_many(db, 3)
                taken[0].retry(db, after=0)
                taken[1].retry(db, after=3600)
            for db, by in ((one, worker), (other, second)):
                (again,) = by.claim_many(db, 1)  # its last attempt
                again.retry(db)
            page = new_page(server.url())
            page.goto("/")
            boxes = page.locator("#guards .work")
            expect(boxes).to_have_count(2)
            for box in boxes.all():
                expect(box).to_contain_text("1 ready (next jobs/4), 1 later, 1 claimed, ⚠ 1 dead letter")
                expect(box.locator("tbody tr")).to_have_count(1)
                expect(box.locator("tbody tr")).to_contain_text("jobs/3")
                expect(box.locator("tbody tr")).to_contain_text("reporter")
            taken[2].finish(other, status="done")
            expect(boxes.nth(1)).to_contain_text("0 claimed")
            assert not Axe().run(page).response["violations"]
