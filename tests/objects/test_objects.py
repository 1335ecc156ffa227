"""ObjectGuard: objects are replaced by the newest holder alone, through boto3, aiobotocore and obstore."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import boto3
import obstore
import pytest
from aiobotocore.session import get_session
from botocore.config import Config
from click.testing import CliRunner
from obstore.store import MemoryStore, S3Store

import fenced
from fenced.cli.guards import guard as guard_commands
from fenced.drills.command import drill
from fenced.errors import Conflict, Misconfigured, Misuse, StaleToken, Uncovered, Unsupported
from fenced.guards.cells import Swapped, key_of
from fenced.objects import AsyncObjectGuard, ObjectGuard, bucket_policy
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.objects.guard import contents
from fenced.stores.objects.guard.buckets import ObstoreBucket, _version
from fenced.stores.objects.guard.cells import ObjectCells, ObjectMarks, path_of
from fenced.stores.objects.guard.contents import GuardedObjects
from fenced.values.model import Credential, Stamp
from fenced_testkit.servers import SeaweedServer
from fenced_testkit.servers.seaweedfs import BUCKET
from tests.bound import Bound
from tests.forking import said_by_child

pytestmark = pytest.mark.xdist_group("objects")
NAME = "reports/daily.csv"
_prefixes = (f"guard-{number}" for number in itertools.count())
BIG = 11 * 1024 * 1024


def stamp(token: int, seq: int = 1, name: str = NAME) -> Stamp:
    return Stamp("00000000000000aa", (name,), token, seq, f"{token:032x}")


def boto_client(endpoint: str, **config: Any) -> Any:
    return boto3.client("s3", endpoint_url=endpoint, config=Config(**config), **KEYS)


KEYS = {"region_name": "us-east-1", "aws_access_key_id": "a", "aws_secret_access_key": "b"}


def s3_store(endpoint: str, retries: int = 0, timeout: str = "30s") -> S3Store:
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        skip_signature=True,
        client_options={"allow_http": True, "timeout": timeout},
        retry_config={"max_retries": retries},
    )


@pytest.fixture(params=["boto3", "obstore"])
def guard(request: pytest.FixtureRequest, seaweed_server: SeaweedServer) -> Bound:
    if request.param == "boto3":
        return Bound(ObjectGuard(BUCKET, prefix=next(_prefixes)), boto_client(seaweed_server.endpoint()))
    return Bound(ObjectGuard(prefix=next(_prefixes)), s3_store(seaweed_server.endpoint()))


# What it does.


# proves guard s3: deletes-leave-a-mark
def test_a_stale_holder_changes_nothing(guard: Bound) -> None:
    with fenced.Client("memory:") as client:
        with client.hold(NAME) as first:
            guard.write(first, NAME, b"one")
            old = first.next_stamp()
        with client.hold(NAME) as new:
            with guard.change(new, NAME) as report:
                assert report.body == b"one"
                with pytest.raises(StaleToken):
                    guard.write(old, NAME, b"late")
                report.body = report.body + b", two"
            for late in (
                lambda: guard.write(old, NAME, b"late"),
                lambda: guard.delete(old, NAME),
                lambda: guard.upload(old, NAME, io.BytesIO(b"late")),
                lambda: guard.read(old, NAME),
            ):
                with pytest.raises(StaleToken):
                    late()  # type: ignore[no-untyped-call]
            assert guard.peek(NAME) == b"one, two"
            guard.delete(new, NAME)
            assert guard.read(new, NAME) is None and guard.peek(NAME) is None
            with pytest.raises(StaleToken):
                guard.write(old, NAME, b"created again")
            assert guard.peek(NAME) is None
            guard.write(new, NAME, b"three")
            assert guard.peek(NAME) == b"three"


async def test_the_same_in_asyncio(seaweed_server: SeaweedServer) -> None:
    session = get_session()
    async with session.create_client("s3", endpoint_url=seaweed_server.endpoint(), **KEYS) as client:
        with pytest.raises(Misuse, match="AsyncObjectGuard"):
            ObjectGuard(BUCKET).peek(client, NAME)
        guard = Bound(AsyncObjectGuard(BUCKET, prefix=next(_prefixes)), client)
        await guard.upload(stamp(5), NAME, io.BytesIO(b"x" * BIG))
        async with guard.change(stamp(6), NAME) as report:
            assert report.body == b"x" * BIG
            report.body = b"two"
        for late in (guard.write(stamp(5), NAME, b"late"), guard.delete(stamp(5), NAME)):
            with pytest.raises(StaleToken):
                await late
        await guard.announce(stamp(7), NAME)
        with pytest.raises(StaleToken):
            await guard.write(stamp(6), NAME, b"late")
        assert await guard.read(stamp(7), NAME) == await guard.peek(NAME) == b"two"
        await guard.download(stamp(7), NAME, file := io.BytesIO())
        assert file.getvalue() == b"two"
        assert await guard.sweep() == 1


async def test_a_lease_is_announced_at_its_grant() -> None:
    """By hold(guards=[...]), for the objects of all its names; in both colours."""
    store = MemoryStore()
    guard = Bound(ObjectGuard(), store)
    with fenced.Client("memory:") as client:
        lease = client.acquire("a", "b")
        older = lease.next_stamp()
        lease.release()
        with client.hold_all(["a", "b"], guards=[guard.on()]):
            for name in older.names:
                with pytest.raises(StaleToken):
                    guard.write(older, name, b"late")
    async with fenced.AsyncClient("memory:") as leases:
        other = Bound(AsyncObjectGuard(prefix="other"), store)
        async with leases.hold("c", guards=[other.on()]) as held:
            with pytest.raises(StaleToken):
                await other.write(held.next_stamp()._replace(token=held.token - 1), "c", b"late")


def test_large_objects(guard: Bound) -> None:
    """They are uploaded in parts under a new key; what is refused or overtaken is removed."""
    body = bytes(range(256)) * (BIG // 256)
    guard.upload(stamp(5), NAME, io.BytesIO(body))
    guard.download(stamp(5), NAME, file := io.BytesIO())
    assert file.getvalue() == body
    with guard.change(stamp(6), NAME) as report:
        report.body = (report.body or b"")[:100_000]
    assert guard.peek(NAME) == body[:100_000]
    assert len(payloads(guard)) == 2
    with pytest.raises(StaleToken):
        guard.write(stamp(5), NAME, body[:120_000])
    assert len(payloads(guard)) == 2, "what a refused writer has uploaded is deleted"
    guard.announce(stamp(7), NAME)
    assert guard.sweep() == 1 and guard.sweep() == 0
    assert guard.peek(NAME) == body[:100_000]
    with pytest.raises(KeyError):
        guard.download(stamp(1, name="other"), "other", io.BytesIO())


def test_uploads_that_were_not_completed(seaweed_server: SeaweedServer) -> None:
    """A failed one is aborted at once, one of a dead holder by `sweep` when a newer holder has announced."""
    client, prefix = boto_client(seaweed_server.endpoint()), next(_prefixes)
    guard = Bound(ObjectGuard(BUCKET, prefix=prefix), client)

    def unfinished() -> int:
        return len(client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", ()))

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert unfinished() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard.upload(stamp(5), NAME, Broken(b"x"))
    assert unfinished() == 0
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/payloads/5-{'0' * 32}/{NAME}=cell")
    assert unfinished() == 1 and guard.sweep() == 0, "its holder may still complete it"
    guard.announce(stamp(6), NAME)
    assert guard.sweep() == 1 and unfinished() == 0
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/payloads/5-{'1' * 32}/{NAME}=cell")
    guard._of().marks._known = None
    step(guard._of().marks.set_mode("shadow"))
    assert guard.sweep() == 0, "in this mode its holder is let through"
    step(guard._of().marks.set_mode("enforce"))
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/payloads/0-{'0' * 32}/{NAME}=cell")
    assert (guard.sweep(), unfinished()) == (1, 1), "who writes without a lease is let through"
    step(guard._of().marks.set_mode("require"))
    assert (guard.sweep(), unfinished()) == (1, 0)


def test_a_body_that_looks_like_the_guards_own(guard: Bound) -> None:
    for body in (contents._DELETED, contents._LARGE + b"x", b""):
        guard.write(stamp(5), NAME, body)
        assert guard.peek(NAME) == body


def config_is_known(guard: Bound) -> None:
    """The configuration is not read again for a minute, so that no request depends on how fast a test is."""
    marks = guard._of().marks
    marks._known = step(marks._config())._replace(at=marks._runtime.now() + 60)


def payloads(guard: Bound) -> list[str]:
    return step(guard._of()._bucket.keys("payloads/"))


def test_blocks(guard: Bound) -> None:
    guard.write(stamp(5), NAME, b"one")
    with pytest.raises(ZeroDivisionError), guard.change(stamp(5), NAME) as report:
        report.body = b"half"
        raise ZeroDivisionError
    with guard.change(stamp(5), NAME):
        pass
    assert guard.peek(NAME) == b"one"
    with pytest.raises(Conflict), guard.change(stamp(5), NAME) as report:
        guard.write(stamp(5, 2), NAME, b"another thread")
        report.body = b"one more"
    assert guard.peek(NAME) == b"another thread"
    with pytest.raises(Uncovered):
        guard.write(stamp(5), "other", b"")
    with pytest.raises(Misuse, match="bytes"):
        guard.write(stamp(5), NAME, "text")


def test_how_many_requests(seaweed_server: SeaweedServer) -> None:
    """Three for a new token, two for the same holder's next change; the configuration is read once a second."""
    client, prefix = boto_client(seaweed_server.endpoint()), next(_prefixes)
    sent: list[str] = []
    client.meta.events.register("before-send.s3", lambda request, **_: sent.append(request.method))

    def change(guard: Bound, token: int) -> list[str]:
        config_is_known(guard)
        sent.clear()
        with guard.change(stamp(token), NAME) as report:
            report.body = (report.body or b"") + b"x"
        return list(sent)

    for token in (1, 2):
        guard = Bound(ObjectGuard(BUCKET, prefix=prefix), client)
        guard.peek(NAME)
        first = change(guard, token)
    assert first == ["GET", "PUT", "PUT"]
    assert change(guard, 2) == ["GET", "PUT"]
    assert change(guard, 3) == ["PUT", "PUT"], "nobody else has written since"
    assert Bound(ObjectGuard(BUCKET, prefix=prefix), client).peek(NAME) == b"xxxx"


