"""Two tokens with disjoint names: what one of them does neither changes the other nor is visible to it.

Random requests of both are played to one instance, and those of each alone to another one. Everything that a client is
answered must be the same both times. Exempt are what docs/service.md names: gaps between tokens (answers are compared
with the rank of a token in place of its number), `/metrics`, and the numbers of a namespace on the live page.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fenced.service import api, events, live
from fenced.service.access import Principal, TokenFile
from fenced.service.api import Api
from fenced.service.namespaces import ServedNamespace
from fenced.service.requests import Call
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.contracts import Authority, Runtime
from tests.service.inside import Written, app_of

NAMES = {"one": "job", "two": "jobs"}
"""What each token may use, and everything below it."""
STEPS = 50
EXEMPT = frozenset({"last_token", "number", "samples", "sample", "hour", "store"})


class Place:
    """One instance before an empty store, whose clock stands still until it is moved."""

    now = 1000.0

    def __init__(self, folder: Path, store: str) -> None:
        Place.now = 1000.0
        lines = [
            f'[[token]]\nid = "{who}"\nsha256 = "{hashlib.sha256(who.encode()).hexdigest()}"\n'
            f'rights = ["lease", "guard", "observe", "operate"]\n'
            f'names = ["{name}"]\nnamespaces = ["default", "{who}"]\n'
            for who, name in NAMES.items()
        ]
        (folder / "tokens.toml").write_text("".join(lines))
        self._memories: dict[str, MemoryStore] = {}
        self._path = folder / f"{secrets.token_hex(4)}.ledger"
        make = self._memory if store == "memory" else self._ledger
        values = f"memory://{secrets.token_hex(8)}"
        self.api = Api(make, TokenFile(str(folder / "tokens.toml")), values=values)

    def _memory(self, runtime: Runtime, namespace: str) -> Authority:
        if namespace not in self._memories:
            self._memories[namespace] = MemoryStore(lambda: self.now)
            self._memories[namespace].realm = f"{len(namespace):016x}"
        return MemoryAuthority(self._memories[namespace], runtime)

    def _ledger(self, runtime: Runtime, namespace: str) -> Authority:
        return LedgerAuthority(self._path, runtime, namespace=namespace, clock=lambda: round(self.now * 1e9))


class Client:
    """One token. What it sends depends on its own random numbers and on what it was answered, and on nothing else."""

    def __init__(self, place: Place, who: str, seed: int) -> None:
        self._draw = random.Random(f"{seed} {who}")
        self._place = place
        self._who = who
        headers = {"authorization": f"Bearer {who}"}
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(place.api)), base_url="http://service", headers=headers
        )
        self._attempts: list[str] = []
        self._stamps: list[str] = [f"1:{0:016x}:{2**53 - 2}:-:{1:032x}:job"]
        self.answered: list[Any] = []

    async def step(self) -> None:
        kinds = [
            self._ask,
            self._renew,
            self._end,
            self._batch,
            self._look,
            self._take,
            self._value,
            self._page,
        ]
        await self._draw.choices(kinds, (6, 2, 3, 2, 4, 2, 4, 1))[0]()

    async def _send(self, method: str, path: str, body: object = None, **options: Any) -> Any:
        if body is not None:
            options["content"] = json.dumps(body)
        answer = await self._http.request(method, path, **options)
        kind = answer.headers.get("content-type", "")
        found = answer.json() if "json" in kind else answer.text
        self.answered.append([method, path, answer.status_code, found])
        return found if isinstance(found, dict) else {}

    def _name(self) -> str:
        """Mostly one of its own; sometimes one of the other's."""
        whose = self._who if self._draw.random() < 0.8 else self._draw.choice(list(NAMES))
        return self._draw.choice(
            (NAMES[whose], f"{NAMES[whose]}/1", f"{NAMES[whose]}/2", f"{NAMES[whose]}/2/3")
        )

    def _asked(self) -> dict[str, object]:
        if self._attempts and self._draw.random() < 0.2:
            attempt = self._draw.choice(self._attempts)
        else:
            attempt = f"{self._draw.getrandbits(128):032x}"
            self._attempts.append(attempt)
        names = sorted({self._name() for _ in range(self._draw.choice((1, 1, 1, 2)))})
        holder = {"id": self._draw.choice(("shared", self._who)), "label": self._who}
        count = {"number": self._draw.randrange(1, 50), "settled": self._draw.randrange(60)}
        return {
            "attempt": attempt, "names": names, "ttl": self._draw.choice((20, 600)), "holder": holder,
            "wait": self._draw.random() < 0.5, "lock_delay": self._draw.choice((0, 0, 5)),
            **(count if self._draw.random() < 0.2 else {}),
        }  # fmt: skip

    def _attempt(self) -> str:
        return self._draw.choice([*self._attempts, hashlib.md5(self._who.encode()).hexdigest()])

    async def _ask(self) -> None:
        found = await self._send("POST", "/v1/leases" + self._namespace(), self._asked())
        self._stamps += [found["stamp"]] if "stamp" in found else []

    def _namespace(self) -> str:
        return self._draw.choice(("", "", "", f"?namespace={self._draw.choice(list(NAMES))}"))

    async def _renew(self) -> None:
        await self._send("POST", "/v1/leases/renew", {"attempts": [self._attempt(), self._attempt()]})

    async def _end(self) -> None:
        way = self._draw.choice(("release", "withdraw"))
        keep = {"keep": 5} if way == "release" and self._draw.random() < 0.3 else {}
        await self._send("POST", f"/v1/leases/{way}", {"attempt": self._attempt(), **keep})

    async def _batch(self) -> None:
        do = [{"ask": self._asked()}, {"renew": self._attempt()}, {"release": {"attempt": self._attempt()}}]
        await self._send("POST", "/v1/batch", {"do": do})

    async def _look(self) -> None:
        path = self._draw.choice(("", f"/{self._name()}", "?limit=1", f"?limit=2&after={self._name()}"))
        await self._send("GET", f"/v1/names{path}")
        await self._send("GET", "/v1" + self._namespace())

    async def _take(self) -> None:
        name, way = self._name(), self._draw.random()
        if way < 0.1:
            await self._send("POST", "/v1/floor", {"above": 5})
        elif way < 0.2:
            await self._send("POST", "/v1/tidy", {})
        elif way < 0.3:
            await self._send("POST", "/v1/namespaces", {"namespace": self._draw.choice(list(NAMES))})
        else:
            held = (await self._send("GET", f"/v1/names/{name}")).get("held_by")
            token = held["token"] if held else 0
            await self._send("POST", f"/v1/names/{name}/force-release", {"token": token, "reason": "test"})

    async def _value(self) -> None:
        name = self._name()
        headers = (
            {"fenced-stamp": f'"{self._draw.choice(self._stamps)}"'} if self._draw.random() < 0.8 else {}
        )
        method = self._draw.choice(("GET", "PUT", "PUT"))
        options: dict[str, Any] = {"content": self._who} if method == "PUT" else {}
        await self._send(method, f"/v1/values/{name}", headers=headers, **options)
        await self._send("GET", f"/v1/marks/{name}")

    async def _page(self) -> None:
        """The first state of the live page, and the page without a script."""
        cookie = {"cookie": f"fenced_token={self._who}", "authorization": ""}
        page = await self._http.get("/", headers={k: v for k, v in cookie.items() if v})
        rows = re.findall(r'<td role="cell" class="(\w+)">([^<]*)<', page.text)
        self.answered.append(["GET", "/", page.status_code, [row for row in rows if row[0] != "token"]])
        by = self._place.api.tokens.shown(self._who)  # type: ignore[union-attr]
        assert by is not None
        namespace = await self._place.api.namespaces.get("default")
        # It looks as soon as it is opened.
        pages = live.Live(self._place.api.namespaces, self._place.api.events)
        stream = await pages.open(namespace, by)
        sent: list[bytes] = []

        def write(message: bytes) -> None:
            sent.append(message)
            if b"event: state" in message:
                raise EOFError

        exchange: Any = Written(write)
        with pytest.raises(EOFError):
            await stream.send(exchange)
        await pages.close()
        for piece in sent:
            self.answered.append(json.loads(piece.decode().split("\n")[1].removeprefix("data: ")))

    async def close(self) -> None:
        await self._http.aclose()


