"""Stamps on the calls of aiohttp, version 3.12 or later.

session = aiohttp.ClientSession(middlewares=[stamping_middleware("https://orders.internal")], timeout=...)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fenced.client import registry

try:
    import aiohttp
except ImportError as error:
    raise registry.needs_package(__name__, error) from error

from fenced.http.protocol import KEY_HEADER, PROOF_HEADER, SAFE_METHODS, STAMP_HEADER
from fenced.http.sending import SentCall, Stamper, longest

__all__ = ["stamping_middleware"]

Handler = Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]
Middleware = Callable[[aiohttp.ClientRequest, Handler], Awaitable[aiohttp.ClientResponse]]


def stamping_middleware(*origins: str) -> Middleware:
    """Stamps what the session sends to the listed origins, in the body of `stamping` or `operation`.

    aiohttp shows a middleware the timeout of the session only. For a call with another one, pass need= to `stamping`.
    """
    stamper = Stamper(origins)

    async def stamp_call(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
        url = request.url
        call = stamper.stamp(
            (url.scheme, url.raw_host, url.port),
            request.method,
            request.headers,
            _limit(request.session.timeout),
        )
        try:
            response = await handler(request)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            if _would_repeat(call, request, error):
                raise aiohttp.ClientConnectionError(
                    "the connection broke, so it is unknown whether the call was received; aiohttp would repeat it "
                    "with another stamp: make calls that may be repeated in the body of operation()"
                ) from error
            raise
        finally:  # answers and errors show the headers of their request, and programs log them
            for name in (STAMP_HEADER, PROOF_HEADER, KEY_HEADER) if call.fence else ():
                request.headers.popall(name, None)
        media_type = response.headers.get("Content-Type")
        if call.is_problem(media_type):
            call.raise_if_problem(response.status, media_type, await response.read())
        return response

    return stamp_call


def _would_repeat(call: SentCall, request: aiohttp.ClientRequest, error: Exception) -> bool:
    """Whether aiohttp may repeat the call, under a new stamp: a second operation, although the first may be applied."""
    if call.fence is None or call.one_operation or isinstance(error, aiohttp.ClientConnectorError):
        return False
    return request.method not in SAFE_METHODS


def _limit(timeout: aiohttp.ClientTimeout) -> float | None:
    return timeout.total or longest(timeout.sock_connect or timeout.connect, timeout.sock_read)


def __dir__() -> list[str]:
    return __all__
