"""The order of tokens, in seeded worlds; and that the worlds can find a proxy that does not keep it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenced.errors import Misconfigured, Misuse
from fenced.proxy import order
from fenced.proxy.gate import Gate
from fenced.proxy.names import Naming, NoName
from fenced.proxy.order import InFlight, Permit
from fenced.values.model import Credential
from tests.proxy.worlds import NAME, SETTLE, GateWorld, stamp_of


@pytest.mark.parametrize("alone", [False, True])
def test_nothing_stale_reaches_the_upstream_and_every_name_comes_free(alone: bool) -> None:
    arrived = unknown = refused = 0
    for seed in range(60):
        found = GateWorld(seed, alone=alone).run()
        assert not found.stale, f"seed {seed}: {found.stale}"
        assert found.final, f"seed {seed}: the last holder did not get through"
        arrived, unknown, refused = arrived + found.arrived, unknown + found.unknown, refused + found.refused
    assert min(arrived, unknown, refused) > 50  # they did happen


def _never_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "_blocking", lambda *_: [])


def _does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order.Watch, "over_at", lambda self, permit: self._first_seen[permit])


def _sends_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "may_send", lambda *_: True)


def _leaves_the_line_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "_close_to_older", lambda *_: None)


@pytest.mark.parametrize(
    "bug, alone",
    [
        (_never_blocked, False),
        (_does_not_settle, False),
        (_does_not_settle, True),
        (_sends_after_a_pause, False),
        (_leaves_the_line_open, True),
    ],
)
def test_the_worlds_find_planted_bugs(bug: Any, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(300):
        found = GateWorld(seed, alone=alone).run()
        if found.stale or not found.final:
            return
    pytest.fail("300 worlds found nothing")


@pytest.mark.parametrize("planted", [False, True])
def test_an_unknown_outcome_that_cannot_be_noted_is_waited_out(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else than a proxy has raised the mark, so the store refuses the note. A newer request still waits."""

    def forgets(gate: Gate, line: Any, token: int) -> None:
        async def noted() -> None:
            await gate._noted(line, lambda found: found.doubted(gate.proxy, token))
            gate.answered(line, token)

        gate._runtime.spawn(noted, "planted")

    if planted:
        monkeypatch.setattr(Gate, "doubt", forgets)
    world = GateWorld(0, alone=True, faults=0.0)
    (_, runtime, gate) = world._proxies[0]
    entered: list[float] = []

    async def story() -> None:
        line = await gate.enter(NAME, stamp_of(1), runtime.now() + 30)
        assert line is not None
        await gate.store.announce(Credential((stamp_of(5),), (NAME,)))
        doubted = runtime.now()
        gate.doubt(line, 1)
        await world._sleep(runtime, 1.0)  # the note has been refused by now
        await gate.enter(NAME, stamp_of(6), runtime.now() + 30)
        entered.append(runtime.now() - doubted)

    runtime.spawn(story, "story")
    world.world.run(60)
    assert (entered[0] >= SETTLE) is not planted


def test_a_request_is_overdue_once_a_newer_one_has_waited_for_overtime() -> None:
    """By the clock of a world; at a second proxy, too, which learns of the newer token from the store."""
    world = GateWorld(0, faults=0.0)
    (_, runtime, one), (_, other, two), _ = world._proxies
    seen: list[tuple[bool, bool]] = []

    async def newer() -> None:
        await two.enter(NAME, stamp_of(2), other.now() + 300)

    async def story() -> None:
        older = await one.enter(NAME, stamp_of(1), runtime.now() + 300)
        assert older is not None
        await world._sleep(runtime, 100)
        seen.append((one.overdue(older, 1, 10.0), False))
        other.spawn(newer, "newer")
        for seconds in (9.0, 3.0):
            await world._sleep(runtime, seconds)
            line = two._lines[NAME]
            seen.append((one.overdue(older, 1, 10.0), two.overdue(line, 2, 10.0)))

    runtime.spawn(story, "story")
    world.world.run(200)
    assert seen == [(False, False), (False, False), (True, False)]


permits = st.lists(
    unique_by=lambda permit: (permit.proxy, permit.token, permit.unknown),
    elements=st.builds(Permit, st.sampled_from("ab"), st.integers(1, 4), st.integers(0, 3), st.booleans()),
)


