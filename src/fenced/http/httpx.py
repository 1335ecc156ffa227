"""Stamps on the calls of httpx.

api = httpx.Client(transport=StampingTransport("https://orders.internal"), timeout=5)
"""

from __future__ import annotations

from fenced.client import registry

try:
    import httpx
except ImportError as error:
    raise registry.needs_package(__name__, error) from error

from fenced.http.sending import SentCall, Stamper, longest

__all__ = ["AsyncStampingTransport", "StampingTransport"]


class _Stamping:
    """What both transports share."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._stamper = Stamper(origins)

    def _stamped(self, request: httpx.Request) -> tuple[httpx.Request, SentCall]:
        """What is sent: a copy, so the stamp is neither in what a redirect repeats nor in what the program can log."""
        url, headers = request.url, request.headers.copy()
        timeout = longest(*request.extensions.get("timeout", {}).values())
        origin = url.scheme, url.raw_host.decode(), url.port
        call = self._stamper.stamp(origin, request.method, headers, timeout)
        return httpx.Request(
            request.method, url, headers=headers, stream=request.stream, extensions=request.extensions
        ), call


def _media_type(response: httpx.Response) -> str | None:
    media_type: str | None = response.headers.get("content-type")
    return media_type


def _checked(call: SentCall, response: httpx.Response, raw: bytes) -> httpx.Response:
    """The answer with the body that was read from it, unless it means an error."""
    status, headers = response.status_code, response.headers
    decoded = httpx.Response(status, headers=headers, content=raw).content
    call.raise_if_problem(status, _media_type(response), decoded)
    return httpx.Response(
        status, headers=headers, stream=httpx.ByteStream(raw), extensions=response.extensions
    )


class StampingTransport(_Stamping, httpx.BaseTransport):
    """Stamps what httpx.Client sends to the listed origins, in the body of `stamping` or `operation`."""

    def __init__(self, *origins: str, inner: httpx.BaseTransport | None = None) -> None:
        """`inner` makes the connections: by default an httpx.HTTPTransport()."""
        super().__init__(origins)
        self._inner = inner or httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        sent, call = self._stamped(request)
        response = self._inner.handle_request(sent)
        if not call.is_problem(_media_type(response)):
            return response
        assert isinstance(response.stream, httpx.SyncByteStream)
        try:
            raw = b"".join(response.stream)
        finally:
            response.stream.close()
        return _checked(call, response, raw)

    def close(self) -> None:
        self._inner.close()


class AsyncStampingTransport(_Stamping, httpx.AsyncBaseTransport):
    """Stamps what httpx.AsyncClient sends to the listed origins, in the body of `stamping` or `operation`."""

    def __init__(self, *origins: str, inner: httpx.AsyncBaseTransport | None = None) -> None:
        """`inner` makes the connections: by default an httpx.AsyncHTTPTransport()."""
        super().__init__(origins)
        self._inner = inner or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sent, call = self._stamped(request)
        response = await self._inner.handle_async_request(sent)
        if not call.is_problem(_media_type(response)):
            return response
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            raw = b"".join([part async for part in response.stream])
        finally:
            await response.stream.aclose()
        return _checked(call, response, raw)

    async def aclose(self) -> None:
        await self._inner.aclose()


def __dir__() -> list[str]:
    return __all__
