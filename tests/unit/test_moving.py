"""A move to another authority: the order of its steps, and that an interruption anywhere does no harm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fenced import errors
from fenced.client import registry
from fenced.client.moving import GAP, AdoptRealm, GuardTrust, Moved, MoveStep, RaiseFloor, move, next_step
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.stores.memory.guard import MemoryValues
from fenced.values.contracts import Wakeup
from fenced.values.model import TOKEN_MAX, Ask, Credential, Granted, Holder, Stamp, Standing, grant_id

OLD, NEW, OTHER = "00000000000000aa", "00000000000000bb", "00000000000000cc"


def guard(realm: str | None, highest: int, max_jump: int | None = None) -> GuardTrust:
    return GuardTrust("sqlite:///shop.db", realm, highest, max_jump)


def test_the_order_of_the_steps() -> None:
    old, low, high = Standing(OLD, 70), Standing(NEW, 5), Standing(NEW, 70 + GAP)
    # The floor comes first: above the marks of every guard, and above the old counter.
    assert next_step(old, low, [guard(OLD, 60), guard(None, 0)]) == RaiseFloor(70 + GAP)
    assert next_step(Standing(OLD, 50), low, [guard(OLD, 60)]) == RaiseFloor(60 + GAP)
    # Then one guard after the other; the old authority may have granted a little more meanwhile.
    old = Standing(OLD, 1000)
    assert next_step(old, high, [guard(OLD, 990), guard(None, 0)]) == AdoptRealm(0)
    assert next_step(old, high, [guard(NEW, 990), guard(OLD, 995)]) == AdoptRealm(1)
    # New tokens in the first guard are no reason to raise the floor for the second one again.
    used = Standing(NEW, high.last_token + 9)
    assert next_step(old, used, [guard(NEW, used.last_token), guard(OLD, 995)]) == AdoptRealm(1)
    assert next_step(old, used, [guard(NEW, used.last_token), guard(NEW, 995)]) is None
    # Adopted by hand before the floor was raised.
    assert next_step(old, low, [guard(NEW, 60)]) == RaiseFloor(1000 + GAP)


def test_no_step_is_taken_where_none_is_safe() -> None:
    old, new = Standing(OLD, 70), Standing(NEW, 5)
    with pytest.raises(errors.Misuse, match=f"the same authority, realm {OLD}"):
        next_step(old, old, [guard(OLD, 1)])
    with pytest.raises(errors.Misconfigured, match=f"trusts realm {OTHER}, which is neither .*{OLD}.*{NEW}"):
        next_step(old, new, [guard(OLD, 1), guard(OTHER, 1)])
    with pytest.raises(
        errors.Misconfigured, match=r"max_jump \(1000\).* fenced guard trust URL --max-jump off"
    ):
        next_step(old, new, [guard(OLD, 60, max_jump=1000)])
    assert next_step(old, new, [guard(OLD, 0, max_jump=1000)])  # the first mark may be anything
    with pytest.raises(errors.Misconfigured, match="too few tokens are left"):
        next_step(Standing(OLD, TOKEN_MAX - 1), new, [guard(OLD, 60)])


class Killed(BaseException):
    """Stands for the end of the process that runs the move."""


class Site:
    """Two authorities and two guards. At each request of a move, holders of both authorities write to both guards."""

    def __init__(self) -> None:
        self.runtime = BlockingRuntime()
        self.stores = [MemoryStore(self.runtime.now, realm=realm) for realm in (OLD, NEW)]
        self.authorities = [MemoryAuthority(store, self.runtime) for store in self.stores]
        self.guards = [MemoryValues() for _ in range(2)]
        self.admitted: list[list[Stamp]] = [[], []]
        self.refused: list[str] = []
        self.early: list[list[Stamp]] = [[], []]
        """Leases that were granted before the move."""
        for each in self.guards:
            step(each.open())
        for number in (0, 1):
            self.early[number] = [self.lease(0), self.lease(0), self.lease(1)]
        self.write(0, self.lease(0))
        self.write(1, self.lease(0))

    def lease(self, authority: int) -> Stamp:
        store, secret = self.stores[authority], self.runtime.secret()
        answer = step(self.authorities[authority].ask(Ask(secret, (secret,), 60.0, Holder("h", "h", "h", 1))))
        assert isinstance(answer, Granted)
        return Stamp(store.realm, ("orders",), answer.token, None, grant_id(secret))

    def write(self, number: int, stamp: Stamp) -> None:
        try:
            step(self.guards[number].write(Credential((stamp,)), "orders", b""))
            self.admitted[number].append(stamp)
        except errors.Refused as refused:
            self.refused.append(refused.kind)

    def work(self) -> None:
        """Each authority's new and early leases; the newest of the old authority last, as the worst case."""
        for number in (0, 1):
            trusted = step(self.guards[number].status(0.0)).realm
            new = self.lease(1)
            for stamp in (new, *self.early[number], self.lease(0)):
                self.write(number, stamp)
            assert (new in self.admitted[number]) == (trusted == NEW), "at no time are both refused"

    def move(self, at_each_request: Callable[[], None] = lambda: None) -> Moved:
        old, new, *guards = (Observed(each, at_each_request) for each in (*self.authorities, *self.guards))
        return step(move(old, new, guards, self.runtime, patience=0.0))

    def check(self, moved: Moved) -> None:
        """Each guard has switched once and for good, and has admitted no token below an earlier one."""
        self.work()
        assert [each.realm for each in moved.guards] == [NEW, NEW]
        for stamps in self.admitted:
            assert [realm for realm, _ in itertools.groupby(stamp.realm for stamp in stamps)] == [OLD, NEW]
            tokens = [stamp.token for stamp in stamps]
            assert tokens == sorted(tokens)
        again = self.move()
        assert again.new.last_token - moved.new.last_token < GAP // 2, "a complete move is not repeated"


