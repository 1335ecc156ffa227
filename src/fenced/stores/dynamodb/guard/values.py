"""Values under names in a DynamoDB table, by its address."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from fenced.errors import Misconfigured, Misuse, redacted, shown
from fenced.guards.boto import BotoClient
from fenced.guards.options import options_in, split_options
from fenced.runtime import forking
from fenced.stores.dynamodb.guard.cells import DynamoCells, DynamoMarks
from fenced.values import timing
from fenced.values.contracts import Runtime


class DynamoValues(DynamoMarks):
    """Values under names, one item each."""

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> DynamoValues:
        parts = urlsplit(url)
        if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
            raise Misuse(f"the address of a table is dynamodb://table/prefix, not {shown(redacted(url))}")
        rest, options = split_options(url, "endpoint", "region")
        options_in(rest)  # Misuse if there are others
        where = options.pop("endpoint", None), options.pop("region", None)
        prefix = unquote(parts.path).strip("/")
        cells = UrlCells(where, parts.netloc, f"{prefix}/" if prefix else "", runtime)
        return cls(cells, runtime, url, **options)


class UrlCells(DynamoCells):
    """Cells on a client that the address describes."""

    def __init__(
        self, where: tuple[str | None, str | None], table: str, prefix: str, runtime: Runtime
    ) -> None:
        super().__init__(_boto(where, runtime), table, prefix, runtime)
        self._where = where
        forking.register(self)

    def _before_fork(self) -> None:
        return

    def _forked(self) -> None:
        self.boto = _boto(self._where, self._runtime)  # the connections are the parent's


def _boto(where: tuple[str | None, str | None], runtime: Runtime) -> BotoClient:
    return BotoClient(_client(*where, os.getpid()), runtime, "an aiobotocore client")


@lru_cache(maxsize=16)
def _client(endpoint: str | None, region: str | None, process: int) -> Any:
    """One client for each server and process: making one takes a tenth of a second, and threads share it."""
    config = Config(
        retries={"total_max_attempts": 1},  # a retry could not tell its own success
        connect_timeout=timing.CALL_SECONDS,
        read_timeout=timing.CALL_SECONDS,
        max_pool_connections=50,
        parameter_validation=False,  # the guard makes them itself, and it takes a tenth of each request
    )
    try:
        return boto3.client("dynamodb", endpoint_url=endpoint, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise Misconfigured(f"dynamodb: {error}") from error
