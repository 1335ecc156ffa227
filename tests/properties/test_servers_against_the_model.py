"""Authorities behind a network give the answers of the reference model, through any story that Hypothesis invents.

The server's clock is nobody's to set: time passes by moving what is stored back. Tokens need not be the model's
own, since a server may skip some; they must rise when the model's do, and be the same when the model's are.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from fenced.client import registry
from fenced.errors import FencedError
from fenced.leases.rows import LeaseAlgorithm
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.mariadb.authority.authority import MariadbAuthority
from fenced.stores.memory.authority import MemoryStore
from fenced.stores.redis.authority.scripts import tag
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.values.contracts import Authority
from fenced.values.model import Ask, Busy, Granted, HeldBy, Holder, Kept, Waiting
from fenced_testkit.servers import EtcdServer, MariadbServer, RedisServer
from fenced_testkit.stepped import Stepped
from tests.conformance.authorities.test_mariadb import LATER as MARIADB_LATER
from tests.conformance.authorities.test_postgresql import LATER
from tests.conformance.authorities.test_redis import PASS_TIME
from tests.etcd.aging import Time
from tests.planted.bugs import Barging, EveryAskIsNew, LockDelayAfterRelease, RenewalRevives, store_with
from tests.shifted import Shifted
from tests.zookeeper.shifting import pass_time

NAMES = ["a", "b", "c"]
SECRETS = [f"{i:032x}" for i in range(6)]
HOLDERS = {secret: Holder(secret, "label", "host", 1) for secret in SECRETS}
"""One each: where names of one client live and expire together, they would do so here."""
SLACK_SECONDS = 0.02
"""What may go by between the two readings of the clock. Every other time in the stories is whole seconds away."""


class AgainstTheModel(RuleBasedStateMachine):
    url: str
    oracle: type[MemoryStore] = MemoryStore
    holders: ClassVar[dict[str, Holder]] = HOLDERS
    later: Callable[[AgainstTheModel, int], None]
    """Lets so many milliseconds go by for the authority of a story."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0.0
        self.namespace = secrets.token_hex(8)
        self.runtime = Shifted(BlockingRuntime())
        self.real = self.open()
        step(self.real.open())
        self.model = Stepped.over(self.oracle(lambda: time.time() + self.ahead))
        self.tokens = {0: 0}
        # Attempts are remembered under their secrets, in all namespaces: each story has its own.
        self.secret = {name: secrets.token_hex(16) for name in SECRETS}

    def open(self) -> Authority:
        return registry.authority(self.url, self.runtime, self.namespace)

    def teardown(self) -> None:
        step(self.real.close())

    def same_token(self, real: int, model: int) -> bool:
        if real in self.tokens:
            return self.tokens[real] == model
        rises = real > max(self.tokens) and model > max(self.tokens.values())
        self.tokens[real] = model
        return rises

    def same_holder(self, real: HeldBy | None, model: HeldBy | None) -> bool:
        if real is None or model is None:
            return real is model
        return self.same_token(real.token, model.token) and real.grant == model.grant

    def same(self, real: object, model: object) -> bool:
        match real, model:
            case Granted(token, remaining, ttl), Granted(other, left, other_ttl):
                return self.same_token(token, other) and abs(remaining - left) < 1 and ttl == other_ttl
            case Waiting(check_in, _, held_by), Waiting(other_check_in, _, other):
                looks = (check_in <= SLACK_SECONDS) == (other_check_in <= SLACK_SECONDS)
                return looks and self.same_holder(held_by, other)
            case Busy(_, held_by), Busy(_, other):
                return self.same_holder(held_by, other)
            case Kept(remaining), Kept(left):
                return abs(remaining - left) < 1
            case list(), list():
                return len(real) == len(model) and all(map(self.same, real, model))
            case _:
                return real == model

    def both(self, real: Coroutine[Any, Any, object], model: Callable[[], object]) -> None:
        outcomes: list[object] = []
        calls: list[Callable[[], object]] = [lambda: step(real), model]
        for call in calls:
            try:
                outcomes.append(call())
            except FencedError as error:
                outcomes.append(type(error))
        assert self.same(*outcomes), outcomes

    @rule(
        who=st.sampled_from(SECRETS),
        names=st.sets(st.sampled_from(NAMES), min_size=1, max_size=2),
        ttl=st.sampled_from([10.0, 10.0, 10.0, 30.0]),
        wait=st.booleans(),
        delay=st.sampled_from([0.0, 0.0, 20.0]),
    )
    def ask(self, who: str, names: set[str], ttl: float, wait: bool, delay: float) -> None:
        ask = Ask(self.secret[who], tuple(sorted(names)), ttl, self.holders[who], wait, delay)
        self.both(self.real.ask(ask), lambda: self.model.ask(ask))

    @rule(who=st.lists(st.sampled_from(SECRETS), min_size=1, max_size=6, unique=True))
    def renew(self, who: list[str]) -> None:
        chosen = [self.secret[each] for each in who]
        self.both(self.real.renew(chosen), lambda: self.model.renew(chosen))

    @rule(who=st.sampled_from(SECRETS), keep=st.sampled_from([0.0, 0.0, 20.0]))
    def release(self, who: str, keep: float) -> None:
        secret = self.secret[who]
        self.both(self.real.release(secret, keep=keep), lambda: self.model.release(secret, keep=keep))

    @rule(who=st.sampled_from(SECRETS))
    def withdraw(self, who: str) -> None:
        self.both(self.real.withdraw(self.secret[who]), lambda: self.model.withdraw(self.secret[who]))

    @rule(name=st.sampled_from(NAMES), behind=st.sampled_from([0, 0, 1]))
    def force_release(self, name: str, behind: int) -> None:
        held_by, held = step(self.real.observe(name)).held_by, self.model.observe(name).held_by
        assert self.same_holder(held_by, held)
        token, model_token = (each.token - behind if each is not None else 1 for each in (held_by, held))
        real = step(self.real.force_release(name, token))
        model = self.model.force_release(name, model_token)
        assert (real is None) == (model is None) and self.same_token(real or 0, model or 0)

    @rule(above=st.integers(0, 40))
    def raise_floor(self, above: int) -> None:
        self.model.raise_floor(max(self.tokens.values()) + above)
        assert step(self.real.raise_floor(max(self.tokens) + above)) >= max(self.tokens) + above

    @rule(milliseconds=st.sampled_from([1000, 4000, 11_000, 25_000, 700_000]))
    def pass_time(self, milliseconds: int) -> None:
        """What is over is forgotten at once, on both sides: servers also sweep by themselves, the model does not."""
        self.ahead += milliseconds / 1e3
        type(self).later(self, milliseconds)
        step(self.real.tidy())
        self.model.tidy()

    @rule()
    def look(self) -> None:
        real, model = step(self.real.survey()), self.model.survey(limit=100)
        assert [(v.name, len(v.waiters)) for v in real] == [(v.name, len(v.waiters)) for v in model]
        assert all(self.same_holder(a.held_by, b.held_by) for a, b in zip(real, model, strict=True))


