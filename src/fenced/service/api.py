"""The API of one instance: requests to calls of an authority, and its answers to responses. docs/service.md."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fenced.authorities.shared.rules import NoNamespace
from fenced.contracts import Authority
from fenced.errors import FencedError, InvariantBroken, Misuse, Refused, Unavailable
from fenced.model import (
    Ask,
    BatchOperation,
    Busy,
    Ended,
    Gone,
    Granted,
    Holder,
    Kept,
    Release,
    Released,
    Renewal,
    Unknown,
    Waiting,
    Withdrawal,
    check_names,
    grant_id,
)
from fenced.model import BatchAnswer as BatchResult
from fenced.runtime import clocks
from fenced.runtime.aio import AioRuntime
from fenced.service import answers, openapi
from fenced.service.access import EVERYBODY, Principal, TokenFile
from fenced.service.bodies import (
    Answer,
    AskBody,
    BatchAnswers,
    BatchBody,
    BatchItem,
    FailedAnswer,
    FloorAnswer,
    FloorBody,
    ForceReleaseBody,
    MarkBody,
    MintedBody,
    NameBody,
    NamesBody,
    NamespaceBody,
    ProblemView,
    ReleaseBody,
    RenewBody,
    RenewedAnswers,
    StandingBody,
    TidyAnswer,
    WaitingAnswer,
    WithdrawBody,
)
from fenced.service.events import Events
from fenced.service.held import HeldAnswer, held_seconds
from fenced.service.limits import Limits, Rates, retry_after
from fenced.service.metrics import Metrics
from fenced.service.namespaces import AnotherStore, MakeAuthority, ServedNamespace, ServedNamespaces
from fenced.service.replies import as_response, plain
from fenced.service.routes import ROUTES, ApiRoute
from fenced.service.values import ServedValues
from fenced.wire.problems import Problem, problem

BODY_BYTES_MAX = 65_536
LARGE_BODY_BYTES_MAX = 2**20
"""Of a batch, and of a renewal of thousands of leases."""
PAGE_MAX = 1000
READY_SECONDS = 2.0
KEEPING = (RenewBody, ReleaseBody, WithdrawBody)

log = logging.getLogger("fenced.service")


class AnyText(Convertor[str]):
    """The rest of a path, also with line feeds, which Starlette's own `path` does not match."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("text", AnyText())


class Call(NamedTuple):
    """One request: its namespace, its decoded body, and the rest."""

    request: Request
    body: Any
    namespace: str
    realm: str
    by: Principal