def test_no_mark_is_ever_deleted(seaweed_server: SeaweedServer) -> None:
    """So nothing depends on how the store treats the condition of a DELETE, and the policy may deny it."""
    client, prefix = boto_client(seaweed_server.endpoint()), next(_prefixes)
    deleted: list[str] = []

    def note(request: Any, **_: Any) -> None:
        if request.method == "DELETE":
            deleted.append(request.url.partition(f"/{prefix}/")[2].partition("/")[0])

    client.meta.events.register("before-send.s3", note)
    guard = Bound(ObjectGuard(BUCKET, prefix=prefix), client)
    guard.upload(stamp(5), NAME, io.BytesIO(b"large"))
    guard.delete(stamp(6), NAME)
    with pytest.raises(StaleToken):
        guard.write(stamp(5, 2), NAME, b"x" * BIG)
    assert guard.sweep() == 1
    assert deleted == ["probe", "payloads", "payloads"]


def test_a_thousand_late_writes() -> None:
    guard = Bound(ObjectGuard(), MemoryStore())
    guard.write(stamp(5), NAME, b"old")
    guard.write(stamp(6), NAME, b"new")
    for seq in range(1000):
        with pytest.raises(StaleToken):
            guard.write(stamp(5, seq), NAME, b"late")
    assert guard.peek(NAME) == b"new"