TOKEN = re.compile(r'("(?:token|mark|floor)": |1:realm:|token |stale: )(\d+)')


def ranked(answers: list[Any]) -> list[Any]:
    """The answers with ranks in place of tokens and realms, and without what is exempt."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(each) for key, each in value.items() if key not in EXEMPT}
        return [cleaned(each) for each in value] if isinstance(value, list) else value

    texts = [re.sub(r"\b[0-9a-f]{16}\b", "realm", json.dumps(cleaned(each))) for each in answers]
    seen: dict[str, set[int]] = {}
    for text in texts:  # tokens of different namespaces are not compared with each other
        seen.setdefault(namespace_of(text), set()).update(int(number) for _, number in TOKEN.findall(text))
    ranks = {
        each: {number: place for place, number in enumerate(sorted(numbers))}
        for each, numbers in seen.items()
    }
    return [_with_ranks(text, ranks[namespace_of(text)]) for text in texts]


def _with_ranks(text: str, ranks: dict[int, int]) -> str:
    return TOKEN.sub(lambda it: f"{it[1]}{ranks[int(it[2])]}", text)


def namespace_of(text: str) -> str:
    found = re.search(r"[?]namespace=(\w+)", text)
    return found[1] if found else "default"


async def play(folder: Path, store: str, seed: int, present: list[str]) -> dict[str, list[Any]]:
    """What each of those that are present was answered."""
    place = Place(folder, store)
    await place.api.namespaces.opened("default", create=True)
    for who in NAMES:
        await place.api.namespaces.opened(who, create=True)
    clients = {who: Client(place, who, seed) for who in NAMES}
    order = random.Random(seed)
    try:
        for _ in range(2 * STEPS):
            whose = order.choice([*NAMES] * 10 + ["time"])
            if whose == "time":
                # All of it is less than stores remember what has ended.
                Place.now += order.choice((6.0, 21.0))
            elif whose in present:
                await clients[whose].step()
    finally:
        for client in clients.values():
            await client.close()
        await place.api.close()
    return {who: ranked(clients[who].answered) for who in present}


def differences(folder: Path, store: str, seed: int) -> list[str]:
    async def run() -> list[str]:
        both = await play(folder, store, seed, list(NAMES))
        found = []
        for who in NAMES:
            alone = (await play(folder, store, seed, [who]))[who]
            for expected, answer in zip(alone, both[who], strict=True):
                if expected != answer:
                    found.append(f"seed {seed}, {who}: alone {expected}, with the other one {answer}")
                    break
        return found

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live page shows times by the clock of the store."""
    for module in (live, events):
        monkeypatch.setattr(module, "_now", lambda: Place.now)


