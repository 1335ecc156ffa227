"""The client core in a world of its own, where time is virtual: what happens when, to the microsecond."""

from collections.abc import Awaitable, Callable

import pytest

from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import State
from fenced.core.renewing import Renewer
from fenced.errors import (
    FencedError,
    Indeterminate,
    LeaseLost,
    Misconfigured,
    Misuse,
    NotGranted,
    Unavailable,
)
from fenced.runtime.blocking import step
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.model import Ask, AskAnswer, Busy, Ended, Holder, ReleaseAnswer, Standing
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process, World
from tests.planted.bugs import ClosedClientRenews

HOLDER = Holder("1" * 32, "client", "host", 1)
Story = Callable[[LeaseEngine, "Deaf", SimulatedRuntime], Awaitable[None]]


class Deaf(MemoryAuthority):
    """An authority that can be out of reach for a while."""

    fails: type[Unavailable] | type[Indeterminate] | None = None
    hangs = False
    tried = 0
    loses = 0.0
    """The next answer to an ask is lost, and its client learns so after this many seconds."""

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        answer = await super().ask(ask, until)
        if seconds := self.loses:
            self.loses = 0.0
            await self._runtime.wait(self._runtime.wakeup(), self._runtime.now() + seconds)
            raise Indeterminate("no answer")
        return answer

    async def _reach(self, until: float | None) -> None:
        self.tried += 1
        if self.hangs:
            assert until is not None
            await self._runtime.wait(self._runtime.wakeup(), until)
            raise Indeterminate("silent")
        if self.fails is not None:
            raise self.fails("out of reach")

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        await self._reach(until)
        return await super().release(secret, keep=keep)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        await self._reach(until)
        return await super().withdraw(secret)


def play(story: Story, seconds: float = 200.0) -> None:
    world = World(1)
    process = Process(world, "client")
    runtime = SimulatedRuntime(process)
    authority = Deaf(MemoryStore(runtime.now), runtime)
    engine = LeaseEngine(authority, runtime, HOLDER)
    done: list[bool] = []

    async def run() -> None:
        await story(engine, authority, runtime)
        done.append(True)

    runtime.spawn(run, "story")
    world.run(seconds)
    assert done, "the story came to its end"


def in_a_world(story: Story) -> Callable[[], None]:
    """A test that is a story."""

    def test() -> None:
        play(story)

    test.__doc__ = story.__doc__
    return test


@pytest.mark.parametrize("engine_type", [LeaseEngine, ClosedClientRenews])
def test_a_closed_client_renews_nothing(engine_type: type[LeaseEngine]) -> None:
    """Its keeper runs beside it. The planted one goes on."""
    world = World(1)
    store = MemoryStore(lambda: world.now)
    program, beside = (SimulatedRuntime(Process(world, name)) for name in ("program", "keeper"))
    renewer = Renewer(MemoryAuthority(store, beside), beside, program)
    engine = engine_type(MemoryAuthority(store, program), program, HOLDER, renewer=renewer)
    found: list[bool] = []

    async def story() -> None:
        hold = await engine.acquire(LeaseRequest.checked(["a"], ttl=3))
        await sleep(program, 10)
        assert hold.state is State.HELD
        await engine.close()
        await sleep(program, 10)
        found.append((await MemoryAuthority(store, program).observe("a")).held_by is None)

    program.spawn(story, "story")
    world.run(100)
    assert found == [engine_type is LeaseEngine]


async def sleep(runtime: SimulatedRuntime, seconds: float) -> None:
    await runtime.wait(runtime.wakeup(), runtime.now() + seconds)


