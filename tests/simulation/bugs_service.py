"""Planted bugs in the shipped client of the service, and in an instance, that a world must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.http1.responses import ResponseReader
from fenced.net.pool import ConnectionBroken
from fenced.runtime.sockets import Late
from fenced.stores.service.authority.authority import ServiceAuthority
from fenced.stores.service.authority.listening import ServicePool, ServiceWakeups
from fenced.stores.service.wire.connection import REPLY_BYTES_MAX, HttpReply, HttpWire
from fenced_testkit.worlds.service import ServiceBackend, ServiceInstance, WatchedConnection
from fenced_testkit.worlds.site import Site
from tests.planted import bugs
from tests.planted import bugs_http as http_bugs
from tests.simulation.planting import over, with_authority, with_backend


class Failing(ServiceBackend):
    """The gateway and the store often fail."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        site.faults.server_fault_every = 0.5

    def faults(self) -> Sequence[Callable[[], None]]:
        return (self._break_gateway, self._break_store)


class TrustingWire(HttpWire):
    async def exchange(self, *request: Any, **options: Any) -> HttpReply:
        reply = await super().exchange(*request, **options)
        if reply.status == 502:
            raise Unavailable("the gateway said so")
        return reply


class DoubtlessWire(HttpWire):
    async def exchange(self, *request: Any, **options: Any) -> HttpReply:
        try:
            return await super().exchange(*request, **options)
        except ConnectionBroken as error:
            self.close()
            raise Unavailable(str(error)) from error


class PatientWire(HttpWire):
    async def exchange(self, *request: Any, **options: Any) -> HttpReply:
        try:
            return await super().exchange(*request, **options)
        except ConnectionBroken as error:
            if not isinstance(error.__cause__, Late):
                raise
            # For the pool this is an answer: the connection is kept, and its reader has forgotten what it waits for.
            self._reader = ResponseReader(REPLY_BYTES_MAX)
            raise Indeterminate(str(error)) from error


class WithWire(ServiceAuthority):
    wire_type: type[HttpWire]

    async def _connect(self, until: float) -> HttpWire:
        made = self.wire_type(self._address, self._route, self._runtime)
        self._wires.add(made)
        await made.connect(until)
        return made


class GatewayIsBelieved(WithWire):
    """A gateway's 502 is taken for "nothing happened", although the instance may carry the request out."""

    wire_type = TrustingWire


class BrokenMeansNothingHappened(WithWire):
    """A connection that broke after the request was sent is taken for "nothing happened"."""

    wire_type = DoubtlessWire


class LateResponseAnswersTheNext(WithWire):
    """A connection whose response came too late is used again: the next request takes that response for its own."""

    wire_type = PatientWire


class DeafWakeups(ServiceWakeups):
    def _look(self, publics: list[str]) -> list[str]:
        super()._look(publics)
        return []


class SecondLineIsIgnored(ServiceAuthority):
    """The second line of a held response wakes nobody: the waiter asks when `check_in` is over."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._wakeups = DeafWakeups(self._runtime, self._pool.adopt)


class UnknownIsAnsweredAsNo(Failing):
    """An instance answers 503, "nothing happened", where the store itself did not know."""

    def results(self, operations: Any) -> Any:
        try:
            return super().results(operations)
        except Indeterminate as error:
            failed: FencedError = Unavailable(str(error))
            raise failed from error


class OneTryPool(ServicePool):
    @property
    def broken(self) -> int:
        return 0

    @broken.setter
    def broken(self, count: int) -> None:
        return


class BusyIsFinal(ServiceAuthority):
    """A refusal after a doubted try is taken for its end: the first copy arrives late, and nobody withdraws it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pool.__class__ = OneTryPool


class RawWire(HttpWire):
    async def exchange(self, *request: Any, **options: Any) -> HttpReply:
        try:
            return await super().exchange(*request, **options)
        except ConnectionBroken as error:
            raise error.__cause__ or error from None


class RawErrors(WithWire):
    """A connection that breaks raises the error of its socket, not one of the contract."""

    wire_type = RawWire


class Barging(ServiceBackend):
    """A free name goes to whoever asks next, not to the head of the queue."""

    store_type = bugs.store_with(bugs.Barging)


class LettingGo(ServiceBackend):
    """Clients are often let go of by their balancer, which delivers their requests later."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        site._plan(0.2, self._let_go)

    def _let_go(self) -> None:
        for client in self.site.processes:
            self.site.streams.let_go_next(
                client, self.world.rng.choice(self.processes()), 0.5 * self.site.pace
            )


def serving(bug: type[WatchedConnection]) -> type[Site]:
    """A site whose instances have the bug in the shipped HTTP server."""
    instance = type(bug.__name__, (ServiceInstance,), {"connection_type": bug})
    return with_backend(bug, type(bug.__name__, (ServiceBackend,), {"instance_type": instance}))


class AnswersOutOfOrder(http_bugs.AnswersOutOfOrder, WatchedConnection):
    __doc__ = http_bugs.AnswersOutOfOrder.__doc__


class BodyIsTakenForAHead(http_bugs.BodyIsTakenForAHead, WatchedConnection):
    __doc__ = http_bugs.BodyIsTakenForAHead.__doc__


class KeptAfterABadLength(http_bugs.KeptAfterABadLength, WatchedConnection):
    __doc__ = http_bugs.KeptAfterABadLength.__doc__


class HeldAfterTheClientIsGone(http_bugs.GoneIsNotNoticed, WatchedConnection):
    """The server does not say that a client has gone: its answer is held on, and sent to nobody."""


PLANTED = [
    type(
        "BusyIsFinal",
        (with_authority(BusyIsFinal, LettingGo),),
        {"waits": (0.0,), "__doc__": BusyIsFinal.__doc__},
    ),
    with_authority(RawErrors, ServiceBackend),
    over(bugs.Barging, Barging),
    over(bugs.DeadlineFromTheReply, ServiceBackend, engine_type=bugs.engine_with(bugs.DeadlineFromTheReply)),
    over(bugs.UnavailableIsBelieved, Failing, engine_type=bugs.UnavailableIsBelieved),
    with_authority(GatewayIsBelieved, Failing),
    with_authority(BrokenMeansNothingHappened, ServiceBackend),
    with_authority(LateResponseAnswersTheNext, ServiceBackend),
    with_authority(SecondLineIsIgnored, ServiceBackend),
    with_backend(UnknownIsAnsweredAsNo, UnknownIsAnsweredAsNo),
    serving(AnswersOutOfOrder),
    serving(BodyIsTakenForAHead),
    serving(KeptAfterABadLength),
    serving(HeldAfterTheClientIsGone),
]
