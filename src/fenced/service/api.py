"""The API of one instance: requests to calls of an authority, and its answers to responses. docs/service.md."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fenced.errors import FencedError, Misuse, Unavailable
from fenced.leases.rules import NoNamespace
from fenced.net.problems import Problem, problem
from fenced.runtime import clocks
from fenced.runtime.aio import AioRuntime
from fenced.service import answers, openapi, page
from fenced.service.access import EVERYBODY, Admission, Principal, TokenFile, is_own_host
from fenced.service.bodies import (
    AskBody,
    BatchBody,
    FloorAnswer,
    FloorBody,
    ForceReleaseBody,
    MarkBody,
    MintedBody,
    NameBody,
    NamesBody,
    NamespaceBody,
    RenewBody,
    StandingBody,
    TidyAnswer,
    WaitingAnswer,
)
from fenced.service.events import Events
from fenced.service.held import HeldAnswer, HeldResponse, held_seconds
from fenced.service.hot_requests import HotRequest
from fenced.service.limits import Limits
from fenced.service.live import Live
from fenced.service.metrics import Metrics, labels_text
from fenced.service.namespaces import AnotherStore, MakeAuthority, ServedNamespace, ServedNamespaces
from fenced.service.quotas import Quotas
from fenced.service.replies import NotAdmitted, ServiceReply, ServiceRequest, as_response, plain
from fenced.service.routes import ROUTES, ApiRoute
from fenced.service.values import ServedValues
from fenced.service.work import work_of
from fenced.values.model import BatchAnswer, BatchOperation, grant_id

BODY_BYTES_MAX = 65_536
LARGE_BODY_BYTES_MAX = 2**20
"""Of a batch, and of a renewal of thousands of leases."""
PAGE_MAX = 1000
READY_SECONDS = 2.0
CLOSE = ("connection", "close")
"""For answers to requests whose body is not read to its end."""

_DECODERS = {
    route.body: msgspec.json.Decoder(route.body) for route in ROUTES if route.body not in (None, bytes)
}
_encode = msgspec.json.Encoder().encode
log = logging.getLogger("fenced.service")


class AnyText(Convertor[str]):
    """The rest of a path, also with line feeds, which Starlette's own `path` does not match."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("text", AnyText())


class Call(msgspec.Struct):
    """One request: its namespace, its decoded body, and the rest."""

    request: ServiceRequest
    body: Any
    namespace: str
    realm: str
    by: Principal


