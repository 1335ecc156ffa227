"""DynamoGuard: the caller's own items are written by the newest holder alone, through boto3 and aiobotocore."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
from typing import Any

import boto3
import pytest
from aiobotocore.session import get_session
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from click.testing import CliRunner

import fenced
from fenced.drills.command import drill
from fenced.drills.relay import Fault, Proxy
from fenced.dynamodb import AsyncDynamoGuard, DynamoGuard
from fenced.errors import (
    Conflict,
    FencedError,
    Misconfigured,
    Misuse,
    StaleToken,
    Unavailable,
    Uncovered,
    Unsupported,
)
from fenced.guards import cellguard
from fenced.runtime.blocking import step
from fenced.stores.dynamodb.guard.cells import DynamoCells, DynamoMarks
from fenced.values.contracts import MANY_NAMES
from fenced.values.model import Stamp
from fenced_testkit.servers import DynamoServer
from fenced_testkit.servers.dynamodb import TABLE
from tests.bound import Bound
from tests.entering import is_entered_once, is_entered_once_by_tasks
from tests.guard_outage_harness import is_used_after_a_fork

pytestmark = pytest.mark.xdist_group("dynamodb")
NAME = "stock/42"
_numbers = itertools.count()


def stamp(token: int, seq: int = 1, *names: str) -> Stamp:
    return Stamp("00000000000000aa", names or (NAME,), token, seq, f"{token:032x}")


def connect(endpoint: str, tries: int | None = None) -> Any:
    config = Config(retries={"total_max_attempts": tries}) if tries else None
    return boto3.client("dynamodb", endpoint_url=endpoint, config=config)


@pytest.fixture
def client(dynamo_server: DynamoServer) -> Any:
    return connect(dynamo_server.endpoint())


class Item:
    """An item of the caller's own table."""

    def __init__(self) -> None:
        self.key = {"id": {"S": f"item-{next(_numbers)}"}}
        self.at = {"TableName": "stock", "Key": self.key}

    def put(self, count: object, **more: Any) -> dict[str, Any]:
        return {"TableName": "stock", "Item": {**self.key, "count": {"N": str(count)}}, **more}

    def one_more(self) -> dict[str, Any]:
        return {
            **self.at,
            "UpdateExpression": "ADD #count :one",
            "ExpressionAttributeNames": {"#count": "count"},
            "ExpressionAttributeValues": {":one": {"N": "1"}},
        }

    def count(self, client: Any) -> int | None:
        found = client.get_item(**self.at, ConsistentRead=True).get("Item")
        return None if found is None else int(found["count"]["N"])


@pytest.fixture
def item() -> Item:
    return Item()


@pytest.fixture
def guard(client: Any) -> Bound:
    return Bound(DynamoGuard(TABLE, prefix=f"guard-{next(_numbers)}"), client)


def test_a_stale_holder_changes_nothing(guard: Bound, client: Any, item: Item) -> None:
    with fenced.Client("memory:") as leases:
        with leases.hold(NAME) as first:
            with guard.transaction(first, NAME) as tx:
                assert tx.get(**item.at) is None
                tx.put(**item.put(10))
            old = first.next_stamp()
        with leases.hold(NAME) as new:
            with guard.transaction(new) as tx:
                found = tx.get(**item.at)
                assert found is not None and found["count"] == {"N": "10"}
                with pytest.raises(StaleToken), guard.transaction(old) as late:
                    late.delete(**item.at)
                tx.update(**item.one_more())
            with pytest.raises(StaleToken):
                guard.announce(old)
            assert item.count(client) == 11
            with guard.transaction(new) as tx:
                tx.delete(**item.at)
            with pytest.raises(StaleToken), guard.transaction(old) as tx:
                tx.put(**item.put(99))
            assert item.count(client) is None


