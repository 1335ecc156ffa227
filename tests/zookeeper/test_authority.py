"""What is particular to the ZooKeeper authority: sessions, numbers, names, rights, forks, and how little it asks."""

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fenced
from fenced.authorities.zookeeper import ZooKeeperAuthority, jute
from fenced.authorities.zookeeper.address import Address
from fenced.authorities.zookeeper.session import Session
from fenced.authorities.zookeeper.tree import Paths, name_of, queue_of
from fenced.errors import FencedError, Misconfigured, Misuse, Unavailable
from fenced.model import TOKEN_MAX, Busy, Ended, Granted, Kept, Released, Waiting, check_name, grant_id
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing.faults import Proxy
from fenced.testing.inputs import ODD_NAMES
from fenced.testing.kit import asking, granted
from fenced.testing.servers import ZooKeeperServer
from tests.zookeeper.raw import Raw
from tests.zookeeper.shifting import Shifted, end_session, pass_time

RUNTIME = BlockingRuntime()
SECRET = "open sesame/@"


@contextmanager
def opened(url: str, namespace: str, runtime: Any = RUNTIME) -> Iterator[ZooKeeperAuthority]:
    authority = ZooKeeperAuthority.at(url, runtime, namespace)
    try:
        step(authority.open())
        yield authority
    finally:
        step(authority.close())


@pytest.fixture
def pair(zookeeper_url: str) -> Iterator[tuple[ZooKeeperAuthority, ZooKeeperAuthority]]:
    """Two clients of one namespace."""
    namespace = secrets.token_hex(8)
    with opened(zookeeper_url, namespace) as one, opened(zookeeper_url, namespace) as two:
        yield one, two


@pytest.fixture
def raw(zookeeper_url: str) -> Iterator[Raw]:
    with Raw(zookeeper_url) as client:
        yield client
        client.end_session()


Pair = tuple[ZooKeeperAuthority, ZooKeeperAuthority]


def places(raw: Raw, authority: ZooKeeperAuthority, name: str = "orders") -> list[str]:
    path = authority._paths.name(name)
    return [f"{path}/{child}" for child in raw.children(path)]


def woken(authority: ZooKeeperAuthority, public: str) -> None:
    limit = time.monotonic() + 5
    while public not in step(authority.hear(RUNTIME.now() + 0.5)):
        assert time.monotonic() < limit


# Tokens.


# proves authority zookeeper: transaction-numbers
def test_a_token_is_the_number_of_the_transaction_that_queued(pair: Pair, raw: Raw) -> None:
    one, _ = pair
    ask = asking(RUNTIME, "a", "b")
    token = step(granted(one, ask)).token
    nodes = [*places(raw, one, "a"), *places(raw, one, "b"), one._paths.attempt(grant_id(ask.secret))]
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
    step(granted(one, holder))
    other = one if same_client else two
    for waiter in waiters:
        assert isinstance(step(other.ask(waiter)), Waiting)
    minted = step(two.force_release("orders"))
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
    step(granted(one, holder))
    assert isinstance(step(one.ask(early)), Waiting)
    if what == "force":
        step(two.force_release("orders"))
    else:
        step(two.raise_floor(step(two.open()).last_token + 100))
    other = one if same_client else two
    assert isinstance(step(other.ask(late)), Waiting)
    if what == "raise":
        assert step(one.release(holder.secret)) == Released()
    first = step(granted(one, early)).token
    assert step(one.renew([early.secret], 2.0)) == [Kept(10.0)]
    (waiting,) = step(other.renew([late.secret], 2.0))  # which looks again: something has changed ahead
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
    step(granted(one, holder))
    assert isinstance(step(one.ask(early)), Waiting)
    step(one.force_release("orders"))
    other = one if same_client else two
    tokens: list[int] = []
    stand = other._stand

    async def stand_late(session: Session, mine: Any, *rest: Any) -> Any:
        if mine.public == grant_id(late.secret) and not tokens:
            tokens.append((await granted(one, early)).token)
            assert await one.renew([early.secret], 2.0) == [Kept(10.0)]
        return await stand(session, mine, *rest)

    monkeypatch.setattr(other, "_stand", stand_late)
    assert isinstance(step(other.ask(late)), Waiting)
    assert step(one.release(early.secret)) == Released()
    woken(other, grant_id(late.secret))
    assert step(granted(other, late)).token > tokens[0]


