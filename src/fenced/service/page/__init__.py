"""The live page: HTML that says something without a script, one module, one stylesheet, and a log-in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote

from starlette.requests import Request, cookie_parser
from starlette.responses import Response
from starlette.routing import Route

from fenced.errors import FencedError, Unavailable
from fenced.service.access import EVERYBODY
from fenced.service.replies import NotAdmitted, as_response
from fenced.values.model import NameView, Standing

if TYPE_CHECKING:
    from fenced.service.access import Principal, TokenFile
    from fenced.service.api import Api
    from fenced.service.replies import HeadersOfRequest

OPERATOR_HEADER = "fenced-operator"
"""A page of another site cannot send it: a browser would ask first, and the answer is no."""
COOKIE = "fenced_token"
ROWS_WITHOUT_SCRIPT = 200
FORM_BYTES_MAX = 4096

_FOLDER = files(__name__)
_PAGE, _LOGIN, _NOTICE = (
    Template((_FOLDER / f"{name}.html").read_text()) for name in ("live", "login", "notice")
)
_ASSETS = {
    name: ("text/css" if name.endswith(".css") else "text/javascript", (_FOLDER / name).read_bytes())
    for name in ("live.css", "live.js", "lanes.js", "words.js")
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-cache",
}


def logged_in(headers: HeadersOfRequest, tokens: TokenFile) -> Principal | None:
    """Who has logged in. A request with an Authorization header is judged by that alone."""
    cookies = headers.get("cookie")
    if cookies is None or headers.get("authorization") is not None:
        return None
    return tokens.shown(unquote(cookie_parser(cookies).get(COOKIE, "")))


def is_wanted(headers: HeadersOfRequest) -> bool:
    """Whether an operator's request was not made by a page of another site."""
    by_browser = headers.get("origin") is not None or headers.get("cookie") is not None
    return not by_browser or headers.get(OPERATOR_HEADER) is not None


def routes(api: Api) -> list[Route]:
    """What belongs to the page alone, and is no part of the API."""

    async def page(request: Request) -> Response:
        namespace = request.query_params.get("namespace", "default")
        if api.tokens is not None:
            by = logged_in(request.headers, api.tokens)
            api.quotas.check_rate(request, by)
            if by is None or not by.may("observe", namespace):
                refused = "This token may not read this namespace." if by else ""
                return _login(namespace, refused, 403 if by else 401)
        else:
            by = EVERYBODY
            api.quotas.check_rate(request, by)
        try:
            served = await api.namespaces.get(namespace, by=by)
            looker = await served.looker()
            standing = await looker.open(create=False)
            views = await served.survey(by, "", ROWS_WITHOUT_SCRIPT)
        except FencedError as error:
            status = 503 if isinstance(error, Unavailable) else 404
            return _html(_NOTICE, status, {"message": escape(str(error))})
        readable = [each for each in api.namespaces.names if by.may("observe", each)]
        fields = _fields(namespace, looker.url, standing, shows_log_out=by is not EVERYBODY)
        return _html(_PAGE, 200, {**fields, "rows": _rows(views), "namespaces": _links(readable, namespace)})

    async def log_in(request: Request) -> Response:
        namespace = request.query_params.get("namespace", "default")
        api.quotas.check_rate(request)
        if api.tokens is None:
            return Response(status_code=303, headers={"location": "./"})
        form = bytearray()
        async for piece in request.stream():
            form += piece
            if len(form) > FORM_BYTES_MAX:
                return _login(namespace, "That is no token.", 401)
        token = parse_qs(form.decode("latin-1")).get("token", [""])[0].strip()
        by = api.tokens.shown(token)
        if by is None:
            return _login(namespace, "This token is not known.", 401)
        if by.namespaces and namespace not in by.namespaces:
            namespace = by.namespaces[0]
        response = Response(status_code=303, headers={"location": f"./?namespace={quote(namespace)}"})
        _set_cookie(request, response, quote(token, safe=""))
        return response

    async def log_out(request: Request) -> Response:
        response = Response(status_code=303, headers={"location": "./"})
        _set_cookie(request, response, "", max_age=0)
        return response

    def own(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """For this site only."""

        async def checked(request: Request) -> Response:
            try:
                api.check_site(request)
                return await endpoint(request)
            except NotAdmitted as error:
                return as_response(error.problem)

        return checked

    return [
        Route("/", own(page), methods=["GET"]),
        Route("/login", own(log_in), methods=["POST"]),
        Route("/logout", own(log_out), methods=["POST"]),
        *(Route(f"/{name}", _asset(name), methods=["GET"]) for name in _ASSETS),
    ]


def _set_cookie(request: Request, response: Response, value: str, max_age: int | None = None) -> None:
    """For this page only: its path is the one under which the page is served."""
    # A gateway that terminates TLS says so in the header. A client that lies there only harms its own log-in.
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
    response.set_cookie(
        COOKIE, value, max_age=max_age, path=None, secure=secure, httponly=True, samesite="strict"
    )


def _asset(name: str) -> Callable[[Request], Awaitable[Response]]:
    media_type, content = _ASSETS[name]

    async def asset(request: Request) -> Response:
        return Response(content, 200, _HEADERS, media_type)

    return asset


def _login(namespace: str, message: str, status: int) -> Response:
    return _html(_LOGIN, status, {"namespace": quote(namespace), "message": escape(message)})


def _html(template: Template, status: int, fields: dict[str, str]) -> Response:
    return Response(template.substitute(fields), status, _HEADERS, "text/html")


def _fields(namespace: str, store: str, standing: Standing, *, shows_log_out: bool) -> dict[str, str]:
    return {
        "namespace": escape(namespace),
        "store": escape(store),
        "guarantee": "best effort" if standing.doubts else "strict",
        "last_token": f"{standing.last_token:,}",
        "logout": "" if shows_log_out else "hidden",
    }


def _links(namespaces: list[str], shown: str) -> str:
    return "".join(
        f'<li><a href="?namespace={quote(each, safe="")}"{" aria-current=page" if each == shown else ""}>'
        f"{escape(each)}</a></li>"
        for each in namespaces
    )


def _rows(views: list[NameView]) -> str:
    """The table without a script. Everything that a stranger wrote is escaped."""
    return "".join(
        '<tr role="row">'
        + _cell("name", view.name)
        + _cell("holder", _who(view))
        + _cell("token", f"{view.held_by.token:,}" if view.held_by else "")
        + _cell("left", f"{view.held_by.remaining:.0f} s" if view.held_by else "free")
        + _cell("line", f"{len(view.waiters)} waiting" if view.waiters else "")
        + "</tr>"
        for view in views
    )


def _cell(kind: str, text: str) -> str:
    return f'<td role="cell" class="{kind}">{escape(text)}</td>'


def _who(view: NameView) -> str:
    if view.held_by is None:
        return ""
    who = view.held_by.holder
    return f"{who.label or 'no label'} on {who.host or 'an unknown host'}"
