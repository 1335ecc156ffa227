"""One candidate of an election, in a process that is killed and stopped. It commands followers while it leads.

Its leader does not look at its lease before a command: a process that was stopped in front of that line could not help
it either. So a stopped leader commands once more when it goes on, and its followers have to refuse it.
Its client is best-effort, because Debian's etcd is one whose tokens a crash could take back; here no server crashes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time

import fenced
from fenced.recipes.election import AsyncElection, AsyncTerm, Election, Term

ELECTION = "seat"
EVERY = 0.05
AGAIN = 0.1


def _line(who: str, term: Term | AsyncTerm) -> bytes:
    return json.dumps({"who": who, "stamp": str(term.stamp())}).encode() + b"\n"


def blocking(url: str, who: str, ttl: float, ports: list[int]) -> None:
    followers = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    answers = [follower.makefile() for follower in followers]
    for follower in followers:
        follower.sendall(json.dumps({"who": who}).encode() + b"\n")

    def lead(term: Term) -> None:
        while True:
            for follower, answer in zip(followers, answers, strict=True):
                follower.sendall(_line(who, term))
                answer.readline()
            term.check()
            time.sleep(EVERY)

    with fenced.Client(url, label=who, guarantee="best-effort") as client:
        election = Election(client, ELECTION, candidate=who, ttl=ttl)
        while True:
            try:
                election.run(lead)
            except fenced.FencedError as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                time.sleep(AGAIN)


async def in_asyncio(url: str, who: str, ttl: float, ports: list[int]) -> None:
    followers = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
    for _, writer in followers:
        writer.write(json.dumps({"who": who}).encode() + b"\n")

    async def lead(term: AsyncTerm) -> None:
        while True:
            for _, writer in followers:
                writer.write(_line(who, term))
            await asyncio.sleep(EVERY)

    async def listen(reader: asyncio.StreamReader) -> None:
        while await reader.readline():
            pass
        os._exit(0)  # the run is over

    listening = [asyncio.create_task(listen(reader)) for reader, _ in followers]
    async with fenced.AsyncClient(url, label=who, guarantee="best-effort") as client:
        election = AsyncElection(client, ELECTION, candidate=who, ttl=ttl)
        while listening:
            try:
                await election.run(lead)
            except fenced.FencedError as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                await asyncio.sleep(AGAIN)


if __name__ == "__main__":
    url, who, colour, ttl, *ports = sys.argv[1:]
    if colour == "asyncio":
        asyncio.run(in_asyncio(url, who, float(ttl), [int(port) for port in ports]))
    else:
        blocking(url, who, float(ttl), [int(port) for port in ports])
