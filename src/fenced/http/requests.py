"""Stamps on the calls of requests.

session = requests.Session()
stamp_calls(session, "https://orders.internal")
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from fenced.client import registry

try:
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Timeout
except ImportError as error:
    raise registry.needs_package(__name__, error) from error

from fenced.http.sending import Stamper, longest

__all__ = ["StampingAdapter", "stamp_calls"]


def stamp_calls(session: requests.Session, *origins: str, **options: Any) -> None:
    """Stamp what the session sends to the listed origins, in the body of `stamping` or `operation`.

    It mounts a StampingAdapter for every address. `options` are those of requests' HTTPAdapter, such as `max_retries`.
    """
    adapter = StampingAdapter(*origins, **options)
    session.mount("https://", adapter)
    session.mount("http://", adapter)


class StampingAdapter(HTTPAdapter):
    """Stamps what is sent to the listed origins, and removes stamps from what is sent elsewhere."""

    __attrs__ = [*HTTPAdapter.__attrs__, "_stamper"]  # noqa: RUF012 (what requests pickles, in its own form)

    def __init__(self, *origins: str, **options: Any) -> None:
        self._stamper = Stamper(origins)
        super().__init__(**options)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        # A copy, so the stamp is neither in what a redirect repeats nor in what the program can log.
        sent, url = request.copy(), urlsplit(str(request.url))
        origin = url.scheme, url.hostname, url.port
        call = self._stamper.stamp(origin, str(request.method), sent.headers, _limit(timeout))
        response = super().send(sent, stream, timeout, verify, cert, proxies)
        response.request = request
        media_type = response.headers.get("Content-Type")
        if call.is_problem(media_type):
            call.raise_if_problem(response.status_code, media_type, response.content)
        return response


def _limit(timeout: Any) -> float | None:
    """How long a call may take: the longer of its timeouts."""
    if isinstance(timeout, Timeout):
        whole = [timeout.total, timeout.connect_timeout, timeout.read_timeout]
        limits = [limit if isinstance(limit, int | float) else None for limit in whole]
        return limits[0] if limits[0] is not None else longest(*limits[1:])
    return longest(*timeout) if isinstance(timeout, tuple) else timeout


def __dir__() -> list[str]:
    return __all__
