"""What a guard over objects costs: a guarded change against a GET and a PUT through the same client, turn by turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians
from fenced.objects import ObjectGuard
from fenced.values.model import Stamp
from fenced_testkit.servers import SeaweedServer
from fenced_testkit.servers.seaweedfs import BUCKET

ROUNDS = 200
BODY = b"x" * 1024
NAME = "stock/42"


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    import boto3

    with SeaweedServer() as server:
        client: Any = boto3.client(
            "s3",
            endpoint_url=server.endpoint(),
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        client.put_object(Bucket=BUCKET, Key="plain", Body=BODY)
        guards = [ObjectGuard(BUCKET, prefix="bench") for _ in range(2)]
        tokens = itertools.count(2)

        def plain() -> None:
            client.get_object(Bucket=BUCKET, Key="plain")["Body"].read()
            client.put_object(Bucket=BUCKET, Key="plain", Body=BODY)

        def change(guard: ObjectGuard, name: str, token: int) -> None:
            with guard.change(client, _stamp(name, token), name) as found:
                found.body = BODY

        def newer() -> None:  # the guards take turns, so neither remembers what is there
            token = next(tokens)
            guard = guards[token % 2]
            guard._of(client).marks._seen.clear()
            change(guard, "newer", token)

        def same() -> None:
            change(guards[0], "same", 1)

        for key, what, action, target in (
            (
                "objects_new",
                "read, modify and write an object of 1 KB, a new token each: 3 requests",
                newer,
                2.2,
            ),
            ("objects_same", "the same, the same token: 2 requests", same, None),
        ):
            theirs, ours = medians(plain, action, rounds=effort.of(ROUNDS), warm_up=effort.size(10))
            yield ratio(key, what, ours, theirs, target=target, against="GET and PUT, boto3 on SeaweedFS")


def _stamp(name: str, token: int) -> Stamp:
    return Stamp("00000000000000aa", (name,), token, None, f"{token:032x}")
