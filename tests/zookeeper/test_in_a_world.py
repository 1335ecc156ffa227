"""Stories of the ZooKeeper authority that need a certain order of events: told on the ensemble in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fenced.errors import FencedError, Indeterminate
from fenced.stores.zookeeper.authority.attempt import ZooKeeperAttempt
from fenced.stores.zookeeper.authority.attempts import OwnAttempts
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.authority.nodes import Nodes
from fenced.stores.zookeeper.authority.session import SessionCall, ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import QueueLook
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import ZooKeeperWire
from fenced.values.model import Ask, Ended, Granted, Holder, Released, Waiting, grant_id
from fenced_testkit.runtime.network import SimulatedNetwork
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World
from fenced_testkit.worlds.zookeeper_ensemble import Ensemble, PeerLink, Replica
from fenced_testkit.worlds.zookeeper_member import ClientConnection, Request
from fenced_testkit.worlds.zookeeper_tree import CLOSE_SESSION, MULTI, Entry, Ids
from tests.simulation.bugs_zookeeper import made_with
from tests.zookeeper.acting import paths_of, session_of

HOLDER = Holder("id", "label", "host", 1)


class Stage:
    """An ensemble of three, and clients that know its leader alone."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.network = SimulatedNetwork(self.world)
        self.ensemble = Ensemble(self.world, sync_limit=50)
        self.world.run(0.1)
        leader = self.ensemble.leader()
        assert leader is not None
        self.leader = leader
        self.network.listen(leader.process, ("leader", 2181), leader.member)

    def client(
        self, name: str, kind: type[ZooKeeperAuthority] = ZooKeeperAuthority, url: str = "zookeeper://leader"
    ) -> ZooKeeperAuthority:
        runtime = SimulatedRuntime(Process(self.world, name), self.network)
        return kind.at(url, runtime, "default")

    def freeze_followers_at_write_of(self, chosen: int, *, skipped: int = 0) -> None:
        """The leader orders this session's next write but so many, and nobody confirms it for a while."""
        order, writes = self.leader._order, itertools.count()

        def freeze(by: Replica, link: PeerLink | None, request: Request, session: int, ids: Ids) -> None:
            if session == chosen and request.kind == MULTI and next(writes) == skipped:
                self.leader._order = order  # type: ignore[method-assign]
                for replica in self.ensemble.replicas:
                    if replica is not self.leader:
                        replica.process.pause(3.0)
            order(by, link, request, session, ids)

        self.leader._order = freeze  # type: ignore[method-assign]

    def play(self, authority: ZooKeeperAuthority, work: Coroutine[Any, Any, object]) -> object:
        """The result of a call, or the error that it raised."""
        results: list[object] = []

        async def run() -> None:
            try:
                results.append(await work)
            except FencedError as error:
                results.append(error)

        authority._runtime.spawn(run, "story")
        while not results:
            self.world.run(self.world.now + 0.01)
        return results[0]


def ask(secret: str, *, wait: bool) -> Ask:
    return Ask(secret * 32, ("orders",), 30.0, HOLDER, wait)


def places_after_a_withdrawal(kind: type[ZooKeeperAuthority]) -> int:
    """A waiter is withdrawn while nobody can say whether its ask is carried out. How many places there are then.

    Asked in another session, the leader answers at once that there is no place; then its followers return, and the
    place is made.
    """
    stage = Stage(1)
    one, two = stage.client("one"), stage.client("two", kind)
    for each in (one, two):
        stage.play(each, each.open())
    assert isinstance(stage.play(one, one.ask(ask("a", wait=False))), Granted)
    assert isinstance(stage.play(two, two.ask(ask("b", wait=True))), Waiting)
    stage.play(two, session_of(two, 60.0).exchange(until=two._runtime.now() + 1.0))  # connects
    stage.freeze_followers_at_write_of(session_of(two, 30.0).id)
    now = two._runtime.now
    assert isinstance(stage.play(two, two.ask(ask("c", wait=True), now() + 1.0)), Indeterminate)
    while stage.play(two, two.withdraw("c" * 32, now() + 1.0)) != Released():
        pass
    stage.world.run(stage.world.now + 5.0)
    stage.play(two, two.renew(["b" * 32]))
    return len(stage.leader.tree.nodes["/fenced/default/n/orders"].children)


def test_a_withdrawn_attempt_has_no_place_even_if_its_ask_is_carried_out_later() -> None:
    assert places_after_a_withdrawal(ZooKeeperAuthority) == 2


class AskedInAnotherSession(OwnAttempts):
    """Whether a lost request was carried out is asked in another session, which does not wait for that request."""

    async def standing(self, call: SessionCall, mine: ZooKeeperAttempt) -> QueueLook | None:
        other = call._replace(session=self.session(60.0))
        record = await self._nodes.stored(other, mine.public)
        return None if record is None else await super().standing(call, mine)


def test_a_question_in_another_session_would_be_caught() -> None:
    assert places_after_a_withdrawal(made_with("attempts", AskedInAnotherSession)) == 3