class EtcdAgainstTheModel(AgainstTheModel):
    """All attempts are of one client, and share its leases of etcd's."""

    holders: ClassVar[dict[str, Holder]] = dict.fromkeys(SECRETS, HOLDERS[SECRETS[0]])

    def same(self, real: object, model: object) -> bool:
        """A name has what is left of the lease that it came to, which was confirmed some time ago: two thirds of it."""
        if isinstance(real, Granted) and isinstance(model, Granted):
            rest = model.remaining - model.ttl / 3 - 1 < real.remaining < model.remaining + 1
            return rest and self.same_token(real.token, model.token) and real.ttl == model.ttl
        return super().same(real, model)

    def open(self) -> Authority:
        self.time = Time(self.url, self.runtime)
        return self.time.bind(EtcdAuthority.at(self.url, self.runtime, self.namespace), self.runtime)

    def teardown(self) -> None:
        super().teardown()
        self.time.pass_by(1e9)


def tell_stories(
    url: str,
    later: Callable[[AgainstTheModel, int], None],
    oracle: type[MemoryStore] = MemoryStore,
    machine: type[AgainstTheModel] = AgainstTheModel,
    examples: int = 60,
) -> None:
    machine.url, machine.later, machine.oracle = url, staticmethod(later), oracle
    case = machine.TestCase()
    stories = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, report_multiple_bugs=False
    )
    # The same stories each time, and as many as it takes; found is enough.
    planted = settings(stories, max_examples=2000, derandomize=True, phases=[Phase.generate], database=None)
    type(case).settings = stories if oracle is MemoryStore else planted
    case.runTest()


def redis_later(redis_server: RedisServer) -> Callable[[AgainstTheModel, int], None]:
    def later(story: AgainstTheModel, milliseconds: int) -> None:
        keys = [f"fenced:{{{tag(story.namespace)}}}:{part}" for part in ("attempts", "forget")]
        redis_server.execute("EVAL", PASS_TIME, 2, *keys, milliseconds * 1000)

    return later


def test_redis(redis_server: RedisServer) -> None:
    tell_stories(redis_server.url(), redis_later(redis_server))


@pytest.mark.parametrize("bug", [Barging, EveryAskIsNew, LockDelayAfterRelease, RenewalRevives])
def test_the_stories_can_fail(bug: type[LeaseAlgorithm], redis_server: RedisServer) -> None:
    """An oracle with a planted bug is contradicted."""
    with pytest.raises(AssertionError):
        tell_stories(redis_server.url(), redis_later(redis_server), store_with(bug))


@pytest.mark.timeout(180)
def test_postgresql(postgresql_url: str) -> None:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:

        def later(_: AgainstTheModel, milliseconds: int) -> None:
            connection.execute(LATER.format(milliseconds * 1000).encode())

        tell_stories(postgresql_url, later)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shortens", [True, False], ids=["usual", "algorithm"])
def test_mariadb(
    shortens: bool, mariadb_server: MariadbServer, mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its usual cases are scripts of their own: with them, and with the algorithm alone."""
    monkeypatch.setattr(MariadbAuthority, "shortens", shortens)
    database = mariadb_url.rpartition("/")[2]

    def later(_: AgainstTheModel, milliseconds: int) -> None:
        mariadb_server.execute(MARIADB_LATER.format(milliseconds * 1_000_000), database)

    tell_stories(mariadb_url, later, examples=40)


@pytest.mark.timeout(180)
def test_etcd(etcd_server: EtcdServer) -> None:
    def later(story: AgainstTheModel, milliseconds: int) -> None:
        assert isinstance(story, EtcdAgainstTheModel)
        story.time.pass_by(milliseconds / 1000)

    tell_stories(etcd_server.url(), later, machine=EtcdAgainstTheModel, examples=40)


@pytest.mark.timeout(180)
def test_zookeeper(zookeeper_url: str) -> None:
    def later(story: AgainstTheModel, milliseconds: int) -> None:
        assert isinstance(story.real, ZooKeeperAuthority)
        pass_time(milliseconds / 1000, story.runtime, [story.real], zookeeper_url)

    tell_stories(zookeeper_url, later)
