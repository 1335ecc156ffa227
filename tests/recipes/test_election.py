"""Election: one leader of each term, stepping down in place, hand-over, priorities, followers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import fenced
from fenced.recipes.election import (
    AsyncElection,
    AsyncFollower,
    AsyncTerm,
    Election,
    Follower,
    Leader,
    Term,
    leading,
)

TTL = 5.0


class Camp:
    """Candidates in threads. `led` has who led which term, in order."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.led: list[tuple[str, int]] = []
        self.changed = threading.Condition()
        self.elections: dict[str, Election] = {}
        self._close = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []

    def add(self, candidate: str, priority: int = 0) -> Election:
        """A candidate; returns when it leads or waits."""
        client = self._close.enter_context(fenced.Client(self.url, label=candidate))
        election = Election(client, "seat", candidate=candidate, priority=priority, ttl=TTL)

        def lead(term: Term) -> None:
            with self.changed:
                self.led.append((candidate, term.number))
                self.changed.notify_all()
            term.lease.wait_lost()
            term.check()

        def run() -> None:
            with contextlib.suppress(fenced.FencedError):  # its client is closed at the end of the test
                election.run(lead)

        thread = threading.Thread(target=run, name=candidate)
        self._threads.append(thread)
        thread.start()
        self.elections[candidate] = election
        for leader in election.changes(every=0.02):
            if candidate == leader.candidate:
                break
            while candidate not in election.leader().waiting and not election.health().leads:
                threading.Event().wait(0.01)
            break
        return election

    def until_led_by(self, candidate: str) -> int:
        with self.changed:
            assert self.changed.wait_for(lambda: self.led and self.led[-1][0] == candidate, 60)
            return self.led[-1][1]

    def close(self) -> None:
        for election in self.elections.values():
            election.stop()
        self._close.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def camp(url: str) -> Iterator[Camp]:
    made = Camp(url)
    yield made
    made.close()


def test_each_term_has_a_greater_number_and_one_leader(camp: Camp) -> None:
    for candidate in ("a", "b", "c"):
        camp.add(candidate)
    camp.until_led_by("a")
    camp.elections["a"].resign()
    camp.until_led_by("b")
    camp.elections["b"].resign()
    camp.until_led_by("c")
    numbers = [term for _, term in camp.led]
    assert numbers == sorted(set(numbers))
    assert camp.elections["c"].leader() == Leader("c", numbers[-1])
    assert set(camp.elections["c"].leader().waiting) <= {"a", "b"}


def test_resigning_waits_for_the_end_of_the_block_and_gives_the_seat_back_at_once(url: str) -> None:
    with fenced.Client(url) as one, fenced.Client(url) as two:
        first, second = Election(one, "seat", ttl=60), Election(two, "seat", ttl=60)
        told, ended = threading.Event(), threading.Event()

        def lead() -> None:
            for term in first:
                with term:
                    term.lease.wait_lost()
                    told.set()
                    ended.wait(60)
                break

        leader = threading.Thread(target=lead)
        leader.start()
        while not first.health().leads:
            threading.Event().wait(0.01)
        resigning = threading.Thread(target=first.resign)
        resigning.start()
        assert told.wait(60) and resigning.is_alive()
        assert not first.health().leads
        assert second.leader().candidate is not None  # the block still runs: nobody else may lead
        ended.set()
        resigning.join(60)
        leader.join(60)
        for term in second:  # at once, not after the ttl
            with term:
                term.check()
            break


def test_resigning_in_the_block_ends_it_there(url: str) -> None:
    with fenced.Client(url) as client:
        election = Election(client, "seat", ttl=TTL)
        for term in election:
            with term:
                election.resign()
                term.check()
                pytest.fail("the term had ended")
            break
        assert election.leader() == Leader(None, 0)


def test_an_error_of_the_leader_is_raised_and_gives_the_seat_back(url: str) -> None:
    def lead(term: Term) -> None:
        raise ZeroDivisionError

    with fenced.Client(url) as client:
        election = Election(client, "seat", ttl=TTL)
        with pytest.raises(ZeroDivisionError):
            election.run(lead)
        assert election.leader() == Leader(None, 0)


def test_a_lost_seat_is_no_error_of_the_block_but_another_lost_lease_is(url: str) -> None:
    with fenced.Client(url) as client:
        for term in Election(client, "seat", ttl=TTL):
            with pytest.raises(fenced.LeaseLost, match="other"), term, client.hold("other") as other:
                other._grant.lose("gone")
                other.check()
            break


def test_a_term_that_nobody_entered_is_given_back(url: str) -> None:
    with fenced.Client(url) as client:
        election = Election(client, "seat", ttl=TTL)
        for _ in election:
            break
        assert election.leader() == Leader(None, 0)


def test_hand_over_passes_by_those_who_wait_longer(camp: Camp) -> None:
    for candidate in ("a", "b", "c"):
        camp.add(candidate)
    camp.elections["a"].hand_over("c")
    camp.until_led_by("c")
    assert [who for who, _ in camp.led] == ["a", "c"]


def test_hand_over_to_nobody_is_a_resignation(camp: Camp) -> None:
    camp.add("a")
    camp.add("b")
    camp.elections["a"].hand_over("missing", within=1)
    camp.until_led_by("b")


def test_the_higher_priority_leads_first(camp: Camp) -> None:
    camp.add("a")
    camp.add("low", 1)
    camp.add("high", 7)
    camp.elections["a"].resign()
    camp.until_led_by("high")
    assert [who for who, _ in camp.led] == ["a", "high"]


