"""What is particular to the ZooKeeper authority: sessions, numbers, names, rights, forks, and how little it asks."""

import asyncio
import itertools
import re
import secrets
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fenced
from fenced.drills.relay import Proxy
from fenced.errors import FencedError, Misconfigured, Misuse, Unavailable
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import step
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.authority.tree import Paths, name_of
from fenced.stores.zookeeper.wire import jute
from fenced.testing.inputs import ODD_NAMES
from fenced.testing.kit import asking, granted
from fenced.values.model import Busy, Ended, Granted, Kept, Released, Waiting, check_name, grant_id
from fenced_testkit.servers import ZooKeeperServer
from tests.forking import inherits_no_lease
from tests.shifted import Shifted
from tests.zookeeper.acting import RUNTIME, Pair, opened, paths_of, places, session_of, woken
from tests.zookeeper.raw import Raw
from tests.zookeeper.shifting import end_session, pass_time

SECRET = "open sesame/@"


# Waiting.


# proves authority zookeeper: pushed
def test_a_release_wakes_the_head_of_the_queue_alone(zookeeper_server: ZooKeeperServer, pair: Pair) -> None:
    """A hand-over is the release and one look of the next waiter: five requests, however many wait."""
    one, _ = pair
    asks = [asking(RUNTIME, "orders", wait=True) for _ in range(12)]
    step(granted(one, asks[0]))
    for ask in asks[1:]:
        assert isinstance(step(one.ask(ask)), Waiting)

    def received() -> int:
        lines = zookeeper_server.four_letter("mntr").splitlines()
        return next(
            int(float(line.split("\t")[1])) for line in lines if line.startswith("zk_packets_received")
        )

    before = received()
    for ask, following in itertools.pairwise(asks):
        assert step(one.release(ask.secret)) == Released()
        woken(one, grant_id(following.secret))
        assert isinstance(step(one.ask(following)), Granted)
    assert received() - before <= 5 * len(asks)


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


def test_a_late_grant_has_its_whole_ttl(zookeeper_url: str) -> None:
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
    end_session(session_of(one, 5.0))
    woken(two, grant_id(waiter.secret))
    answer = step(two.ask(waiter))
    assert isinstance(answer, Waiting) and answer.check_in == pytest.approx(20, abs=1)


@pytest.mark.parametrize("same_client", [True, False])
def test_a_place_that_somebody_deleted_is_no_place(pair: Pair, raw: Raw, same_client: bool) -> None:
    """The waiter behind it is first then. The one whose place it was is out, and never granted."""
    one, two = pair
    two = one if same_client else two
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


def test_a_place_whose_attempt_somebody_deleted_can_be_taken_by_force(pair: Pair, raw: Raw) -> None:
    one, two = pair
    ask = asking(RUNTIME, "orders")
    token = step(granted(one, ask)).token
    assert raw.delete(paths_of(one).attempt(grant_id(ask.secret))) == 0
    assert isinstance(step(two.ask(asking(RUNTIME, "orders"))), Busy)
    minted = step(two.force_release("orders", token))
    assert minted is not None and minted > token
    assert step(one.renew([ask.secret])) == [Ended("revoked")]
    assert step(granted(two, asking(RUNTIME, "orders"))).token > minted


# Sessions.


# proves authority zookeeper: server-ttl
@pytest.mark.xdist_group("zookeeper")
def test_the_server_bounds_the_ttl_and_the_grant_says_so() -> None:
    with (
        ZooKeeperServer({"minSessionTimeout": "4000", "maxSessionTimeout": "8000"}) as server,
        opened(server.url(), "default") as authority,
    ):
        for asked, given_ttl in ((0.5, 3.0), (4.5, 4.5), (3600.0, 6.0)):
            ask = asking(RUNTIME, f"for/{asked}", ttl=asked)
            grant = step(granted(authority, ask))
            assert (grant.ttl, grant.remaining) == (given_ttl, given_ttl)
            assert step(authority.renew([ask.secret])) == [Kept(given_ttl)]


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
                assert step(authority.renew([ask.secret])) == [Kept(10.0)]
                assert proxy.connections == connections + made


def test_only_what_the_leader_answers_is_a_sign_of_life(pair: Pair) -> None:
    one, _ = pair
    step(granted(one, asking(RUNTIME, "orders")))
    session, root = session_of(one, 10.0), paths_of(one).root
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
    assert step(one.renew([early.secret, late.secret])) == [Ended("revoked"), Kept(10.0)]
    for path in places(raw, one, "late"):  # which is watched by now
        assert raw.delete(path) == 0
    assert step(one.renew([late.secret])) == [Ended("revoked")]
    assert step(one.release(late.secret)) == Ended("revoked")
    assert step(one.survey()) == [] and raw.children(paths_of(one).attempts) == []


