"""Receivers over real HTTP: uvicorn and gunicorn, both depths, the decorator, every rule and verdict."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import fenced
from fenced_testkit.servers import PostgresqlServer
from tests.http.counting import RULES, WAYS, create_tables, name_of
from tests.http.serving import Browser, serving, stamp

pytestmark = pytest.mark.xdist_group("receivers")
NUMBERS = itertools.count(1)
SERVERS = ("uvicorn", "gunicorn")


class Receivers:
    """One receiver of each kind, on the same stores. If one is killed, its parent starts another."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports
        self.browsers = {kind: Browser(port) for kind, port in ports.items()}


@pytest.fixture(scope="module")
def receivers(
    postgresql_server: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Receivers]:
    database = postgresql_server.url(postgresql_server.create_database())
    create_tables(database)
    store = f"sqlite:///{tmp_path_factory.mktemp('marks')}/marks"
    for rule in RULES:
        with fenced.Values(f"{store}-{rule}") as values:
            values.set_mode("require")
    options = "--bind fd://{fd} --threads 2 --preload --keep-alive 600 --timeout 600 --log-level error"
    commands = {
        "uvicorn": ["tests.http.asgi_app", database, store, "{fd}"],
        "gunicorn": ["gunicorn", *options.split(), "tests.http.wsgi_app:app_from_environment()"],
    }
    with ExitStack() as stack:
        ports = {
            server: stack.enter_context(serving(*command, DATABASE_URL=database, STORE_URL=store))
            for server, command in commands.items()
        }
        found = Receivers(ports)
        yield found
        for browser in found.browsers.values():
            browser.close()


# For each rule: the operations in their order, as token and seq, and what is answered.
STORIES: dict[str, list[tuple[int, int, int, str | None]]] = {
    "retry": [
        (2, 1, 201, None),
        (2, 1, 201, None),
        (1, 9, 412, "stale"),
        (3, 1, 201, None),
        (2, 2, 412, "stale"),
    ],
    "once": [
        (2, 1, 201, None),
        (2, 1, 201, "replayed"),
        (2, 2, 412, "duplicate"),
        (3, 1, 201, None),
        (2, 1, 412, "stale"),
    ],
    "sequenced": [
        (2, 1, 201, None),
        (2, 3, 201, None),
        (2, 3, 201, "replayed"),
        (2, 2, 412, "out_of_order"),
        (3, 1, 201, None),
        (2, 4, 412, "stale"),
    ],
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
def test_every_verdict(receivers: Receivers, server: str, way: str, rule: str) -> None:
    browser, number = receivers.browsers[server], next(NUMBERS)
    path, name, applied = f"/{way}/{rule}/{number}", name_of(way, rule, number), 0
    for token, seq, status, kind in STORIES[rule]:
        reply = browser.post(path, stamp(token, seq, name))
        applied += reply.status == 201 and not reply.replayed
        assert (reply.status, "replayed" if reply.replayed else reply.kind) == (status, kind), reply
        if reply.status == 201:
            assert json.loads(reply.body) == {"qty": applied}
    refusals = [
        ("missing", 428, browser.post(path)),
        ("uncovered", 403, browser.post(path, stamp(9, 1, "another/1"))),
        ("foreign", 403, browser.post(path, stamp(9, 1, name)._replace(realm="cd" * 8))),
        ("reused", 412, browser.post(path, stamp(3, 5, name)._replace(grant="f" * 32))),
        ("invalid", 400, browser.post(path, fenced_stamp="1:nonsense")),
    ]
    assert [(kind, status) for kind, status, _ in refusals] == [(r.kind, r.status) for *_, r in refusals]
    if rule != "retry":
        assert browser.post(path, stamp(3, None, name)).kind == "invalid", "this rule needs a seq"
    found = browser.send("GET", path)
    assert (found.status, found.body) == (200, str(applied).encode()), (
        "a safe method passes, and saw every effect"
    )


@pytest.mark.parametrize("server", SERVERS)
def test_the_receiver_is_killed_between_the_mark_and_the_effect(receivers: Receivers, server: str) -> None:
    """Atomic: nothing has happened. Before: the mark has risen, and what the repeat gets depends on the rule."""
    outcomes = {
        ("atomic", "retry"): (201, None, 2),
        ("atomic", "sequenced"): (201, None, 2),
        ("before", "retry"): (201, None, 1),  # admitted again, since the token is the newest
        ("before", "sequenced"): (504, "indeterminate", 0),  # never twice: nobody knows whether it happened
    }
    victim = receivers.browsers[server]
    survivor = receivers.browsers["gunicorn" if server == "uvicorn" else "uvicorn"]
    for (depth, rule), (status, kind, applied) in outcomes.items():
        number = next(NUMBERS)
        path, name = f"/{depth}/{rule}/{number}", name_of(depth, rule, number)
        with pytest.raises((OSError, http.client.HTTPException)):
            victim.post(path, stamp(2, 1, name), x_crash="now")
        victim.close()
        older = survivor.post(path, stamp(1, 1, name))
        if depth == "before":
            assert older.kind == "stale", "the mark has risen"
        else:
            assert older.status == 201, "nothing of the request is left"
        repeated = survivor.post(path, stamp(2, 1, name))
        assert (repeated.status, repeated.kind) == (status, kind), path
        assert survivor.send("GET", path).body == str(applied).encode(), path


def test_a_thousand_late_requests_and_none_is_admitted(receivers: Receivers) -> None:
    number = next(NUMBERS)
    path, name = f"/atomic/retry/{number}", name_of("atomic", "retry", number)
    browsers, stale = list(receivers.browsers.values()), stamp(5, 1, name)
    assert browsers[0].post(path, stale).status == 201
    assert browsers[1].post(path, stamp(6, 1, name)).status == 201
    replies = Counter(browser.post(path, stale).kind for _ in range(500) for browser in browsers)
    assert replies == {"stale": 1000}
    assert browsers[0].send("GET", path).body == b"2"


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_refused_upload_is_not_read(receivers: Receivers, server: str, way: str) -> None:
    """The client sends the beginning of 60 MB, and has its answer."""
    number = next(NUMBERS)
    with socket.create_connection(("127.0.0.1", receivers.ports[server]), timeout=100) as connection:
        head = f"POST /{way}/retry/{number} HTTP/1.1\r\nHost: here\r\nFenced-Stamp: nonsense\r\n"
        connection.sendall(head.encode() + b"Content-Length: 60000000\r\n\r\n" + bytes(10_000))
        assert connection.recv(12) == b"HTTP/1.1 400"
