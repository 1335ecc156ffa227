"""The guard over objects passes the kit, on a real S3 interface through obstore and boto3."""

from __future__ import annotations

import itertools
from typing import Any

import boto3
import pytest
from obstore.store import MemoryStore

from fenced.guards.cells import Cell
from fenced.guards.options import options_in
from fenced.stores.objects.guard.boto import BotoBucket
from fenced.stores.objects.guard.buckets import Bucket, ObstoreBucket
from fenced.stores.objects.guard.cells import TRAITS, ObjectCells
from fenced.stores.objects.guard.values import ObjectValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.values.contracts import NamedValues, Runtime
from fenced.values.decision import Rule
from fenced_testkit.servers import SeaweedServer
from fenced_testkit.servers.seaweedfs import BUCKET
from tests.colours import alternating, named

BACKEND = "s3"
pytestmark = pytest.mark.xdist_group("objects")


ON_THE_WIRE = named(
    GUARD_CHECKS,
    "the_newer_token_wins",
    "a_refused_or_failed_write_leaves_no_trace",
    "bad_names_are_not_written",
    "marks_last",
)
"""What depends on the client: outcomes of requests, keys, lists."""


class Harness:
    _numbers = itertools.count()

    def __init__(self, runtime: Runtime, server: SeaweedServer, client: Any = None) -> None:
        self.runtime = runtime
        self._client = client
        self.traits = TRAITS
        self._server = server
        self._of_rule: dict[Rule, str] = {}
        self._rule: Rule = "retry"

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        self._of_rule.setdefault(rule, f"kit/{next(self._numbers)}-{rule}")
        return await self._open(f"&rule={rule}&mode={mode}")

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        asked = f"&rule={rule}" if rule else ""
        return await self._open(f"&mode=observe{asked}")  # what is there keeps its own mode

    async def _open(self, options: str) -> ObjectValues:
        guard = self._at(options)
        await guard.open()
        return guard

    def _at(self, options: str = "") -> ObjectValues:
        prefix = self._of_rule[self._rule]
        if self._client is None:
            return ObjectValues.at(self._server.url(prefix) + options, self.runtime)
        bucket: Bucket
        if isinstance(self._client, MemoryStore):
            bucket = ObstoreBucket(self._client, f"{prefix}/", self.runtime)
        else:
            bucket = BotoBucket(self._client, BUCKET, f"{prefix}/", self.runtime)
        return ObjectValues(ObjectCells(bucket), self.runtime, "s3:", **options_in(f"s3:?{options}"))

    async def write_raw(self, name: str, value: bytes) -> bool:
        """As a program would that knows the format and not the rules."""
        cells: ObjectCells = self._at().cells
        version, blob = await cells.get(f"n/{name}")
        cell = Cell.unpacked(name, blob).changed("by hand", None, value)
        return bool(await cells.swap([(f"n/{name}", version, cell.packed())]))

    async def close(self) -> None:
        return


# proves guard s3: audit-lags, mode-lag, cooperative
@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_CHECKS))
def test_objects(check: Check[GuardHarness], colour: Colour, seaweed_server: SeaweedServer) -> None:
    run(check, lambda runtime: Harness(runtime, seaweed_server), colour)


@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_CHECKS, COLOURS[::-1]))
def test_the_other_colour(check: Check[GuardHarness], colour: Colour, seaweed_server: SeaweedServer) -> None:
    """In memory, where a request costs no round trip."""
    run(check, lambda runtime: Harness(runtime, seaweed_server, MemoryStore()), colour)


@pytest.mark.parametrize(("check", "colour"), alternating(ON_THE_WIRE))
def test_through_boto3(
    check: Check[GuardHarness], colour: Colour, seaweed_server: SeaweedServer, boto_client: Any
) -> None:
    run(check, lambda runtime: Harness(runtime, seaweed_server, boto_client), colour)


@pytest.fixture(scope="module")
def boto_client(seaweed_server: SeaweedServer) -> Any:
    keys = {"region_name": "us-east-1", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    return boto3.client("s3", endpoint_url=seaweed_server.endpoint(), **keys)