@pytest.mark.parametrize(
    ("store", "seed"), [*(("memory", seed) for seed in range(5)), *(("ledger", seed) for seed in range(3))]
)
def test_neither_notices_the_other(tmp_path: Path, store: str, seed: int) -> None:
    assert differences(tmp_path, store, seed) == []


def longer_words(by: Principal, name: str) -> bool:
    """Planted: `job` reaches `jobs`, too."""
    return by.names is None or any(name.startswith(each) for each in by.names)


async def surveyed_before_filtering(
    served: ServedNamespace, by: Principal, after: str, limit: int
) -> list[Any]:
    """Planted: names of others take the places in a list."""
    views = await (await served.looker()).survey(after=after, limit=limit)
    return [view for view in views if by.owns(view.name)]


def all_events(page: live.OpenPage, found: Any) -> list[Any]:
    """Planted: the live page shows what happens to the names of others."""
    return list(found)


def any_name(route: Any, call: Call) -> None:
    """Planted: only the right of a token is looked at, not its names."""


BUGS: list[tuple[object, str, Callable[..., Any]]] = [
    (Principal, "owns", longer_words),
    (ServedNamespace, "survey", surveyed_before_filtering),
    (live.OpenPage, "events", all_events),
    (api, "_check_rights", any_name),
]


@pytest.mark.parametrize("bug", BUGS, ids=[each.__name__ for *_, each in BUGS])
def test_planted_bugs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Any) -> None:
    monkeypatch.setattr(*bug)
    assert any(differences(tmp_path, "memory", seed) for seed in range(5))
