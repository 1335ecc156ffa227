"""What is particular to the etcd authority: codec, addresses, rights, versions, sessions, and how little it asks."""

import re
import secrets
import time
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fenced
from fenced.errors import Misconfigured, Misuse, Unavailable, Unsupported
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.authority import probe
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.authority.keys import ClaimInfo, KeyRecord, Keys, Phase
from fenced.stores.etcd.authority.leases import Leases
from fenced.stores.etcd.wire import messages, protobuf
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.testing.inputs import ODD_NAMES
from fenced.testing.kit import asking, granted
from fenced.values.model import Busy, Ended, Granted, Holder, Kept, Released, Waiting, grant_id
from fenced_testkit.servers import EtcdServer
from tests.etcd.aging import LEASE_REVOKE, Time
from tests.forking import inherits_no_lease
from tests.shifted import Shifted

RUNTIME = BlockingRuntime()


def opened(url: str, namespace: str | None = None) -> EtcdAuthority:
    authority = EtcdAuthority.at(url, RUNTIME, namespace or secrets.token_hex(8))
    step(authority.open())
    return authority


@pytest.fixture
def authority(etcd_server: EtcdServer) -> Iterator[EtcdAuthority]:
    authority = opened(etcd_server.url())
    yield authority
    step(authority.close())


# The codec.


@pytest.mark.parametrize(
    "number, coded",
    [
        (0, "00"),
        (1, "01"),
        (127, "7f"),
        (128, "8001"),
        (150, "9601"),
        (300, "ac02"),
        (2**63 - 1, "ffffffffffffffff7f"),
        (-1, "ffffffffffffffffff01"),
    ],
)
def test_numbers_are_written_as_protobuf_does(number: int, coded: str) -> None:
    assert protobuf.varint(number).hex() == coded
    ((field, read),) = protobuf.fields(b"\x08" + bytes.fromhex(coded))
    assert (field, protobuf.signed(protobuf.whole(read))) == (1, number)


def test_messages_are_those_of_etcd() -> None:
    """Bytes that etcd's own client sends, and bytes that etcd has sent."""
    put = messages.txn([messages.absent(b"k")], [messages.put(b"k", b"v", 5)], [messages.get(b"k")])
    assert put.hex() == "0a0510011a016b" + "120a1208" + "0a016b" + "120176" + "1805" + "1a050a030a016b"
    assert messages.watch_deletion(7, b"k", 9).hex() == "0a0a" + "0a016b" + "1809" + "2a0100" + "3807"
    reply = bytes.fromhex("0a0408051809" + "1001" + "1a100a0e" + "120c0a016b1006180720012a0176")
    told = messages.TxnReply(reply)
    assert told.header == messages.Header(5, 9) and told.succeeded
    assert told.found[0].kvs == [messages.KeyValue(b"k", 6, 7, b"v", 0)]


@given(st.lists(st.tuples(st.integers(1, 2**20), st.integers(0, 2**64 - 1) | st.binary(max_size=300))))
def test_written_fields_are_read_back(parts: list[tuple[int, int | bytes]]) -> None:
    raw = b""
    for field, value in parts:
        if isinstance(value, int):
            raw += protobuf.varint(field << 3) + protobuf.varint(value)
        else:
            raw += protobuf.message(field, value)
    assert list(protobuf.fields(raw)) == parts


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_malformed(raw: bytes) -> None:
    try:
        list(protobuf.fields(raw))
        messages.TxnReply(raw)
        messages.watch_reply(raw)
    except protobuf.MalformedMessage:
        pass


# Keys.


def test_no_name_is_a_prefix_of_another() -> None:
    keys = Keys("default")
    names = [*ODD_NAMES, "a/b", "ab", "a0"]
    for one in names:
        for other in names:
            if one != other:
                assert not keys.under(other).startswith(keys.under(one))
                assert not keys.under(one) <= keys.under(other) < keys.behind(one)
        assert keys.spot(keys.claim(one)).name == one
        assert keys.spot(keys.place(one, 2**52, "f" * 32)) == (one, b"q")
    assert sorted(names, key=keys.under) == sorted(names, key=str.encode)
    assert not Keys("a/b").start.startswith(Keys("a").start)