class Observed:
    """An authority or a guard; `at_each_request` is called before and after each of its methods."""

    def __init__(self, inner: Any, at_each_request: Callable[[], None]) -> None:
        self._inner, self._at_each_request = inner, at_each_request

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not callable(method):
            return method

        async def request(*args: Any, **options: Any) -> Any:
            self._at_each_request()
            answer = await method(*args, **options)
            self._at_each_request()
            return answer

        return request


def test_holders_of_both_authorities_write_at_every_point_of_a_move() -> None:
    site = Site()
    site.check(site.move(site.work))


def test_the_other_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: guards adopt before the floor is raised, and refuse both authorities in between."""

    def adopt_first(old: Standing, new: Standing, guards: Sequence[GuardTrust]) -> MoveStep | None:
        left = [number for number, each in enumerate(guards) if each.realm != new.realm]
        return AdoptRealm(left[0]) if left else next_step(old, new, guards)

    monkeypatch.setattr("fenced.client.moving.next_step", adopt_first)
    site = Site()
    with pytest.raises(AssertionError, match="at no time are both refused"):
        site.move(site.work)


def test_killed_before_and_after_every_request_and_run_again() -> None:
    points: list[None] = []
    Site().move(lambda: points.append(None))
    for killed_at in range(len(points)):
        site, left = Site(), iter(range(killed_at))

        def work_and_die(site: Site = site, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                site.work()
                raise Killed

        with pytest.raises(Killed):
            site.move(work_and_die)
        site.work()
        site.check(site.move())


class Doubtful(MemoryAuthority):
    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return replace(await super().open(create=create, until=until), doubts=("fsync is off",))


def test_an_authority_that_could_repeat_tokens_must_be_accepted() -> None:
    site = Site()
    old, new = site.authorities[0], Doubtful(site.stores[1], site.runtime)
    with pytest.raises(errors.Misconfigured, match=r"fsync is off.* --guarantee best-effort"):
        step(move(old, new, site.guards, site.runtime, patience=0.0))
    assert step(new.open()).last_token < GAP
    site.check(step(move(old, new, site.guards, site.runtime, patience=0.0, guarantee="best-effort")))


class BusyOnce(MemoryValues):
    """Its first adoption finds a transaction in the way."""

    tries = 0

    async def adopt(self, realm: str) -> None:
        self.tries += 1
        if self.tries == 1:
            raise errors.Contended("process 7 is in the way")
        await super().adopt(realm)


def test_a_busy_guard_is_tried_again_and_then_says_so() -> None:
    site, busy = Site(), BusyOnce()
    old, new = site.authorities
    with pytest.raises(errors.Contended, match=r"process 7 is in the way.* run the same command again"):
        step(move(old, new, [busy], site.runtime, patience=0.0))
    busy.tries = 0
    moved = step(move(old, new, [busy], site.runtime, patience=60.0))
    assert (moved.guards[0].realm, busy.tries) == (NEW, 2)


class Stopped(BlockingRuntime):
    """Its time passes while somebody waits, and only then."""

    at = 1000.0

    def now(self) -> float:
        return self.at

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        self.at = max(self.at, until or 0.0)
        return False


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_move_is_reported_when_every_program_has_noticed(tmp_path: Path, interrupted: bool) -> None:
    """A program has read the realm of a guarded folder a moment ago: once the move is done, it refuses OLD's holders.

    Also if an earlier run was killed right after the adoption.
    """
    site, runtime = Site(), Stopped()
    program, guard = (registry.guard(f"file://{tmp_path}", runtime) for _ in range(2))
    step(program.open())
    for _ in range(2):  # the first one makes the folder trust OLD
        step(program.write(Credential((site.lease(0),)), "orders", b"old"))
    if interrupted:
        step(guard.adopt(NEW))
    old, new = site.authorities
    step(move(old, new, [guard], runtime, patience=0.0))
    with pytest.raises(errors.ForeignRealm):
        step(program.write(Credential((site.lease(0),)), "orders", b"too late"))
    step(program.write(Credential((site.lease(1),)), "orders", b"new"))