class Api:
    """One instance. Everything that it remembers may be lost: the store decides."""

    def __init__(
        self,
        make: MakeAuthority,
        tokens: TokenFile | None = None,
        audit: Callable[[dict[str, object]], None] | None = None,
        values: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.namespaces = ServedNamespaces(make)
        self.values = ServedValues(values, self._default_realm, self._refused)
        self.tokens = tokens
        self._audit = audit or (lambda entry: log.info("%s", entry))
        self.numbers = Metrics()
        self.events = Events()
        self.stopping = False
        self._random = AioRuntime()
        self._running = 0
        self._rates = Rates()
        self._openapi = msgspec.json.encode(openapi.document())
        by_path: dict[str, dict[str, ApiRoute]] = {}
        for route in ROUTES:
            by_path.setdefault(route.path, {})[route.method] = route
        self.app = Starlette(
            routes=[
                Route(path.replace("{name}", "{name:text}"), self._endpoint(routes), methods=list(routes))
                for path, routes in sorted(by_path.items(), key=lambda item: -len(item[0]))
            ],
            exception_handlers={HTTPException: _not_found, Exception: _bug},
        )

    def send_on(self) -> None:
        """This instance stops: answer the held requests, and hold no more."""
        self.stopping = True
        self.namespaces.send_on()

    async def close(self) -> None:
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
            except NoNamespace as error:
                response = self._failed(plain(404, "There is no such namespace", str(error)))
            except AnotherStore as error:
                response = self._failed(plain(421, "This instance has another store", str(error)))
            except FencedError as error:
                response = self._failed(problem(error))
            finally:
                self._running -= 1
            self.numbers.count("fenced_requests_total", route=route.path, status=str(response.status_code))
            return response

        return endpoint

    async def _respond(self, route: ApiRoute, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return self._failed(refusal)
        by = EVERYBODY
        if self.tokens is not None and route.right is not None:
            found = self.tokens.principal(request.headers.getlist("authorization"))
            if found is None:
                response = self._failed(
                    plain(401, "This needs a bearer token", "no token, or an unknown one")
                )
                response.headers["www-authenticate"] = "Bearer"
                return response
            by = found
        body = None
        if route.body is not None:
            limit = LARGE_BODY_BYTES_MAX if route.body in (BatchBody, RenewBody) else BODY_BYTES_MAX
            data = await _read(request, limit, self.limits.body_time)
            if isinstance(data, Problem):
                response = self._failed(data)
                response.headers["connection"] = "close"  # the rest of the body is not read
                return response
            try:
                body = data if route.body is bytes else msgspec.json.decode(data, type=route.body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise Misuse(f"the body of this request is not as it should be: {error}") from None
        query = request.query_params
        namespace = "default"
        if isinstance(body, NamespaceBody):
            namespace = body.namespace
        elif "namespace" in route.parameters:
            namespace = query.get("namespace", namespace)
        call = Call(request, body, namespace, query.get("realm", ""), by)
        names = _names_of(call)
        if route.handler in ("raise_floor", "tidy") and by.names is not None:
            return self._failed(plain(403, "This token does not allow that", "it concerns all names"))
        if not by.may(route.right, namespace) or not by.may_use(names):
            return self._failed(
                plain(403, "This token does not allow that", f"it needs {_shown(route, names)}")
            )
        if (seconds := self._wait(call, route)) > 0:
            response = self._failed(
                plain(429, "Too many requests", f"nothing happened; try again in {seconds:.3g} seconds")
            )
            response.headers["retry-after"] = retry_after(seconds)
            return response
        answer = await getattr(self, route.handler)(call)
        return answer if isinstance(answer, Response) else self._answered(answer)

    def _wait(self, call: Call, route: ApiRoute) -> float:
        """How long this client has to wait, if its requests are limited.

        Renewals and ends of leases are counted separately: other requests of the same client must not cost it a lease.
        """
        rate = call.by.rate or self.limits.rate
        if rate is None or route.right is None:
            return 0.0
        peer = call.request.client
        client = call.by.id if call.by is not EVERYBODY else peer.host if peer else "unix"
        kind = "keeping" if route.body in KEEPING else "other"
        cost = len(call.body.do) if isinstance(call.body, BatchBody) else 1
        return self._rates.wait(f"{kind} {client}", rate, cost)

    def _refusal(self, request: Request) -> Problem | None:
        """Why this request is not looked at."""
        if self._running > self.limits.running:
            return problem(Unavailable("too many requests are under way; nothing happened"))
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            # A page of another site could send requests to a service on this machine.
            return plain(403, "The request comes from a page of another site", "only its own page may use it")
        return None

    def _answered(self, answer: msgspec.Struct) -> Response:
        status, headers = 200, {}
        if isinstance(answer, Answer):
            status = answers.STATUS[type(answer)]
            self.numbers.count("fenced_answers_total", answer=str(answer.__struct_config__.tag))
            if status == 409:
                headers = {"retry-after": "1"}
        return Response(msgspec.json.encode(answer), status, headers, "application/json")

    def _failed(self, found: Problem) -> Response:
        kind = str(msgspec.json.decode(found.body)["type"]).rpartition(":")[2]
        self.numbers.count("fenced_errors_total", type=kind)
        return as_response(found)

    # Leases.

    async def look(self, call: Call) -> StandingBody:
        namespace, standing = await self.namespaces.opened(call.namespace, create=False)
        return answers.standing_body(namespace.name, namespace.leases, standing)

    async def create(self, call: Call) -> StandingBody:
        namespace, standing = await self.namespaces.opened(call.namespace, create=True)
        return answers.standing_body(namespace.name, namespace.leases, standing)

    async def _namespace(self, call: Call) -> ServedNamespace:
        return await self.namespaces.get(call.namespace, call.realm)

    def _ask_of(self, body: AskBody) -> Ask:
        # A constant id would tie the leases of different clients together.
        who = Holder(
            body.holder.id or self._random.secret(), body.holder.label, body.holder.host, body.holder.pid
        )
        names = check_names(body.names)
        return Ask(body.attempt, names, body.ttl, who, body.wait, body.lock_delay, body.number, body.settled)

    async def _ask(self, namespace: ServedNamespace, ask: Ask) -> Answer:
        began = clocks.now()
        found = await namespace.leases.ask(ask)
        self.events.answered(namespace.name, ask, found)
        answer = answers.asked(ask, found, namespace.realm)
        if answers.STATUS[type(answer)] == 200:
            self.numbers.granted(clocks.now() - began)
        return answer

    async def ask(self, call: Call) -> Answer | Response:
        namespace, ask = await self._namespace(call), self._ask_of(call.body)
        seconds = held_seconds(call.request, call.body)
        if not ask.wait or seconds <= 0 or not self._may_hold(call.by):
            return await self._ask(namespace, ask)
        namespace.listen()
        # Before it asks, so that it misses no wake-up.
        held = namespace.held.add(grant_id(ask.secret), call.by.id)
        try:
            answer = await self._ask(namespace, ask)
        except BaseException:
            held.close()
            raise
        if not isinstance(answer, WaitingAnswer):
            held.close()
            return answer
        self.numbers.count("fenced_answers_total", answer="waiting")
        if self.stopping:  # since it was looked at
            held.wake(False)
        return HeldAnswer(answer, held, seconds, call.request)

    def _may_hold(self, by: Principal) -> bool:
        """Whether one more request may be held. A waiter that is answered at once asks again later."""
        if self.stopping or self.namespaces.held >= self.limits.held:
            return False
        return by is EVERYBODY or self.namespaces.held_by(by.id) < self.limits.held_each

    async def renew(self, call: Call) -> RenewedAnswers:
        body: RenewBody = call.body
        namespace = await self._namespace(call)
        found = await namespace.leases.renew(body.attempts, clocks.now() + body.timeout)
        for attempt, answer in zip(body.attempts, found, strict=True):
            self.events.answered(namespace.name, Renewal(attempt), answer)
        return RenewedAnswers([answers.renewed(each) for each in found])  # type: ignore[misc]

    async def release(self, call: Call) -> Answer:
        body: ReleaseBody = call.body
        namespace = await self._namespace(call)
        answer = await namespace.leases.release(body.attempt, keep=body.keep)
        self.events.answered(namespace.name, Release(body.attempt), answer)
        return answers.ended(answer)

    async def withdraw(self, call: Call) -> Answer:
        body: WithdrawBody = call.body
        namespace = await self._namespace(call)
        answer = await namespace.leases.withdraw(body.attempt)
        self.events.answered(namespace.name, Withdrawal(body.attempt), answer)
        return answers.ended(answer)

    async def batch(self, call: Call) -> BatchAnswers:
        """Each operation is answered separately. They share one durable write if the store can do that."""
        body: BatchBody = call.body
        namespace = await self._namespace(call)
        items = [self._operation(item) for item in body.do]
        operations = [item for item in items if not isinstance(item, FencedError)]
        began = clocks.now()
        many: Callable[..., Awaitable[list[BatchResult]]] | None = getattr(namespace.leases, "many", None)
        if many is not None:
            found = await many(operations)
        else:
            found = list(await asyncio.gather(*(_single(namespace.leases, each) for each in operations)))
        for operation, result in zip(operations, found, strict=True):
            self.events.answered(namespace.name, operation, result)
            if isinstance(result, Granted):
                self.numbers.granted(clocks.now() - began)
        results = iter(found)
        each = [(None, item) if isinstance(item, FencedError) else (item, next(results)) for item in items]
        return BatchAnswers([_batch_answer(item, result, namespace.realm) for item, result in each])  # type: ignore[misc]

    def _operation(self, item: BatchItem) -> BatchOperation | FencedError:
        try:
            match item:
                case BatchItem(ask=AskBody() as ask, renew=None, release=None, withdraw=None):
                    return self._ask_of(ask)
                case BatchItem(ask=None, renew=str(attempt), release=None, withdraw=None):
                    return Renewal(attempt)
                case BatchItem(ask=None, renew=None, release=ReleaseBody() as release, withdraw=None):
                    return Release(release.attempt, release.keep)
                case BatchItem(ask=None, renew=None, release=None, withdraw=WithdrawBody() as withdraw):
                    return Withdrawal(withdraw.attempt)
            raise Misuse("an item of a batch is one of ask, renew, release, withdraw")
        except Misuse as error:
            return error

    # Values.

    async def write_value(self, call: Call) -> Response:
        return await self.values.write(call.request, call.request.path_params["name"], call.body)

    async def read_value(self, call: Call) -> Response:
        return await self.values.read(call.request, call.request.path_params["name"])

    async def mark(self, call: Call) -> MarkBody:
        return await self.values.mark(call.request.path_params["name"])

    async def _default_realm(self) -> str:
        return (await self.namespaces.get("default")).realm

    def _refused(self, guard: str, error: Refused) -> None:
        self.numbers.count("fencing_reject_total", kind=error.kind)
        self.events.refused(guard, error)

    # Operating.

    async def survey(self, call: Call) -> NamesBody:
        after, limit = call.request.query_params.get("after", ""), call.request.query_params.get("limit")
        if limit is not None and not (
            limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX
        ):
            raise Misuse(f"limit is a number from 1 to {PAGE_MAX}")
        looker = await (await self._namespace(call)).looker()
        views = await looker.survey(after=after, limit=int(limit or PAGE_MAX))
        return NamesBody([answers.name_body(view) for view in views if call.by.may_use([view.name])])

    async def observe(self, call: Call) -> NameBody:
        looker = await (await self._namespace(call)).looker()
        return answers.name_body(await looker.observe(call.request.path_params["name"]))

    async def force_release(self, call: Call) -> MintedBody:
        body: ForceReleaseBody = call.body
        name, leases = call.request.path_params["name"], (await self._namespace(call)).leases
        minted = await leases.force_release(name, body.token)
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
        looker = await (await self.namespaces.get("default")).looker()
        await looker.open(create=False, until=clocks.now() + READY_SECONDS)
        return Response("ready\n", media_type="text/plain")

    async def metrics(self, call: Call) -> Response:
        text = self.numbers.text(self.namespaces.held)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, call: Call) -> Response:
        return Response(self._openapi, media_type="application/json")


async def _single(leases: Authority, operation: BatchOperation) -> BatchResult:
    try:
        match operation:
            case Ask():
                return await leases.ask(operation)
            case Renewal():
                return (await leases.renew([operation.secret]))[0]
            case Release():
                return await leases.release(operation.secret, keep=operation.keep)
            case Withdrawal():
                return await leases.withdraw(operation.secret)
    except FencedError as error:
        return error


def _batch_answer(operation: BatchOperation | None, result: BatchResult, realm: str) -> Answer:
    match result, operation:
        case FencedError(), _:
            return FailedAnswer(msgspec.json.decode(problem(result).body, type=ProblemView))
        case ((Granted() | Busy()), Ask()):
            return answers.asked(operation, result, realm)
        case Released(), _:
            return answers.ended(result)
        case ((Kept() | Waiting() | Ended() | Gone() | Unknown()), _):
            return answers.renewed(result)
    raise InvariantBroken("an answer that does not fit to its operation")


def _names_of(call: Call) -> list[str]:
    """The names that a request is about. Renewals and releases have none: the attempt is their secret."""
    names = [call.request.path_params["name"]] if "name" in call.request.path_params else []
    asks = [call.body] if isinstance(call.body, AskBody) else []
    if isinstance(call.body, BatchBody):
        asks = [item.ask for item in call.body.do if item.ask is not None]
    return names + [name for ask in asks for name in ask.names]


def _shown(route: ApiRoute, names: list[str]) -> str:
    return f"the right {route.right}, this namespace" + (" and all of these names" if names else "")


async def _read(request: Request, limit: int, seconds: float) -> bytes | Problem:
    """The body, if it is not too long and arrives in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    return plain(413, "The body is too long", f"at most {limit} bytes")
    except TimeoutError:
        return plain(408, "The body did not arrive in time", f"it has {seconds:g} seconds")
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
    """An error that nothing expected. Its outcome is unknown to the client, as with every 500."""
    log.error("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return as_response(plain(500, "Internal Server Error", "this is a bug of fenced; its log says more"))