def places_after_moving_to_the_leader(kind: type[ZooKeeperAuthority]) -> int:
    """The ask went through a follower, and the leader has ordered it. The client withdraws it at the leader itself.

    The leader answers a sync of its own clients at once, from a state in which the ask is not carried out yet.
    """
    stage = Stage(1)
    follower = next(each for each in stage.ensemble.replicas if each is not stage.leader)
    stage.network.listen(follower.process, ("follower", 2181), follower.member)
    one, two = stage.client("one"), stage.client("two", kind, "zookeeper://follower,later")
    for each in (one, two):
        stage.play(each, each.open())
    assert isinstance(stage.play(one, one.ask(ask("a", wait=False))), Granted)
    assert isinstance(stage.play(two, two.ask(ask("b", wait=True))), Waiting)
    stage.freeze_followers_at_write_of(session_of(two, 30.0).id)
    now = two._runtime.now
    assert isinstance(stage.play(two, two.ask(ask("c", wait=True), now() + 1.0)), Indeterminate)
    stage.network.listen(stage.leader.process, ("later", 2181), stage.leader.member)
    while stage.play(two, two.withdraw("c" * 32, now() + 1.0)) != Released():
        pass
    stage.world.run(stage.world.now + 5.0)
    stage.play(two, two.renew(["b" * 32]))
    return len(stage.leader.tree.nodes["/fenced/default/n/orders"].children)


def test_an_attempt_withdrawn_at_the_leader_has_no_place() -> None:
    assert places_after_moving_to_the_leader(ZooKeeperAuthority) == 2


def test_a_sync_that_ends_doubt_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: whether a lost request was carried out is read behind a sync."""
    monkeypatch.setattr(Nodes, "tick", lambda nodes: jute.sync(nodes.paths.root))
    assert places_after_moving_to_the_leader(ZooKeeperAuthority) == 3


def test_a_proposal_that_an_election_has_discarded_does_not_come_back() -> None:
    """Its leader was cut off, others elected another one, and that one leaves: the old one has the longer log."""
    stage = Stage(1)
    old, discarded = stage.leader, Entry(0, 0, 4711, CLOSE_SESSION, b"")
    old.cut = True
    old._propose(discarded)
    stage.world.run(stage.world.now + 15.0)
    new = stage.ensemble.leader()
    assert new is not None and new is not old
    old.cut = False
    old.leave()
    new.leave()
    stage.world.run(stage.world.now + 5.0)
    assert stage.ensemble.leader() is not None
    assert all(discarded not in replica.log for replica in stage.ensemble.replicas)


# How long a holder may believe.


class Behind(Stage):
    """A client of a follower that reports to the leader every 0.1 s. Its session lasts 0.497 s, its lease 0.3725 s."""

    def __init__(self, kind: type[ZooKeeperAuthority]) -> None:
        super().__init__(1)
        self.follower = next(each for each in self.ensemble.replicas if each is not self.leader)
        self.network.listen(self.follower.process, ("follower", 2181), self.follower.member)
        self.one = self.client("one", kind, "zookeeper://follower")
        self.play(self.one, self.one.open())
        other = self.client("other")
        self.play(other, other.ask(ask("b", wait=False)))  # makes the name's node
        self.play(other, other.release("b" * 32))

    def greet_late(self, seconds: float, *, once: bool = False) -> None:
        """The follower answers new connections, or the next one, so long after it has asked the leader."""
        member = self.follower.member
        greeted = member._greeted

        def late(client: ClientConnection, timeout: int, password: bytes, valid: bool) -> None:
            if once:
                member._greeted = greeted  # type: ignore[method-assign]
            self.world.after(seconds, lambda: greeted(client, timeout, password, valid))

        member._greeted = late  # type: ignore[method-assign]

    def ask_at(self, when: float, secret: str = "a") -> None:
        self.world.run(when)
        short = Ask(secret * 32, ("orders",), 0.3725, HOLDER, False)
        assert isinstance(self.play(self.one, self.one.ask(short)), Granted)

    def renew_at(self, when: float) -> None:
        self.world.run(when)
        assert isinstance(self.play(self.one, self.one.renew(["a" * 32])), list)

    def believed_after_the_end(self) -> float:
        """The leader hears no more of the client. How long that believes in its lease after the leader has ended it."""
        (mine,) = session_of(self.one, 0.3725).attempts.values()
        self.follower.cut = True
        while paths_of(self.one).attempt(mine.public) in self.leader.tree.nodes:
            self.world.run(self.world.now + 0.001)
        return mine.expires - self.one._runtime.now()


def after_a_late_greeting(kind: type[ZooKeeperAuthority]) -> float:
    """When the client sends its ask, the leader last heard of it when it connected."""
    stage = Behind(kind)
    stage.greet_late(0.4)
    stage.ask_at(3.0)
    return stage.believed_after_the_end()


def after_unreported_requests(kind: type[ZooKeeperAuthority]) -> float:
    """The ask was reported at once. The first renewal came after the next report, the second before the third."""
    stage = Behind(kind)
    stage.ask_at(3.085)
    stage.renew_at(3.203)
    stage.renew_at(3.285)
    return stage.believed_after_the_end()


STORIES = [after_a_late_greeting, after_unreported_requests]


@pytest.mark.parametrize("story", STORIES)
def test_a_lease_is_not_believed_for_longer_than_from_what_the_leader_has_heard(
    story: Callable[[type[ZooKeeperAuthority]], float],
) -> None:
    assert story(ZooKeeperAuthority) <= 0.0


class AnswersAreSignsOfLife(ZooKeeperSession):
    """A session is believed to be alive from each request that the leader has answered, before the leader has heard of
    it."""

    def _confirm(self, wire: ZooKeeperWire, sent: float) -> None:
        super()._confirm(wire, sent)
        self.confirmed = sent


@pytest.mark.parametrize("story", STORIES)
def test_answers_that_are_signs_of_life_would_be_caught(
    story: Callable[[type[ZooKeeperAuthority]], float],
) -> None:
    assert story(made_with("session", AnswersAreSignsOfLife)) > 0.0


def test_a_session_that_may_be_over_is_confirmed_before_it_carries_a_grant() -> None:
    """By another connection. Otherwise the ask, which is first in its queue, would have ended as `expired`."""
    stage = Behind(ZooKeeperAuthority)
    stage.ask_at(3.0)
    stage.play(stage.one, stage.one.release("a" * 32))
    stage.greet_late(0.5, once=True)
    stage.ask_at(3.31, "b")  # on a new connection; the session ends at the first tick after 3.807


def test_a_slow_reply_does_not_shorten_a_lock_delay() -> None:
    """Its own client counts the delay from the expiry, by the leader's clock, which it reads with a request."""
    stage = Stage(1)
    one = stage.client("one")
    stage.play(one, one.open())
    held = Ask("a" * 32, ("orders",), 0.5, HOLDER, False, 3.0)
    kept = Ask("b" * 32, ("other",), 0.5, HOLDER, False)
    for each in (kept, held):
        assert isinstance(stage.play(one, one.ask(each)), Granted)
    ends = session_of(one, 0.5).attempts[grant_id(held.secret)].expires
    for _ in range(3):  # its session goes on, and it expires
        stage.world.run(stage.world.now + 0.2)
        stage.play(one, one.renew([kept.secret]))
    quick = stage.network.delay
    stage.network.delay = lambda source, target: 0.1 if target.name == "one" else 0.001
    following = Ask("c" * 32, ("orders",), 0.5, HOLDER, True)
    assert isinstance(stage.play(one, one.ask(following)), Waiting)
    stage.network.delay = quick
    while not isinstance(stage.play(one, one.ask(following)), Granted):
        stage.world.run(stage.world.now + 0.01)
    assert one._runtime.now() >= ends + 3.0