# proves authority zookeeper: own-memory
def test_another_client_with_the_secret_takes_a_lease_over(pair: Pair) -> None:
    """An ask or a renewal moves it into the session of that client. Its end only one client knows."""
    one, two = pair
    ask, waiter = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", wait=True)
    token = step(granted(one, ask)).token
    assert isinstance(step(one.ask(waiter)), Waiting)
    again = step(granted(two, ask))
    assert again.token == token
    assert step(two.renew([ask.secret])) == [Kept(10.0)]
    assert isinstance(step(one.ask(waiter)), Waiting)
    assert step(one.renew([ask.secret])) == [Kept(10.0)]
    assert step(two.renew([ask.secret])) == [Kept(10.0)]
    held_by = step(one.observe("orders")).held_by
    assert held_by is not None and held_by.token == token
    assert step(two.release(ask.secret)) == step(two.release(ask.secret)) == Released()
    token = step(granted(one, waiter)).token
    assert token > held_by.token
    assert step(two.ask(ask)) == Ended("released")
    assert step(one.release(waiter.secret)) == Released()
    with opened(one.url, one._namespace) as third:  # the limit: it does not know that the attempt has ended
        assert step(granted(third, ask)).token > token


def test_the_first_owner_does_not_expire_a_lease_that_was_taken_over(zookeeper_url: str) -> None:
    namespace, ours = secrets.token_hex(8), Shifted(RUNTIME)
    with opened(zookeeper_url, namespace, ours) as one, opened(zookeeper_url, namespace) as two:
        ask, other = asking(RUNTIME, "orders"), asking(RUNTIME, "other")
        step(granted(one, ask))
        assert step(two.renew([ask.secret])) == [Kept(10.0)]
        ours.ahead += 11
        step(granted(one, other))  # clears up what is overdue, on a session that goes on
        assert step(two.renew([ask.secret])) == [Kept(10.0)]


def test_a_waiter_that_a_renewal_takes_over_has_its_lock_delay(pair: Pair) -> None:
    """It was first, and its own client had not granted it: its delay is announced by the client that does."""
    one, two = pair
    holder, waiter = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", wait=True, lock_delay=20)
    step(granted(one, holder))
    assert isinstance(step(one.ask(waiter)), Waiting)
    assert step(one.release(holder.secret)) == Released()
    assert step(two.renew([waiter.secret])) == [Kept(10.0)]
    held = step(two.observe("orders"))
    assert held.held_by is not None and held.free_in == pytest.approx(30, abs=1)
    assert step(two.release(waiter.secret)) == Released()
    step(granted(one, asking(RUNTIME, "orders")))


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
    limit = time.monotonic() + 90
    while raw.children(paths_of(one).names):
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
        ask = asking(RUNTIME, "orders")
        step(granted(authority, ask))
        for other in ("", "app:wrong@", "eve:open%20sesame%2F%40@"):
            stranger = ZooKeeperAuthority.at(url(other), RUNTIME, "default")
            with pytest.raises(Misconfigured, match="credentials") as caught:
                step(stranger.open())
            assert "sesame" not in str(caught.value) + stranger.url + repr(stranger._address)
            step(stranger.close())
        assert raw.delete(paths_of(authority).attempt(grant_id(ask.secret))) == jute.NO_AUTH
        with opened(url("app:open%20sesame%2F%40@"), "default") as again:
            assert isinstance(step(again.ask(asking(RUNTIME, "orders"))), Busy)


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
        "zookeepers://h?ssl_check_hostname=perhaps",
        "zookeeper://h?ssl_ca_certs=x",
        "zookeeper://h?tls=true",
        f"zookeeper://app:{SECRET}@h:x",
    ],
)
def test_a_malformed_address_is_misuse(url: str) -> None:
    with pytest.raises(Misuse) as caught:
        fenced.Client(url)
    assert "sesame" not in str(caught.value)


def test_an_address_names_members_and_shows_no_secret() -> None:
    address = ZooKeeperAddress("zookeeper://app:pass%3Aword@a,b:2182,[::1]:2183/x/y")
    assert address.members == [("a", 2181), ("b", 2182), ("::1", 2183)]
    assert (address.chroot, address.credentials) == ("/x/y", "app:pass:word")
    assert str(address) == repr(address) == "<ZooKeeperAddress zookeeper://a:2181,b:2182,[::1]:2183/x/y>"


def test_nobody_there_is_unavailable() -> None:
    with pytest.raises(Unavailable), fenced.Client("zookeeper://127.0.0.1:1,127.0.0.1:2") as client:
        client.acquire("orders", wait=0)


@pytest.mark.xdist_group("zookeeper")
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
        for url in (bare, bare.replace("zookeepers:", "zookeeper:")):
            with pytest.raises(FencedError), fenced.Client(url) as client:
                client.acquire("orders", wait=0)


# Forks.


def test_a_forked_child_leaves_its_parents_sessions_alone(zookeeper_url: str) -> None:
    # Patient: the child connects again with wait=0, which takes a busy machine longer than a client's usual patience.
    with fenced.Client(zookeeper_url, namespace=secrets.token_hex(8), patience=10) as client:
        inherits_no_lease(client)


@pytest.mark.xdist_group("zookeeper")
def test_the_keeper_of_an_event_loop_renews_in_the_sessions_of_its_client() -> None:
    """A session belongs to one connection: one of the keeper's own would hold none of the client's nodes."""
    with ZooKeeperServer() as server:

        def sessions() -> set[str]:
            return set(re.findall(r"sid=(0x[0-9a-f]+)", server.four_letter("cons")))

        async def block() -> None:
            async with fenced.AsyncClient(server.url()) as client, client.hold("orders", ttl=3) as lease:
                before = sessions()
                time.sleep(2 * lease.ttl)
                assert before == sessions()
                lease.check()

        asyncio.run(block())


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
