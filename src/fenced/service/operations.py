"""What a request about leases asks of the store, and how the results become its answer."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
from msgspec import Struct

from fenced.errors import FencedError, InvariantBroken, Misuse, Unavailable
from fenced.net.problems import problem
from fenced.runtime import clocks
from fenced.service import answers
from fenced.service.bodies import (
    Answer,
    AskBody,
    BatchAnswers,
    BatchBody,
    BatchItem,
    FailedAnswer,
    ProblemView,
    ReleaseBody,
    RenewBody,
    RenewedAnswers,
    WithdrawBody,
)
from fenced.values import timing
from fenced.values.contracts import Authority
from fenced.values.model import (
    Ask,
    BatchOperation,
    Holder,
    Release,
    Renewal,
    Withdrawal,
    check_name,
    check_names,
)
from fenced.values.model import BatchAnswer as Result

log = logging.getLogger("fenced.service")
ENDS = (Release, Withdrawal)
_holder = lru_cache(maxsize=1024)(Holder)
Done = Callable[[Sequence[Result] | Exception], None]
Answered = Callable[[Sequence[BatchOperation], Sequence[Result], float], None]
"""Called with operations, their results, and how many seconds they took."""


class Work(Struct):
    """The operations of a request, and the function that makes its answer of them, their results and the realm."""

    operations: list[BatchOperation]
    answer: Callable[[list[Any], Sequence[Result], str], Struct]
    until: float | None = None
    """Of renewals. Operations that share a write have no deadline of their own: their client stops waiting instead."""
    only_ends: bool = False
    """It ends leases, and does nothing else."""


def work_of(body: Any, secret: Callable[[], str]) -> Work:
    """`secret` makes the id of a holder that has none."""
    match body:
        case AskBody():
            return Work([_ask(body, secret)], _asked)
        case ReleaseBody():
            return Work([Release(body.attempt, body.keep)], _ended, only_ends=True)
        case BatchBody():
            return _batch([_operation(item, secret) for item in body.do])
        case RenewBody():
            return Work([Renewal(each) for each in body.attempts], _renewed, clocks.now() + body.timeout)
        case WithdrawBody():
            return Work([Withdrawal(body.attempt)], _ended, only_ends=True)
    raise InvariantBroken(f"{type(body).__name__} is not about leases")


def _ask(body: AskBody, secret: Callable[[], str]) -> Ask:
    # A constant id would tie the leases of different clients together.
    holder = body.holder
    who = _holder(holder.id or secret(), holder.label, holder.host, holder.pid)
    names = (check_name(body.names[0]),) if len(body.names) == 1 else check_names(body.names)
    times = body.ttl, who, body.wait, body.lock_delay
    return Ask(body.attempt, names, *times, body.series, body.number, body.settled)


def _only(results: Sequence[Result]) -> Any:
    """The result of a request with one operation; its error is the request's."""
    (result,) = results
    if isinstance(result, FencedError):
        raise result
    return result


def _asked(operations: list[Ask], results: Sequence[Result], realm: str) -> Answer:
    return answers.asked(operations[0], _only(results), realm)


def _ended(_: list[BatchOperation], results: Sequence[Result], realm: str) -> Answer:
    return answers.told(_only(results))


def _renewed(_: list[BatchOperation], results: Sequence[Result], realm: str) -> RenewedAnswers:
    return RenewedAnswers([answers.told(_only([each])) for each in results])  # type: ignore[misc]


def _batch(items: list[BatchOperation | FencedError]) -> Work:
    """Each operation is answered separately."""
    failed = [(place, item) for place, item in enumerate(items) if isinstance(item, FencedError)]
    operations = [item for item in items if not isinstance(item, FencedError)]
    only_ends = all(isinstance(each, ENDS) for each in operations)
    return Work(operations, partial(_batched, failed), only_ends=only_ends)