@given(st.text(max_size=40), st.text(max_size=40))
def test_values_come_back_as_they_were(label: str, host: str) -> None:
    holder = Holder("0" * 32, label, host, 7)
    record = KeyRecord(
        Phase.GRANTED, ("a", "caf\u00e9"), 1.5, 2.0, holder, hold=5, seconds=2, ticket=9, offset=3
    )
    assert KeyRecord.read(record.written()) == record
    about = ClaimInfo.of("a" * 32, record)
    assert ClaimInfo.read(about.written()) == about
    assert b"\x7f" not in record.written() + about.written()


# Addresses.


def test_addresses() -> None:
    address = EtcdAddress("etcd://root:p%40ss%2F@h1,h2:1234,[::1]:99")
    assert address.targets == ["h1:2379", "h2:1234", "[::1]:99"]
    assert address.members[2] == ("::1", 99)
    assert (address.user, address.password) == ("root", "p@ss/")
    assert "p@ss" not in address.url + repr(address) and "root" not in address.url
    assert EtcdAddress("etcds://h1").tls


@pytest.mark.parametrize(
    "url",
    [
        "etcd://",
        "etcd:h1",
        "etcd://h1/path",
        "etcd://h1,h1",
        "etcd://h1,",
        "etcd://secret@h1",
        "etcd://h1:99999999",
        "etcd://h1?ssl_ca_certs=x",
        "etcds://h1?unknown=x",
        "etcds://h1?ssl_keyfile=x",
        "etcd://root:secret@h1:port",
    ],
)
def test_wrong_addresses_are_misuse(url: str) -> None:
    with pytest.raises(Misuse) as error:
        EtcdAuthority.at(url, RUNTIME, "default")
    assert "secret" not in str(error.value)


def test_a_missing_certificate_is_told() -> None:
    with pytest.raises(Misconfigured, match="ssl_ca_certs"):
        step(EtcdAuthority.at("etcds://127.0.0.1:1?ssl_ca_certs=/nowhere", RUNTIME, "default").open())


# Rights.


@pytest.mark.xdist_group("etcd")
def test_users_and_their_tokens() -> None:
    """A wrong password is told; a token that the server has forgotten is asked for again."""
    with EtcdServer(password="secret") as server:
        authority = opened(server.url())
        step(granted(authority, asking(RUNTIME, "before")))
        server.restart()  # it forgets the tokens that it has given
        step(granted(authority, asking(RUNTIME, "after")))
        authority._wire.token = "made-up.1"
        step(granted(authority, asking(RUNTIME, "forged")))
        step(authority.close())
        for url in (server.url().replace("secret", "other"), server.url().replace("root:secret@", "")):
            refused = EtcdAuthority.at(url, RUNTIME, "default")
            with pytest.raises(Misconfigured) as error:
                step(refused.open())
            assert "secret" not in str(error.value)
            step(refused.close())


@pytest.mark.xdist_group("etcd")
def test_a_client_certificate_is_asked_for() -> None:
    """The two schemes differ in the connection only; without a certificate this server takes nobody, and says so."""
    with EtcdServer(tls=True) as server:
        step(opened(server.url()).close())
        without = re.sub(r"&ssl_certfile=.*", "", server.url())
        with pytest.raises(Misconfigured, match="certificate"):
            step(EtcdAuthority.at(without, RUNTIME, "default").open())


# Versions.


# proves authority etcd: version-floor
def test_a_version_that_can_repeat_tokens_is_best_effort(etcd_server: EtcdServer) -> None:
    """Refused unless that is accepted; the message names every bug, and where it is fixed."""
    status = etcd_server.status()
    assert status is not None
    doubts = probe.known_bugs(status.version, probe.REPEATS_TOKENS)
    with fenced.Client(etcd_server.url(), namespace=secrets.token_hex(8)) as client:
        assert step(client._authority.open()).doubts == doubts
        if doubts:
            with pytest.raises(Misconfigured, match="--guarantee best-effort") as refused:
                client.acquire("orders")
            assert all(doubt in str(refused.value) for doubt in doubts)
    with fenced.Client(etcd_server.url(), guarantee="best-effort", namespace=secrets.token_hex(8)) as client:
        client.acquire("orders").release()


