"""Forked children of a test, which never go on as a second pytest."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import fenced


def said_by_child(work: Callable[[], object]) -> Any:
    """What `work` returns in a forked child, by way of JSON."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    assert text, "the child failed"
    return json.loads(text)


def inherits_no_lease(client: fenced.Client) -> None:
    """The child's lease is lost, its client works on connections of its own, and the parent's lease lives on."""
    lease = client.acquire("a", ttl=5)

    def child() -> list[object]:
        said: list[object] = [lease.state, lease.lost_reason]
        try:
            lease.release()
        except fenced.LeaseLost as error:
            said.append(error.reason)
        with client.try_hold("a") as mine:
            said.append(mine is None)
        with client.hold("b", ttl=5) as own:
            said.append(own.token > lease.token)
        return said

    assert said_by_child(child) == ["lost", "forked", "forked", True, True]
    lease.check()
    client.acquire("c").release()
    lease.release()
    with client.hold("a"):
        pass
