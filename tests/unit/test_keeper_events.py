"""What the keeper tells of its renewals, in virtual time: rounds, leases that were saved, pauses of the process."""

from collections.abc import Sequence
from typing import TypeVar

import pytest

from fenced import events
from fenced.core import keeping
from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState, State
from fenced.errors import Unavailable
from fenced.metrics import Recorder
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.model import Holder, RenewAnswer
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World

E = TypeVar("E")
TTL = 6.0
ANSWER_SECONDS = 0.3


class Slow(MemoryAuthority):
    """It takes its time to answer a renewal, and can be out of reach."""

    deaf = False

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        answers = None if self.deaf else await super().renew(secrets, until)
        await self._runtime.wait(self._runtime.wakeup(), self._runtime.now() + ANSWER_SECONDS)
        if answers is None:
            raise Unavailable("out of reach")
        return answers


class Scene:
    """One client in a world of its own. With `observed`, what it tells is in `seen` and counted by a recorder."""

    def __init__(self, *, observed: bool = True) -> None:
        self.world = World(1)
        self.process = Process(self.world, "client")
        self.runtime = SimulatedRuntime(self.process)
        self.authority = Slow(MemoryStore(lambda: self.world.now), self.runtime)
        self.recorder, self.seen = Recorder(["a*"]), list[events.Event]()
        holder = Holder("1" * 32, "client", "host", 1)
        emit = self._hear if observed else None
        self.engine = LeaseEngine(self.authority, self.runtime, holder, emit=emit)
        self.leases: list[GrantState] = []

    def _hear(self, event: events.Event) -> None:
        self.seen.append(event)
        self.recorder(event)

    def acquire(self, *names: str) -> None:
        async def story() -> None:
            for name in names:
                self.leases.append(await self.engine.acquire(LeaseRequest.checked([name], ttl=TTL)))

        self.runtime.spawn(story, "story")
        self.go_on(0.001)
        assert len(self.leases) == len(names)

    def go_on(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def revoke(self, lease: GrantState) -> None:
        async def story() -> None:
            await self.authority.force_release(lease.names[0], lease.token)

        self.runtime.spawn(story, "revoke")

    def heard(self, kind: type[E]) -> list[E]:
        found: list[E] = [event for event in self.seen if isinstance(event, kind)]
        self.seen = [event for event in self.seen if not isinstance(event, kind)]
        return found

    def rounds(self) -> list[tuple[tuple[int, int, int], object]]:
        """The numbers of each, and its share to a thousandth."""
        return [
            ((each.kept, each.unknown, each.ended), pytest.approx(each.used_ratio, abs=0.001))
            for each in self.heard(events.RenewalRound)
        ]

    @property
    def on_time(self) -> float:
        """The share of the ttl that has passed when a renewal is confirmed that was sent when it was due."""
        return (1 / 3 * (1 - 0.15 * self.engine.keeper.jitter)) + ANSWER_SECONDS / TTL


def test_a_round_tells_of_all_its_leases_at_once() -> None:
    scene = Scene()
    scene.acquire("a", "b")
    scene.go_on(TTL / 3 + ANSWER_SECONDS)
    assert scene.rounds() == [((2, 0, 0), scene.on_time)]
    scene.revoke(scene.leases[0])
    scene.go_on(TTL / 3 + ANSWER_SECONDS)
    assert scene.rounds() == [((1, 0, 1), scene.on_time)]
    text = scene.recorder.text()
    assert 'fenced_renewals_total{outcome="kept"} 3\n' in text
    assert 'fenced_renewals_total{outcome="unknown"} 0\n' in text
    assert 'fenced_renewals_total{outcome="ended"} 1\n' in text
    assert "fenced_renewal_used_ratio_count 2\n" in text
    assert "fenced_loss_pause_seconds_count 0\n" in text, "it was revoked, and no pause is to blame"


def test_the_worst_lease_of_a_round_is_told() -> None:
    """Two leases that are due together, of which one has used up more of its ttl than the other."""
    scene = Scene()
    scene.acquire("a")
    scene.go_on(0.2)  # within the 15 % of a ttl that are renewed along
    scene.leases.clear()
    scene.acquire("b")
    scene.go_on(TTL / 3 + ANSWER_SECONDS)
    assert scene.rounds() == [((2, 0, 0), scene.on_time)]


def test_the_end_of_a_jeopardy_is_told_once_for_each_lease() -> None:
    scene = Scene()
    scene.acquire("a", "b")
    scene.authority.deaf = True
    scene.go_on(TTL / 2 + ANSWER_SECONDS)
    unknown = scene.heard(events.RenewalRound)
    assert unknown == [events.RenewalRound(0, 2, 0, None)] * len(unknown) and unknown
    assert len(scene.heard(events.LeaseInJeopardy)) == 2 and not scene.heard(events.LeaseSaved)
    scene.authority.deaf = False
    scene.go_on(TTL)
    saved = scene.heard(events.LeaseSaved)
    assert [(each.names, each.token, each.grant) for each in saved] == [
        (lease.names, lease.token, lease.grant) for lease in scene.leases
    ]
    late, *then = scene.heard(events.RenewalRound)
    assert late.kept == 2 and late.used_ratio is not None and late.used_ratio > 0.5
    assert [each.used_ratio for each in then] == [pytest.approx(scene.on_time, abs=0.001)] * len(then)
    text = scene.recorder.text()
    assert 'fenced_saved_total{pattern="a*"} 1\n' in text
    assert 'fenced_saved_total{pattern="other"} 1\n' in text
    assert f'fenced_renewals_total{{outcome="unknown"}} {2 * len(unknown)}\n' in text


def test_an_outage_that_only_renewals_see_is_told_once() -> None:
    """A program that holds one lease for hours asks for nothing meanwhile."""
    scene = Scene()
    scene.acquire("a")
    scene.authority.deaf = True
    scene.go_on(TTL / 2 + ANSWER_SECONDS)
    assert len(scene.heard(events.RenewalRound)) > 1
    assert len(scene.heard(events.ConnectionFailed)) == 1 and not scene.heard(events.ConnectionMade)
    scene.authority.deaf = False
    scene.go_on(TTL)
    assert len(scene.heard(events.ConnectionMade)) == 1 and not scene.heard(events.ConnectionFailed)
    assert "fenced_connection_failures_total 1\n" in scene.recorder.text()


def test_a_lease_that_expires_while_it_is_in_jeopardy_is_not_saved() -> None:
    scene = Scene()
    scene.acquire("a")
    due = scene.leases[0].renew_at
    scene.process.pause(due + 1.0)  # survived
    scene.go_on(due + 1.0 + 2 * ANSWER_SECONDS)
    assert scene.engine.keeper.paused_seconds(0.0) == pytest.approx(1.0, abs=0.01)
    scene.authority.deaf = True
    scene.go_on(2 * TTL)
    scene.authority.deaf = False
    scene.go_on(2 * TTL)
    (ended,) = scene.heard(events.LeaseEnded)
    assert ended.reason == "expired" and ended.paused_seconds == 0.0, (
        "it has run all the time since the last renewal"
    )
    assert scene.heard(events.LeaseInJeopardy) and not scene.heard(events.LeaseSaved)
    assert "fenced_loss_pause_seconds_sum 0\n" in scene.recorder.text()


def test_an_answer_that_comes_too_late_keeps_and_saves_nothing() -> None:
    """The authority has renewed it, and its deadline passes on the way back."""
    scene = Scene()
    scene.acquire("a", "b")
    scene.authority.deaf = True
    scene.go_on(TTL / 3 + ANSWER_SECONDS)
    scene.heard(events.RenewalRound)
    assert all(lease.in_doubt for lease in scene.leases)
    scene.authority.deaf = False
    scene.world.run(scene.leases[0].renew_at + ANSWER_SECONDS / 2)
    scene.engine.keeper.drop(scene.leases[1].secret)
    scene.leases[1].end()  # released meanwhile
    scene.process.pause(TTL)
    scene.go_on(TTL + ANSWER_SECONDS)
    assert scene.heard(events.RenewalRound) == [events.RenewalRound(0, 0, 2, None)]
    assert not scene.heard(events.LeaseSaved)
    (ended,) = scene.heard(events.LeaseEnded)
    assert ended.reason == "expired" and ended.names == ("a",)


def test_a_lost_lease_says_how_long_the_process_did_not_run() -> None:
    """The longest pause since its last renewal: not an earlier one, though it was longer than any."""
    scene = Scene()
    scene.acquire("a")
    due = scene.leases[0].renew_at
    scene.process.pause(due + 1.0)  # survived: late by one second
    scene.go_on(due + 1.0 + 2 * ANSWER_SECONDS)
    assert scene.leases[0].state is State.HELD
    assert scene.engine.keeper.paused_seconds(0.0) == pytest.approx(1.0, abs=0.01)
    assert scene.engine.keeper.paused_seconds(scene.leases[0].confirmed) == 0.0
    due = scene.leases[0].renew_at
    scene.process.pause(2 * TTL)
    late = scene.world.now + 2 * TTL - due
    scene.go_on(3 * TTL)
    (ended,) = scene.heard(events.LeaseEnded)
    assert ended.reason == "expired" and ended.paused_seconds == pytest.approx(late, abs=0.01)
    assert "fenced_loss_pause_seconds_count 1\n" in scene.recorder.text()


def test_of_several_pauses_the_longest_counts() -> None:
    scene = Scene()
    scene.acquire("a")
    keeper = scene.engine.keeper
    for at, late in ((10.0, 3.0), (20.0, 1.0), (30.0, 2.0), (40.0, 0.5), (50.0, 0.1)):
        scene.world.run(at)
        keeper._note_late(at - late)
    for since, longest in ((9, 3.0), (10, 2.0), (29, 2.0), (30, 0.5), (40, 0.0)):
        assert keeper.paused_seconds(since) == pytest.approx(longest), since
    for number in range(100):  # each a little shorter
        keeper._note_late(scene.world.now - 0.45 + number / 1000)
    assert len(keeper._pauses) == keeping.PAUSES_MAX


def test_without_an_observer_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def unasked(*_: object) -> None:
        raise AssertionError("nobody asked for it")

    for name in ("RenewalRound", "LeaseSaved", "_RoundCount"):
        monkeypatch.setattr(keeping, name, unasked)
    scene = Scene(observed=False)
    monkeypatch.setattr(scene.engine.keeper, "paused_seconds", unasked)
    scene.acquire("a", "b")
    scene.authority.deaf = True
    scene.go_on(TTL / 2 + ANSWER_SECONDS)
    assert all(lease.in_doubt for lease in scene.leases)
    scene.authority.deaf = False
    scene.go_on(TTL)
    assert [lease.state for lease in scene.leases] == [State.HELD] * 2
    scene.process.pause(2 * TTL)
    scene.go_on(3 * TTL)
    assert [lease.lost_reason for lease in scene.leases] == ["expired"] * 2