async def test_a_thousand_late_puts(seaweed_server: SeaweedServer) -> None:
    """A holder judges its writes, pauses, is overtaken, and sends them at once: the store refuses every one."""
    store, prefix = s3_store(seaweed_server.endpoint()), next(_prefixes)
    paused, newer = (Bound(AsyncObjectGuard(prefix=prefix), store) for _ in range(2))
    await paused.write(stamp(5), NAME, b"old")
    cells = paused._of().marks.cells
    version, blob = await cells.get(key_of(NAME))
    assert blob is not None
    await newer.announce(stamp(6), NAME)
    late = [cells.swap([(key_of(NAME), version, blob + b"%d" % number)]) for number in range(1000)]
    assert not any(await asyncio.gather(*late))
    with pytest.raises(StaleToken):
        await paused.write(stamp(5), NAME, b"late")
    assert await newer.peek(NAME) == b"old"


def eight_holders(guards: Callable[[], Bound]) -> None:
    """Each changes an object under ever newer tokens, of which the others have drawn higher ones meanwhile."""
    tokens = itertools.count(1)
    acknowledged: list[int] = []

    def hold(guard: Bound) -> None:
        for _ in range(8):
            mine = stamp(next(tokens))
            with contextlib.suppress(StaleToken):
                with guard.change(mine, NAME) as log:
                    log.body = (log.body or b"") + b"%d\n" % mine.token
                acknowledged.append(mine.token)

    with ThreadPoolExecutor(8) as holders:
        list(holders.map(hold, [guards() for _ in range(8)]))
    admitted = [int(line) for line in (guards().peek(NAME) or b"").split()]
    assert admitted == sorted(acknowledged) and admitted[-1] == 64


