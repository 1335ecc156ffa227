"""Forked children of a test, which never go on as a second pytest."""

from __future__ import annotations

import json
import os
import select
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import fenced

ROUNDS = 20


def said_by_child(work: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> Any:
    """What `work` returns in a forked child, by way of JSON. The parent does `meanwhile` again and again."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps({"said": work()}).encode())
        except BaseException:  # noqa: BLE001 - told to the parent, which fails
            os.write(writer, json.dumps({"failed": traceback.format_exc()}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    while not select.select([reader], (), (), 0.001)[0]:
        meanwhile()
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    answer = json.loads(text)
    assert "said" in answer, answer["failed"]
    return answer["said"]


def inherits_no_lease(client: fenced.Client) -> None:
    """The child's lease is lost, its client works on connections of its own, and the parent's lease lives on.

    Both work at the same time: on one connection they would read each other's replies.
    """
    lease = client.acquire("a", ttl=5)

    def child() -> list[object]:
        said: list[object] = [lease.state, lease.lost_reason]
        try:
            lease.release()
        except fenced.LeaseLost as error:
            said.append(error.reason)
        with client.try_hold("a") as mine:
            said.append(mine is None)
        for _ in range(ROUNDS):
            with client.hold("b", ttl=5) as own:
                said.append(own.token > lease.token)
        return said

    client.acquire("c").release()  # so that there is an idle connection
    said = said_by_child(child, lambda: client.acquire("c").release())
    assert said == ["lost", "forked", "forked", True, *[True] * ROUNDS]
    lease.check()
    lease.release()
    with client.hold("a"):
        pass
