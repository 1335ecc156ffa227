"""What a guard over DynamoDB costs, on an emulator, against the same requests without a guard, turn by turn."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians
from fenced.dynamodb import DynamoGuard
from fenced.values.model import Stamp
from fenced_testkit.servers import DynamoServer
from fenced_testkit.servers.dynamodb import KEYS, TABLE

ROUNDS = 300
NAME = "stock/42"
KEY = {"id": {"S": "42"}}
WRITE = {"TableName": "stock", "Item": {**KEY, "count": {"N": "10"}}}


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    import boto3

    os.environ.update(KEYS)
    with DynamoServer() as server:
        client: Any = boto3.client("dynamodb", endpoint_url=server.endpoint())
        guard = DynamoGuard(TABLE, prefix="bench")
        tokens = itertools.count(2)

        def put() -> None:
            client.put_item(**WRITE)

        def transact() -> None:
            client.transact_write_items(TransactItems=[{"Put": WRITE}])

        def get_and_put() -> None:
            client.get_item(TableName="stock", Key=KEY, ConsistentRead=True)
            client.put_item(**WRITE)

        def same() -> None:
            with guard.transaction(client, _stamp("same", 1)) as tx:
                tx.put(**WRITE)

        def newer() -> None:
            guard._of(client)._seen.clear()  # another process has written last
            with guard.transaction(client, _stamp("newer", next(tokens))) as tx:
                tx.get(TableName="stock", Key=KEY)
                tx.put(**WRITE)

        for key, what, ours, theirs, against in (
            (
                "dynamodb_same",
                "a transaction of the same holder: 1 request",
                same,
                transact,
                "transact_write_items",
            ),
            ("dynamodb_put", "the same", same, put, "put_item"),
            (
                "dynamodb_new",
                "read, modify and write, a new token: 4 requests",
                newer,
                get_and_put,
                "get_item and put_item",
            ),
        ):
            bare, fenced = medians(theirs, ours, rounds=effort.of(ROUNDS), warm_up=effort.size(10))
            yield ratio(key, what, fenced, bare, against=f"{against}, boto3 on an emulator")


def _stamp(name: str, token: int) -> Stamp:
    return Stamp("00000000000000aa", (name,), token, None, f"{token:032x}")