class ShortWay(Protocol):
    """A connection whose request takes the short way."""

    request: HotRequest

    def reply(self, reply: ServiceReply) -> None: ...
    def hold(self, held: HeldAnswer) -> None: ...
    def finish(self, found: Sequence[BatchAnswer] | Exception) -> None:
        """Call `Api.finish`."""


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
        self.numbers = Metrics()
        self._requests = self.numbers.by_labels("fenced_requests_total")
        self._answers = self.numbers.by_labels("fenced_answers_total")
        # Every counter has a sample from the start: `increase()` sees no first event of one that begins with it.
        self._answers.update({sent.label: 0 for sent in answers.SENT.values()})
        self._requests.update({_labels(each.path, status): 0 for each in ROUTES for status in each.answers})
        self.events = Events()
        self.live = Live(self.namespaces, self.events, guards, self.limits.pages_each)
        self.values = ServedValues(values, self._default_realm, self.numbers, self.events, guards)
        self.stopping = False
        self.scheme = "http"
        """That of its own page. A gateway that terminates TLS says so; a page of another site cannot."""
        self.own_host_only = False
        """Answer only requests that name this machine by its loopback address, or come by a Unix socket."""
        self._random = AioRuntime()
        self._running = 0
        self._access = 0
        """How often the file of tokens was read again."""
        self.quotas = Quotas(self.limits)
        self._openapi = msgspec.json.encode(openapi.document())
        by_path: dict[str, dict[str, ApiRoute]] = {}
        for route in ROUTES:
            by_path.setdefault(route.path, {})[route.method] = route
        self.app = Starlette(
            routes=[
                Route(path.replace("{name}", "{name:text}"), self._endpoint(routes), methods=list(routes))
                for path, routes in sorted(by_path.items(), key=lambda item: -len(item[0]))
            ]
            + page.routes(self),
            exception_handlers={HTTPException: _not_found, Exception: _bug},
        )
        # It would redirect to the host that the client names, and behind a gateway to http://.
        self.app.router.redirect_slashes = False

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

    def _endpoint(self, routes: dict[str, ApiRoute]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            route = routes["GET" if request.method == "HEAD" else request.method]
            self._running += 1
            try:
                response = await self._respond(route, request)
            except (FencedError, NotAdmitted) as error:
                response = as_response(self._failed(error))
            finally:
                self._running -= 1
            self._count(route, response.status_code)
            return response

        return endpoint

    async def _respond(self, route: ApiRoute, request: Request) -> Response:
        self._check_running()
        admission = self._admit(route, request)
        data = (
            b"" if route.body is None else await _read(request, body_bytes_max(route), self.limits.body_time)
        )
        answer = await getattr(self, route.handler)(self._call(route, request, admission, data))
        return answer if isinstance(answer, Response) else as_response(self._answered(answer))

    def serve(self, way: ShortWay, data: bytes) -> None:
        """Answer a request of `HOT` without a task of its own. Its body has been read.

        Access, decoding, operations, answers and counters are those of the other way. Either `reply` or `hold` is
        called, maybe at once.
        """
        request = way.request
        head = request.head
        self._running += 1
        try:
            self._check_running()
            admission = head.admission
            if admission is None or admission.access != self._access:
                admission = head.admission = self._admit(head.route, request)
            call = self._call(head.route, request, admission, data)
            namespace = self.namespaces.known(call.namespace, call.realm)
            work = work_of(call.body, self._random.secret)
            self.quotas.check_leases(call.by, work)
            held = self._hold(namespace, call)
        except Exception as error:  # noqa: BLE001 as on the other way, a bug is answered by 500
            self._served(way, error)
        else:
            request.work, request.realm, request.held = work, namespace.realm, held
            namespace.worker.start(work, way.finish)

    def finish(self, way: ShortWay, found: Sequence[BatchAnswer] | Exception) -> None:
        """Answer the request that `serve` has begun."""
        request = way.request
        work, held = request.work, request.held
        del request.work  # an idle connection needs no memory for it
        if request.head.admission is not None:
            self.quotas.note_leases(request.head.admission.by, work, found)
        made: msgspec.Struct | Exception
        try:
            made = (
                found if isinstance(found, Exception) else work.answer(work.operations, found, request.realm)
            )
        except Exception as error:  # noqa: BLE001 the request is answered by it
            made = error
        if held is None or not self._is_held(held, made):
            self._served(way, made)
            return
        self._running -= 1
        self._count(request.head.route, 202)
        way.hold(held)

    def _served(self, way: ShortWay, made: msgspec.Struct | Exception) -> None:
        self._running -= 1
        reply = self._failed(made) if isinstance(made, Exception) else self._answered(made)
        self._count(way.request.head.route, reply.status)
        way.reply(reply)

    def reload_tokens(self) -> bool:
        """Read the file of tokens again, if there is one. What the old ones have admitted is not used any more."""
        if self.tokens is not None:
            self.tokens.reload()
            self._access += 1
            self.live.end_all_but(self.tokens.is_current)
        return self.tokens is not None

    def check_site(self, request: ServiceRequest) -> None:
        """NotAdmitted if a page of another site has sent this request."""
        if self.own_host_only and request.client and not is_own_host(request.headers.get("host") or ""):
            # A page of another site can make its own name lead to loopback; its requests then name that site.
            needs = "name this machine as 127.0.0.1 or localhost, or start the service with --no-credentials"
            raise NotAdmitted(plain(403, "The request is meant for another host", needs))
        origin, scheme = (
            request.headers.get("origin"),
            request.headers.get("x-forwarded-proto") or self.scheme,
        )
        if origin is not None and origin != f"{scheme}://{request.headers.get('host')}":
            # A page of another site could send requests to a service on this machine.
            raise NotAdmitted(
                plain(403, "The request comes from a page of another site", "only its own page may use it")
            )

    def _check_running(self) -> None:
        if self._running > self.limits.running:
            raise Unavailable("too many requests are under way; nothing happened")

    def _admit(self, route: ApiRoute, request: ServiceRequest) -> Admission:
        """Whose request it is. NotAdmitted if it is not looked at. Only its head decides, and the file of tokens."""
        query, namespace = request.query_params, "default"
        if "namespace" in route.parameters:
            namespace = query.get("namespace", namespace)
        by = self._principal(route, request)
        return Admission(by, namespace, query.get("realm", ""), self._access)

    def _principal(self, route: ApiRoute, request: ServiceRequest) -> Principal:
        if route.right is not None:
            self.check_site(request)
        if route.right == "operate" and not page.is_wanted(request.headers):
            needs = f"from a browser it needs the header {page.OPERATOR_HEADER}"
            raise NotAdmitted(plain(403, "This may be the form of another site", needs))
        if self.tokens is None or route.right is None:
            return EVERYBODY
        found = self.tokens.principal(request.headers.getlist("authorization"))
        if found is None:
            found = page.logged_in(request.headers, self.tokens)
        if found is None:
            self.quotas.check_rate(request)
            refusal = plain(401, "This needs a bearer token", "no token, or an unknown one")
            raise NotAdmitted(refusal, ("www-authenticate", "Bearer"))
        return found

    def _call(self, route: ApiRoute, request: ServiceRequest, admission: Admission, data: bytes) -> Call:
        """The request with its body, if this client may send it."""
        body, by = _decoded(route, data), admission.by
        namespace = body.namespace if isinstance(body, NamespaceBody) else admission.namespace
        call = Call(request, body, namespace, admission.realm, by)
        if by is not EVERYBODY:
            _check_rights(route, call)
        if route.right is not None:
            self.quotas.check_rate(request, by, body)
        return call

    def _answered(self, answer: msgspec.Struct) -> ServiceReply:
        status, headers, label = answers.SENT.get(type(answer), answers.SENT_OTHER)
        if label:
            self._answers[label] += 1
        return ServiceReply(status, headers, _encode(answer))

    def _failed(self, error: Exception) -> ServiceReply:
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
                found = bug("a request about leases", error)
        kind = str(msgspec.json.decode(found.body)["type"]).rpartition(":")[2]
        self.numbers.count("fenced_errors_total", type=kind)
        headers = [header for header in found.headers if header[0].lower() != "content-length"]
        return ServiceReply(found.status, headers, found.body)

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
            self.numbers.granted(seconds, granted)

    async def lease(self, call: Call) -> msgspec.Struct:
        """Asks that are not held, renewals, releases, withdrawals and batches of them."""
        namespace = await self._namespace(call)
        work = work_of(call.body, self._random.secret)
        self.quotas.check_leases(call.by, work)
        results: asyncio.Future[Sequence[BatchAnswer]] = asyncio.get_running_loop().create_future()

        def done(found: Sequence[BatchAnswer] | Exception) -> None:
            self.quotas.note_leases(call.by, work, found)
            if results.done():  # its task was cancelled
                return
            if isinstance(found, Exception):
                results.set_exception(found)
            else:
                results.set_result(found)

        namespace.worker.start(work, done)
        return work.answer(work.operations, await results, namespace.realm)

    renew = release = withdraw = batch = lease

    async def ask(self, call: Call) -> msgspec.Struct | Response:
        held = self._hold(await self._namespace(call), call)
        if held is None:
            return await self.lease(call)
        try:
            answer = await self.lease(call)
        except BaseException:
            held.close()
            raise
        return HeldResponse(held) if self._is_held(held, answer) else answer

    def _hold(self, namespace: ServedNamespace, call: Call) -> HeldAnswer | None:
        """What holds the answer to an ask if that is waiting. Made before it asks, so that it misses no wake-up."""
        body = call.body
        if not (isinstance(body, AskBody) and body.wait):
            return None
        seconds = held_seconds(call.request, body)
        if seconds <= 0 or not self._may_hold(call.by):
            return None
        namespace.listen()
        request = namespace.held.add(grant_id(body.attempt), call.by.id)
        return HeldAnswer(request, seconds, call.request.headers)

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

    async def write_value(self, call: Call) -> Response:
        return await self.values.write(call.request, call.request.path_params["name"], call.body)

    async def read_value(self, call: Call) -> Response:
        return await self.values.read(call.request, call.request.path_params["name"])

    async def mark(self, call: Call) -> MarkBody:
        return await self.values.mark(call.request.path_params["name"])

    async def _default_realm(self) -> str:
        return (await self.namespaces.get("default")).realm

    # Operating.

    async def survey(self, call: Call) -> NamesBody:
        after, limit = call.request.query_params.get("after", ""), call.request.query_params.get("limit")
        if limit is not None and not (
            limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX
        ):
            raise Misuse(f"limit is a number from 1 to {PAGE_MAX}")
        views = await (await self._namespace(call)).survey(call.by, after, int(limit or PAGE_MAX))
        return NamesBody([answers.name_body(view) for view in views])

    async def observe(self, call: Call) -> NameBody:
        looker = await (await self._namespace(call)).looker()
        return answers.name_body(call.by.seen(await looker.observe(call.request.path_params["name"])))

    async def live_events(self, call: Call) -> Response:
        return await self.live.open(await self._namespace(call), call.by)

    async def force_release(self, call: Call) -> MintedBody:
        body: ForceReleaseBody = call.body
        name, leases = call.request.path_params["name"], (await self._namespace(call)).leases
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
        peer = call.request.client
        self._audit(
            {
                "action": action,
                "by": call.by.id,
                "from": peer.host if peer else "unix",
                "namespace": call.namespace,
                **what,
            }
        )

    async def health(self, call: Call) -> Response:
        return Response("alive\n", media_type="text/plain")

    async def ready(self, call: Call) -> Response:
        """Not while it stops, so that a balancer sends no new requests; and not while the store does not answer."""
        if self.stopping:
            return Response("not ready: this instance stops\n", 503, media_type="text/plain")
        try:
            looker = await (await self.namespaces.get("default")).looker()
            await looker.open(create=False, until=clocks.now() + READY_SECONDS)
        except FencedError as error:
            self.namespaces.outages.note([error])
            raise
        self.namespaces.outages.worked()
        return Response("ready\n", media_type="text/plain")

    async def metrics(self, call: Call) -> Response:
        text = self.numbers.text(self.namespaces.held, self.events.expired.total())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, call: Call) -> Response:
        return Response(self._openapi, media_type="application/json")