def test_a_withdrawn_ask_leaves_no_lock_delay() -> None:
    """Its caller gave up between the request that makes its lock_delay nodes and the reply: it was never granted."""
    stage = Stage(1)
    one, two = stage.client("one"), stage.client("two")
    for each in (one, two):
        stage.play(each, each.open())
    assert isinstance(stage.play(one, one.ask(ask("a", wait=False))), Granted)
    delayed = Ask("b" * 32, ("other",), 30.0, HOLDER, False, 20.0)
    stage.freeze_followers_at_write_of(session_of(one, 30.0).id, skipped=1)  # that of its places
    now = one._runtime.now
    assert isinstance(stage.play(one, one.ask(delayed, now() + 1.0)), Indeterminate)
    while stage.play(one, one.withdraw(delayed.secret, now() + 1.0)) != Released():
        pass
    stage.world.run(stage.world.now + 5.0)
    assert isinstance(stage.play(two, two.ask(Ask("c" * 32, ("other",), 30.0, HOLDER, False))), Granted)


def test_an_attempt_told_to_have_expired_stays_over() -> None:
    """A leader that a majority no longer follows expires a session, says so, and fails. The session lives on."""
    stage = Stage(1)
    one = stage.client("one", url="zookeeper://leader,later")
    stage.play(one, one.open())
    short = Ask("a" * 32, ("orders",), 0.5, HOLDER, False)
    assert isinstance(stage.play(one, one.ask(short)), Granted)
    stage.leader.cut = True
    stage.world.run(stage.world.now + 2.0)
    stage.play(one, one.renew([short.secret], one._runtime.now() + 0.2))
    assert session_of(one, 0.5).id == 0
    while (new := stage.ensemble.leader()) is None or new is stage.leader:
        stage.world.run(stage.world.now + 0.1)
    assert paths_of(one).attempt(grant_id(short.secret)) in new.tree.nodes
    stage.network.listen(new.process, ("later", 2181), new.member)
    assert stage.play(one, one.ask(short, one._runtime.now() + 2.0)) == Ended("expired")