async def test_the_same_in_asyncio(dynamo_server: DynamoServer, client: Any, item: Item) -> None:
    async def story(asking: Any, prefix: str) -> None:
        guard = Bound(AsyncDynamoGuard(TABLE, prefix=prefix), asking)
        async with guard.transaction(stamp(5)) as tx:
            tx.put(**item.put(1))
        await guard.announce(stamp(6))
        with pytest.raises(StaleToken):
            async with guard.transaction(stamp(5, 2)) as tx:
                tx.put(**item.put(2))
        async with guard.transaction(stamp(6)) as tx:
            found = await tx.get(**item.at)
            assert found is not None and found["count"] == {"N": "1"}
            tx.update(**item.one_more())
        with pytest.raises(Misuse, match="async with"), guard.transaction(stamp(6)):
            pass

    async with get_session().create_client("dynamodb", endpoint_url=dynamo_server.endpoint()) as asking:
        with pytest.raises(Misuse, match="AsyncDynamoGuard"):
            DynamoGuard(TABLE).announce(asking, stamp(5))
        await story(asking, f"aio-{next(_numbers)}")
    await story(client, f"aio-{next(_numbers)}")
    assert item.count(client) == 2


def test_conditions_of_the_callers_own(guard: Bound, client: Any, item: Item) -> None:
    """Conflict, and nothing was written; the fence is judged first."""
    other = Item()
    absent = {"ConditionExpression": "attribute_not_exists(id)"}
    with guard.transaction(stamp(5)) as tx:
        tx.put(**item.put(1, **absent))
        tx.check(**other.at, **absent)
    with pytest.raises(Conflict, match="write 1 of the transaction"), guard.transaction(stamp(5, 2)) as tx:
        tx.put(**other.put(1))
        tx.put(**item.put(2, **absent))
    guard.announce(stamp(6))
    with pytest.raises(StaleToken), guard.transaction(stamp(5, 3)) as tx:
        tx.put(**item.put(3, **absent))
    assert (item.count(client), other.count(client)) == (1, None)
    with pytest.raises(ZeroDivisionError), guard.transaction(stamp(6)) as tx:
        tx.put(**item.put(4))
        raise ZeroDivisionError
    with guard.transaction(stamp(6)):
        pass
    assert item.count(client) == 1


def test_several_names(guard: Bound, client: Any, item: Item) -> None:
    both = stamp(5, 1, "a", "b")
    with guard.transaction(both) as tx:
        tx.put(**item.put(1))
    guard.announce(stamp(6, 1, "b"))
    with pytest.raises(StaleToken), guard.transaction(both) as tx:
        tx.put(**item.put(2))
    with guard.transaction(both, "a") as tx:
        tx.put(**item.put(3))
    with pytest.raises(Uncovered), guard.transaction(both, "c") as tx:
        tx.put(**item.put(4))
    assert item.count(client) == 3


def test_mistakes(guard: Bound, client: Any, item: Item) -> None:
    with pytest.raises(Misuse, match="belongs to the guard"), guard.transaction(stamp(5)) as tx:
        tx.delete(TableName=TABLE, Key={"name": {"S": "config"}})
    with pytest.raises(Unsupported, match="100 items"), guard.transaction(stamp(5)) as tx:
        for _ in range(100):
            tx.put(**item.put(1))
    with pytest.raises(Misuse, match="refuses the request"), guard.transaction(stamp(5)) as tx:
        tx.put(**item.put(1))
        tx.put(**item.put(2))
    nowhere = {"TableName": "nowhere", "Key": item.key}
    with pytest.raises(Misuse, match="not found"), guard.transaction(stamp(5)) as tx:
        tx.get(**nowhere)
    with pytest.raises(Misuse, match="not found"), guard.transaction(stamp(5)) as tx:
        tx.delete(**nowhere)
    with pytest.raises(Misuse, match="give the guard"):
        DynamoGuard(TABLE).announce(boto3.resource("dynamodb"), stamp(5))
    for wrong, table in (
        (boto3.resource("dynamodb", endpoint_url=client.meta.endpoint_url).meta.client, TABLE),
        (client, "stock"),
        (client, "no-such-table"),
    ):
        with pytest.raises(Misconfigured, match="create-table"):
            Bound(DynamoGuard(table), wrong).announce(stamp(5))
    for url in ("dynamodb:///prefix", "dynamodb://key:secret@table", "dynamodb://table?colour=red"):
        with pytest.raises(Misuse):
            fenced.Values(url)