@given(permits, st.integers(1, 5), st.sampled_from("ab"))
def test_permits(found: list[Permit], token: int, proxy: str) -> None:
    before = InFlight(None, tuple(dict.fromkeys(found)))
    after = before.admitted(stamp_of(token), proxy)
    assert InFlight.unpacked("a", after.packed()) == after
    ours, earlier = after.permit(proxy, token), before.permit(proxy, token)
    assert ours is not None and (earlier is None or ours.beat == earlier.beat + 1)
    assert set(after.others(token)) == set(before.others(token))  # others' permits are never touched
    doubted = after.doubted(proxy, token)
    assert doubted.permit(proxy, token) == ours  # what is in flight stays in flight
    (doubt,) = (p for p in doubted.permits if p.proxy == proxy and p.token == token and p.unknown)
    assert doubt not in after.permits  # it is a new one, so everybody waits from now on


def test_a_proxy_that_renews_is_not_silent() -> None:
    watch, permit = order.Watch(settle=30.0), Permit("a", 1, beat=1)
    watch.look([permit], 10.0)
    assert not watch.silent(permit, 12.9) and watch.silent(permit, 13.0)
    renewed = permit._replace(beat=2)
    watch.look([renewed], 12.9)
    assert not watch.silent(renewed, 13.0)


def test_a_value_of_another_program_is_not_taken_for_ours() -> None:
    for value in (b"", b"7", b"[1, 2]", b'["1:x", []]', b"\xff"):
        with pytest.raises(Misconfigured):
            InFlight.unpacked("orders/42", value)


@pytest.mark.parametrize(
    "template, target, name",
    [
        ("orders/{path.id}", "/orders/42", "orders/42"),
        ("orders/{path.id}", "/orders/42/items/7?x=1", "orders/42"),
        ("orders/{path.id}", "/orders/%34%32/", "orders/42"),
        ("orders/{path.id}", "/customers/42", None),
        ("orders/{path.id}", "/orders", None),
        ("/v1/{shop}/orders/{id} = orders/{path.shop}-{path.id}", "/v1/eu/orders/7", "orders/eu-7"),
        ("/orders/{id:int} = orders/{path.id}", "/orders/7", "orders/7"),
        ("/orders/{id:int} = orders/{path.id}", "/orders/07", None),
        ("carts/{header.X-Cart}", "/anything", "carts/c1"),
        ("carts/{query.cart}", "/buy?cart=9", "carts/9"),
        ("everything", "/a/b", "everything"),
    ],
)
def test_names(template: str, target: str, name: str | None) -> None:
    assert Naming([template]).name_of(target.encode(), lambda: [(b"x-cart", b"c1")]) == name


@pytest.mark.parametrize(
    "target",
    "//orders/42 /./orders/42 /x/../orders/42 /orders/%2e%2e/42 /orders/a%2Fb /orders;v=1/42 /orders\\42 "
    "/orders/%00 /orders/%ff /orders/%20 /orders/%2534%2532 /orders/4%zz /orders/42;v=1 /orders/42%3Bv=1".split(),
)
def test_a_path_that_can_be_read_in_two_ways_has_no_name(target: str) -> None:
    with pytest.raises(NoName):
        Naming(["orders/{path.id}"]).name_of(target.encode(), list)


def test_a_field_has_one_value() -> None:
    carts = Naming(["carts/{query.cart}"])
    for query in (
        "|cart=|cart=1&cart=2|cart=1%2F2|cart=..|cart=1;cart=2|cart=1&x=2;cart=3|cart=1&cart[]=2|cart=1&cart%5Bx%5D=2|"
        "cart[]=1|cart=1&Cart=2|cart=1&+cart=2|cart=1&cart%00x=2|cart=%2531|cart=1&c%2561rt=2|cart=%ff"
    ).split("|"):
        with pytest.raises(NoName):
            carts.name_of(f"/buy?{query}".encode(), list)
    assert carts.name_of(b"/buy?x[]=1&cart=1&y=%25&cart2=2", list) == "carts/1"
    assert Naming(["carts/{query.cart_id}"]).name_of(b"/?cart_id=1&cart=2", list) == "carts/1"
    with pytest.raises(NoName):
        Naming(["carts/{query.cart_id}"]).name_of(b"/?cart_id=1&cart.id=2", list)


@pytest.mark.parametrize("other", [b"x_cart", b"X.Cart", b"x-cart"])
def test_a_header_that_a_service_may_take_for_another(other: bytes) -> None:
    headers = [(b"x-cart", b"1"), (b"x-carts", b"3"), (other, b"2")]
    with pytest.raises(NoName):
        Naming(["carts/{header.x-cart}"]).name_of(b"/buy", lambda: headers)
    assert Naming(["carts/{header.x-cart}"]).name_of(b"/buy", lambda: headers[:2]) == "carts/1"


@pytest.mark.parametrize(
    "text", ["/orders/{id}", "{path.id}-x", "/a/{b} = a/{c}", "/a/{b} = a/{path.c}", "a/{cookie.b}"]
)
def test_a_template_that_is_none(text: str) -> None:
    with pytest.raises(Misuse):
        Naming([text])
