"""The live page: HTML that says something without a script, one module, one stylesheet, and a log-in."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote

from fenced.errors import FencedError, Unavailable
from fenced.http1.heads import BadMessage
from fenced.http1.writing import ServerReply
from fenced.service.access import EVERYBODY
from fenced.service.routes import ApiRoute
from fenced.values.model import NameView, Standing

if TYPE_CHECKING:
    from fenced.service.access import Principal, TokenFile
    from fenced.service.api import Api
    from fenced.service.requests import Call, RequestHeaders

OPERATOR_HEADER = "fenced-operator"
"""A page of another site cannot send it: a browser would ask first, and the answer is no."""
COOKIE = "fenced_token"
ROWS_WITHOUT_SCRIPT = 200

_FOLDER = files(__name__)
_PAGE, _LOGIN, _NOTICE = (
    Template((_FOLDER / f"{name}.html").read_text()) for name in ("live", "login", "notice")
)
_ASSETS = {
    name: ("text/css" if name.endswith(".css") else "text/javascript", (_FOLDER / name).read_bytes())
    for name in ("live.css", "live.js", "lanes.js", "watch.js", "words.js")
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "same-origin"),
    ("cache-control", "no-cache"),
)
PAGE_ROUTES = (
    ApiRoute("GET", "/", "show", "The live page", None, page=True),
    ApiRoute("POST", "/login", "log_in", "Log in by a token", None, bytes, page=True),
    ApiRoute("POST", "/logout", "log_out", "Forget the token", None, page=True),
    *(ApiRoute("GET", f"/{name}", "asset", "A part of the live page", None, page=True) for name in _ASSETS),
)


def logged_in(headers: RequestHeaders, tokens: TokenFile) -> Principal | None:
    """Who has logged in. A request with an Authorization header is judged by that alone."""
    cookies = headers.get("cookie")
    if cookies is None or headers.get("authorization") is not None:
        return None
    pairs = (each.strip().partition("=") for each in cookies.split(";"))
    found = {name: value.strip() for name, _, value in pairs}
    return tokens.shown(unquote(found.get(COOKIE, "")))


def is_wanted(headers: RequestHeaders) -> bool:
    """Whether an operator's request was not made by a page of another site."""
    by_browser = headers.get("origin") is not None or headers.get("cookie") is not None
    return not by_browser or headers.get(OPERATOR_HEADER) is not None


class LivePage:
    """What belongs to the page alone, and is no part of the API."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def answer(self, call: Call, body: bytes | BadMessage) -> ServerReply:
        """Answer a request of PAGE_ROUTES."""
        if call.head.route.handler == "asset":
            media_type, content = _ASSETS[call.head.route.path[1:]]
            return ServerReply(200, (*_HEADERS, ("content-type", f"{media_type}; charset=utf-8")), content)
        self._api.check_site(call)
        if call.head.route.handler == "log_in":
            return self._log_in(call, body)
        if call.head.route.handler == "log_out":
            return ServerReply(303, (("location", "./"), self._cookie(call, "", "; Max-Age=0")), b"")
        return await self._show(call)

    async def _show(self, call: Call) -> ServerReply:
        api, namespace, by = self._api, call.query.get("namespace", "default"), EVERYBODY
        if api.tokens is not None:
            known = logged_in(call.headers, api.tokens)
            api.quotas.check_rate(call, known)
            if known is None or not known.may("observe", namespace):
                refused = "This token may not read this namespace." if known else ""
                return _login(namespace, refused, 403 if known else 401)
            by = known
        else:
            api.quotas.check_rate(call, by)
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

    def _log_in(self, call: Call, form: bytes | BadMessage) -> ServerReply:
        namespace, tokens = call.query.get("namespace", "default"), self._api.tokens
        self._api.quotas.check_rate(call)
        if tokens is None:
            return ServerReply(303, (("location", "./"),), b"")
        if isinstance(form, BadMessage):
            return _login(namespace, "That is no token.", 401)
        token = parse_qs(form.decode("latin-1")).get("token", [""])[0].strip()
        by = tokens.shown(token)
        if by is None:
            return _login(namespace, "This token is not known.", 401)
        if by.namespaces and namespace not in by.namespaces:
            namespace = by.namespaces[0]
        cookie = self._cookie(call, quote(token, safe=""))
        return ServerReply(303, (("location", f"./?namespace={quote(namespace)}"), cookie), b"")

    def _cookie(self, call: Call, value: str, more: str = "") -> tuple[str, str]:
        """For this page only: its path is the one under which the page is served."""
        # A gateway that terminates TLS says so in the header. A client that lies there only harms its own log-in.
        secure = "https" in (self._api.scheme, call.headers.get("x-forwarded-proto"))
        return (
            "set-cookie",
            f"{COOKIE}={value}; HttpOnly{more}; SameSite=strict{'; Secure' if secure else ''}",
        )


def _login(namespace: str, message: str, status: int) -> ServerReply:
    return _html(_LOGIN, status, {"namespace": quote(namespace), "message": escape(message)})


def _html(template: Template, status: int, fields: dict[str, str]) -> ServerReply:
    headers = (*_HEADERS, ("content-type", "text/html; charset=utf-8"))
    return ServerReply(status, headers, template.substitute(fields).encode())


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
        + _cell("since", "")
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
