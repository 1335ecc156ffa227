"""An application with a candidate in each worker, as docs/election.md shows it: `uvicorn --workers 4` runs it.

Its leader commands followers, as `candidate.py` does. A worker is killed and never stopped here: it commands for as
long as its term is not cancelled.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import fenced
from evidence.elections.candidate import ELECTION, EVERY
from fenced.recipes.election import AsyncTerm, leading

WHO = f"worker {os.getpid()}"
TTL = float(os.environ.get("ELECTION_TTL", "2"))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    ports = [int(port) for port in os.environ["ELECTION_FOLLOWERS"].split(",")]
    followers = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
    for _, writer in followers:
        writer.write(json.dumps({"who": WHO}).encode() + b"\n")

    async def lead(term: AsyncTerm) -> None:
        while True:
            line = json.dumps({"who": WHO, "stamp": str(term.stamp())}).encode() + b"\n"
            for _, writer in followers:
                writer.write(line)
            await asyncio.sleep(EVERY)

    async with (
        fenced.AsyncClient(os.environ["ELECTION_AUTHORITY"], label=WHO) as client,
        leading(client, ELECTION, lead, candidate=WHO, ttl=TTL) as app.state.election,
    ):
        yield
    for _, writer in followers:
        writer.close()


app = FastAPI(lifespan=lifespan)


@app.get("/leads")
async def leads() -> dict[str, object]:
    health = app.state.election.health()
    return {"who": WHO, "leads": health.leads, "term": health.term}
