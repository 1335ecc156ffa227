"""The service in a world: the shipped client over simulated streams, against two instances before one store.

The instances decode, decide and encode by the service's own functions. Between a request and the store, and between the
store and the reply, any of them may crash. A gateway in front now and then answers 502 by itself, while the request is
lost, carried out, or carried out later. The store is the memory authority's, whose decisions the judge sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fenced.errors import FencedError, Indeterminate, InvariantBroken, Unavailable
from fenced.http1.bodies import LAST_CHUNK, body_of, chunk
from fenced.http1.heads import HEAD_END, RequestHead, request_head
from fenced.http1.writing import reply_head
from fenced.net.problems import problem
from fenced.service import answers
from fenced.service.bodies import AskBody, ReleaseBody, RenewBody, Turn, WithdrawBody
from fenced.service.work import work_of
from fenced.stores.memory.authority import MemoryAuthority
from fenced.stores.service.authority.authority import ServiceAuthority
from fenced.stores.service.wire.connection import LINES_MEDIA_TYPE
from fenced.values.contracts import Authority
from fenced.values.model import (
    Ask,
    BatchAnswer,
    BatchOperation,
    Release,
    Renewal,
    Standing,
    Waiting,
    Withdrawal,
    grant_id,
)
from fenced_testkit.runtime.network import SimulatedConnection
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process
from fenced_testkit.worlds.memory import REALM, MemoryBackend

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

PORT = 8700
HELD_SECONDS = 30.0
BODIES: dict[str, Any] = {
    "/v1/leases": AskBody,
    "/v1/leases/renew": RenewBody,
    "/v1/leases/release": ReleaseBody,
    "/v1/leases/withdraw": WithdrawBody,
}
JSON = [("content-type", "application/json")]


def written(status: int, headers: Sequence[tuple[str, str]], body: bytes) -> bytes:
    return reply_head(status, tuple(headers), b"content-length: %d\r\n\r\n" % len(body)) + body


GATEWAY = written(502, [("content-type", "text/html")], b"<h1>502 Bad Gateway</h1>")


class HeldReply:
    """A response in lines whose second one is not sent yet."""

    def __init__(self, connection: SimulatedConnection) -> None:
        self._connection = connection
        self._over = False

    def end(self, turn: bool) -> None:
        if not self._over:
            self._over = True
            line = msgspec.json.encode(Turn(turn)) + b"\n"
            self._connection.send(b"".join((*chunk(line), LAST_CHUNK)))


class ServiceInstance:
    """One instance and its process: requests in, responses out. A crash loses all that it has."""

    def __init__(self, backend: ServiceBackend, name: str) -> None:
        self.backend = backend
        self.world = backend.world
        self.name = name
        self._start()

    def _start(self) -> None:
        self.process = Process(self.world, self.name)
        self._unread: dict[SimulatedConnection, bytes] = {}
        self._held: dict[str, list[HeldReply]] = {}
        self.backend.site.streams.listen(self.process, (self.name, PORT), self)

    def restart(self, down: float) -> None:
        self.process.crash()
        self.world.after(down, self._start)

    def notify(self, public: str) -> None:
        """The store notifies the process that lives now."""
        self.process.deliver(partial(self._wake, public))

    def _wake(self, public: str) -> None:
        for held in self._held.pop(public, ()):
            held.end(True)

    # Connections.

    def on_open(self, connection: SimulatedConnection) -> None:
        self._unread[connection] = b""

    def on_close(self, connection: SimulatedConnection) -> None:
        self._unread.pop(connection, None)

    def on_bytes(self, connection: SimulatedConnection, data: bytes) -> None:
        data = self._unread[connection] + data
        while (end := data.find(HEAD_END) + 4) > 3:
            head = request_head(data[:end])
            pieces, rest = body_of(head.length).feed(data[end:])
            if rest is None:
                break
            self._pass_gateway(connection, head, b"".join(pieces))
            data = bytes(rest)
        self._unread[connection] = data

    def _pass_gateway(self, connection: SimulatedConnection, head: RequestHead, body: bytes) -> None:
        """The gateway of this instance passes a request on, or answers by itself."""
        if not self.backend.gateway_fails:
            self._carry_out(connection, head, body)
            return
        connection.send(GATEWAY)
        rng, carry_out = self.world.rng, partial(self._carry_out, None, head, body)
        match rng.choice(("lost", "carried out", "late")):
            case "carried out":
                carry_out()
            case "late":  # also if this process has died and another one has taken its place
                after = rng.uniform(0.1, 2 * self.backend.site.pace)
                self.world.after(after, self.backend.unless_jumped(lambda: self.process.deliver(carry_out)))

    # Requests.

    def _carry_out(self, connection: SimulatedConnection | None, head: RequestHead, body: bytes) -> None:
        """Ask the store, and reply when it has answered. `connection`: None if nobody waits for the reply."""
        path = head.target.partition(b"?")[0].decode()
        if path in BODIES:
            work = work_of(msgspec.json.decode(body, type=BODIES[path]), self._secret)
            waits = b"prefer" in dict(head.headers())

            def decide() -> None:
                try:
                    results = self.backend.results(work.operations)
                    answer = work.answer(work.operations, results, REALM)
                except FencedError as error:
                    self._reply(connection, self._problem(error))
                    return
                held = waits and isinstance(results[0], Waiting)
                reply = partial(
                    self._answer, connection, answer, work.operations[0] if held else None, results[0]
                )
                # Until then it may crash, and nobody learns what the store has decided.
                self._after(self.backend.store_delay(), reply)

            self._after(self.backend.store_delay(), decide)
        else:
            standing = Standing(REALM, self.backend.store.rows.token)
            view = answers.standing_body("default", self.backend.leases, standing)
            self._reply(connection, written(200, JSON, msgspec.json.encode(view)))

    def _answer(
        self, connection: SimulatedConnection | None, answer: Any, held: BatchOperation | None, result: Any
    ) -> None:
        outcome, data = answers.SENT.get(type(answer), answers.SENT_OTHER), msgspec.json.encode(answer)
        status = outcome.status
        if held is None or connection is None:
            self._reply(connection, written(status, JSON, data))
            return
        assert isinstance(held, Ask)
        lines = (("content-type", LINES_MEDIA_TYPE),)
        head = reply_head(status, lines, b"transfer-encoding: chunked\r\n\r\n")
        self._reply(connection, b"".join((head, *chunk(data + b"\n"))))
        reply = HeldReply(connection)
        self._held.setdefault(grant_id(held.secret), []).append(reply)
        seconds = min(HELD_SECONDS, result.check_in)
        turn = seconds >= result.check_in
        self._after(seconds, partial(reply.end, turn))

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it later; never, if this process dies before."""
        process = self.process
        self.world.after(seconds, self.backend.unless_jumped(lambda: process.deliver(call)))

    def _reply(self, connection: SimulatedConnection | None, data: bytes) -> None:
        if connection is not None:
            connection.send(data)

    def _problem(self, error: FencedError) -> bytes:
        found = problem(error)
        headers = [(name.lower(), value) for name, value in found.headers if name != "Content-Length"]
        return written(found.status, headers, found.body)

    def _secret(self) -> str:
        return f"{self.world.rng.getrandbits(128):032x}"


class ServiceBackend(MemoryBackend):
    """Two instances, and a store that answers them at once, or not at all for a while."""

    name = "service"
    authority_type: type[ServiceAuthority] = ServiceAuthority

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.gateway_fails = False
        self._jumps = 0
        self.store_fails: type[FencedError] | None = None
        self.leases = MemoryAuthority(self.store, SimulatedRuntime(Process(self.world, "traits")))
        self._slow = self.world.rng.choice((0.0, 0.001, 0.05))
        self.instances = [ServiceInstance(self, name) for name in ("one", "two")]

    def authority(self, process: Process, runtime: SimulatedRuntime) -> Authority:
        url = "http://" + ",".join(f"{instance.name}:{PORT}" for instance in self.instances)
        return self.authority_type.at(url, runtime, "default")

    def left(self, authority: Authority) -> None:
        return

    def processes(self) -> Sequence[Process]:
        return [instance.process for instance in self.instances]

    def unless_jumped(self, call: Callable[[], None]) -> Callable[[], None]:
        """No gateway or instance keeps a request for minutes."""
        jumps = self._jumps
        return lambda: call() if jumps == self._jumps else None

    def jumped(self) -> None:
        self._jumps += 1
        super().jumped()

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
