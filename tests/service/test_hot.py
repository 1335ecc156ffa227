"""Hot names: what is waited for, as far as a token may see it, and how long asks had queued."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

import fenced
from fenced.cli.looking import top
from fenced.runtime import clocks
from fenced.service.access import TokenFile
from fenced.service.api import Api
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced_testkit.servers import ServiceServer
from tests.service.inside import app_of

OWNERS = {"all": [], "jobs": ["jobs"]}


def test_a_token_sees_its_own_hot_names(tmp_path: Path) -> None:
    lines = [
        f'[[token]]\nid = "{who}"\nsha256 = "{hashlib.sha256(who.encode()).hexdigest()}"\n'
        f'rights = ["lease", "observe"]\n' + (f"names = {names}\n" if names else "")
        for who, names in OWNERS.items()
    ]
    (tmp_path / "tokens.toml").write_text("\n".join(lines))
    store = MemoryStore(clocks.now)
    api = Api(lambda runtime, _: MemoryAuthority(store, runtime), TokenFile(str(tmp_path / "tokens.toml")))

    async def story() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(api)), base_url="http://service"
        ) as http:

            async def get(who: str, path: str) -> httpx.Response:
                return await http.get(path, headers={"authorization": f"Bearer {who}"})

            async def ask(number: int, name: str) -> int:
                body = {
                    "attempt": f"{number:032x}", "names": [name], "ttl": 30, "wait": True, "holder": {"label": "w"},
                }  # fmt: skip
                of_all = {"authorization": "Bearer all", "prefer": "wait=0"}
                return (await http.post("/v1/leases", json=body, headers=of_all)).status_code

            assert (await get("all", "/v1/hot")).json() == {"hot": []}
            assert [await ask(number, name) for number, name in enumerate(("jobs/1", "orders"))] == [200, 200]
            for number, name in enumerate(("jobs/1", "orders", "orders"), 10):
                assert await ask(number, name) == 202
                assert await ask(number, name) == 202, "the same ask again counts once"
            hot = (await get("all", "/v1/hot")).json()["hot"]
            assert [(each["name"], each["count"]) for each in hot] == [("orders", 2), ("jobs/1", 1)]
            hot = (await get("jobs", "/v1/hot")).json()["hot"]
            assert [(each["name"], each["count"]) for each in hot] == [("jobs/1", 1)]
            released = {"attempt": f"{1:032x}"}
            of_all = {"authorization": "Bearer all"}
            assert (await http.post("/v1/leases/release", json=released, headers=of_all)).status_code == 200
            assert await ask(11, "orders") == 200
            text = (await get("all", "/metrics")).text
            assert "\nfenced_contended_total 3\n" in text
            assert "\nfenced_acquire_seconds_count 3\n" in text and "\nfenced_store_seconds_count 3\n" in text
        await api.close()

    asyncio.run(story())


@pytest.mark.xdist_group("service")
def test_fenced_top() -> None:
    with ServiceServer() as service, fenced.Client(service.url()) as client, client.hold("orders/42"):
        with fenced.Client(service.url()) as other, pytest.raises(fenced.NotGranted):
            other.acquire("orders/42", wait=0.1)
        done = CliRunner().invoke(top, ["--authority", service.url(), "--json"], catch_exceptions=False)
    (found,) = json.loads(done.stdout)
    assert (found["name"], found["waited_for"], found["held_by"]["token"]) == ("orders/42", 1, 1)
