"""A newer service with an older client, and the other way round: what 0.2.0 said over HTTP, recorded.

`python -m tests.upgrades.test_service` records it. A file that was released is never written again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from fenced import __version__
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.service.address import service_address
from fenced.stores.service.authority.authority import ServiceAuthority
from fenced.stores.service.wire.connection import HttpReply, HttpWire, InstanceRoute
from fenced.values.model import Ask, Holder
from tests.service.instances import OverMemory, running

pytestmark = pytest.mark.xdist_group("service")
RECORDED = sorted((Path(__file__).parent / "fixtures").glob("service_*.json"))
FIRST, SECOND, NOBODY = (f"{number:032x}" for number in (1, 2, 3))
SERIES = "b" * 32
HOLDER = Holder("a" * 32, "report", "host", 1)


class RecordingWire(HttpWire):
    exchanges: list[dict[str, Any]]

    async def exchange(
        self, method: str, target: str, body: bytes, until: float, **options: Any
    ) -> HttpReply:
        reply = await super().exchange(method, target, body, until, **options)
        sent = {"method": method, "target": target, "body": body.decode()}
        self.exchanges.append({**sent, "status": reply.status, "answer": reply.body.decode()})
        return reply


class ReplayingWire(HttpWire):
    """Answers as it was recorded."""

    later: dict[str, Any] = {}  # noqa: RUF012
    """Fields that are in every object of an answer, too."""
    exchanges: list[dict[str, Any]]

    async def exchange(
        self, method: str, target: str, body: bytes, until: float, **options: Any
    ) -> HttpReply:
        found = self.exchanges.pop(0)
        assert (method, target.partition("?")[0]) == (found["method"], found["target"].partition("?")[0])
        answer = json.loads(found["answer"], object_hook=lambda fields: {**fields, **self.later})
        return HttpReply(found["status"], "application/json", json.dumps(answer).encode())


class LaterWire(ReplayingWire):
    later = {"of_a_later_version": [1]}  # noqa: RUF012


class PlayingAuthority(ServiceAuthority):
    wire_type: type[HttpWire]
    exchanges: list[dict[str, Any]]

    async def _connect(self, until: float) -> HttpWire:
        made = self.wire_type(self._address, self._route, self._runtime)
        made.exchanges = self.exchanges  # type: ignore[attr-defined]
        return made


def story(url: str, namespace: str, wire_type: type[HttpWire], exchanges: list[dict[str, Any]]) -> list[str]:
    """Every request that a client makes; what it understood."""
    client = PlayingAuthority(service_address(url), BlockingRuntime(), namespace)
    client.wire_type, client.exchanges = wire_type, exchanges
    waiting = Ask(SECOND, ("orders/42",), 60.0, HOLDER, wait=True, lock_delay=1.0)
    found: list[Any] = [
        step(client.open()),
        step(client.open(create=False)),
        step(client.ask(Ask(FIRST, ("orders/42",), 60.0, HOLDER, series=SERIES, number=2, settled=1))),
        step(client.ask(Ask(NOBODY, ("orders/42",), 60.0, HOLDER))),
        step(client.ask(waiting)),
        step(client.renew([FIRST, SECOND, NOBODY])),
        step(client.observe("orders/42")),
        step(client.survey()),
        step(client.release(FIRST, keep=0.5)),
        step(client.withdraw(SECOND)),
        step(client.ask(waiting)),
        step(client.force_release("orders/42", 1)),
        step(client.raise_floor(100)),
        step(client.tidy()),
        client.traits,
    ]
    step(client.close())
    return [repr(each) for each in found]


def shape(answer: object) -> object:
    """The names of the fields of an answer, and the kinds of their values."""
    if isinstance(answer, dict):
        return {name: shape(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [shape(each) for each in answer]
    return answer if isinstance(answer, str) and re.fullmatch("[a-z]+", answer) else type(answer)


def includes(new: object, old: object) -> bool:
    """Whether the newer answer has all that the older one had."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(name in new and includes(new[name], old[name]) for name in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(new) >= len(old) and all(map(includes, new, old))
    return new == old


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_an_older_client_at_a_newer_service(path: Path) -> None:
    runtime = BlockingRuntime()
    with running(1) as instances:
        harness = OverMemory(runtime, instances)
        namespace = f"{harness._place}/default"
        address = service_address(instances.url)
        wire = HttpWire(address, InstanceRoute(address, runtime), runtime)
        for old in json.loads(path.read_text()):
            target = re.sub("&?realm=[0-9a-f]+", "", old["target"]).replace("NAMESPACE", namespace)
            body = old["body"].replace("NAMESPACE", namespace).encode()
            reply = step(wire.exchange(old["method"], target, body, runtime.now() + 60))
            assert reply.status == old["status"], (target, reply.body)
            new, before = shape(json.loads(reply.body)), shape(json.loads(old["answer"]))
            assert includes(new, before), (target, new, before)
        wire.close()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_newer_client_at_an_older_service(path: Path) -> None:
    """And at a later one, whose answers have fields that this client does not know."""
    of_then, of_later = (
        story("http://127.0.0.1:1", "NAMESPACE", kind, json.loads(path.read_text()))
        for kind in (ReplayingWire, LaterWire)
    )
    assert of_then == of_later


def record(path: Path) -> None:
    exchanges: list[dict[str, Any]] = []
    with running(1) as instances:
        namespace = f"{OverMemory(BlockingRuntime(), instances)._place}/default"
        story(instances.url, namespace, RecordingWire, exchanges)
    text = json.dumps(exchanges, indent=1)
    path.write_text(
        text.replace(quote(namespace, safe=""), "NAMESPACE").replace(namespace, "NAMESPACE") + "\n"
    )


if __name__ == "__main__":
    record(Path(__file__).parent / "fixtures" / f"service_{__version__}.json")