@pytest.mark.parametrize(
    "version, tokens, leases",
    [
        ("3.3.25", {17780, 14370, 14571}, 2),
        ("3.4.23", {17780}, 2),
        ("3.4.32", set(), 1),
        ("3.4.38", set(), 0),
        ("3.5.1", {17780, 14370, 14571, 13766, 14685}, 2),
        ("3.5.14", set(), 1),
        ("3.5.23", set(), 0),
        ("3.6.4", set(), 1),
        ("3.6.5", set(), 0),
        ("4.0.1", set(), 0),
        ("?", set(), 0),
    ],
)
def test_known_bugs(version: str, tokens: set[int], leases: int) -> None:
    found = probe.known_bugs(version, probe.REPEATS_TOKENS)
    assert {int(re.findall(r"etcd (\d+); fixed in 3", bug)[0]) for bug in found} == tokens
    assert len(probe.known_bugs(version, probe.HARMS_LEASES)) == leases
    assert len(probe.warnings(version)) == bool(leases)


# etcd's leases.


def stored(authority: EtcdAuthority, key: bytes) -> messages.KeyValue:
    """A key as etcd has it."""
    wire = EtcdWire(EtcdAddress(authority.url), RUNTIME)
    reply = messages.TxnReply(
        step(wire.call(messages.TXN, messages.txn((), [messages.get(key)]), RUNTIME.now() + 5))
    )
    wire.close()
    found = reply.found[0].first
    assert found is not None
    return found


# proves authority etcd: sessions, whole-seconds
def test_a_lease_of_etcds_is_used_again_after_a_release(etcd_server: EtcdServer) -> None:
    """By the next attempt, and by one at a time; and a ttl is what the server made of it."""
    namespace = secrets.token_hex(8)
    one, two, keys = (
        opened(etcd_server.url(), namespace),
        opened(etcd_server.url(), namespace),
        Keys(namespace),
    )
    first, second, third = (asking(RUNTIME, name, ttl=1.4) for name in "abc")
    lease = step(granted(one, first))
    assert lease.ttl == 2.0 and 0 < lease.remaining <= lease.ttl
    of_first = stored(one, keys.claim("a")).lease
    assert step(one.release(first.secret)) == Released()
    assert step(granted(one, second)).remaining <= lease.remaining, "what is left of it"
    step(granted(one, third))
    of_second, of_third = (stored(one, keys.claim(name)).lease for name in "bc")
    assert of_first == of_second != of_third
    assert step(two.renew([second.secret])) == [Kept(2.0)], "by another client"
    limit = time.monotonic() + 90
    while step(one.survey()):
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert step(one.renew([second.secret, third.secret])) == [Ended("expired")] * 2
    for client in (one, two):
        step(client.close())


def test_a_deleted_name_is_revoked(etcd_server: EtcdServer, authority: EtcdAuthority) -> None:
    """A keep-alive still succeeds when an administrator deletes a name; its holder learns it by its renewal."""
    taken, kept = asking(RUNTIME, "taken"), asking(RUNTIME, "kept")
    for ask in (taken, kept):
        step(granted(authority, ask))
    prefix = authority._space.keys.under("taken").decode()
    # A zero byte cannot be an argument: so all keys up to the next name.
    etcd_server_delete(authority, prefix.encode())
    assert step(authority.renew([taken.secret, kept.secret])) == [Ended("revoked"), Kept(10.0)]
    # And if the same client takes it again, the old attempt is not revived by that.
    again = asking(RUNTIME, "taken")
    step(granted(authority, again))
    assert step(authority.renew([taken.secret, again.secret])) == [Ended("revoked"), Kept(10.0)]
    assert step(authority.release(taken.secret)) == Ended("revoked")
    assert isinstance(step(authority.ask(asking(RUNTIME, "taken"))), Busy)


def etcd_server_delete(authority: EtcdAuthority, prefix: bytes) -> None:
    request = messages.txn(
        (), [protobuf.message(3, protobuf.data(1, prefix) + protobuf.data(2, prefix + b"\xff"))]
    )
    step(authority._space.run(request, RUNTIME.now() + 5))


def test_a_keep_alive_that_says_zero_is_a_loss(etcd_server: EtcdServer) -> None:
    """etcd answers it without an error."""
    wire, until = EtcdWire(EtcdAddress(etcd_server.url()), RUNTIME), RUNTIME.now() + 10
    leases = Leases(wire, RUNTIME)
    alive, gone = (step(leases.grant(30, until)) for _ in range(2))
    step(wire.call(LEASE_REVOKE, messages.lease_id(gone.id), until))
    before = gone.confirmed
    assert step(leases.keep_alive([gone, alive], until)) == {alive.id}
    assert gone.confirmed == before < alive.confirmed
    assert step(leases.left(gone.id, until)) < 0 <= step(leases.left(alive.id, until))
    wire.close()


