"""Who holds a name, whether a stamp is of the lease that does, and waiting until no earlier holder can act."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import fenced
from fenced.client.leases import AsyncLease
from fenced.client.looking import REMEMBERED_MAX, SeenHolders, current
from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.model import AskAnswer, HeldBy, Holder, NameView, Stamp
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World

_numbers = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory:looking-{next(_numbers)}"


class Counted:
    """How often a client asks its authority."""

    def __init__(self, client: fenced.Client | fenced.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        observe = client._authority.observe

        async def counted(*words: Any, **options: Any) -> NameView:
            self.asked += 1
            return await observe(*words, **options)

        monkeypatch.setattr(client._authority, "observe", counted)


def test_the_holder_of_a_name_is_found(url: str) -> None:
    with fenced.Client(url, label="billing") as one, fenced.Client(url) as two:
        assert two.holder("orders/42") is None
        with one.hold("orders/42") as lease:
            found = two.holder("orders/42")
            assert found is not None
            assert (found.holder.label, found.token, found.grant) == ("billing", lease.token, lease.grant)
            assert 0 < found.remaining <= lease.ttl
        assert two.holder("orders/42") is None
        with pytest.raises(fenced.Misuse):
            two.holder("")


def test_a_stamp_is_verified_until_its_lease_ends(url: str) -> None:
    with fenced.Client(url) as one, fenced.Client(url) as two:
        with one.hold_all(["orders/42", "orders/43"]) as lease:
            stamp = lease.next_stamp()
            for fence in (stamp, str(stamp), lease, stamp._replace(seq=None)):
                two.verify(fence)
            two.verify(stamp, "orders/43")
            with pytest.raises(fenced.Uncovered, match="orders/44"):
                two.verify(stamp, "orders/44")
            with pytest.raises(fenced.ForeignRealm):
                two.verify(stamp._replace(realm="0" * 16))
            with pytest.raises(fenced.ReusedToken):
                two.verify(stamp._replace(grant="0" * 32))
            with pytest.raises(fenced.InvalidStamp):
                two.verify("no stamp")
        with pytest.raises(fenced.LeaseLost, match="nobody holds it") as ended:
            two.verify(stamp)
        assert ended.value.reason == "gone"
        with two.hold("orders/43"):
            two_tokens = "token 1 is stale: 2 has been seen"
            with pytest.raises(fenced.StaleToken, match=f"orders/43: {two_tokens}") as stale:
                one.verify(stamp, "orders/43")
            assert stale.value.mark == 2
            with pytest.raises(fenced.Overtaken):
                one.verify(stamp)


async def test_the_same_in_asyncio(url: str) -> None:
    async with fenced.AsyncClient(url) as one, fenced.AsyncClient(url) as two:
        async with one.hold("orders/42") as lease:
            found = await two.holder("orders/42")
            assert found is not None and found.token == lease.token
            await two.verify(lease.next_stamp(), max_age=5)
            late = lease.next_stamp()
        async with two.hold("orders/42"):
            with pytest.raises(fenced.StaleToken):
                await one.verify(late)


def test_an_answer_is_used_again_for_max_age(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It admits a lease that ended meanwhile, and never one that was seen to be overtaken."""
    with fenced.Client(url) as one, fenced.Client(url) as two:
        counted = Counted(two, monkeypatch)
        with one.hold("orders/42") as lease:
            first = lease.next_stamp()
            for _ in range(3):
                two.verify(first, max_age=60)
            assert counted.asked == 1
            two.verify(first)
            assert counted.asked == 2
        two.verify(first, max_age=60)  # what max_age admits
        with pytest.raises(fenced.LeaseLost):
            two.verify(first)
        with one.hold("orders/42") as lease:
            two.verify(lease.next_stamp(), max_age=60)  # a higher token is asked about, whatever was seen
            asked = counted.asked
            with pytest.raises(fenced.StaleToken):
                two.verify(first, max_age=60)
            assert counted.asked == asked  # the higher one refuses all lower ones, without a question


def test_a_late_answer_does_not_replace_a_newer_one() -> None:
    """Two threads ask, and the older answer arrives last."""
    seen = SeenHolders()
    old, new = (HeldBy(Holder("0" * 32, "", "", 1), token, f"{token:032x}", 1.0) for token in (1, 2))
    seen.saw("a", new, 5.0)
    seen.saw("a", old, 6.0)
    assert seen.of("a") == (2, new.grant, 5.0)
    seen.saw("a", new, 4.0)
    assert seen.of("a") == (2, new.grant, 5.0)
    seen.saw("a", new, 7.0)
    assert seen.of("a") == (2, new.grant, 7.0)


def test_only_so_many_holders_are_remembered() -> None:
    seen, by = SeenHolders(), HeldBy(Holder("0" * 32, "", "", 1), 1, "0" * 32, 1.0)
    for number in range(REMEMBERED_MAX + 5):
        seen.saw(f"orders/{number}", by, float(number))
    assert seen.of("orders/4") is None and seen.of("orders/5") is not None


# In virtual time.

HOLDER = Holder("1" * 32, "client", "host", 1)
SLOW = 3.0


class SlowAuthority(MemoryAuthority):
    """Questions reach it late."""

    decides_after = 0.0

    async def ask(self, ask: Any, until: float | None = None) -> AskAnswer:
        if self.decides_after:
            await self._runtime.wait(self._runtime.wakeup(), self._runtime.now() + self.decides_after)
        return await super().ask(ask, until)


