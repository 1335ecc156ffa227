"""Cells as items of a DynamoDB table: one item for each name, replaced while it still has the version that was read.

    name     the prefix, then `config` or `n/NAME`: the partition key
    version  drawn at random by each write, so that no two are alike
    cell     mark, value and newest operations

One cell is replaced by a conditional PutItem. Several cells, or a cell and the caller's own items, are one
TransactWriteItems, if the server has that. The configuration is never part of it: an item in every transaction would
let all transactions of a table collide.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

from fenced.errors import (
    Conflict,
    FencedError,
    Indeterminate,
    Misconfigured,
    Misuse,
    Unavailable,
    Unsupported,
)
from fenced.guards.boto import BotoAnswer, BotoClient, answer_in
from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import Swapped
from fenced.guards.remembered import AUDIT_LAGS
from fenced.values.contracts import MANY_NAMES, MODE_LAG, Runtime, Trait

TRAITS = (
    MANY_NAMES,
    AUDIT_LAGS,
    MODE_LAG,
    Trait("conditions-proven", "A table service that ignores conditions is refused when it is opened."),
    Trait(
        "transactions-optional",
        "Without TransactWriteItems the guard writes one name at a time, and none of the caller's own items.",
    ),
    Trait("writes-settled", "A transaction leaves its id with the mark, so a read settles a lost reply."),
    Trait("cooperative", "Anyone who may write to the tables can do it without the guard."),
)
ITEMS_MAX = 100
"""How many items a transaction, or a request that reads, may have."""
_PROBE = "probe"
_KEY, _VERSION, _CELL = "name", "version", "cell"
_NAMES = {"#version": _VERSION}
_BUSY = {"ProvisionedThroughputExceededException", "RequestLimitExceeded", "ThrottlingException"}
_BUSY_REASONS = {"ProvisionedThroughputExceeded", "ThrottlingError"}
_UNKNOWN_OPERATION = {"UnknownOperationException", "UnknownOperation"}
_COLLIDED = {
    "ConditionalCheckFailedException",
    "ReplicatedWriteConflictException",
    "TransactionConflictException",
}
"""The item has changed, or another request on it is in progress: nothing was written."""
_ANOTHER_KEY = re.compile("the schema|Missing the key|Type mismatch")
_TOO_LARGE = re.compile("(?i)size has exceeded|exceeds? the|too large|length less than or equal to")
_PROBE_TRIES = 5
_PAUSE_SECONDS = 0.05

Writes = list[dict[str, Any]]
"""What a caller writes in the same transaction, as TransactItems has it."""


class DynamoCells:
    """Items below a prefix of a table that is the guard's alone."""

    def __init__(self, boto: BotoClient, table: str, prefix: str, runtime: Runtime) -> None:
        self.boto = boto
        self.table = table
        self._prefix = prefix
        self._runtime = runtime

    async def get(self, key: str) -> tuple[str | None, bytes | None]:
        reply = await self.reading("get_item", TableName=self.table, Key=self._key(key), ConsistentRead=True)
        return _cell(reply.get("Item"))

    async def get_many(self, keys: Sequence[str]) -> list[tuple[str | None, bytes | None]]:
        if len(keys) == 1:
            return [await self.get(keys[0])]
        found: dict[str, Any] = {}
        left = [self._key(key) for key in keys]
        while left:
            asked, left = left[:ITEMS_MAX], left[ITEMS_MAX:]
            wanted = {self.table: {"Keys": asked, "ConsistentRead": True}}
            reply = await self.reading("batch_get_item", RequestItems=wanted)
            found |= {item[_KEY]["S"]: item for item in reply["Responses"].get(self.table, ())}
            if lacking := reply.get("UnprocessedKeys", {}).get(self.table, {}).get("Keys", []):
                left += lacking
                # The server is busy, or the reply was full.
                await self._runtime.wait(self._runtime.wakeup(), self._runtime.now() + _PAUSE_SECONDS)
        return [_cell(found.get(self._prefix + key)) for key in keys]

    async def swap(
        self, changes: Sequence[tuple[str, Any, bytes | None]], writes: Writes | None = None
    ) -> Swapped:
        versions = [version if blob is None else self._runtime.secret() for _, version, blob in changes]
        requests = [
            self._change(key, version, blob, new)
            for (key, version, blob), new in zip(changes, versions, strict=True)
        ]
        if len(requests) == 1 and "Put" in requests[0] and not writes:
            done = await self._put(requests[0]["Put"])
        else:
            done = await self._transact(requests, writes or [])
        return Swapped(tuple(versions) if done else None)

    async def keys(self) -> list[str]:
        found: list[str] = []
        more: dict[str, Any] = {}
        while True:
            page = await self.reading(
                "scan",
                TableName=self.table,
                ConsistentRead=True,
                ProjectionExpression="#name",
                FilterExpression="begins_with(#name, :names)",
                ExpressionAttributeNames={"#name": _KEY},
                ExpressionAttributeValues={":names": {"S": f"{self._prefix}n/"}},
                **more,
            )
            found += [item[_KEY]["S"].removeprefix(self._prefix) for item in page["Items"]]
            if "LastEvaluatedKey" not in page:
                return found
            more = {"ExclusiveStartKey": page["LastEvaluatedKey"]}

    async def prove(self) -> bool:
        """Misconfigured unless the server refuses a write whose condition does not hold; whether it has transactions.

        The item of the probe stays: the guard deletes nothing, and needs no right to.
        """
        await self.reading(
            "put_item", TableName=self.table, Item=self._change(_PROBE, None, b"", "there")["Put"]["Item"]
        )
        for version in (None, "never there"):
            await self._prove(self._put, self._change(_PROBE, version, b"", "ignored")["Put"])
        try:
            await self._prove(self._transact, [self._change(_PROBE, "never there", b"", "ignored")], [])
        except Unsupported:
            return False
        return True

    async def _prove(self, write: Callable[..., Awaitable[bool]], *arguments: Any) -> None:
        for _ in range(_PROBE_TRIES):
            try:
                done = await write(*arguments)
                break
            except Indeterminate as error:
                unknown = error  # a client that retries, or no answer: what the item says now decides
                if done := (await self.get(_PROBE))[0] == "ignored":
                    break
        else:
            raise Unavailable(f"{self.table}: cannot find out whether conditions are honoured") from unknown
        if done:
            raise Misconfigured(
                f"{self.table}: this server ignores the condition of a write, so it cannot refuse a stale holder"
            )

    async def close(self) -> None:
        return

    async def reading(self, method: str, **arguments: Any) -> Any:
        """A request that may be repeated: without a reply nothing is unknown."""
        try:
            return await self.boto.send(method, **arguments)
        except self.boto.failures as error:
            self._fail(error, Unavailable)

    async def item(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Read an item of the caller's, consistently."""
        try:
            reply = await self.boto.send("get_item", **{**request, "ConsistentRead": True})
        except self.boto.failures as error:
            _fail(error, Unavailable)
        item: dict[str, Any] | None = reply.get("Item")
        return item

    async def _put(self, request: dict[str, Any]) -> bool:
        try:
            await self.boto.send("put_item", **request)
        except self.boto.failures as error:
            if self._answered(error).code in _COLLIDED:
                return False
            self._fail(error, Indeterminate)
        return True

    async def _transact(self, cells: list[dict[str, Any]], writes: Writes) -> bool:
        if len(cells) + len(writes) > ITEMS_MAX:
            raise Unsupported(f"DynamoDB takes {ITEMS_MAX} items a transaction, the guard's own included")
        try:
            await self.boto.send("transact_write_items", TransactItems=cells + writes)
        except self.boto.failures as error:
            if answer_in(error).code in _UNKNOWN_OPERATION:
                raise Unsupported(
                    f"{self.table}: this server has no TransactWriteItems, so it writes one name at a time"
                ) from error
            if self._answered(error).code == "TransactionCanceledException":
                return self._cancelled(error, len(cells))
            if writes:
                _fail(error, Indeterminate)
            self._fail(error, Indeterminate)
        return True

    def _cancelled(self, error: Any, ours: int) -> bool:
        """False: try again. The reply has a reason for each item."""
        codes = [reason.get("Code", "None") for reason in error.response.get("CancellationReasons", ())]
        failed = [number for number, code in enumerate(codes) if code != "None"]
        if any(number < ours for number in failed) or "TransactionConflict" in codes:
            return False
        if not failed or _BUSY_REASONS & set(codes):
            raise Unavailable(f"DynamoDB cancelled the transaction; nothing was written: {error}") from error
        first = failed[0]
        what = f"write {first - ours} of the transaction failed ({codes[first]}); nothing was written"
        if codes[first] == "ConditionalCheckFailed":
            raise Conflict(f"the condition of {what}") from error
        said = error.response["CancellationReasons"][first].get("Message", "")
        kind = Unsupported if _TOO_LARGE.search(said) else Misuse
        raise kind(f"{what}: {said}") from error

    def _answered(self, error: Exception) -> BotoAnswer:
        """The answer, if it is the answer to the only request that was sent."""
        answer = answer_in(error)
        if answer.status and not answer.sent_once:
            # A retry by boto3 was answered, and the first try may have happened.
            raise Indeterminate(f"the first reply was lost, and a retry was answered: {error}") from error
        return answer

    def _fail(self, error: Exception, kind: type[FencedError]) -> NoReturn:
        """The error for a request about the guard's own table."""
        code = answer_in(error).code
        if code == "ResourceNotFoundException":
            raise Misconfigured(f"there is no table {self.table}; {_create(self.table)}") from error
        if code == "ValidationException" and _ANOTHER_KEY.search(str(error)):
            raise Misconfigured(f"{self.table} has another key; {_create(self.table)} ({error})") from error
        _fail(error, kind)

    def _key(self, key: str) -> dict[str, Any]:
        return {_KEY: {"S": self._prefix + key}}

    def _change(self, key: str, version: str | None, blob: bytes | None, new: str | None) -> dict[str, Any]:
        """What TransactItems has for a cell: a Put, or a ConditionCheck if nothing is to be written."""
        about: dict[str, Any] = {"TableName": self.table, "ExpressionAttributeNames": _NAMES}
        if version is None:
            about["ConditionExpression"] = "attribute_not_exists(#version)"
        else:
            about["ConditionExpression"] = "#version = :version"
            about["ExpressionAttributeValues"] = {":version": {"S": version}}
        if blob is None:
            return {"ConditionCheck": {"Key": self._key(key), **about}}
        assert new is not None
        item = {**self._key(key), _VERSION: {"S": new}, _CELL: {"B": blob}}
        return {"Put": {"Item": item, **about}}


class DynamoMarks(CellGuard):
    """Marks and small values, one item for each name."""

    traits: tuple[Trait, ...] = TRAITS
    kind = "a guard over DynamoDB"
    remembers = True
    records_writes = True
    cells: DynamoCells

    async def open(self) -> None:
        if not await self.cells.prove():
            self.traits = tuple(trait for trait in TRAITS if trait != MANY_NAMES)
            self._many = False
        await super().open()

    async def _commit(self, changes: list[tuple[str, Any, bytes | None]], writes: Writes | None) -> Swapped:
        return await self.cells.swap(changes, writes)


def _cell(item: dict[str, Any] | None) -> tuple[str | None, bytes | None]:
    if item is None:
        return None, None
    try:
        return item[_VERSION]["S"], item[_CELL]["B"]
    except (KeyError, TypeError) as error:
        raise Misconfigured("an item is not a guard's: something else wrote to its table") from error


def _fail(error: Exception, kind: type[FencedError]) -> NoReturn:
    status, code, _ = answer_in(error)
    if status == 413 or (status == 400 and _TOO_LARGE.search(str(error))):
        raise Unsupported(f"DynamoDB does not take a request of this size: {error}") from error
    if code in ("ValidationException", "ParamValidationError", "ResourceNotFoundException"):
        raise Misuse(f"DynamoDB refuses the request: {error}") from error
    if code in _BUSY:
        raise Unavailable(f"DynamoDB is busy; nothing was written: {error}") from error
    if code in ("NoCredentialsError", "NoRegionError"):
        raise Misconfigured(f"the client lacks its settings: {error}") from error
    if 400 <= status < 500 and code != "TransactionInProgressException":
        raise Misconfigured(f"DynamoDB refuses the request: {error}") from error
    raise kind(f"DynamoDB did not answer: {error}") from error


def _create(table: str) -> str:
    return (
        "the guard needs a table of its own with the partition key `name` and no sort key: aws dynamodb create-table "
        f"--table-name {table} --attribute-definitions AttributeName=name,AttributeType=S --key-schema "
        "AttributeName=name,KeyType=HASH --billing-mode PAY_PER_REQUEST"
    )