# What it needs of the server.


def careless(endpoint: str, operation: str) -> Any:
    """A client whose server ignores the conditions of this operation."""

    def without(request: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in request.items() if "Expression" not in key}

    def ignore(params: dict[str, Any], **_: Any) -> dict[str, Any]:
        if "TransactItems" not in params:
            return without(params)
        items = [{kind: without(about) for kind, about in one.items()} for one in params["TransactItems"]]
        return {"TransactItems": items}

    client = connect(endpoint)
    client.meta.events.register(f"provide-client-params.dynamodb.{operation}", ignore)
    return client


# proves guard dynamodb: conditions-proven
@pytest.mark.parametrize("operation", ["PutItem", "TransactWriteItems"])
def test_a_server_that_ignores_conditions_is_refused(operation: str, dynamo_server: DynamoServer) -> None:
    guard = Bound(DynamoGuard(TABLE, prefix="careless"), careless(dynamo_server.endpoint(), operation))
    with pytest.raises(Misconfigured, match="ignores the condition"):
        guard.announce(stamp(5))


# proves guard dynamodb: transactions-optional
def test_a_server_without_transactions(dynamo_server: DynamoServer, item: Item) -> None:
    client = connect(dynamo_server.endpoint())
    unknown = {"Error": {"Code": "UnknownOperationException"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    client.meta.events.register(
        "before-call.dynamodb.TransactWriteItems", lambda **_: (AWSResponse("", 400, {}, None), unknown)
    )
    guard = Bound(DynamoGuard(TABLE, prefix=f"guard-{next(_numbers)}"), client)
    guard.announce(stamp(5, 1, "a", "b"))
    with pytest.raises(Unsupported, match="TransactWriteItems"), guard.transaction(stamp(5)) as tx:
        tx.put(**item.put(1))
    marks = guard._of()
    assert MANY_NAMES not in marks.traits
    with pytest.raises(StaleToken):
        guard.announce(stamp(4, 1, "b"))
    carried = fenced.client.guarding.credential(stamp(5, 1, "a", "b"))
    with pytest.raises(Unsupported):
        step(marks.write_many(carried, {"a": b"1", "b": b"1"}))
    assert step(marks.write(carried, "a", b"1")) == 1


# When the server fails.


# proves guard dynamodb: writes-settled
@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.CUT_BEFORE, Fault.CUT_AFTER], ids=lambda f: f.name)
@pytest.mark.parametrize("tries", [None, 1], ids=["boto3 retries", "one try"])
def test_a_cut_transaction_happens_once(
    tries: int | None, fault: Fault, dynamo_server: DynamoServer, client: Any, item: Item
) -> None:
    """Under the same token, where no new mark shows whether it happened: adding twice would be seen."""
    with Proxy(dynamo_server.host, dynamo_server.port) as proxy:
        through = connect(f"http://{proxy.host}:{proxy.port}", tries)
        guard = Bound(DynamoGuard(TABLE, prefix=f"guard-{next(_numbers)}"), through)
        with guard.transaction(stamp(5)) as tx:
            tx.update(**item.one_more())
        trigger = proxy.on(b"TransactWriteItems", fault)
        with guard.transaction(stamp(5)) as tx:
            tx.update(**item.one_more())
        trigger.wait()
    assert item.count(client) == 2


