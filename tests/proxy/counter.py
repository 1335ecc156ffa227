"""An upstream of its own process: counters, kept in a journal; it knows nothing of tokens and only writes them down.

python counter.py PORT JOURNAL
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

PORT, JOURNAL = int(sys.argv[1]), Path(sys.argv[2])
VALUES: dict[str, str] = {}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await asyncio.sleep(random.random() * 0.01)  # between its arrival and its effect
            if method == "PUT":
                token = headers["fenced-stamp"].split(":")[2]
                os.write(journal, f"{target} {token} {body.decode()}\n".encode())
                VALUES[target] = body.decode()
                answer = "HTTP/1.1 204 No Content\r\n\r\n"
            else:
                value = VALUES.get(target, "0")
                answer = f"HTTP/1.1 200 OK\r\ncontent-length: {len(value)}\r\n\r\n{value}"
            writer.write(answer.encode())
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", PORT)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


journal = os.open(JOURNAL, os.O_CREAT | os.O_RDWR | os.O_APPEND)
for line in JOURNAL.read_text().splitlines():
    name, _, last = line.split(" ")
    VALUES[name] = last
asyncio.run(main())