def test_a_newer_number_outlives_who_took_it(pair: Pair) -> None:
    """Between it and the last waiter stood one that left without being granted anything."""
    one, two = pair
    holder, early, middle, last = (asking(RUNTIME, "orders", wait=True) for _ in range(4))
    step(granted(one, holder))
    for client, ask in ((one, early), (one, middle), (two, last)):
        assert isinstance(step(client.ask(ask)), Waiting)
    step(one.force_release("orders"))
    first = step(granted(one, early)).token
    assert step(one.release(early.secret)) == Released()
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(one.withdraw(middle.secret)) == Released()
    woken(two, grant_id(last.secret))
    assert step(granted(two, last)).token > first


def test_force_that_goes_unnoticed_would_be_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: whoever was ahead is gone, and how does not matter."""
    told = Session._changed

    def careless(self: Session, mine: Any, event: jute.Event) -> None:
        told(self, mine, jute.Event(jute.DELETED, event.path))

    monkeypatch.setattr(Session, "_changed", careless)
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
        f"{ids[1]}~-2147483647",
        f"{ids[2]}--2147483648",
        f"{ids[3]}--2147483647",
    ]
    assert queue_of(list(reversed(children)), stat).publics == ids


# Waiting.


# proves authority zookeeper: pushed
def test_who_waits_asks_nothing_and_is_told_in_order(zookeeper_server: ZooKeeperServer, pair: Pair) -> None:
    """A hand-over is one request, the release; its waiter knows from the order of the news that it is first."""
    one, _ = pair
    asks = [asking(RUNTIME, "orders", wait=True) for _ in range(12)]
    step(granted(one, asks[0]))
    for ask in asks[1:]:
        assert isinstance(step(one.ask(ask)), Waiting)

    def received() -> int:
        lines = zookeeper_server.tell("mntr").splitlines()
        return next(
            int(float(line.split("\t")[1])) for line in lines if line.startswith("zk_packets_received")
        )

    before = received()
    for ask, following in itertools.pairwise(asks):
        assert step(one.release(ask.secret)) == Released()
        woken(one, grant_id(following.secret))
        assert isinstance(step(one.ask(following)), Granted)
    assert received() - before <= len(asks)


def test_one_that_leaves_the_middle_of_a_queue_lets_nobody_in(pair: Pair) -> None:
    one, two = pair
    holder, middle, last = (asking(RUNTIME, "orders", wait=True) for _ in range(3))
    step(granted(one, holder))
    assert isinstance(step(one.ask(middle)), Waiting)
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(one.withdraw(middle.secret)) == Released()
    woken(two, grant_id(last.secret))
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(one.release(holder.secret)) == Released()
    woken(two, grant_id(last.secret))
    step(granted(two, last))


def test_who_was_told_long_ago_asks_for_a_sign_of_life_first(zookeeper_url: str) -> None:
    runtime = Shifted(RUNTIME)
    with opened(zookeeper_url, secrets.token_hex(8), runtime) as one:
        holder, waiter = asking(runtime, "orders"), asking(runtime, "orders", wait=True)
        step(granted(one, holder))
        assert isinstance(step(one.ask(waiter)), Waiting)
        assert step(one.release(holder.secret)) == Released()
        runtime.ahead += 2
        assert step(granted(one, waiter)).remaining == 10.0


def test_a_waiter_behind_a_lock_delay_is_not_let_in(pair: Pair) -> None:
    one, two = pair
    holder, waiter = asking(RUNTIME, "orders", ttl=5, lock_delay=20), asking(RUNTIME, "orders", wait=True)
    step(granted(one, holder))
    assert isinstance(step(two.ask(waiter)), Waiting)
    end_session(one._session(5.0), one._address)
    woken(two, grant_id(waiter.secret))
    answer = step(two.ask(waiter))
    assert isinstance(answer, Waiting) and answer.check_in == pytest.approx(20, abs=1)


def test_a_place_that_somebody_deleted_is_no_place(pair: Pair, raw: Raw) -> None:
    """The waiter behind it is first then. The one whose place it was is out, and never granted."""
    one, two = pair
    holder, lost, last = (asking(RUNTIME, "orders", wait=True) for _ in range(3))
    step(granted(one, holder))
    assert isinstance(step(two.ask(lost)), Waiting)
    assert isinstance(step(one.ask(last)), Waiting)
    (place,) = [path for path in places(raw, one) if grant_id(lost.secret) in path]
    assert raw.delete(place) == 0
    assert step(one.release(holder.secret)) == Released()
    woken(one, grant_id(last.secret))
    step(granted(one, last))
    assert step(two.ask(lost)) == Ended("revoked")


def test_a_waiter_that_does_not_watch_its_own_place_would_be_caught(
    pair: Pair, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: only the one ahead is watched."""
    told = Session._changed

    def careless(self: Session, mine: Any, event: jute.Event) -> None:
        if event.path not in mine.places.values():
            told(self, mine, event)

    monkeypatch.setattr(Session, "_changed", careless)
    one, two = pair
    holder, lost = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", wait=True)
    step(granted(two, holder))
    assert isinstance(step(two.ask(lost)), Waiting)
    (place,) = [path for path in places(raw, two) if grant_id(lost.secret) in path]
    raw.delete(place)
    assert step(two.release(holder.secret)) == Released()
    assert isinstance(step(two.ask(lost)), Granted)  # and so might be another
    step(granted(one, asking(RUNTIME, "orders")))


