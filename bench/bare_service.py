"""A service for the proxy's figures, as fast as Python allows: every request is answered with two bytes.

python -m bench.bare_service
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"


class Service(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        return

    def on_message_complete(self) -> None:
        self._transport.write(ANSWER)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Service, "127.0.0.1", 0)
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