def revoke(authority: EtcdAuthority, lease: int) -> None:
    wire = EtcdWire(EtcdAddress(authority.url), RUNTIME)
    step(wire.call(LEASE_REVOKE, messages.lease_id(lease), RUNTIME.now() + 5))
    wire.close()


def test_an_idle_lease_that_was_revoked_is_replaced(etcd_server: EtcdServer) -> None:
    namespace = secrets.token_hex(8)
    authority, first, second = (
        opened(etcd_server.url(), namespace),
        asking(RUNTIME, "a"),
        asking(RUNTIME, "a"),
    )
    step(granted(authority, first))
    lease = stored(authority, Keys(namespace).claim("a")).lease
    assert step(authority.release(first.secret)) == Released()
    revoke(authority, lease)
    step(granted(authority, second))
    assert step(authority.renew([first.secret, second.secret])) == [Ended("released"), Kept(10.0)]
    step(authority.close())


def test_a_late_renewal_does_not_prolong_a_delay(authority: EtcdAuthority) -> None:
    """The lease has expired, its lock_delay runs: whoever still renews it keeps nothing alive."""
    late = asking(RUNTIME, "a", ttl=1, lock_delay=4)
    step(granted(authority, late))
    limit = time.monotonic() + 90
    while step(authority.observe("a")).held_by is not None:
        time.sleep(0.05)
    assert step(authority.observe("a")).free_in > 0
    while step(authority.survey()):
        assert step(authority.renew([late.secret])) == [Ended("expired")]
        assert time.monotonic() < limit
        time.sleep(0.2)


# Many names.


def test_as_many_names_as_a_lease_may_have(authority: EtcdAuthority) -> None:
    """A transaction of etcd's has at most 128 operations; what does not fit follows."""
    names = [f"{number:02}" + "x" * 198 for number in range(64)]
    holder = asking(RUNTIME, names[63])
    step(granted(authority, holder))
    many = asking(RUNTIME, *names, wait=True)
    assert isinstance(step(authority.ask(many)), Waiting)
    step(authority.release(holder.secret))
    token = step(granted(authority, many)).token
    views = step(authority.survey())
    assert len(views) == 64 and {view.held_by.token for view in views if view.held_by} == {token}
    assert views[7].names == tuple(names)
    assert step(authority.release(many.secret)) == Released()
    assert step(authority.survey()) == []
    with pytest.raises(Unsupported, match="63 names"):
        step(authority.ask(asking(RUNTIME, *names, lock_delay=5)))


# What it asks.


def received(server: EtcdServer) -> int:
    with urllib.request.urlopen(f"{server.client_url}/metrics") as page:
        text = page.read().decode()
    return round(
        sum(map(float, re.findall(r"^grpc_server_msg_received_total\{.*\} (\S+)$", text, re.MULTILINE)))
    )


# proves authority etcd: pushed
@pytest.mark.xdist_group("etcd")
def test_a_waiter_is_pushed_and_asks_nothing(etcd_server: EtcdServer) -> None:
    namespace = secrets.token_hex(8)
    one, two = opened(etcd_server.url(), namespace), opened(etcd_server.url(), namespace)
    holder, waiter = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", wait=True)
    step(granted(one, holder))
    assert isinstance(step(two.ask(waiter)), Waiting)
    step(two.next_wakeups(RUNTIME.now() + 0.2))
    before = received(etcd_server)
    assert step(two.next_wakeups(RUNTIME.now() + 1.0)) == []
    assert received(etcd_server) == before
    step(one.release(holder.secret))
    assert step(two.next_wakeups(RUNTIME.now() + 5.0)) == [grant_id(waiter.secret)]
    step(granted(two, waiter))
    assert received(etcd_server) - before == 2, "a release and a grant"
    for each in (one, two):
        step(each.close())