@in_a_world
async def test_a_lease_of_which_little_is_left_is_renewed_before_it_ends(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    """The answer to its first ask was lost, and the second one was told of a fifth of its ttl: less than the time
    after which a whole one is renewed."""
    authority.loses = 4.0
    hold = await engine.acquire(LeaseRequest.checked(["a"], ttl=5))
    assert 0.5 < hold.remaining() < 1.0 and hold.state is State.HELD
    await sleep(runtime, 0.8)
    assert hold.remaining() > 4.0
    await sleep(runtime, 60)
    assert hold.state is State.HELD


@in_a_world
async def test_a_sleeping_keeper_is_woken_for_max_hold(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    await engine.acquire(LeaseRequest.checked(["long"], ttl=60))  # for which it sleeps seconds at a time
    await sleep(runtime, 0.1)
    hold = await engine.acquire(LeaseRequest.checked(["short"], ttl=60, max_hold=1))
    lost: list[tuple[str, float]] = []
    began = runtime.now()
    hold.on_lost(lambda reason: lost.append((reason, runtime.now() - began)))
    await sleep(runtime, 3)
    assert [reason for reason, _ in lost] == ["max_hold"]
    assert lost[0][1] == pytest.approx(1.0, abs=0.01)


@in_a_world
async def test_the_end_of_a_block_looks_at_the_clock(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    """Nobody has noticed that `max_hold` is over: the release that follows says so all the same."""
    hold = await engine.acquire(LeaseRequest.checked(["a"], ttl=60, max_hold=1))
    engine.keeper.drop(hold.secret)  # which would have told
    await sleep(runtime, 2.5)
    with pytest.raises(LeaseLost) as caught:
        await engine.release_at_exit(hold, raised=False)
    assert caught.value.reason == "max_hold"


@in_a_world
async def test_at_least_for_is_kept_after_success_even_if_the_release_fails_at_first(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    """The settler repeats the release with what is left, and does not free the name. A failed body frees it at once."""
    job = LeaseRequest.checked(["job"], ttl=60, wait=None, at_least_for=50)
    hold = await engine.acquire(job)
    await engine.release_at_exit(hold, raised=True)
    began = runtime.now()
    hold = await engine.acquire(job)
    assert runtime.now() - began < 1, "after a failure the name is free at once"
    await sleep(runtime, 10)
    authority.fails = Unavailable
    await engine.release_at_exit(hold, raised=False)
    await sleep(runtime, 10)
    authority.fails = None
    await sleep(runtime, 2)
    view = await authority.observe("job")
    assert view.held_by is None and view.free_in == pytest.approx(50 - 22, abs=0.1)
    with pytest.raises(NotGranted, match="not free yet"):
        await engine.acquire(LeaseRequest.checked(["job"], wait=0))
    again = await engine.acquire(job)
    assert runtime.now() - began == pytest.approx(50, abs=0.5)
    await sleep(runtime, 51)
    await engine.release_at_exit(again, raised=False)
    assert (await authority.observe("job")).free_in == 0, "a job that ran for longer frees it at once"


def test_a_warning_of_the_store_is_logged_once_unless_best_effort_is_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Warned(Deaf):
        async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
            return Standing("0" * 16, 0, (), ("it is old (fixed in 2.0)",))

    runtime = SimulatedRuntime(Process(World(1), "client"))
    for guarantee in ("best-effort", "strict", "strict"):
        authority = Warned(MemoryStore(runtime.now), runtime)
        step(LeaseEngine(authority, runtime, HOLDER, guarantee=guarantee).standing())
        assert [record.getMessage() for record in caplog.records] == (
            [] if guarantee == "best-effort" else ["fenced: warning: it is old (fixed in 2.0)"]
        )


def test_an_authority_that_could_not_be_opened_has_granted_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its tables were made may be unknown; that no lease was asked for is not."""

    async def unknown(self: Deaf, *, create: bool = True, until: float | None = None) -> Standing:
        raise Indeterminate("installed or not")

    monkeypatch.setattr(Deaf, "open", unknown)

    async def story(engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime) -> None:
        for wait in (0, 60):
            with pytest.raises(Unavailable, match="installed or not"):
                await engine.acquire(LeaseRequest.checked(["orders"], wait=wait))

    play(story)


@pytest.mark.parametrize("refused", [NotGranted, Misconfigured, Misuse])
def test_a_refusal_after_a_doubted_try_ends_the_attempt(
    refused: type[FencedError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy of the ask is still on its way when the second is refused: it finds a tombstone."""
    asks: list[Ask] = []

    async def full(self: Deaf, ask: Ask, until: float | None = None) -> AskAnswer:
        asks.append(ask)
        if len(asks) == 1:
            raise Indeterminate("cut off")
        if refused is not NotGranted:
            raise refused("another server has taken over")
        return Busy(10_000, None)

    async def story(engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Deaf, "ask", full)
            with pytest.raises(refused):
                await engine.acquire(LeaseRequest.checked(["orders"], wait=5))
        assert len(asks) == 2 and asks[0] == asks[1]
        assert await authority.ask(asks[0]) == Ended("withdrawn")

    play(story)


@pytest.mark.parametrize("error", [Unavailable, Indeterminate])
def test_after_a_failed_release_the_lease_is_over_here(error: type[Unavailable | Indeterminate]) -> None:
    """Asking again is no Misuse: it queues behind the old grant, which the settler ends when it can."""

    async def story(engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime) -> None:
        hold = await engine.acquire(LeaseRequest.checked(["a"], ttl=60))
        authority.fails = error
        with pytest.raises(error):
            await engine.release(hold)
        assert hold.state is State.RELEASED
        await engine.release(hold)  # repeating it is harmless
        began = runtime.now()
        runtime.spawn(lambda: heal(authority, runtime), "heal")
        again = await engine.acquire(LeaseRequest.checked(["a"], ttl=60))
        assert again.token > hold.token
        assert runtime.now() - began < 10 + 1.1, "within a second of the server's return"

    async def heal(authority: Deaf, runtime: SimulatedRuntime) -> None:
        await sleep(runtime, 10)
        authority.fails = None

    play(story)


@in_a_world
async def test_a_release_is_not_repeated_after_the_lease_has_expired(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    hold = await engine.acquire(LeaseRequest.checked(["a"], ttl=5))
    authority.fails = Unavailable
    with pytest.raises(Unavailable):
        await engine.release(hold)
    await sleep(runtime, 5)
    assert authority.tried > 5
    await sleep(runtime, 60)
    tried = authority.tried
    await sleep(runtime, 60)
    assert authority.tried == tried


@in_a_world
async def test_a_release_is_tried_once_more_after_a_stand_still(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    """Longer than the ttl; but an authority whose leader changed meanwhile has begun the ttl again."""
    hold = await engine.acquire(LeaseRequest.checked(["a"], ttl=5))
    authority.fails = Unavailable
    with pytest.raises(Unavailable):
        await engine.release(hold)
    authority.fails, tried = None, authority.tried
    runtime._process.pause(100)
    await sleep(runtime, 0.01)
    await sleep(runtime, 10)
    assert authority.tried == tried + 1


@in_a_world
async def test_a_hanging_withdrawal_delays_no_renewal(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    given_up = await engine.acquire(LeaseRequest.checked(["a"], ttl=60))
    authority.hangs = True
    with pytest.raises(Indeterminate):
        await engine.release(given_up)
    kept = await engine.acquire(LeaseRequest.checked(["b"], ttl=0.3))
    await sleep(runtime, 20)
    assert kept.state is State.HELD


@in_a_world
async def test_closing_does_not_wait_for_a_silent_server(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    hold = await engine.acquire(LeaseRequest.checked(["a"], ttl=60))
    authority.hangs = True
    with pytest.raises(Indeterminate):
        await engine.release(hold)
    await sleep(runtime, 1)  # the settler waits for an answer
    began = runtime.now()
    await engine.close()
    assert runtime.now() - began < 0.25


@in_a_world
async def test_closing_tries_once_more(
    engine: LeaseEngine, authority: Deaf, runtime: SimulatedRuntime
) -> None:
    hold = await engine.acquire(LeaseRequest.checked(["a"], ttl=60))
    authority.fails = Unavailable
    with pytest.raises(Unavailable):
        await engine.release(hold)
    authority.fails = None
    await engine.close()
    assert (await authority.observe("a")).held_by is None