def test_a_place_whose_attempt_somebody_deleted_can_be_taken_by_force(pair: Pair, raw: Raw) -> None:
    one, two = pair
    ask = asking(RUNTIME, "orders")
    token = step(granted(one, ask)).token
    assert raw.delete(one._paths.attempt(grant_id(ask.secret))) == 0
    assert isinstance(step(two.ask(asking(RUNTIME, "orders"))), Busy)
    minted = step(two.force_release("orders"))
    assert minted is not None and minted > token
    assert step(one.renew([ask.secret], 2.0)) == [Ended("revoked")]
    assert step(granted(two, asking(RUNTIME, "orders"))).token > minted


# Sessions.


# proves authority zookeeper: server-ttl
@pytest.mark.xdist_group("serial")
def test_the_server_bounds_the_ttl_and_the_grant_says_so() -> None:
    with (
        ZooKeeperServer({"minSessionTimeout": "4000", "maxSessionTimeout": "8000"}) as server,
        opened(server.url(), "default") as authority,
    ):
        for asked, given_ttl in ((0.5, 3.0), (4.5, 4.5), (3600.0, 6.0)):
            ask = asking(RUNTIME, f"for/{asked}", ttl=asked)
            grant = step(granted(authority, ask))
            assert (grant.ttl, grant.remaining) == (given_ttl, given_ttl)
            assert step(authority.renew([ask.secret], 1.0)) == [Kept(given_ttl)]


def test_a_session_that_was_silent_is_confirmed_before_anything_is_granted_on_it(
    zookeeper_server: ZooKeeperServer,
) -> None:
    """By a new connection, of which the leader is asked: until then it may have heard of it long ago."""
    runtime = Shifted(RUNTIME)
    with Proxy(zookeeper_server.host, zookeeper_server.port) as proxy:
        url = f"zookeeper://{proxy.host}:{proxy.port}"
        with opened(url, secrets.token_hex(8), runtime) as authority:
            ask = asking(runtime, "orders")
            step(granted(authority, ask))
            connections = proxy.connections
            for seconds, made in ((3.0, 0), (3.2, 0), (4.0, 1), (1.0, 1)):
                runtime.ahead += seconds
                assert step(authority.renew([ask.secret], 2.0)) == [Kept(10.0)]
                assert proxy.connections == connections + made


