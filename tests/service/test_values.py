"""The values of the service: what their guard admits and refuses over HTTP, and which requests are none."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from fenced.errors import AlreadyApplied, Conflict, MissingStamp, StaleToken
from fenced.http import stamping
from fenced.http.httpx import AsyncStampingTransport
from fenced.http.protocol import fence_headers
from fenced.net.problems import error_from
from fenced.runtime import clocks
from fenced.service.access import TokenFile
from fenced.service.api import Api
from fenced.service.values import values_beside
from fenced.service.watched import WatchedGuard
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.model import Stamp
from tests.service.inside import app_of

GUARDS = ("memory://{0}", "sqlite:///{1}/values.db", "file://{1}")


class Program:
    """A program that calls an instance in this process."""

    def __init__(self, api: Api, bearer: str = "") -> None:
        headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(api)), base_url="http://service", headers=headers
        )

    async def take(self, name: str) -> str:
        """A lease; whoever held the name loses it to an operator. Returns the stamp."""
        held = (await self.http.get(f"/v1/names/{name}")).json()["held_by"]
        if held is not None:
            taken = {"token": held["token"]}
            assert (await self.http.post(f"/v1/names/{name}/force-release", json=taken)).status_code == 200
        ask = {"attempt": secrets.token_hex(16), "names": [name], "ttl": 600}
        granted = await self.http.post("/v1/leases", json=ask)
        assert granted.status_code == 200
        return str(granted.json()["stamp"])

    async def write(self, name: str, value: bytes, stamp: str, **headers: str) -> httpx.Response:
        stamped = {"fenced-stamp": f'"{stamp}"'} if stamp else {}
        return await self.http.put(f"/v1/values/{name}", content=value, headers={**stamped, **headers})

    async def read(self, name: str, stamp: str = "") -> httpx.Response:
        stamped = {"fenced-stamp": f'"{stamp}"'} if stamp else {}
        return await self.http.get(f"/v1/values/{name}", headers=stamped)


def error_of(answer: httpx.Response) -> object:
    return error_from(answer.status_code, answer.headers["content-type"], answer.content)


@asynccontextmanager
async def served(
    values: str | None, tokens: TokenFile | None = None, guards: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Program, Api]]:
    store = MemoryStore(clocks.now)
    api = Api(lambda runtime, _: MemoryAuthority(store, runtime), tokens, values=values, guards=guards)
    await api.namespaces.opened("default", create=True)
    program = Program(api)
    try:
        yield program, api
    finally:
        await program.http.aclose()
        await api.close()


@pytest.mark.parametrize("guard", GUARDS)
async def test_a_stale_holder_is_refused(guard: str, tmp_path: Path) -> None:
    """The storage service of the story: the highest token of each name decides."""
    async with served(guard.format(tmp_path.name, tmp_path)) as (program, api):
        assert isinstance(error_of(await program.write("a/b", b"x", "")), MissingStamp)
        stranger = f"1:{'0' * 16}:9:-:{'1' * 32}:a/b"  # comes first, and still does not say whom to trust
        assert (await program.write("a/b", b"x", stranger)).json()["type"] == "urn:fenced:problem:foreign"
        assert (await program.read("a/b")).status_code == 404
        old = await program.take("a/b")
        first = await program.write("a/b", b"\x00first", old)
        assert (first.status_code, first.headers["etag"], first.json()) == (200, '"1"', {"version": 1})
        new = await program.take("a/b")
        found = await program.read("a/b", new)  # announces, before the new holder has written anything
        assert (found.content, found.headers["etag"]) == (b"\x00first", '"1"')
        late = await program.write("a/b", b"late", old)
        error = error_of(late)
        assert isinstance(error, StaleToken) and (error.name, error.mark) == ("a/b", 3)
        assert old.split(":")[4] not in late.text and "late" not in late.text
        assert (await program.read("a/b", old)).status_code == 412
        assert isinstance(error_of(await program.write("a/b", b"2", new, **{"if-match": '"7"'})), Conflict)
        assert isinstance(error_of(await program.write("a/b", b"2", new, **{"if-none-match": "*"})), Conflict)
        second = await program.write("a/b", b"second", new, **{"if-match": '"1"'})
        assert second.headers["etag"] == '"2"'
        other = await program.take("other")
        assert (await program.write("a/b", b"x", other)).json()["type"] == "urn:fenced:problem:uncovered"
        assert (await program.read("a/b")).content == b"second"
        assert (await program.http.get("/v1/marks/a/b")).json() == {"name": "a/b", "token": 3}
        assert (await program.http.get("/v1/marks/nobody")).json()["token"] == 0
        refused = [event for event in api.events.since(0) if event.kind == "refused"]
        assert [event.why for event in refused] == ["missing", "foreign", "stale", "stale", "uncovered"]
        assert (refused[2].token, refused[2].mark) == (1, 3)
        assert (refused[2].grant, refused[2].mark_grant) == (old.split(":")[4], new.split(":")[4])
        metrics = (await program.http.get("/metrics")).text
        for kind, count in {"stale": 2, "missing": 1, "uncovered": 1, "foreign": 1}.items():
            assert (
                f'fencing_reject_total{{guard="values",kind="{kind}",source="service"}} {count}\n' in metrics
            )
        of = '{guard="values",ruling="refuse",source="service"}'
        assert f"\ncritical_write_without_token_total{of} 1\n" in metrics
        of = 'guard="values",source="service"'
        for line in (
            f'bucket{{{of},le="-3"}} 0',
            f'bucket{{{of},le="-2"}} 2',
            f'bucket{{{of},le="1"}} 2',
            f'bucket{{{of},le="2"}} 3',  # the new holder has raised the mark from 1 to 3
            f"sum{{{of}}} -2",
            f"count{{{of}}} 3",
        ):
            assert f"\ntoken_gap_{line}\n" in metrics
        assert '\nlease_expired_while_executing_total{reason="expired"} 0\n' in metrics


@pytest.mark.parametrize("guard", GUARDS)
async def test_a_refusal_is_one_event(guard: str, tmp_path: Path) -> None:
    """Also if the page reads the records of the guard: some guards keep them where the page finds them."""
    url = guard.format(tmp_path.name, tmp_path)
    async with served(url, guards=(url,)) as (program, api):
        old, new = [await program.take("a") for _ in range(2)]
        assert (await program.write("a", b"new", new)).status_code == 200
        for stamp in (old, "", old, await program.take("b"), f"1:{'0' * 16}:9:-:{'1' * 32}:a"):
            assert (await program.write("a", b"late", stamp)).status_code >= 400
        watched = WatchedGuard(url)
        wanted, refused = ["stale", "missing", "stale", "uncovered", "foreign"], list[str]()
        while refused != wanted:  # guards over cells write once a second
            for record in await watched.look(status=False):
                api.events.decided(record, url)
            refused = [event.why for event in api.events.since(0) if event.kind == "refused"]
            assert refused == wanted[: len(refused)]
            await asyncio.sleep(0.05)
        await watched.close()


async def test_a_repeated_write_is_applied_once(tmp_path: Path) -> None:
    """Rule `sequenced`: the stamp identifies the operation, so a client may send it again after a broken connection."""
    async with served(f"memory://{tmp_path.name}?rule=sequenced") as (program, _):
        stamp = Stamp.parse(await program.take("a"))._replace(seq=1)
        headers = fence_headers(stamp)
        once = await program.http.put("/v1/values/a", content=b"1", headers=headers)
        again = await program.http.put("/v1/values/a", content=b"1", headers=headers)
        assert once.json() == {"version": 1} and isinstance(error_of(again), AlreadyApplied)
        unnumbered = await program.write("a", b"1", str(stamp._replace(seq=None)))
        assert unnumbered.json()["type"] == "urn:fenced:problem:invalid"


async def test_senders_raise_what_the_service_refused(tmp_path: Path) -> None:
    """It speaks the protocol of receivers, so the hooks in HTTP clients work with it."""
    async with served(f"memory://{tmp_path.name}") as (program, api):
        old, new = [Stamp.parse(await program.take("a")) for _ in range(2)]
        inner = httpx.ASGITransport(app_of(api))
        transport = AsyncStampingTransport("http://service", inner=inner)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            with stamping(new):
                assert (await http.put("/v1/values/a", content=b"new")).json() == {"version": 1}
            with stamping(old), pytest.raises(StaleToken) as refused:
                await http.put("/v1/values/a", content=b"old")
            assert refused.value.stamp == old and refused.value.mark == new.token


async def test_requests_that_are_none(tmp_path: Path) -> None:
    async with served(f"memory://{tmp_path.name}") as (program, _):
        stamp = await program.take("a")
        for headers in (
            {"fenced-stamp": stamp},  # without quotation marks
            {"fenced-stamp": f'"{stamp}x, y"'},
            {"fenced-proof": '"1"'},
            {"fenced-stamp": f'"{stamp}"', "if-match": "*"},
            {"fenced-stamp": f'"{stamp}"', "if-match": 'W/"1"'},
            {"fenced-stamp": f'"{stamp}"', "if-match": '"1"', "if-none-match": "*"},
        ):
            assert (await program.http.put("/v1/values/a", content=b"x", headers=headers)).status_code == 400
        assert (await program.http.get("/v1/values/a?at_least=-1")).status_code == 400
        for path in ("values/a%0Ab", "values/%0A", "marks/%00", "values/a?at_least=null"):
            assert (await program.http.get(f"/v1/{path}")).status_code == 400
        waits = await program.http.get("/v1/values/a?at_least=5")
        assert (waits.status_code, waits.headers["retry-after"]) == (503, "1")
        assert (await program.write("a", b"x" * 70_000, stamp)).status_code == 413
        assert (await program.read("a")).status_code == 404, "nothing was written"
    async with served(None) as (program, _):
        assert (await program.read("a")).json()["type"] == "urn:fenced:problem:unsupported"


async def test_values_need_the_right_guard(tmp_path: Path) -> None:
    """The right `guard`, for the names of the token; a namespace in the query does not widen that."""
    file = tmp_path / "tokens.toml"
    rights = {
        "all": 'rights = ["lease", "guard", "observe", "operate"]',
        "some": 'rights = ["guard"]\nnames = ["a"]',
        "other": 'rights = ["guard"]\nnamespaces = ["other"]',
        "none": 'rights = ["lease", "observe", "operate"]',
    }
    entry = '[[token]]\nid = "{0}"\nsha256 = "{1}"\n{2}\n'
    file.write_text(
        "".join(entry.format(who, hashlib.sha256(who.encode()).hexdigest(), rights[who]) for who in rights)
    )
    async with served(f"memory://{tmp_path.name}", TokenFile(str(file))) as (_, api):
        stamp = await Program(api, "all").take("a/1")
        expected = [("some", "a/1", 200), ("some", "b", 403), ("none", "a/1", 403), ("other", "a/1", 403)]
        expected += [("other", "a/1?namespace=other", 403), ("", "a/1", 401)]
        for who, name, status in expected:
            assert (await Program(api, who).write(name, b"x", stamp)).status_code == status, (who, name)


def test_where_the_values_are() -> None:
    assert values_beside("sqlite:////var/lib/leases.db") == "sqlite:////var/lib/leases.values.db"
    assert values_beside("ledger:///.serve/leases") == "sqlite:///.serve/leases.values.db"
    assert values_beside("postgresql://db/shop") is None