def _batched(
    failed: list[tuple[int, FencedError]],
    operations: list[BatchOperation],
    results: Sequence[Result],
    realm: str,
) -> BatchAnswers:
    made = [
        _batch_answer(operation, result, realm) for operation, result in zip(operations, results, strict=True)
    ]
    for place, error in failed:
        made.insert(place, _failed(error))
    return BatchAnswers(made)  # type: ignore[arg-type]


def _operation(item: BatchItem, secret: Callable[[], str]) -> BatchOperation | FencedError:
    ask, renew, release, withdraw = item.ask, item.renew, item.release, item.withdraw
    if (ask is None) + (renew is None) + (release is None) + (withdraw is None) != 3:
        return Misuse("an item of a batch is one of ask, renew, release, withdraw")
    if release is not None:
        return Release(release.attempt, release.keep)
    if renew is not None:
        return Renewal(renew)
    if withdraw is not None:
        return Withdrawal(withdraw.attempt)
    try:
        return _ask(ask, secret)  # type: ignore[arg-type]
    except Misuse as error:
        return error


def _failed(error: FencedError) -> Answer:
    return FailedAnswer(msgspec.json.decode(problem(error, by="service").body, type=ProblemView))


def _batch_answer(operation: BatchOperation, result: Any, realm: str) -> Answer:
    if isinstance(result, FencedError):
        return _failed(result)
    if isinstance(operation, Ask):
        return answers.asked(operation, result, realm)
    if isinstance(operation, Renewal):
        return answers.told(result)
    return answers.told(result)