def test_only_what_the_leader_answers_is_a_sign_of_life(pair: Pair) -> None:
    one, _ = pair
    step(granted(one, asking(RUNTIME, "orders")))
    session, root = one._session(10.0), one._paths.root
    for request, counts in (
        (jute.get_data(root), False),
        (jute.get_children(root), False),
        (jute.sync(root), True),
        (jute.multi([jute.delete("/nothing")]), True),
    ):
        before = session.confirmed
        step(session.exchange(request, until=RUNTIME.now() + 5))
        assert (session.confirmed > before) == counts
    before = session.confirmed
    step(session.exchange(until=RUNTIME.now() + 5))
    assert session.confirmed == before


# proves authority zookeeper: revoked
def test_a_name_that_somebody_deleted_is_revoked(pair: Pair, raw: Raw) -> None:
    """By hand, in a client of another make: the keep-alive still succeeds, the next renewal tells."""
    one, _ = pair
    early, late = asking(RUNTIME, "orders"), asking(RUNTIME, "late")
    step(granted(one, early))
    step(granted(one, late))
    for path in places(raw, one):
        assert raw.delete(path) == 0
    assert step(one.renew([early.secret, late.secret], 2.0)) == [Ended("revoked"), Kept(10.0)]
    for path in places(raw, one, "late"):  # which is watched by now
        assert raw.delete(path) == 0
    assert step(one.renew([late.secret], 2.0)) == [Ended("revoked")]
    assert step(one.release(late.secret)) == Ended("revoked")
    assert step(one.survey()) == [] and raw.children(one._paths.attempts) == []


# proves authority zookeeper: own-memory
def test_who_has_the_secret_can_take_a_lease_over(pair: Pair) -> None:
    """A renewal moves it into the session of who renews. What is over only its own client remembers."""
    one, two = pair
    ask, waiter = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", wait=True)
    token = step(granted(one, ask)).token
    assert isinstance(step(one.ask(waiter)), Waiting)
    again = step(granted(two, ask))
    assert (again.token, again.remaining) == (token, 0.0)  # another client's session: nothing is promised
    assert step(two.renew([ask.secret], 2.0)) == [Kept(10.0)]
    assert isinstance(step(one.ask(waiter)), Waiting)
    assert step(one.renew([ask.secret], 2.0)) == [Ended("revoked")]
    assert step(two.renew([ask.secret], 2.0)) == [Kept(10.0)]
    held_by = step(one.observe("orders")).held_by
    assert held_by is not None and held_by.token == token
    assert step(two.release(ask.secret)) == step(two.release(ask.secret)) == Released()
    assert step(granted(one, waiter)).token > token


def test_what_was_taken_over_is_not_expired_by_its_first_owner(zookeeper_url: str) -> None:
    namespace, ours = secrets.token_hex(8), Shifted(RUNTIME)
    with opened(zookeeper_url, namespace, ours) as one, opened(zookeeper_url, namespace) as two:
        ask, other = asking(RUNTIME, "orders"), asking(RUNTIME, "other")
        step(granted(one, ask))
        assert step(two.renew([ask.secret], 2.0)) == [Kept(10.0)]
        ours.ahead += 11
        step(granted(one, other))  # clears up what is overdue, on a session that goes on
        assert step(two.renew([ask.secret], 2.0)) == [Kept(10.0)]