def test_the_check_can_fail(
    dynamo_server: DynamoServer, client: Any, item: Item, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the id of the transaction in the cell nobody can say whether it happened."""
    monkeypatch.setattr(DynamoMarks, "records_writes", False)
    with pytest.raises((AssertionError, FencedError)):
        test_a_cut_transaction_happens_once(1, Fault.LOSE_REPLY, dynamo_server, client, item)


@pytest.mark.parametrize(
    ("reasons", "ends"),
    [
        (["TransactionConflict", "None"], None),
        (["None", "TransactionConflict"], None),
        (["None", "ThrottlingError"], Unavailable),
        (["None", "ValidationError"], Misuse),
    ],
)
def test_a_cancelled_transaction(
    reasons: list[str], ends: type[FencedError] | None, dynamo_server: DynamoServer, item: Item
) -> None:
    """As AWS documents it; no emulator has two transactions in progress."""
    client = connect(dynamo_server.endpoint())
    guard = Bound(DynamoGuard(TABLE, prefix=f"guard-{next(_numbers)}"), client)
    left = [reasons] * 2

    def cancel(**_: Any) -> Any:
        if not left:
            return None
        codes = [{"Code": code} for code in left.pop()]
        about = {"HTTPStatusCode": 400, "RetryAttempts": 0}
        error = {"Code": "TransactionCanceledException"}
        return AWSResponse("", 400, {}, None), {
            "Error": error,
            "ResponseMetadata": about,
            "CancellationReasons": codes,
        }

    with pytest.raises(ends) if ends else contextlib.nullcontext(), guard.transaction(stamp(5)) as tx:
        tx.put(**item.put(1))
        client.meta.events.register("before-call.dynamodb.TransactWriteItems", cancel)
    assert item.count(client) == (None if ends else 1)


def test_used_after_a_fork(dynamo_server: DynamoServer) -> None:
    is_used_after_a_fork(dynamo_server.url(f"fork-{next(_numbers)}"))


# Late and concurrent holders.


def test_a_thousand_late_writes(dynamo_server: DynamoServer, client: Any, item: Item) -> None:
    """What a paused process has put together, and sends when it wakes up."""

    class Paused(BaseException):
        """Before the request is sent."""

    prefix = f"guard-{next(_numbers)}"
    pausing = connect(dynamo_server.endpoint())
    queued: list[Any] = []
    guard = Bound(DynamoGuard(TABLE, prefix=prefix), pausing)
    with contextlib.suppress(Paused), guard.transaction(stamp(5)) as tx:
        tx.update(**item.one_more())

        def pause(request: Any, **_: Any) -> None:
            queued.append(request)
            raise Paused

        pausing.meta.events.register("before-send.dynamodb.TransactWriteItems", pause)
    with Bound(DynamoGuard(TABLE, prefix=prefix), client).transaction(stamp(6)) as tx:
        tx.put(**item.put(100))
    (late,) = queued
    connection = http.client.HTTPConnection(dynamo_server.host, dynamo_server.port, timeout=60)
    for _ in range(1000):
        connection.request("POST", "/", late.body, dict(late.headers))
        reply = connection.getresponse()
        assert reply.status == 400 and b"ConditionalCheckFailed" in reply.read()
    connection.close()
    assert item.count(client) == 100


def test_tokens_of_eight_holders_never_fall(client: Any, item: Item) -> None:
    """Each appends its token under ever newer ones; whatever was acknowledged is there, in the order of the tokens."""
    prefix, tokens, lock = f"guard-{next(_numbers)}", itertools.count(1), threading.Lock()
    acknowledged: list[int] = []
    wrong: list[BaseException] = []

    def holder() -> None:
        guard = Bound(DynamoGuard(TABLE, prefix=prefix), client)
        try:
            for _ in range(4):
                with lock:
                    mine = stamp(next(tokens))
                with contextlib.suppress(StaleToken):
                    with guard.transaction(mine) as tx:
                        log = (tx.get(**item.at) or {}).get("log", {"S": ""})["S"]
                        tx.put(TableName="stock", Item={**item.key, "log": {"S": f"{log}{mine.token} "}})
                    acknowledged.append(mine.token)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            wrong.append(error)

    threads = [threading.Thread(target=holder) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    found = client.get_item(**item.at, ConsistentRead=True)["Item"]["log"]["S"]
    admitted = [int(token) for token in found.split()]
    assert admitted == sorted(acknowledged) and admitted[-1] == 32


def test_a_drill(dynamo_server: DynamoServer) -> None:
    """A storm asks the guard for nothing else; `make evidence` runs storms."""
    address = dynamo_server.url(f"drill-{next(_numbers)}")
    result = CliRunner().invoke(
        drill, ["sigstop", "--seed", "7", "--guard", address, "--ttl", "0.7", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["verdict"] == "held" and found["overtaken"] > 0


def test_a_rule_that_is_not_installed(client: Any) -> None:
    prefix = f"rule-{next(_numbers)}"
    Bound(DynamoGuard(TABLE, prefix=prefix), client).announce(stamp(5))
    wrong = Bound(DynamoGuard(TABLE, prefix=prefix, rule="once"), client)
    with pytest.raises(Misconfigured, match=r"rule retry.*says once"), wrong.transaction(stamp(5)):
        raise AssertionError


async def test_a_transaction_is_entered_once(client: Any) -> None:
    item, prefix = Item(), f"once-{next(_numbers)}"
    guard, suspending = (
        Bound(DynamoGuard(TABLE, prefix=prefix), client),
        Bound(AsyncDynamoGuard(TABLE, prefix=prefix), client),
    )
    is_entered_once(lambda: guard.transaction(stamp(5)), lambda tx: tx.update(**item.one_more()))
    await is_entered_once_by_tasks(
        lambda: suspending.transaction(stamp(5)), lambda tx: tx.update(**item.one_more())
    )
    assert client.get_item(**item.at, ConsistentRead=True)["Item"]["count"] == {"N": "2"}


def test_limits_are_unsupported(client: Any, dynamo_server: DynamoServer) -> None:
    """Too many items, or one that is too large: nothing is written, and the guard goes on."""
    guard, item = Bound(DynamoGuard(TABLE, prefix=f"limits-{next(_numbers)}"), client), Item()
    large = item.put(1)
    large["Item"]["text"] = {"S": "x" * 500_000}
    for writes in ([item.put(1), *(Item().put(1) for _ in range(99))], [large]):
        with pytest.raises(Unsupported), guard.transaction(stamp(5)) as tx:
            for write in writes:
                tx.put(**write)
    with fenced.Values(dynamo_server.url("limits")) as values, pytest.raises(Unsupported):
        values.write(stamp(5), NAME, b"x" * 500_000)
    with guard.transaction(stamp(5)) as tx:
        assert tx.get(**item.at) is None


class Overloaded:
    """A client of a server that processes one key of a batch at a time, as a busy one may."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.meta = client.meta

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_get_item(self, RequestItems: dict[str, Any]) -> Any:  # noqa: N803 - as boto3 names it
        ((table, asked),) = RequestItems.items()
        first, *rest = asked["Keys"]
        reply = self._client.batch_get_item(RequestItems={table: {**asked, "Keys": [first]}})
        return {**reply, "UnprocessedKeys": {table: {**asked, "Keys": rest}} if rest else {}}


def test_unprocessed_keys_are_asked_for_again(client: Any) -> None:
    """They are not missing: the highest mark is among them, and so is the one that refuses."""
    prefix = f"busy-{next(_numbers)}"
    Bound(DynamoGuard(TABLE, prefix=prefix), client).announce(stamp(9, 0, "a", "b", "c"))
    guard = Bound(DynamoGuard(TABLE, prefix=prefix), Overloaded(client))
    with pytest.raises(StaleToken):
        guard.announce(stamp(8, 0, "a", "b", "c"))
    for name, token in (("a", 10), ("b", 11), ("c", 12)):
        guard.announce(stamp(token, 0, name))
    assert step(guard._of().highest()) == 12


def test_unprocessed_keys_that_count_as_missing_are_noticed(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = DynamoCells.reading

    async def forgetful(cells: DynamoCells, method: str, **arguments: Any) -> Any:
        return {**await reading(cells, method, **arguments), "UnprocessedKeys": {}}

    monkeypatch.setattr(DynamoCells, "reading", forgetful)
    monkeypatch.setattr(cellguard, "TRIES", 3)
    with pytest.raises((AssertionError, FencedError)):
        test_unprocessed_keys_are_asked_for_again(client)
