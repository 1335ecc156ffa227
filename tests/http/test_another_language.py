"""A client that is not ours, written from the page, agrees with the vectors; our receivers answer it."""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

import fenced
from fenced.errors import REFUSALS
from fenced.http import Before, Receiver
from fenced.proofs import Proof
from fenced.testing import vectors


async def show(scope: Any, receive: Any, send: Any) -> None:
    """Answers what the receiver has read, or has the answer to a verdict sent."""
    kind = scope["path"].removeprefix("/verdict/")
    if kind in REFUSALS:
        raise REFUSALS[kind]("")
    if kind == "applied":
        raise fenced.AlreadyApplied("")
    fence = scope["fenced"].fence
    stamp, proof = (fence.stamp, fence.text) if isinstance(fence, Proof) else (fence, None)
    body = json.dumps({"stamp": None if stamp is None else str(stamp), "proof": proof}).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def served(app: Any) -> Iterator[str]:
    # With the protocol named, asyncio sets TCP_NODELAY: otherwise the second part of each answer is 40 ms late.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def test_a_client_in_node_agrees_with_the_vectors() -> None:
    rows = json.loads(vectors.PATH.read_text())["http"]
    store = "memory:another-language"
    fenced.Values(store).set_mode("require")
    names = {"/apply/orders/{id}": "orders/{id}", "/parsed": None, "/verdict/{kind}": None}
    judged = Before(show, store=store, names=names, rule="sequenced")
    with served(Receiver(judged)) as url:
        done = subprocess.run(
            ["node", Path(__file__).with_name("client.mjs"), url, vectors.PATH],
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(rows["requests"]) + len(rows["verdicts"]["rows"]) + 7