# proves authority zookeeper: delay-noticed
def test_a_lock_delay_counts_from_when_the_expiry_is_noticed(zookeeper_url: str) -> None:
    """By its own client it is known; by others at the first look."""
    namespace, time_of_both = secrets.token_hex(8), Shifted(RUNTIME)
    with opened(zookeeper_url, namespace, time_of_both) as two:
        with opened(zookeeper_url, namespace, time_of_both) as one:
            step(granted(one, asking(RUNTIME, "orders", ttl=5, lock_delay=20)))
            pass_time(60, time_of_both, [one], zookeeper_url)
        assert step(two.observe("orders")).free_in == pytest.approx(20, abs=1)
        assert isinstance(step(two.ask(asking(RUNTIME, "orders"))), Busy)
        pass_time(21, time_of_both, [two], zookeeper_url)
        step(granted(two, asking(RUNTIME, "orders")))


# proves authority zookeeper: idle-names
def test_idle_names_are_removed_by_the_server_and_tokens_go_on(pair: Pair, raw: Raw) -> None:
    one, _ = pair
    ask = asking(RUNTIME, "once")
    token = step(granted(one, ask)).token
    step(one.release(ask.secret))
    limit = time.monotonic() + 20
    while raw.children(one._paths.names):
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert step(granted(one, asking(RUNTIME, "once"))).token > token  # which it thought was there


# Names, addresses and rights.


@given(st.lists(st.text(min_size=1, max_size=60), min_size=2, max_size=6, unique=True))
def test_names_become_paths_one_to_one(names: list[str]) -> None:
    paths, good = Paths("/a", "default"), []
    for name in [*names, *ODD_NAMES]:
        try:
            good.append(check_name(name))
        except Misuse:
            continue
    made = [paths.name(name) for name in good]
    assert len(set(made)) == len(set(good))
    for name, path in zip(good, made, strict=True):
        *_, segment = path.split("/")
        assert path == f"{paths.names}/{segment}" and name_of(segment) == name
        assert segment.isascii() and segment.isprintable() and segment not in (".", "..")


def test_chroots_and_namespaces_are_apart(zookeeper_url: str, raw: Raw) -> None:
    top = secrets.token_hex(8)
    with (
        opened(f"{zookeeper_url}/{top}/b", "n/1") as one,
        opened(f"{zookeeper_url}/{top}", "n/1") as two,
        opened(f"{zookeeper_url}/{top}", "n") as three,
    ):
        assert len({step(each.open()).realm for each in (one, two, three)}) == 3
        for each in (one, two, three):
            step(granted(each, asking(RUNTIME, "orders")))
        assert sorted(raw.children(f"/{top}/fenced")) == ["n", "n%2F1"]


def test_without_create_nothing_is_made(zookeeper_url: str, raw: Raw) -> None:
    chroot = f"/{secrets.token_hex(8)}"
    authority = ZooKeeperAuthority.at(zookeeper_url + chroot, RUNTIME, "default")
    with pytest.raises(Misconfigured, match="no namespace"):
        step(authority.open(create=False))
    step(authority.close())
    assert chroot[1:] not in raw.children("/")


def test_a_node_of_another_program_is_refused(zookeeper_url: str, raw: Raw) -> None:
    chroot = f"/{secrets.token_hex(8)}"
    for path in (chroot, f"{chroot}/fenced", f"{chroot}/fenced/default"):
        raw.create(path, b"not ours")
    authority = ZooKeeperAuthority.at(zookeeper_url + chroot, RUNTIME, "default")
    with pytest.raises(Misconfigured, match="another program"):
        step(authority.open())
    step(authority.close())