def test_without_a_look_at_the_queue_whoever_has_the_seat_leads(camp: Camp) -> None:
    """Priorities are wishes."""
    camp.add("a")
    low = camp.add("low")
    camp.add("high", 7)

    async def fails(*_: object, **__: object) -> None:
        raise fenced.Unavailable("no look")

    low._candidate._engine().authority.observe = fails  # type: ignore[method-assign,assignment]
    camp.elections["a"].resign()
    camp.until_led_by("low")


@pytest.mark.parametrize("wrong", [True, 1.5, "1"])
def test_a_priority_is_a_whole_number(url: str, wrong: object) -> None:
    with fenced.Client(url) as client, pytest.raises(fenced.Misuse, match="priority"):
        Election(client, "seat", priority=wrong)


def test_a_follower_obeys_no_earlier_term(url: str, tmp_path: Path) -> None:
    durable: Callable[[], fenced.Values] = lambda: fenced.Values(f"sqlite:///{tmp_path}/terms.db")  # noqa: E731
    with fenced.Client(url) as client:
        stamps = []
        for term in Election(client, "seat", ttl=TTL):
            with term:
                stamps.append(term.stamp())
            if len(stamps) == 2:
                break
        old, new = stamps
        for follower in (Follower("seat"), Follower("seat", durable())):
            follower.accept(old)
            follower.accept(str(new))
            with pytest.raises(fenced.StaleToken):
                follower.accept(old)
        with pytest.raises(fenced.StaleToken):
            Follower("seat", durable()).accept(old)  # after a restart
        with pytest.raises(fenced.Uncovered):
            Follower("other").accept(new)


def test_a_follower_receives_messages_about_many_names(url: str, tmp_path: Path) -> None:
    """The name is that of the message, and never what its stamp says."""
    marks = fenced.Values(f"sqlite:///{tmp_path}/received.db")
    with fenced.Client(url) as client:
        stamps = []
        for _ in range(2):
            with client.hold("orders/42") as lease:
                stamps.append(lease.next_stamp())
        with client.hold("orders/43") as lease:
            other = lease.next_stamp()
    for receiver in (Follower(), Follower(marks=marks)):
        receiver.accept(str(stamps[1]), "orders/42")
        receiver.accept(other, "orders/43")
        with pytest.raises(fenced.StaleToken):
            receiver.accept(stamps[0], "orders/42")
        with pytest.raises(fenced.Uncovered):
            receiver.accept(other, "orders/42")
        with pytest.raises(fenced.Misuse, match="what the message is about"):
            receiver.accept(other)
        with pytest.raises(fenced.InvalidStamp):
            receiver.accept("nonsense", "orders/42")


# asyncio.


async def test_the_body_is_cancelled_when_the_leader_resigns(url: str) -> None:
    async with fenced.AsyncClient(url) as client:
        election = AsyncElection(client, "seat", candidate="a", ttl=TTL)
        terms: list[int] = []
        cancelled = 0
        async for term in election:
            async with term:
                terms.append(term.number)
                if len(terms) == 3:
                    break
                resigning = asyncio.create_task(election.resign())
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled += 1
                    raise
            await resigning
        assert cancelled == 2 and terms == sorted(set(terms))
        assert await election.leader() == Leader(None, 0)


async def test_resigning_in_the_body_ends_it_there(url: str) -> None:
    async with fenced.AsyncClient(url) as client:
        election = AsyncElection(client, "seat", ttl=TTL)
        async for term in election:
            async with term:
                await election.resign()
                pytest.fail("the term had ended")
            break


async def test_a_cancellation_from_outside_is_not_swallowed(url: str) -> None:
    async with fenced.AsyncClient(url) as client:
        election = AsyncElection(client, "seat", ttl=TTL)
        leads = asyncio.Event()

        async def lead(term: AsyncTerm) -> None:
            leads.set()
            await asyncio.sleep(60)

        task = asyncio.create_task(election.run(lead))
        await leads.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await election.leader() == Leader(None, 0)


async def test_one_worker_leads_while_the_applications_run(url: str) -> None:
    led: list[str] = []
    changed = asyncio.Condition()

    def schedule(worker: str) -> Callable[[AsyncTerm], Awaitable[object]]:
        async def lead(term: AsyncTerm) -> None:
            async with changed:
                led.append(worker)
                changed.notify_all()
            await asyncio.sleep(3600)

        return lead

    async with fenced.AsyncClient(url) as one, fenced.AsyncClient(url) as two:
        async with leading(two, "seat", schedule("two"), ttl=TTL) as second:
            async with changed:
                await changed.wait_for(lambda: led)
            async with leading(one, "seat", schedule("one"), ttl=TTL) as first:
                assert (second.health().leads, first.health().leads) == (True, False)
                while first.candidate not in (await first.leader()).waiting:
                    await asyncio.sleep(0.01)
                await second.resign()
                async with changed:
                    await changed.wait_for(lambda: led[-1] == "one")
        assert await first.leader() == Leader(None, 0)


async def test_a_follower_in_asyncio(url: str, tmp_path: Path) -> None:
    async with (
        fenced.AsyncClient(url) as client,
        fenced.AsyncValues(f"sqlite:///{tmp_path}/terms.db") as marks,
    ):
        stamps = []
        async for term in AsyncElection(client, "seat", ttl=TTL):
            async with term:
                stamps.append(term.stamp())
            if len(stamps) == 2:
                break
        for follower in (AsyncFollower("seat", marks), AsyncFollower("seat")):
            await follower.accept(stamps[1])
            with pytest.raises(fenced.StaleToken):
                await follower.accept(str(stamps[0]))