class Laboratory:
    """Engines in one world, over one store."""

    def __init__(self) -> None:
        self.world = World(1)
        self.store = MemoryStore(lambda: self.world.now)
        self.failed: list[BaseException] = []

    def engine(self, name: str) -> LeaseEngine:
        runtime = SimulatedRuntime(Process(self.world, name))
        return LeaseEngine(SlowAuthority(self.store, runtime), runtime, HOLDER)

    def run(self, *stories: tuple[LeaseEngine, Callable[[], Any]]) -> None:
        for engine, story in stories:
            engine.runtime.spawn(self._kept(story), "story")
        self.world.run(200.0)
        if self.failed:
            raise self.failed[0]

    def _kept(self, story: Callable[[], Any]) -> Callable[[], Any]:
        async def run() -> None:
            try:
                await story()
            except BaseException as error:  # noqa: BLE001 - raised by the test
                self.failed.append(error)

        return run


class Client:
    """As much of a client as a lease needs."""

    def __init__(self, engine: LeaseEngine) -> None:
        self._engine = engine


def leased(grant: GrantState, engine: LeaseEngine) -> AsyncLease:
    return AsyncLease(grant, Client(engine))  # type: ignore[arg-type]


async def sleep(engine: LeaseEngine, seconds: float) -> None:
    await engine.runtime.wait(engine.runtime.wakeup(), engine.runtime.now() + seconds)


class WaitsFromTheRequest(AsyncLease):
    """The planted mistake: the bounds count from when the lease was asked for, and not from its answer."""

    async def wait_out(self, *, pause: Any, delivery: Any) -> float:
        until = self._grant.acquired + pause + delivery
        await self._grant.wait_lost(until)
        return float(pause + delivery)


@pytest.mark.parametrize("kind", [AsyncLease, WaitsFromTheRequest])
def test_no_earlier_holder_acts_after_the_bounds(kind: type[AsyncLease]) -> None:
    """It believes until its own deadline, pauses after its last check, and its message is on its way. The next holder's
    question reaches the authority late."""
    lab, pause, delivery = Laboratory(), 2.0, 1.0
    first, second = lab.engine("first"), lab.engine("second")
    assert isinstance(second.authority, SlowAuthority)
    second.authority.decides_after = SLOW
    acted: list[float] = []
    waited: list[float] = []

    async def holds() -> None:
        grant = await first.acquire(LeaseRequest.checked(["a"], ttl=4))
        first.keeper.drop(grant.secret)  # cut off: nothing is renewed
        while grant.remaining() > 0:
            checked = first.runtime.now()
            await sleep(first, 0.01)
        acted.append(checked + pause + delivery)

    async def follows() -> None:
        await sleep(second, 1.5)
        grant = await second.acquire(LeaseRequest.checked(["a"], ttl=30, wait=0.0))
        bound = await kind(grant, Client(second)).wait_out(pause=pause, delivery=delivery)  # type: ignore[arg-type]
        waited.append(second.runtime.now())
        assert bound == pause + delivery

    lab.run((first, holds), (second, follows))
    assert (acted[0] <= waited[0]) is (kind is AsyncLease)


def test_waiting_out_ends_with_the_lease() -> None:
    lab = Laboratory()
    engine = lab.engine("one")

    async def story() -> None:
        grant = await engine.acquire(LeaseRequest.checked(["a"], ttl=30, max_hold=2))
        began = engine.runtime.now()
        with pytest.raises(fenced.LeaseLost):
            await leased(grant, engine).wait_out(pause=60, delivery=1)
        assert engine.runtime.now() - began < 3
        for wrong in (-1, True, "1", float("nan")):
            with pytest.raises(fenced.Misuse):
                await leased(grant, engine).wait_out(pause=wrong, delivery=0)  # type: ignore[arg-type]

    lab.run((engine, story))


def test_an_answer_is_as_old_as_its_question() -> None:
    """A lease that ended while the answer was on its way is not called fresh."""
    lab = Laboratory()
    engine = lab.engine("one")
    asked: list[float] = []
    observe = engine.authority.observe

    async def slowly(name: str, until: float | None = None) -> NameView:
        view = await observe(name, until)
        asked.append(engine.runtime.now())
        await sleep(engine, SLOW)
        return view

    engine.authority.observe = slowly  # type: ignore[method-assign]

    async def story() -> None:
        grant = await engine.acquire(LeaseRequest.checked(["a"], ttl=30))
        seen = SeenHolders()
        for _ in range(2):  # the answer took longer than max_age: it is used once
            await current(engine, seen, grant.announcement(), ("a",), SLOW / 2)
        assert len(asked) == 2
        await current(engine, seen, grant.announcement(), ("a",), SLOW * 2)
        assert len(asked) == 2

    lab.run((engine, story))


def test_a_lease_of_a_restored_authority_is_not_current(url: str) -> None:
    """Its counter went back: the token that is held is lower than that of the stamp."""
    with fenced.Client(url) as client, client.hold("a") as lease:
        later = Stamp(lease.realm, lease.names, lease.token + 5, 1, "f" * 32)
        with pytest.raises(fenced.LeaseLost, match="token 1 holds it"):
            client.verify(later)


def test_blocking_wait_out(url: str) -> None:
    with fenced.Client(url) as client, client.hold("a") as lease:
        began = client._runtime.now()
        assert lease.wait_out(pause=0.05, delivery=0.05) == pytest.approx(0.1)
        assert client._runtime.now() - began >= 0.1