# proves authority zookeeper: own-nodes
def test_nodes_belong_to_their_credentials_alone(zookeeper_url: str, raw: Raw) -> None:
    """A digest of user and password; who has others, or none, is told so and changes nothing."""
    top = secrets.token_hex(8)
    raw.create(f"/{top}")

    def url(who: str) -> str:
        return zookeeper_url.replace("://", f"://{who}") + f"/{top}"

    with opened(url("app:open%20sesame%2F%40@"), "default") as authority:
        step(granted(authority, asking(RUNTIME, "orders")))
        for other in ("", "app:wrong@", "eve:open%20sesame%2F%40@"):
            stranger = ZooKeeperAuthority.at(url(other), RUNTIME, "default")
            with pytest.raises(Misconfigured, match="credentials") as caught:
                step(stranger.open())
            assert "sesame" not in str(caught.value) + stranger.url + repr(stranger._address)
            step(stranger.close())
        (place,) = places_path(authority)
        assert raw.delete(place) == jute.NO_AUTH or raw.children(authority._paths.names) == []
        with opened(url("app:open%20sesame%2F%40@"), "default") as again:
            assert isinstance(step(again.ask(asking(RUNTIME, "orders"))), Busy)


def places_path(authority: ZooKeeperAuthority) -> list[str]:
    return [path for mine in authority._memory.values() for path in mine.places.values()]


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://",
        "zookeeper://h:x",
        "zookeeper://h:99999",
        "zookeeper://h,,i",
        "zookeeper://user@h",
        "zookeeper://h/a//b",
        "zookeeper://h/a/../b",
        "zookeeper://h/zookeeper",
        "zookeeper://h?timeout=5",
        "zookeeper://h?tls=perhaps",
        "zookeeper://h?tls=off&ssl_ca_certs=x",
        f"zookeeper://app:{SECRET}@h:x",
    ],
)
def test_what_is_no_address_is_misuse(url: str) -> None:
    with pytest.raises(Misuse) as caught:
        fenced.Client(url)
    assert "sesame" not in str(caught.value)


def test_an_address_names_members_and_shows_no_secret() -> None:
    address = Address("zookeeper://app:pass%3Aword@a,b:2182,[::1]:2183/x/y")
    assert address.members == [("a", 2181), ("b", 2182), ("::1", 2183)]
    assert (address.chroot, address.credentials) == ("/x/y", "app:pass:word")
    assert str(address) == repr(address) == "Address('zookeeper://a:2181,b:2182,[::1]:2183/x/y')"


def test_nobody_there_is_unavailable() -> None:
    with pytest.raises(Unavailable), fenced.Client("zookeeper://127.0.0.1:1,127.0.0.1:2") as client:
        client.acquire("orders", wait=0)


@pytest.mark.xdist_group("serial")
def test_tls_and_a_certificate_of_nobody() -> None:
    """The same over TLS, in both colours; a server that nobody vouches for is not spoken to."""
    with ZooKeeperServer(tls=True) as server:
        with fenced.Client(server.url()) as client, client.hold("orders") as lease:
            lease.check()

        async def both() -> None:
            async with fenced.AsyncClient(server.url()) as client, client.hold("orders", ttl=5) as lease:
                lease.check()
                await client.acquire("another")

        asyncio.run(both())
        bare = server.url().partition("?")[0]
        for url in (f"{bare}?tls=true", bare):
            with pytest.raises(FencedError), fenced.Client(url) as client:
                client.acquire("orders", wait=0)


# Forks.


def test_a_forked_child_leaves_its_parents_sessions_alone(zookeeper_url: str) -> None:
    with fenced.Client(zookeeper_url, namespace=secrets.token_hex(8)) as client:
        lease = client.acquire("orders", ttl=5)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with client.try_hold("orders") as mine:
                    status = 0 if mine is None else 2
                with client.hold("another", ttl=5) as other:
                    other.check()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        lease.check()
        assert client._authority is not None
        lease.release()
        with client.hold("orders"):
            pass


def test_one_event_loop_after_another(zookeeper_url: str) -> None:
    """Nothing of a client holds on to a loop that is gone."""

    async def use() -> int:
        runtime = AioRuntime()
        authority = ZooKeeperAuthority.at(zookeeper_url, runtime, "loops")
        await authority.open()
        ask = asking(runtime, "orders")
        token = (await granted(authority, ask)).token
        await authority.release(ask.secret)
        await authority.close()
        runtime.close()
        return token

    assert asyncio.run(use()) < asyncio.run(use())