def test_a_renewal_reads_128_names_at_a_time(etcd_server: EtcdServer, authority: EtcdAuthority) -> None:
    """And each of them is kept alive by a message, all in one stream."""
    asks = [asking(RUNTIME, f"orders/{number}", ttl=30) for number in range(300)]
    for ask in asks:
        step(granted(authority, ask))
    before = received(etcd_server)
    assert step(authority.renew([ask.secret for ask in asks])) == [Kept(30.0)] * 300
    assert received(etcd_server) - before <= 300 + 3


# Forks.


def test_a_forked_child_leaves_its_parents_connections_alone(etcd_server: EtcdServer) -> None:
    with fenced.Client(etcd_server.url(), namespace=secrets.token_hex(8), guarantee="best-effort") as client:
        inherits_no_lease(client)
        authority = client._authority
        assert isinstance(authority, EtcdAuthority)
        assert not authority._wire.broken, "a connection of two processes breaks, and is replaced silently"


# The attempt.


def test_an_unknown_grant_is_found_by_its_attempt(etcd_server: EtcdServer) -> None:
    """Through the queue, too: whoever repeats the ask gets the token that was minted."""
    namespace = secrets.token_hex(8)
    one, two = opened(etcd_server.url(), namespace), opened(etcd_server.url(), namespace)
    holder, waiter = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", wait=True)
    step(granted(one, holder))
    assert isinstance(step(one.ask(waiter)), Waiting)
    assert isinstance(step(two.ask(waiter)), Waiting), "another client of the same attempt"
    step(one.release(holder.secret))
    first = step(granted(one, waiter))
    again = step(two.ask(waiter))
    assert isinstance(again, Granted) and again.token == first.token
    assert step(two.withdraw(waiter.secret)) == Released()
    assert step(one.release(waiter.secret)) == Released()
    assert step(one.ask(waiter)) == Ended("withdrawn")
    for each in (one, two):
        step(each.close())


@pytest.mark.parametrize("tidied", [False, True])
def test_an_attempt_that_etcd_has_forgotten_may_be_used_again(tidied: bool, etcd_server: EtcdServer) -> None:
    """What the client remembers of it decides nothing, although nobody has renewed or released it."""
    runtime = Shifted(RUNTIME)
    time_of_etcd = Time(etcd_server.url(), runtime)
    authority = EtcdAuthority.at(etcd_server.url(), runtime, secrets.token_hex(8))
    time_of_etcd.bind(authority, runtime)
    step(authority.open())
    attempt = asking(runtime, "a")
    first = step(granted(authority, attempt))
    with pytest.raises(Misuse, match="used before"):
        step(authority.ask(attempt._replace(names=("b",))))
    time_of_etcd.pass_by(700)
    if tidied:
        step(authority.tidy())
    again = step(granted(authority, attempt._replace(names=("b",))))
    assert again.token > first.token
    step(authority.close())


def test_a_repeated_ask_prolongs_nothing(etcd_server: EtcdServer) -> None:
    """Only renewals do: an answer that was lost is the same when it is repeated, with what is left by now."""
    runtime = Shifted(RUNTIME)
    time_of_etcd = Time(etcd_server.url(), runtime)
    authority = EtcdAuthority.at(etcd_server.url(), runtime, secrets.token_hex(8))
    time_of_etcd.bind(authority, runtime)
    step(authority.open())
    attempt = asking(runtime, "a", ttl=10)
    first = step(granted(authority, attempt))
    time_of_etcd.pass_by(4)
    again = step(granted(authority, attempt))
    assert again.token == first.token
    assert again.remaining <= 6
    step(authority.close())


def test_a_lease_of_records_that_was_revoked_is_replaced(etcd_server: EtcdServer) -> None:
    """The etcd lease of the records of ended attempts is gone: a typed error, and the next try works."""
    namespace = secrets.token_hex(8)
    holders, authority = (opened(etcd_server.url(), namespace) for _ in range(2))
    asks = [asking(RUNTIME, name) for name in "ab"]
    tokens = [step(granted(holders, ask)).token for ask in asks]
    assert step(authority.force_release("a", tokens[0])) is not None
    revoke(authority, stored(authority, Keys(namespace).attempt(grant_id(asks[0].secret))).lease)
    with pytest.raises(Unavailable):
        step(authority.force_release("b", tokens[1]))
    assert step(authority.force_release("b", tokens[1])) is not None
    for client in (holders, authority):
        step(client.close())
