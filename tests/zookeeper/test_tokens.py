"""Tokens of ZooKeeper: transaction numbers, in the order of the grants whatever happens in between."""

import itertools
from typing import Any

import pytest

from fenced.errors import Misconfigured
from fenced.runtime.blocking import step
from fenced.stores.zookeeper.authority.session import SessionCall
from fenced.stores.zookeeper.authority.tree import QueueLook, queue_of
from fenced.stores.zookeeper.authority.watching import PlaceWatch
from fenced.stores.zookeeper.wire import jute
from fenced.testing.kit import asking, granted
from fenced.values.model import TOKEN_MAX, Kept, Released, Waiting, grant_id
from tests.zookeeper.acting import RUNTIME, Pair, paths_of, places, woken
from tests.zookeeper.raw import Raw


# proves authority zookeeper: transaction-numbers
def test_a_token_is_the_number_of_the_transaction_that_queued(pair: Pair, raw: Raw) -> None:
    one, _ = pair
    ask = asking(RUNTIME, "a", "b")
    token = step(granted(one, ask)).token
    nodes = [*places(raw, one, "a"), *places(raw, one, "b"), paths_of(one).attempt(grant_id(ask.secret))]
    assert {raw.get(node)[1].czxid for node in nodes} == {token}
    step(one.raise_floor(10**12))
    assert 10**12 < step(granted(one, asking(RUNTIME, "c"))).token < 10**12 + 1000
    view = step(pair[1].observe("a"))
    assert view.held_by is not None and view.held_by.token == token  # of before the raise, and told so


@pytest.mark.parametrize("same_client", [True, False])
def test_a_waiter_behind_a_name_taken_by_force_is_granted_above_it(pair: Pair, same_client: bool) -> None:
    """Its place in the queue is older than the token that force-release minted: it gets a newer one."""
    one, two = pair
    holder = asking(RUNTIME, "orders")
    waiters = [asking(RUNTIME, "orders", wait=True) for _ in range(3)]
    held = step(granted(one, holder)).token
    other = one if same_client else two
    for waiter in waiters:
        assert isinstance(step(other.ask(waiter)), Waiting)
    minted = step(two.force_release("orders", held))
    assert minted is not None
    tokens = [minted]
    for waiter in waiters:
        woken(other, grant_id(waiter.secret))
        tokens.append(step(granted(other, waiter)).token)
        assert step(other.release(waiter.secret)) == Released()
    assert all(a < b for a, b in itertools.pairwise(tokens)), tokens


@pytest.mark.parametrize("what", ["force", "raise"])
@pytest.mark.parametrize("same_client", [True, False])
def test_a_newer_number_is_newer_than_those_behind(pair: Pair, same_client: bool, what: str) -> None:
    """The first waiter takes a newer number. One that came between has an older one, and must not be granted it."""
    one, two = pair
    holder, early, late = (asking(RUNTIME, "orders", wait=True) for _ in range(3))
    held = step(granted(one, holder)).token
    assert isinstance(step(one.ask(early)), Waiting)
    if what == "force":
        step(two.force_release("orders", held))
    else:
        step(two.raise_floor(step(two.open()).last_token + 100))
    other = one if same_client else two
    assert isinstance(step(other.ask(late)), Waiting)
    if what == "raise":
        assert step(one.release(holder.secret)) == Released()
    first = step(granted(one, early)).token
    assert step(one.renew([early.secret])) == [Kept(10.0)]
    (waiting,) = step(other.renew([late.secret]))  # which looks again: something has changed ahead
    assert isinstance(waiting, Waiting) and waiting.check_in > 0
    assert step(one.release(early.secret)) == Released()
    woken(other, grant_id(late.secret))
    assert step(granted(other, late)).token > first


@pytest.mark.parametrize("same_client", [True, False])
def test_a_newer_number_is_noticed_between_the_look_and_the_watch(
    pair: Pair, same_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    holder, early, late = (asking(RUNTIME, "orders", wait=True) for _ in range(3))
    held = step(granted(one, holder)).token
    assert isinstance(step(one.ask(early)), Waiting)
    step(one.force_release("orders", held))
    other = one if same_client else two
    tokens: list[int] = []
    stand = PlaceWatch.stand

    async def stand_late(self: PlaceWatch, call: SessionCall, mine: Any, *rest: Any) -> Any:
        if mine.public == grant_id(late.secret) and not tokens:
            tokens.append((await granted(one, early)).token)
            assert await one.renew([early.secret]) == [Kept(10.0)]
        return await stand(self, call, mine, *rest)

    monkeypatch.setattr(PlaceWatch, "stand", stand_late)
    assert isinstance(step(other.ask(late)), Waiting)
    assert step(one.release(early.secret)) == Released()
    woken(other, grant_id(late.secret))
    assert step(granted(other, late)).token > tokens[0]


def test_a_newer_number_outlives_who_took_it(pair: Pair) -> None:
    """Between it and the last waiter stood one that left without being granted anything."""
    one, two = pair
    holder, early, middle, last = (asking(RUNTIME, "orders", wait=True) for _ in range(4))
    held = step(granted(one, holder)).token
    for client, ask in ((one, early), (one, middle), (two, last)):
        assert isinstance(step(client.ask(ask)), Waiting)
    step(one.force_release("orders", held))
    first = step(granted(one, early)).token
    assert step(one.release(early.secret)) == Released()
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(one.withdraw(middle.secret)) == Released()
    woken(two, grant_id(last.secret))
    assert step(granted(two, last)).token > first


def test_force_that_goes_unnoticed_would_be_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: whoever was ahead is gone, and how does not matter."""
    monkeypatch.setattr(QueueLook, "too_old", lambda *_: False)
    with pytest.raises(AssertionError):
        test_a_waiter_behind_a_name_taken_by_force_is_granted_above_it(pair, same_client=True)


def test_numbers_near_the_end_are_exact(pair: Pair) -> None:
    one, two = pair
    step(one.raise_floor(TOKEN_MAX - 1))
    ask = asking(RUNTIME, "orders")
    for client in (one, one, two):
        assert step(granted(client, ask)).token == TOKEN_MAX
    assert step(one.release(ask.secret)) == Released()
    for client in pair:
        with pytest.raises(Misconfigured, match="used up"):
            step(client.ask(asking(RUNTIME, "another")))
    assert step(one.survey()) == []


def test_the_servers_counter_of_places_may_begin_anew() -> None:
    """It has 32 bits and a sign, and goes on below zero."""
    stat = jute.Stat(*range(11))
    ids = [f"{number:032x}" for number in range(4)]
    children = [
        f"{ids[0]}-2147483646",
        f"{ids[1]}-2147483647",
        f"{ids[2]}--2147483648",
        f"{ids[3]}--2147483647",
    ]
    assert queue_of(list(reversed(children)), stat).publics == ids