class GroupedWork:
    """Carries out operations on one authority object. Used in the loop's thread only.

    If the store can carry out many in one write, those that arrive during a write share the next one. Operations that
    come alone wait for nothing. If the store writes ends of leases without a sync, those are written and answered
    first: what their clients ask next then shares the sync of the others.

    Other stores get as many operations at once as they have connections: a queue here costs less than one at the
    connections.
    """

    def __init__(
        self,
        leases: Authority,
        held: Callable[[], bool],
        answered: Answered,
        noted: Callable[[Sequence[object]], None] = lambda _: None,
    ) -> None:
        """`held`: whether any waiter could be notified by what is written. `noted` gets all results, errors too.

        `answered` is called once for all operations that share a write, after their requests were answered: the clients
        need not wait for it.
        """
        self._leases = leases
        self._held = held
        self._answered = answered
        self._noted = noted
        self._many: Callable[..., Awaitable[list[Result]]] | None = getattr(leases, "many", None)
        self._next: list[tuple[Work, Done]] = []
        self._began = 0.0
        """When the first of the next ones came."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends_first: bool = getattr(leases, "endings_are_quick", False)
        self._ends_have_passed = False
        """Whether the next ones have let ends of leases pass. They do that once."""
        self._writes = False
        self._workers_max: float = getattr(leases, "connections", math.inf)
        self._workers = 0
        self._queue: deque[tuple[BatchOperation, Done, float]] = deque()

    def start(self, work: Work, done: Done) -> None:
        """Call `done` with the results, or with the error that stands for all of them; not before this returns."""
        if self._many is None:
            # Renewals must not wait behind other operations.
            if len(work.operations) != 1 or isinstance(work.operations[0], Renewal):
                self._spawn(self._several(work, done))
            else:
                self._start_one(work.operations[0], done)
            return
        if not self._next:
            self._began = clocks.now()
        self._next.append((work, done))
        if not self._writes:
            # Its first step runs after all requests that have arrived by now were read: those share the first write.
            self._writes = True
            self._spawn(self._together(self._many))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # a loop itself does not keep its tasks
        task.add_done_callback(self._tasks.discard)

    async def _together(self, many: Callable[..., Awaitable[list[Result]]]) -> None:
        try:
            while self._next:
                requests, began = self._taken(), self._began
                operations = [each for work, _ in requests for each in work.operations]
                found: list[Result] | Exception
                try:
                    found = await many(operations)
                except Exception as error:  # noqa: BLE001 whatever it is, those requests are answered by it
                    found = error
                seconds = clocks.now() - began
                if self._held():
                    # The notifications of this write come first: the next holder waits for them, and the client that
                    # has released would take the CPU from it.
                    await asyncio.sleep(0)
                self._share(requests, found)
                self._report(operations, found, seconds)
                if self._ends_have_passed:
                    # What has arrived meanwhile is read, and shares the write of the others.
                    await asyncio.sleep(0)
        finally:
            # Nothing is awaited between the last look at `_next` and this: what comes later starts a task of its own.
            self._writes = False

    def _taken(self) -> list[tuple[Work, Done]]:
        """The requests of the next write."""
        requests, self._next = self._next, []
        if self._ends_first and not self._ends_have_passed:
            others = {each.secret for work, _ in requests if not work.only_ends for each in work.operations}
            ends: list[tuple[Work, Done]] = []
            rest: list[tuple[Work, Done]] = []
            for request in requests:
                # An end must not pass the ask of its own attempt: the lease would be granted after it.
                passes = request[0].only_ends and others.isdisjoint(
                    [each.secret for each in request[0].operations]
                )
                (ends if passes else rest).append(request)
            if ends and rest:
                self._next, self._ends_have_passed = rest, True
                return ends
        self._ends_have_passed = False
        return requests

    def _share(self, requests: list[tuple[Work, Done]], found: list[Result] | Exception) -> None:
        if isinstance(found, Exception):
            for _, done in requests:
                done(found)
            return
        begin = 0
        for work, done in requests:
            end = begin + len(work.operations)
            done(found[begin:end])
            begin = end

    def _report(
        self, operations: Sequence[BatchOperation], found: Sequence[Result] | Exception, seconds: float
    ) -> None:
        self._noted([found] if isinstance(found, Exception) else found)
        if isinstance(found, Exception):
            return
        try:
            self._answered(operations, found, seconds)
        except Exception as error:  # noqa: BLE001 a bug in what people look at must not stop the writes
            log.error("after a write: %s: %s", type(error).__name__, error)

    def _start_one(self, operation: BatchOperation, done: Done) -> None:
        self._queue.append((operation, done, clocks.now() + timing.CALL_SECONDS))
        if self._workers < self._workers_max:
            self._workers += 1
            self._spawn(self._work())

    async def _work(self) -> None:
        """Carry out operations, one after the other, until none is left."""
        try:
            while self._queue:
                operation, done, until = self._queue.popleft()
                found: Sequence[Result] | Exception
                try:
                    found = [await _single(self._leases, operation, until)]
                except Exception as error:  # noqa: BLE001 the request is answered by it
                    found = error
                seconds = clocks.now() - until + timing.CALL_SECONDS
                done(found)
                self._report([operation], found, seconds)
        finally:
            # Nothing is awaited after the queue was found empty, so no operation is left in it without a task.
            self._workers -= 1

    async def _several(self, work: Work, done: Done) -> None:
        found: Sequence[Result] | Exception
        began = clocks.now()
        try:
            if work.answer is _renewed:
                found = await self._leases.renew([each.secret for each in work.operations], work.until)
            else:
                found = await asyncio.gather(*(_single(self._leases, each) for each in work.operations))
        except Exception as error:  # noqa: BLE001 the request is answered by it
            found = error
        seconds = clocks.now() - began
        done(found)
        self._report(work.operations, found, seconds)


async def _single(leases: Authority, operation: BatchOperation, until: float | None = None) -> Result:
    """`until` includes the time in a queue: what nobody waits for any more is not carried out."""
    if until is not None and clocks.now() >= until:
        return Unavailable("all connections to the store were busy; nothing happened")
    try:
        if isinstance(operation, Ask):
            return await leases.ask(operation, until)
        if isinstance(operation, Release):
            return await leases.release(operation.secret, until, keep=operation.keep)
        if isinstance(operation, Renewal):
            return (await leases.renew([operation.secret], until))[0]
        return await leases.withdraw(operation.secret, until)
    except FencedError as error:
        return error
