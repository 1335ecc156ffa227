"""The service in a world: the shipped client over simulated streams, against two shipped instances before one store.

The instances are `Api` behind the shipped HTTP server, on an event loop of the world. Between a request and the store,
and between the store and the reply, any of them may crash. A gateway in front now and then answers 502 by itself, while
the request is lost, carried out, or carried out later. The store is the memory authority's, whose decisions the judge
sees. Strangers send several requests at once, and some that are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fenced.errors import FencedError, Indeterminate, InvariantBroken, Unavailable
from fenced.http1.connections import ServerConnection
from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import BadMessage, RequestHead
from fenced.http1.limits import HttpLimits
from fenced.http1.server import HttpServer, ListenOptions
from fenced.http1.writing import ServerReply
from fenced.service.api import Api
from fenced.stores.service.authority.authority import ServiceAuthority
from fenced.values.contracts import Authority, Trait
from fenced.values.model import (
    Ask,
    BatchAnswer,
    BatchOperation,
    NameView,
    Release,
    Renewal,
    Standing,
    Withdrawal,
)
from fenced_testkit.runtime.loop import SimulatedLoop
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process
from fenced_testkit.worlds.memory import REALM, MemoryBackend
from fenced_testkit.worlds.peers import PipedRequest, PipeliningPeer, hiding, two_lengths

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

PORT = 8700
PEER_EVERY = 1.0
"""Seconds between two strangers, in the mean."""
GATEWAY = ServerReply(502, (("content-type", "text/html"),), b"<h1>502 Bad Gateway</h1>")


class StoreBehind:
    """The store as an instance reaches it: only the calls that the service makes here."""

    traits: ClassVar[tuple[Trait, ...]] = ()
    url = "simulated:"

    def __init__(self, backend: ServiceBackend) -> None:
        self._backend = backend
        self._woken: dict[str, None] = {}
        self._wakeup = asyncio.Event()

    def wake(self, public: str) -> None:
        self._woken[public] = None
        self._wakeup.set()

    async def _call(self, *operations: BatchOperation) -> list[BatchAnswer]:
        """Until the reply the instance may crash, and nobody learns what the store has decided."""
        jumps = self._backend.jumps
        await self._way(jumps)
        found = self._backend.results(operations)
        await self._way(jumps)
        return found

    async def _way(self, jumps: int) -> None:
        await asyncio.sleep(self._backend.store_delay())
        if jumps != self._backend.jumps:
            await asyncio.Event().wait()  # no instance keeps a request for minutes

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return Standing(REALM, self._backend.store.rows.token)

    async def ask(self, ask: Ask, until: float | None = None) -> Any:
        return (await self._call(ask))[0]

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> Any:
        return await self._call(*map(Renewal, secrets))

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> Any:
        return (await self._call(Release(secret, keep)))[0]

    async def withdraw(self, secret: str, until: float | None = None) -> Any:
        return (await self._call(Withdrawal(secret)))[0]

    async def observe(self, name: str, until: float | None = None) -> NameView:
        await asyncio.sleep(self._backend.store_delay())
        return NameView(name, None, (), None, 0.0, ())

    async def next_wakeups(self, until: float) -> list[str]:
        await self._wakeup.wait()
        self._wakeup.clear()
        woken, self._woken = list(self._woken), {}
        return woken


class Unanswered:
    """A request that its gateway has answered by itself: whatever the instance answers reaches nobody."""

    done = True
    received_all = True
    on_gone = on_pressure = None
    peer = "gateway"

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self._body = body

    def read(self, limit: int, then: Callable[[bytes], None]) -> None:
        then(self._body)

    def reply(self, *_: object) -> None:
        return


class WatchedConnection(ServerConnection):
    """A connection of the shipped server. Nothing may be held for a client that has gone."""

    instance: ServiceInstance

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.instance.check_held()


class ServiceInstance:
    """One instance and its process. A crash loses all that it has."""

    connection_type: type[WatchedConnection] = WatchedConnection

    def __init__(self, backend: ServiceBackend, name: str) -> None:
        self.backend = backend
        self.world = backend.world
        self.name = name
        self._start()

    def _start(self) -> None:
        self.process = Process(self.world, self.name)
        self._stores: list[StoreBehind] = []
        self._loop = loop = SimulatedLoop(self.process, self.backend.site.streams)
        self._api: Api = loop.run(Api, self._store)
        self._server: HttpServer = loop.run(HttpServer, self, ListenOptions(), HttpLimits())
        loop.listen((self.name, PORT), self._connection)
        loop.start(self._server._sweeping)

    def _store(self, *_: object) -> Any:
        self._stores.append(StoreBehind(self.backend))
        return self._stores[-1]

    def _connection(self) -> ServerConnection:
        made = self.connection_type(self._server)
        made.instance = self
        return made

    def restart(self, down: float) -> None:
        self.process.crash()
        self.world.after(down, self._start)

    def notify(self, public: str) -> None:
        """The store notifies the process that lives now."""
        for store in self._stores:
            self.process.deliver(partial(self._loop.run, store.wake, public))

    def check_held(self) -> None:
        # Those under way are counted before the store has answered them.
        if self._api.namespaces.held > len(self._server.connections) + self._api._running:
            self.backend.site.judge.broken("H1", "an answer is held for a client that has gone")

    # The gateway of this instance.

    def begin(self, exchange: ServerExchange) -> None:
        """Pass a request on, or answer it without the instance."""
        if self.backend.gateway_fails:
            exchange.read(2**20, partial(self._answer_itself, exchange))
        else:
            self._api.begin(exchange)

    def _answer_itself(self, exchange: ServerExchange, body: bytes | BadMessage) -> None:
        exchange.reply(*GATEWAY)
        if isinstance(body, BadMessage):
            return
        lost: Any = Unanswered(exchange.head, body)
        rng, carry_out = self.world.rng, partial(self._loop.run, self._api.begin, lost)
        match rng.choice(("lost", "carried out", "late")):
            case "carried out":
                carry_out()
            case "late":  # also if this process has died and another one has taken its place
                after = rng.uniform(0.1, 2 * self.backend.site.pace)
                self.world.after(after, self.backend.unless_jumped(lambda: self.process.deliver(carry_out)))

    def refusal(self, error: BadMessage) -> ServerReply:
        return self._api.refusal(error)


class ServiceBackend(MemoryBackend):
    """Two instances, and a store that answers them at once, or not at all for a while."""

    name = "service"
    authority_type: type[ServiceAuthority] = ServiceAuthority
    instance_type: type[ServiceInstance] = ServiceInstance

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.gateway_fails = False
        self.jumps = 0
        self.store_fails: type[FencedError] | None = None
        self._slow = self.world.rng.choice((0.0, 0.001, 0.05))
        self.instances = [self.instance_type(self, name) for name in ("one", "two")]
        self._stranger = Process(self.world, "stranger")
        self.world.after(self.world.rng.expovariate(1 / PEER_EVERY), self._meet)

    def authority(self, process: Process, runtime: SimulatedRuntime) -> Authority:
        url = "http://" + ",".join(f"{instance.name}:{PORT}" for instance in self.instances)
        return self.authority_type.at(url, runtime, "default")

    def left(self, authority: Authority) -> None:
        return

    def processes(self) -> Sequence[Process]:
        return [instance.process for instance in self.instances]

    def unless_jumped(self, call: Callable[[], None]) -> Callable[[], None]:
        """No gateway or instance keeps a request for minutes."""
        jumps = self.jumps
        return lambda: call() if jumps == self.jumps else None

    def jumped(self) -> None:
        self.jumps += 1
        super().jumped()

    def _meet(self) -> None:
        """A stranger sends several requests at once."""
        rng = self.world.rng
        requests = []
        for number in range(rng.randint(1, 6)):
            named = b"GET /v1/names/p%d HTTP/1.1\r\nHost: a\r\n\r\n" % number
            alive = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
            kinds = (
                PipedRequest(named, (200,), b'"p%d"' % number),
                PipedRequest(alive, (200,), b"alive"),
                hiding(b"/nothing", (404,)),
                hiding(b"/v1/leases", (400,)),
                two_lengths(b"/v1/leases"),
            )
            requests.append(rng.choices(kinds, (6, 4, 2, 1, 1))[0])

        def broken(why: str) -> None:
            self.site.judge.broken("H2", why)

        peer = PipeliningPeer(self._stranger, self.site.streams, requests, broken)
        peer.send((self._chosen().name, PORT))
        self.world.after(rng.expovariate(1 / PEER_EVERY), self._meet)

    def store_delay(self) -> float:
        return 0.0 if self.site.healed else self.world.rng.random() * self._slow

    def _woken(self, public: str) -> None:
        for instance in self.instances:
            # A notification that reaches an instance which is not there is lost. Waiters ask when `check_in` is over.
            self.world.after(0.001, partial(instance.notify, public))

    def results(self, operations: Sequence[BatchOperation]) -> list[BatchAnswer]:
        """What the store says to the operations of one request."""
        if self.store_fails is not None:
            if self.store_fails is Indeterminate and self.world.rng.random() < 0.5:
                self._do(operations)
            raise self.store_fails("the store fails")
        return self._do(operations)

    def _do(self, operations: Sequence[BatchOperation]) -> list[BatchAnswer]:
        match operations[0]:
            case Ask() as ask:
                return [self.ask(ask)]
            case Renewal():
                secrets = [each.secret for each in operations if isinstance(each, Renewal)]
                return [*self.renew(secrets)]
            case Release() as release:
                return [self.release(release.secret, release.keep)]
            case Withdrawal() as withdrawal:
                return [self.withdraw(withdrawal.secret)]
        raise InvariantBroken("no such operation")

    # Faults.

    def faults(self) -> Sequence[Callable[[], None]]:
        return (self._restart_one, self._restart_one, self._freeze, self._break_gateway, self._break_store)

    def _chosen(self) -> ServiceInstance:
        return self.world.rng.choice(self.instances)

    def _seconds(self) -> float:
        return self.world.rng.uniform(0.05, 2 * self.site.pace)

    def _restart_one(self) -> None:
        instance = self._chosen()
        if instance.process.alive:
            self.site.judge.say(instance.name, "dies")
            instance.restart(self._seconds())

    def _freeze(self) -> None:
        instance, seconds = self._chosen(), self._seconds()
        self.site.judge.say(instance.name, "stands still for", seconds)
        instance.process.pause(seconds)

    def _break_gateway(self) -> None:
        self.site.judge.say("the gateway answers 502")
        self.gateway_fails = True
        self.world.after(self._seconds() / 2, self._mend_gateway)

    def _mend_gateway(self) -> None:
        self.gateway_fails = False

    def _break_store(self) -> None:
        self.store_fails = self.world.rng.choice((Unavailable, Indeterminate))
        self.site.judge.say("the store fails with", self.store_fails.__name__)
        self.world.after(self._seconds() / 2, self._mend_store)

    def _mend_store(self) -> None:
        self.store_fails = None

    def heal(self) -> None:
        self._mend_gateway()
        self._mend_store()