def _names_of(call: Call) -> list[str]:
    """The names that a request is about. Renewals and releases have none: the attempt is their secret."""
    names = [call.request.path_params["name"]] if "name" in call.request.path_params else []
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
def _labels(path: str, status: int) -> str:
    return labels_text(route=path, status=str(status))


def body_bytes_max(route: ApiRoute) -> int:
    return LARGE_BODY_BYTES_MAX if route.body in (BatchBody, RenewBody) else BODY_BYTES_MAX


def _decoded(route: ApiRoute, data: bytes) -> Any:
    if route.body is None or route.body is bytes:
        return data
    try:
        return _DECODERS[route.body].decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Misuse(f"the body of this request is not as it should be: {error}") from None


async def _read(request: Request, limit: int, seconds: float) -> bytes:
    """The body, if it is not too long and arrives in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise NotAdmitted(plain(413, "The body is too long", f"at most {limit} bytes"), CLOSE)
    except ClientDisconnect:
        raise NotAdmitted(
            plain(400, "The client has gone", "before its request had arrived"), CLOSE
        ) from None
    except TimeoutError:
        late = plain(408, "The body did not arrive in time", f"it has {seconds:g} seconds")
        raise NotAdmitted(late, CLOSE) from None
    return bytes(body)


async def _not_found(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    response = as_response(
        plain(error.status_code, error.detail, "/openapi.json has all paths and their methods")
    )
    response.headers.update(error.headers or {})
    return response


async def _bug(request: Request, error: Exception) -> Response:
    return as_response(bug(f"{request.method} {request.url.path}", error))


def bug(what: str, error: Exception) -> Problem:
    """An error that nothing expected. Its outcome is unknown to the client, as with every 500."""
    log.error("%s: %s: %s", what, type(error).__name__, error)
    return plain(500, "Internal Server Error", "this is a bug of fenced; its log says more")
