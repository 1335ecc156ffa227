"""One grammar for the addresses of all servers that are spoken to over our own streams."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenced.client import registry
from fenced.errors import Misconfigured, Misuse
from fenced.net.address import ServerAddress
from fenced.runtime.blocking import BlockingRuntime
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.redis.address import RedisAddress
from fenced.stores.zookeeper.address import ZooKeeperAddress

KINDS: dict[type[ServerAddress], str] = {
    EtcdAddress: "etcd",
    RedisAddress: "redis",
    ZooKeeperAddress: "zookeeper",
}
each_kind = pytest.mark.parametrize(("kind", "scheme"), KINDS.items(), ids=KINDS.values())


@each_kind
def test_hosts_ports_and_who_we_are(kind: type[ServerAddress], scheme: str) -> None:
    address = kind(f"{scheme}://ro%40ot:p%3Aw%2F@[2001:db8::1]:99")
    assert address.members == [("2001:db8::1", 99)] and address.targets == ["[2001:db8::1]:99"]
    assert (address.user, address.password) == ("ro@ot", "p:w/")
    assert not address.tls and address.context is None
    assert kind(f"{scheme}://h").members == [("h", kind.form.port)]


@each_kind
def test_several_hosts_where_there_can_be_several(kind: type[ServerAddress], scheme: str) -> None:
    url = f"{scheme}://a,b:1234,[::1]"
    if not kind.form.several:
        with pytest.raises(Misuse, match="names one host"):
            kind(url)
        return
    port = kind.form.port
    assert kind(url).members == [("a", port), ("b", 1234), ("::1", port)]
    assert kind(url).url == f"{scheme}://a:{port},b:1234,[::1]:{port}"
    with pytest.raises(Misuse, match="twice"):
        kind(f"{scheme}://a,b,a:{port}")


@each_kind
def test_tls_is_chosen_by_the_scheme_and_has_the_same_words_everywhere(
    kind: type[ServerAddress], scheme: str, tmp_path: Path
) -> None:
    context = kind(f"{scheme}s://h").context
    assert context is not None and context.check_hostname
    context = kind(f"{scheme}s://h?ssl_check_hostname=No&ssl_ca_certs={tmp_path}").context
    assert context is not None and not context.check_hostname
    for option, why in (
        ("ssl_ca_certs=/nowhere", "ssl_ca_certs"),
        (f"ssl_ca_certs={__file__}", "ssl_ca_certs"),
        ("ssl_certfile=/nowhere&ssl_keyfile=/none", "ssl_certfile"),
    ):
        with pytest.raises(Misconfigured, match=why):
            _ = kind(f"{scheme}s://h?{option}").context
        with pytest.raises(Misuse, match=f"must begin with {scheme}s://"):
            kind(f"{scheme}://h?{option}")
    for wrong in ("ssl_keyfile=x", "ssl_check_hostname=perhaps", "ssl_sesame=1", "tls=true"):
        with pytest.raises(Misuse):
            kind(f"{scheme}s://h?{wrong}")


@each_kind
@pytest.mark.parametrize(
    "rest",
    [
        "://h:x",
        "://h:99999",
        "://a,,b",
        "://u:sesame@h:x",
        "://u:ses/ame@h",
        "://u:sesame@h#x",
        "://[::1",
        "://%ff:sesame@h",
        ":h",
        "://h?sesame",
        "://h?wrong=sesame",
    ],
)
def test_a_malformed_address_is_misuse_and_shows_no_secret(
    kind: type[ServerAddress], scheme: str, rest: str
) -> None:
    with pytest.raises(Misuse) as told:
        kind(scheme + rest)
    error = told.value
    assert "sesame" not in str(error) and "ses" not in str(error).split()
    assert error.__cause__ is None and error.__suppress_context__ == (error.__context__ is not None)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@each_kind
@given(password=st.text(min_size=1), text=st.text())
def test_any_text_is_an_address_or_misuse(
    kind: type[ServerAddress], scheme: str, password: str, text: str
) -> None:
    for url in (f"{scheme}://u:{password}@h", f"{scheme}://{text}", f"{scheme}://h/{text}"):
        try:
            kind(url)
        except Misuse:
            continue


def test_parts_of_their_own() -> None:
    address = ZooKeeperAddress("zookeeper://app:pass%3Aword@a/x/y%20z")
    assert (address.chroot, address.credentials) == ("/x/y z", "app:pass:word")
    assert address.url == "zookeeper://a:2181/x/y%20z" and not ZooKeeperAddress("zookeeper://a").authenticated
    redis = RedisAddress("rediss://:pw@/3?client_name=me&socket_timeout=1")
    assert (redis.endpoint, redis.db, redis.password, redis.user) == (("localhost", 6379), 3, "pw", "")
    assert redis.url == "rediss://localhost:6379/3" and redis.client_name == "me"
    file = RedisAddress("unix://me:pw@/run/a%20b.sock?db=2")
    assert (file.endpoint, file.db, file.user, file.password) == ("/run/a b.sock", 2, "me", "pw")
    for wrong in (
        "unix://",
        "redis://h/x",
        "redis://h?db=-1",
        "etcd://h/path",
        "etcd://root@h",
        "zookeeper://u@h",
    ):
        with pytest.raises(Misuse):
            next(kind for kind in KINDS if wrong.partition(":")[0] in kind.form.schemes)(wrong)


def test_an_unknown_scheme_is_answered_with_those_that_every_command_takes() -> None:
    with pytest.raises(Misconfigured, match="known: etcd, etcds, ") as refused:
        registry.authority("mongodb://db.internal/shop", BlockingRuntime())
    assert "fenced+unix, http, https, ledger, mariadb, mysql, postgresql, redis" in str(refused.value)
    assert "memory" not in str(refused.value)
