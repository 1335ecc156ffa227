"""A service for the proxy's figures: an ASGI program that reads the body and answers with two bytes, under uvicorn.

python -m bench.asgi_service
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn

HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"2")]


async def app(scope: Any, receive: Any, send: Any) -> None:
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": b"ok"})


def main() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(f"listening on 127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