def test_tokens_of_eight_holders_never_fall(seaweed_server: SeaweedServer) -> None:
    prefix, store = next(_prefixes), s3_store(seaweed_server.endpoint())
    eight_holders(lambda: Bound(ObjectGuard(prefix=prefix), store))


# proves guard s3: token-in-body
def test_no_two_versions_are_alike() -> None:
    """The same contents under the same token again: a stale comparison must not match."""
    store = MemoryStore()
    guard = Bound(ObjectGuard(), store)
    bodies = set()
    for token in (5, 5, 6, 6):
        guard.write(stamp(token), NAME, b"the same")
        bodies.add(bytes(obstore.get(store, f"n/{NAME}=cell").bytes()))
    assert len(bodies) == 4


def test_the_policy_denies_unconditional_writes_of_cells() -> None:
    policy = bucket_policy("shop", "guarded/")
    assert policy["Statement"][0]["Resource"][0] == "arn:aws:s3:::shop/guarded/n/*"
    for wrong in ("", "a/b", "*"):
        with pytest.raises(Misuse):
            bucket_policy(wrong)
    printed = CliRunner().invoke(guard_commands, ["policy", "s3://shop/guarded"])
    assert json.loads(printed.stdout) == policy and "passes" in printed.stderr
    for url in ("gs://shop/guarded", "memory://shop"):
        assert isinstance(CliRunner().invoke(guard_commands, ["policy", url]).exception, Unsupported)


@pytest.mark.parametrize(
    "url, words",
    {
        "s3:///prefix": "s3://bucket/prefix",
        "s3://key:secret@bucket/prefix": "s3://bucket/prefix",
        "s3://bucket?colour=red": "colour",
        "gs://bucket?endpoint=http://x": "endpoint",
        "az://container": "Account must be specified",
    }.items(),
)
def test_wrong_addresses(url: str, words: str) -> None:
    with pytest.raises((Misuse, Misconfigured), match=words):
        fenced.Values(url)


def test_addresses_of_other_clouds() -> None:
    """The prefix, the rule, the container: nothing is sent."""
    made = fenced.Values("az://container/a/b?account=shop&rule=once")._guard
    assert isinstance(made, ObjectMarks) and isinstance(made.cells.bucket, ObstoreBucket)
    assert made.cells.bucket._prefix == "a/b/" and made._first.rule == "once"
    assert isinstance(fenced.Values("gs://bucket")._guard, ObjectMarks)


def test_obstore_in_a_forked_child() -> None:
    """Its threads are missing there: an error instead of a request without an end."""
    guard = Bound(ObjectGuard(), MemoryStore())
    guard.write(stamp(5), NAME, b"")

    def child() -> str:
        with pytest.raises(Misuse) as caught:
            guard.write(stamp(5), NAME, b"")
        return caught.typename

    assert said_by_child(child) == "Misuse"


def test_wrong_stores() -> None:
    with pytest.raises(Misuse, match="name of a bucket"):
        ObjectGuard().peek(boto_client("http://127.0.0.1:1"), NAME)
    with pytest.raises(Misuse, match="name of a bucket"):
        ObjectGuard(BUCKET).peek(object(), NAME)
    with pytest.raises(Misuse, match="leave `bucket` out"):
        ObjectGuard(BUCKET).peek(MemoryStore(), NAME)


