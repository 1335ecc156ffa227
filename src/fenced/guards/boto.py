"""The program's own client of boto3, aiobotocore or aioboto3."""

from __future__ import annotations

from typing import Any, NamedTuple

from fenced.errors import Misuse
from fenced.values.contracts import Runtime


class BotoAnswer(NamedTuple):
    """What an error of botocore says."""

    status: int
    """The HTTP status; 0: there was no answer."""
    code: str
    sent_once: bool
    """The client has not retried. Otherwise this may be the answer to a retry, whose first request has happened."""


class BotoClient:
    """Calls a client of boto3 in threads, or one of aiobotocore in the loop."""

    def __init__(self, client: Any, runtime: Runtime, asyncio_guard: str) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        self.failures: tuple[type[Exception], ...] = (BotoCoreError, ClientError)
        self.suspends = hasattr(client.__class__, "__aenter__")  # not type(): it may be a weak proxy
        self._client = client
        self._runtime = runtime
        if self.suspends and runtime.colour == "blocking":
            raise Misuse(f"this client is for asyncio; use {asyncio_guard}, or a client of boto3")
        if self.suspends:
            from aiohttp import ClientError as ConnectionFailed

            self.failures += (ConnectionFailed,)

    async def send(self, method: str, **arguments: Any) -> Any:
        call = getattr(self._client, method)
        if self.suspends:
            return await call(**arguments)
        return await self._runtime.call(lambda: call(**arguments))


def answer_in(error: Exception) -> BotoAnswer:
    response = getattr(error, "response", None) or {}
    about = response.get("ResponseMetadata", {})
    return BotoAnswer(
        about.get("HTTPStatusCode", 0),
        response.get("Error", {}).get("Code", "") or type(error).__name__,
        about.get("RetryAttempts") == 0,
    )
