"""The API of one instance: requests to calls of an authority, and its answers to responses. docs/service.md."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec

from fenced.errors import FencedError, Misuse, Unavailable
from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import HEADERS_MAX, BadMessage
from fenced.http1.limits import HEAD_BYTES_MAX
from fenced.http1.writing import ServerReply
from fenced.metrics.numbers import TEXT as METRICS_TEXT
from fenced.net.problems import Problem, problem
from fenced.runtime import clocks
from fenced.runtime.aio import AioRuntime
from fenced.service import answers, openapi, page
from fenced.service.access import EVERYBODY, Admission, Principal, TokenFile, is_own_host
from fenced.service.bodies import (
    HOT_SHOWN,
    AskBody,
    BatchBody,
    FloorAnswer,
    FloorBody,
    ForceReleaseBody,
    HotBody,
    HotView,
    MarkBody,
    MintedBody,
    NameBody,
    NamesBody,
    NamespaceBody,
    StandingBody,
    TidyAnswer,
    WaitingAnswer,
)
from fenced.service.events import Events
from fenced.service.held import LINES_HEADERS, HeldAnswer, held_seconds
from fenced.service.limits import Limits
from fenced.service.live import Live, LiveStream
from fenced.service.metrics import ServiceNumbers
from fenced.service.namespaces import AnotherStore, MakeAuthority, ServedNamespace, ServedNamespaces
from fenced.service.operations import Work, work_of
from fenced.service.quotas import Quotas
from fenced.service.replies import JSON, TEXT, NotAdmitted, as_reply, plain
from fenced.service.requests import Call, Router, ServiceHead
from fenced.service.routes import ROUTES, ApiRoute
from fenced.service.values import ServedValues
from fenced.values.failures import NoNamespace
from fenced.values.model import BatchAnswer, BatchOperation, grant_id

PAGE_MAX = 1000
READY_SECONDS = 2.0
TOO_LONG = plain(
    431, "The head of the request is too long", f"at most {HEAD_BYTES_MAX} bytes and {HEADERS_MAX} headers"
)
TOO_MANY = problem(Unavailable("this instance has too many connections; nothing happened"), by="service")
NO_HTTP = plain(400, "Not a request of HTTP/1.1", "the connection is closed")
TOO_LATE = plain(408, "The request did not arrive in time", "send it again on a new connection")

_DECODERS = {
    route.body: msgspec.json.Decoder(route.body) for route in ROUTES if route.body not in (None, bytes)
}
_encode = msgspec.json.Encoder().encode
log = logging.getLogger("fenced.service")


class Api:
    """One instance. Everything that it remembers may be lost: the store decides."""

    def __init__(
        self,
        make: MakeAuthority,
        tokens: TokenFile | None = None,
        audit: Callable[[dict[str, object]], None] | None = None,
        values: str | None = None,
        limits: Limits | None = None,
        guards: Sequence[str] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.namespaces = ServedNamespaces(make, self._store_answered, self.limits.namespaces_each)
        self.tokens = tokens
        self._audit = audit or (lambda entry: log.info("%s", entry))
        self.numbers = ServiceNumbers()
        self._requests, self._answers = self.numbers.requests, self.numbers.answers
        self.events = Events()
        self.live = Live(self.namespaces, self.events, guards, self.limits.pages_each, self._alerts)
        self.values = ServedValues(values, self._default_realm, self.numbers, self.events, guards)
        self.stopping = False
        self.scheme = "http"
        """That of its own page. A gateway that terminates TLS says so; a page of another site cannot."""
        self.certificate: Callable[[], tuple[str, float] | None] = lambda: None
        """The file of the certificate of this instance, and how many seconds it is still valid."""
        self.own_host_only = False
        """Answer only requests that name this machine by its loopback address, or come by a Unix socket."""
        self._random = AioRuntime()
        self._running = 0
        self._access = 0
        """How often the file of tokens was read again."""
        self.quotas = Quotas(self.limits)
        self._openapi = msgspec.json.encode(openapi.document())
        self._router = Router((*ROUTES, *page.PAGE_ROUTES))
        self._page = page.LivePage(self)
        self._tasks: set[asyncio.Task[None]] = set()

    def _alerts(self) -> list[str]:
        return self.numbers.alerts(self.certificate())

    def send_on(self) -> None:
        """This instance stops: answer the held requests, and hold no more."""
        self.stopping = True
        self.namespaces.send_on()
        self.live.send_on()

    async def close(self) -> None:
        await self.live.close()
        await self.namespaces.close()
        await self.values.close()
        self._random.close()

    # Requests.

    def begin(self, exchange: ServerExchange) -> None:
        """A request. Its head is looked at before its body is read."""
        head = exchange.head.note
        if head is None:
            found = self._router.find(exchange.head)
            if not isinstance(found, ServiceHead):
                exchange.reply(*_not_found(found))
                return
            head = exchange.head.note = found
        call, route = Call(exchange, head), head.route
        if route.page:
            exchange.read(head.body_max, lambda data: self._spawn(partial(self._show, call, data)))
            return
        self._running += 1
        try:
            if self._running > self.limits.running:
                raise Unavailable("too many requests are under way; nothing happened")
            admission = head.admission
            if admission is None or admission.access != self._access:
                admission = head.admission = self._admit(call)
        except (FencedError, NotAdmitted) as error:
            self._answer(call, error)
            return
        call.by, call.namespace, call.realm = admission.by, admission.namespace, admission.realm
        if route.body is None:
            self._decide(call, b"")
        else:
            exchange.read(head.body_max, partial(self._decide, call))

    def _decide(self, call: Call, data: bytes | BadMessage) -> None:
        """The body has come: carry the request out."""
        try:
            if isinstance(data, BadMessage):
                raise NotAdmitted(self._unread(call, data))
            self._read_body(call, data)
            if not call.head.is_work:
                self._spawn(partial(self._respond, call))
            elif self.namespaces.has(call.namespace):
                self._start(call)
            else:
                self._spawn(partial(self._open, call))
        except Exception as error:  # noqa: BLE001 a bug is answered by 500
            self._answer(call, error)

    def _unread(self, call: Call, error: BadMessage) -> Problem:
        if error.status == 413:
            return plain(413, "The body is too long", f"at most {call.head.body_max} bytes")
        if error.status == 408:
            return plain(408, "The body did not arrive in time", f"it has {self.limits.body_time:g} seconds")
        return NO_HTTP

    async def _open(self, call: Call) -> None:
        """Open the namespace, which nobody has used here, and go on."""
        try:
            await self.namespaces.get(call.namespace, call.realm, call.by)
            self._start(call)
        except Exception as error:  # noqa: BLE001 a bug is answered by 500
            self._answer(call, error)

    def _start(self, call: Call) -> None:
        """Carry out asks, renewals, releases, withdrawals and batches of them."""
        namespace = self.namespaces.known(call.namespace, call.realm)
        work = work_of(call.body, self._random.secret)
        self.quotas.check_leases(call.by, work)
        held = self._hold(namespace, call)
        namespace.worker.start(work, partial(self._done, call, work, held, namespace.realm))

    def _done(
        self,
        call: Call,
        work: Work,
        held: HeldAnswer | None,
        realm: str,
        found: Sequence[BatchAnswer] | Exception,
    ) -> None:
        """The store has answered."""
        self.quotas.note_leases(call.by, work, found)
        made: msgspec.Struct | Exception
        try:
            made = found if isinstance(found, Exception) else work.answer(work.operations, found, realm)
        except Exception as error:  # noqa: BLE001 the request is answered by it
            made = error
        if held is not None and self._is_held(held, made):
            self._wait(call, held)
        else:
            self._answer(call, made)

    def _wait(self, call: Call, held: HeldAnswer) -> None:
        """Send what a waiter gets at once. The rest is sent without a task, as soon as `held` has it."""
        exchange = call.exchange
        self._running -= 1
        self._count(call.head.route, 202)
        if exchange.done:
            held.close()
            return
        exchange.on_gone = held.close
        if held.in_lines:
            exchange.begin(202, LINES_HEADERS, held.first)
            held.then(exchange.end)
        else:
            held.then(partial(exchange.reply, 202, JSON))

    async def _respond(self, call: Call) -> None:
        made: Any
        try:
            made = await getattr(self, call.head.route.handler)(call)
        except Exception as error:  # noqa: BLE001 a bug is answered by 500
            made = error
        if isinstance(made, LiveStream):
            self._running -= 1
            self._count(call.head.route, 200)
            await made.send(call.exchange)
        else:
            self._answer(call, made)

    def _answer(self, call: Call, made: msgspec.Struct | ServerReply | Exception) -> None:
        """Answer the request by what has come of it."""
        self._running -= 1
        if isinstance(made, Exception):
            made = self._failed(call, made)
        if isinstance(made, ServerReply):
            status, headers, body = made
        else:
            status, headers, label = answers.SENT.get(type(made), answers.SENT_OTHER)
            body = _encode(made)
            if label:
                self._answers[label] += 1
        self._requests[_labels(call.head.route.path, status)] += 1
        call.exchange.reply(status, headers, body)

    async def _show(self, call: Call, data: bytes | BadMessage) -> None:
        """Answer a request for the live page. Only those of the API are counted."""
        try:
            made = await self._page.answer(call, data)
        except NotAdmitted as error:
            made = as_reply(error.problem)
        except Exception as error:  # noqa: BLE001 a bug is answered by 500
            made = as_reply(_bug(call, error))
        call.exchange.reply(*made)

    def refusal(self, error: BadMessage) -> ServerReply:
        """What is no request, too late or one too many."""
        return as_reply({431: TOO_LONG, 408: TOO_LATE, 503: TOO_MANY}.get(error.status, NO_HTTP))

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)  # a loop itself does not keep its tasks
        task.add_done_callback(self._tasks.discard)

    def reload_tokens(self) -> bool:
        """Read the file of tokens again, if there is one. What the old ones have admitted is not used any more."""
        if self.tokens is not None:
            self.tokens.reload()
            self._access += 1
            self.live.end_all_but(self.tokens.is_current)
        return self.tokens is not None

    def check_site(self, call: Call) -> None:
        """NotAdmitted if a page of another site has sent this request."""
        headers = call.headers
        if self.own_host_only and call.client is not None and not is_own_host(headers.get("host") or ""):
            # A page of another site can make its own name lead to loopback; its requests then name that site.
            needs = "name this machine as 127.0.0.1 or localhost, or start the service with --no-credentials"
            raise NotAdmitted(plain(403, "The request is meant for another host", needs))
        origin, scheme = headers.get("origin"), headers.get("x-forwarded-proto") or self.scheme
        if origin is not None and origin != f"{scheme}://{headers.get('host')}":
            # A page of another site could send requests to a service on this machine.
            raise NotAdmitted(
                plain(403, "The request comes from a page of another site", "only its own page may use it")
            )

    def _admit(self, call: Call) -> Admission:
        """Authenticate the request by its head and the token file; NotAdmitted if that fails."""
        query, namespace = call.query, "default"
        if "namespace" in call.head.route.parameters:
            namespace = query.get("namespace", namespace)
        return Admission(self._principal(call), namespace, query.get("realm", ""), self._access)

    def _principal(self, call: Call) -> Principal:
        right = call.head.route.right
        if right is not None:
            self.check_site(call)
        if right == "operate" and not page.is_wanted(call.headers):
            needs = f"from a browser it needs the header {page.OPERATOR_HEADER}"
            raise NotAdmitted(plain(403, "This may be the form of another site", needs))
        if self.tokens is None or right is None:
            return EVERYBODY
        found = self.tokens.principal(call.headers.getlist("authorization"))
        if found is None:
            found = page.logged_in(call.headers, self.tokens)
        if found is None:
            self.quotas.check_rate(call)
            refusal = plain(401, "This needs a bearer token", "no token, or an unknown one")
            raise NotAdmitted(refusal, ("www-authenticate", "Bearer"))
        return found

    def _read_body(self, call: Call, data: bytes) -> None:
        """Decode the body, and look whether this client may send it."""
        route = call.head.route
        call.body = _decoded(route, data)
        if isinstance(call.body, NamespaceBody):
            call.namespace = call.body.namespace
        if call.by is not EVERYBODY:
            _check_rights(route, call)
        if route.right is not None:
            self.quotas.check_rate(call, call.by, call.body)

    def _failed(self, call: Call, error: Exception) -> ServerReply:
        match error:
            case NotAdmitted():
                found = error.problem
            case NoNamespace():
                found = plain(404, "There is no such namespace", str(error))
            case AnotherStore():
                found = plain(421, "This instance has another store", str(error))
            case FencedError():
                found = problem(error, by="service")
            case _:
                found = _bug(call, error)
        kind = str(msgspec.json.decode(found.body)["type"]).rpartition(":")[2]
        self.numbers.add("fenced_errors_total", kind)
        return as_reply(found)

    def _count(self, route: ApiRoute, status: int) -> None:
        self._requests[_labels(route.path, status)] += 1

    # Leases.

    async def look(self, call: Call) -> StandingBody:
        namespace, standing = await self.namespaces.opened(call.namespace, create=False, by=call.by)
        return answers.standing_body(namespace.name, namespace.leases, standing)

    async def create(self, call: Call) -> StandingBody:
        namespace, standing = await self.namespaces.opened(call.namespace, create=True, by=call.by)
        return answers.standing_body(namespace.name, namespace.leases, standing)

    async def _namespace(self, call: Call) -> ServedNamespace:
        return await self.namespaces.get(call.namespace, call.realm, call.by)

    def _store_answered(
        self,
        namespace: str,
        operations: Sequence[BatchOperation],
        results: Sequence[BatchAnswer],
        seconds: float,
    ) -> None:
        """For the live page and the metrics."""
        granted = self.events.answered(namespace, operations, results)
        if granted:
            self.numbers.granted(seconds, granted, self.events.waited)

    def _hold(self, namespace: ServedNamespace, call: Call) -> HeldAnswer | None:
        """What holds the answer to an ask if that is waiting. Made before it asks, so that it misses no wake-up."""
        body = call.body
        if not (isinstance(body, AskBody) and body.wait):
            return None
        seconds = held_seconds(call.headers, body)
        if seconds <= 0 or not self._may_hold(call.by):
            return None
        namespace.listen()
        request = namespace.held.add(grant_id(body.attempt), call.by.id)
        return HeldAnswer(request, seconds, call.headers)

    def _is_held(self, held: HeldAnswer, answer: msgspec.Struct | Exception) -> bool:
        if not isinstance(answer, WaitingAnswer):
            held.close()
            return False
        self._answers[answers.SENT[WaitingAnswer].label] += 1
        held.begin(answer)
        if self.stopping:  # since it was looked at
            held.send_on()
        return True

    def _may_hold(self, by: Principal) -> bool:
        """Whether one more request may be held. A waiter that is answered at once asks again later."""
        if self.stopping or self.namespaces.held >= self.limits.held:
            return False
        return by is EVERYBODY or self.namespaces.held_by(by.id) < self.limits.held_each

    # Values.

    async def write_value(self, call: Call) -> ServerReply:
        return await self.values.write(call)

    async def read_value(self, call: Call) -> ServerReply:
        return await self.values.read(call)

    async def mark(self, call: Call) -> MarkBody:
        return await self.values.mark(call.name)

    async def _default_realm(self) -> str:
        return (await self.namespaces.get("default")).realm

    # Operating.

    async def survey(self, call: Call) -> NamesBody:
        after, limit = call.query.get("after", ""), call.query.get("limit")
        if limit is not None and not (
            limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX
        ):
            raise Misuse(f"limit is a number from 1 to {PAGE_MAX}")
        views = await (await self._namespace(call)).survey(call.by, after, int(limit or PAGE_MAX))
        return NamesBody([answers.name_body(view) for view in views])

    async def observe(self, call: Call) -> NameBody:
        looker = await (await self._namespace(call)).looker()
        return answers.name_body(call.by.seen(await looker.observe(call.name)))

    async def live_events(self, call: Call) -> LiveStream:
        return await self.live.open(await self._namespace(call), call.by)

    async def force_release(self, call: Call) -> MintedBody:
        body: ForceReleaseBody = call.body
        name, leases = call.name, (await self._namespace(call)).leases
        if call.by.names is not None:
            view = await leases.observe(name)
            # A later grant has another token, and the names of a grant never change: what is seen here stays so.
            if view.held_by is not None and not call.by.may_use(view.names):
                whole = "the lease has other names, too, and would end as a whole"
                raise NotAdmitted(plain(403, "This token does not allow that", whole))
        minted = await leases.force_release(name, body.token)
        if minted is not None:
            why = f"by {call.by.id}: {body.reason or 'no reason given'}"
            self.events.taken(call.namespace, name, body.token, why)
        self._note(call, "force-release", name=name, token=body.token, reason=body.reason, minted=minted)
        return MintedBody(minted)

    async def raise_floor(self, call: Call) -> FloorAnswer:
        body: FloorBody = call.body
        floor = await (await self._namespace(call)).leases.raise_floor(body.above)
        self._note(call, "raise-floor", above=body.above, floor=floor)
        return FloorAnswer(floor)

    async def tidy(self, call: Call) -> TidyAnswer:
        looker = await (await self._namespace(call)).looker()
        forgotten = await looker.tidy()
        self._note(call, "tidy", forgotten=forgotten)
        return TidyAnswer(forgotten)

    def _note(self, call: Call, action: str, **what: object) -> None:
        """What an operator has done, for the audit."""
        self._audit(
            {
                "action": action,
                "by": call.by.id,
                "from": call.client or "unix",
                "namespace": call.namespace,
                **what,
            }
        )

    async def health(self, call: Call) -> ServerReply:
        return ServerReply(200, TEXT, b"alive\n")

    async def ready(self, call: Call) -> ServerReply:
        """Not while it stops, so that a balancer sends no new requests; and not while the store does not answer."""
        if self.stopping:
            return ServerReply(503, TEXT, b"not ready: this instance stops\n")
        try:
            looker = await (await self.namespaces.get("default")).looker()
            await looker.open(create=False, until=clocks.now() + READY_SECONDS)
        except FencedError as error:
            self.namespaces.outages.note([error])
            raise
        self.namespaces.outages.worked()
        return ServerReply(200, TEXT, b"ready\n")

    async def metrics(self, call: Call) -> ServerReply:
        text = self.numbers.text(
            self.namespaces.held, self.events.expired.total(), self.events.contended, self.certificate()
        )
        return ServerReply(200, (("content-type", METRICS_TEXT),), text.encode())

    async def hot(self, call: Call) -> HotBody:
        """Names that the credential may not see are left out before the ten are taken."""
        await self._namespace(call)
        found = self.events.hot_in(call.namespace)
        shown = [HotView(each.name, each.count, each.error) for each in found if call.by.owns(each.name)]
        return HotBody(shown[:HOT_SHOWN])

    async def openapi(self, call: Call) -> ServerReply:
        return ServerReply(200, JSON, self._openapi)


def _names_of(call: Call) -> list[str]:
    """The names that a request is about. Renewals and releases have none: the attempt is their secret."""
    names = [call.name] if call.name else []
    asks = [call.body] if isinstance(call.body, AskBody) else []
    if isinstance(call.body, BatchBody):
        asks = [item.ask for item in call.body.do if item.ask is not None]
    return names + [name for ask in asks for name in ask.names]


def _check_rights(route: ApiRoute, call: Call) -> None:
    """NotAdmitted if this client may not do what it asks for."""
    by = call.by
    if route.handler in ("raise_floor", "tidy") and by.names is not None:
        raise NotAdmitted(plain(403, "This token does not allow that", "it concerns all names"))
    names = _names_of(call) if by.names is not None else []
    if not by.may(route.right, call.namespace) or not by.may_use(names):
        needs = f"it needs the right {route.right}, this namespace" + (
            " and all of these names" if names else ""
        )
        raise NotAdmitted(plain(403, "This token does not allow that", needs))


@lru_cache(maxsize=1024)
def _labels(path: str, status: int) -> tuple[str, str]:
    return path, str(status)


def _decoded(route: ApiRoute, data: bytes) -> Any:
    if route.body is None or route.body is bytes:
        return data
    try:
        return _DECODERS[route.body].decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Misuse(f"the body of this request is not as it should be: {error}") from None


def _not_found(allowed: list[str] | None) -> ServerReply:
    """No such path, or not with this method."""
    detail = "/openapi.json has all paths and their methods"
    if allowed is None:
        return as_reply(plain(404, "Not Found", detail))
    status, headers, body = as_reply(plain(405, "Method Not Allowed", detail))
    return ServerReply(status, (*headers, ("allow", ", ".join(allowed))), body)


def _bug(call: Call, error: Exception) -> Problem:
    """An error that nothing expected. Its outcome is unknown to the client, as with every 500."""
    log.error("%s %s: %s: %s", call.head.route.method, call.head.route.path, type(error).__name__, error)
    return plain(500, "Internal Server Error", "this is a bug of fenced; its log says more")