def test_a_storm(seaweed_server: SeaweedServer) -> None:
    address = seaweed_server.url(next(_prefixes))
    short = ["--seconds", "5", "--holders", "2", "--names", "1"]
    result = CliRunner().invoke(drill, ["storm", "--seed", "7", "--guard", address, *short, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["verdict"] == "held" and found["overtaken"] > 0


# Writers that die.


class Died(BaseException):
    """The process ends here: nothing after it is sent."""


class MortalBucket(ObstoreBucket):
    """Its process dies at the request with this number, before it is sent or before its reply arrives."""

    def __init__(self, store: Any, dies_at: int, after: bool) -> None:
        super().__init__(store, "", BlockingRuntime())
        self.left, self.after = dies_at, after

    async def get(self, key: str) -> Any:
        return await self._count(super().get(key))

    async def put(self, key: str, body: bytes, version: Any) -> Any:
        return await self._count(super().put(key, body, version))

    async def upload(self, key: str, file: BinaryIO) -> None:
        await self._count(super().upload(key, file))

    async def delete(self, key: str) -> None:
        await self._count(super().delete(key))

    async def _count(self, request: Any) -> Any:
        self.left -= 1
        if self.left < 0 or (self.left == 0 and not self.after):
            request.close()
            raise Died
        reply = await request
        if self.left == 0:
            raise Died
        return reply


def objects_on(bucket: Any) -> GuardedObjects:
    return GuardedObjects(
        ObjectMarks(ObjectCells(bucket), BlockingRuntime(), "s3://x"), bucket, BlockingRuntime()
    )


def dies(body: bytes, dies_at: int, after: bool) -> tuple[bool, bool]:
    """A writer dies at this request: whether it died, and whether its write has happened."""
    store = MemoryStore()
    Bound(ObjectGuard(), store).write(stamp(5), NAME, b"old")
    mortal = objects_on(MortalBucket(store, dies_at, after))
    died = False
    try:
        step(mortal.announce(Credential((stamp(6, 0),)), NAME))
        step(mortal.write(Credential((stamp(6),)), NAME, body))
    except Died:
        died = True
    other = Bound(ObjectGuard(), store)
    found = other.peek(NAME)
    assert found in ((b"old", body) if died else (body,))
    assert other.read(stamp(7), NAME) == found
    with pytest.raises(StaleToken):
        other.write(stamp(6, 2), NAME, b"late")
    other.sweep()
    assert other.peek(NAME) == found, "sweeping takes nothing that is in use"
    assert len(payloads(other)) == (found == body and len(body) > contents.SMALL_BYTES)
    return died, found == body


@pytest.mark.parametrize("body", [b"new", b"x" * 100_000], ids=["small", "large"])
def test_a_writer_that_dies_leaves_all_or_nothing(body: bytes) -> None:
    outcomes = set()
    for after in (False, True):
        for dies_at in itertools.count(1):
            outcomes.add(outcome := dies(body, dies_at, after))
            if outcome == (False, True):
                break
    assert outcomes == {(True, False), (True, True), (False, True)}


# The checks can fail.


async def _unconditional(self: ObjectCells, changes: Any) -> Swapped:
    """The mark is compared by the client and not by the store."""
    ((key, _, blob),) = changes
    bucket = self.bucket
    assert isinstance(bucket, ObstoreBucket)
    return Swapped((_version(obstore.put(bucket._store, bucket._prefix + path_of(key), blob)),))


async def _sweep_everything(self: GuardedObjects) -> int:
    """What is in use is swept too."""
    for path in await self._bucket.keys("payloads/"):
        await self._bucket.delete(path)
    return 0


async def _write_in_place(self: GuardedObjects, carried: Any, name: str, file: BinaryIO, expect: Any) -> None:
    """The cell names the upload before it is there."""
    path = path_of("payloads/6-x/" + name)
    await self.marks.write(carried, name, contents._LARGE + path.encode(), expect=expect)
    await self._bucket.upload(path, file)


def test_the_checks_can_fail(seaweed_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def holders() -> None:
        test_tokens_of_eight_holders_never_fall(seaweed_server)

    def dying() -> None:
        test_a_writer_that_dies_leaves_all_or_nothing(b"x" * 100_000)

    for owner, method, bug, check in (
        (ObjectCells, "swap", _unconditional, holders),
        (GuardedObjects, "sweep", _sweep_everything, dying),
        (GuardedObjects, "_upload", _write_in_place, dying),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, bug)
            with pytest.raises((AssertionError, fenced.FencedError)):
                check()


def test_a_rule_that_is_not_installed(seaweed_server: SeaweedServer) -> None:
    store, prefix = s3_store(seaweed_server.endpoint()), next(_prefixes)
    Bound(ObjectGuard(prefix=prefix), store).write(stamp(5), NAME, b"one")
    wrong = Bound(ObjectGuard(prefix=prefix, rule="once"), store)
    with pytest.raises(Misconfigured, match=r"rule retry.*says once"):
        wrong.write(stamp(5, 2), NAME, b"two")
    assert Bound(ObjectGuard(prefix=prefix), store).peek(NAME) == b"one"
