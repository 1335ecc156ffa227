"""One process of a storm: it takes leases, works a little, releases them, and logs every step."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import fenced
from fenced.errors import FencedError, LeaseLost, NotGranted
from fenced.events import Event, ReleaseFailed
from fenced.runtime.clocks import now

WISHES = (("a",), ("b",), ("c",), ("d",), ("e",), ("c", "d"), ("d", "e"))
WAITS = (None, None, None, 0.0, 1.0, 5.0)
TASKS = 2
"""How many tasks take leases in one asyncio process."""
LOOK_SECONDS = 0.1


class EventLog:
    """One line of JSON for each event, written at once, so that the events of a killed process are not lost."""

    def __init__(self, path: str, who: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._who = who
        self._numbers = itertools.count(1)
        self.unreleased: set[int] = set()
        """Tokens of `with` blocks whose release failed; a `with` block does not raise that error."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, ReleaseFailed):
            self.unreleased.add(event.token)

    def write(self, do: str, at: float | None = None, **details: Any) -> None:
        line = {"at": now() if at is None else at, "who": self._who, "do": do, **details}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def asking(self, names: tuple[str, ...], wait: float | None) -> int:
        call = next(self._numbers)
        self.write("asking", call=call, names=names, wait=wait)
        return call

    def granted(self, call: int, lease: fenced.Lease | fenced.AsyncLease) -> None:
        self.write("granted", call=call, token=lease.token, ttl=lease.ttl)

    def look(self, call: int, lease: fenced.Lease | fenced.AsyncLease) -> None:
        """Log that the lease is held; LeaseLost if it is not. The clock is read first, because a pause may follow."""
        at = now()
        lease.check()
        self.write("still", at, call=call)

    def ended(self, call: int, error: BaseException | None = None) -> None:
        why = type(error).__name__ if error is not None else ""
        match error:
            case None:
                how = "released"
            case NotGranted():
                how = "gave up"
            case LeaseLost():
                how = "lost"
            case KeyboardInterrupt():
                how = "interrupted"
            case asyncio.CancelledError():
                how = "cancelled"
            case _:
                how = "failed"
        self.write("ended", call=call, how=how, why=why, message=str(error or "")[:200])

    def block_left(self, call: int, token: int) -> None:
        """A `with` block has ended: log whether its release reached the authority."""
        if token in self.unreleased:
            self.unreleased.discard(token)
            self.write("ended", call=call, how="failed", why="Unavailable", message="release failed")
        else:
            self.ended(call)


class Choices:
    """The random choices of a worker, drawn from its seed."""

    def __init__(self, seed: str, ttl: float) -> None:
        self._random = random.Random(seed)
        self._ttl = ttl

    def wish(self) -> tuple[str, ...]:
        return self._random.choice(WISHES)

    def wait(self) -> float | None:
        return self._random.choice(WAITS)

    def work(self) -> float:
        """Mostly short, and sometimes long enough that the lease must be renewed."""
        long = self._random.random() < 0.01
        return self._random.uniform(0.8, 1.5) * self._ttl if long else self._random.uniform(0.002, 0.04)

    def rest(self) -> float:
        return self._random.uniform(0.0, 0.08)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def patience(self) -> float:
        return self._random.uniform(0.01, 1.0)


# Blocking.


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C, but only in the middle of asking or releasing.

    A Ctrl-C between the grant and the program's next line loses the lease object, as with any lock in Python.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("_attempt", "release") and code.co_filename.endswith("core/acquiring.py"):
            raise KeyboardInterrupt
        frame = frame.f_back


class Worker:
    def __init__(self, client: fenced.Client, log: EventLog, choices: Choices, ttl: float) -> None:
        self.client, self.log, self.choices, self.ttl = client, log, choices, ttl

    def run(self, keep: str | None) -> None:
        """Take leases for ever. With `keep`, also hold that name, and take it again when it is lost."""
        kept: tuple[int, fenced.Lease] | None = None
        while True:
            if keep is not None and kept is None:
                kept = self._acquire((keep,), 0.0)
            names, wait = self.choices.wish(), self.choices.wait()
            (self._explicitly if self.choices.chance(0.5) else self._by_with)(names, wait)
            if kept is not None and kept[1].lost_reason is not None:
                self.log.ended(kept[0], LeaseLost("", reason=kept[1].lost_reason))
                kept = None
            time.sleep(self.choices.rest())

    def _acquire(self, names: tuple[str, ...], wait: float | None) -> tuple[int, fenced.Lease] | None:
        call = self.log.asking(names, wait)
        try:
            lease = self.client.acquire(*names, ttl=self.ttl, wait=wait)
        except (FencedError, KeyboardInterrupt) as error:
            self.log.ended(call, error)
            return None
        self.log.granted(call, lease)
        return call, lease

    def _explicitly(self, names: tuple[str, ...], wait: float | None) -> None:
        taken = self._acquire(names, wait)
        if taken is None:
            return
        call, lease = taken
        with contextlib.suppress(LeaseLost):
            self._work(call, lease)
        self._release(call, lease)

    def _release(self, call: int, lease: fenced.Lease) -> None:
        self.log.write("releasing", call=call)
        while True:
            try:
                lease.release()
            except KeyboardInterrupt as error:
                if lease.state in ("held", "jeopardy"):
                    continue  # the interrupt came before the release began, so release again
                self.log.ended(call, error)
            except FencedError as error:
                self.log.ended(call, error)
            else:
                self.log.ended(call)
            return

    def _by_with(self, names: tuple[str, ...], wait: float | None) -> None:
        call = self.log.asking(names, wait)
        try:
            with self.client.hold_all(names, ttl=self.ttl, wait=wait) as lease:
                self.log.granted(call, lease)
                self._work(call, lease)
                self.log.write("releasing", call=call)
        except (FencedError, KeyboardInterrupt) as error:
            self.log.ended(call, error)
        else:
            self.log.block_left(call, lease.token)

    def _work(self, call: int, lease: fenced.Lease) -> None:
        until = now() + self.choices.work()
        while (left := until - now()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
            self.log.look(call, lease)


# asyncio.


class AsyncWorker:
    def __init__(self, client: fenced.AsyncClient, log: EventLog, choices: Choices, ttl: float) -> None:
        self.client, self.log, self.choices, self.ttl = client, log, choices, ttl

    async def run(self, keep: str | None) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(TASKS):
                tasks.create_task(self._take_turns())
            if keep is not None:
                tasks.create_task(self._keep(keep))

    async def _keep(self, name: str) -> None:
        while True:
            call = self.log.asking((name,), 0.0)
            try:
                lease = await self.client.acquire(name, ttl=self.ttl, wait=0)
                self.log.granted(call, lease)
                await lease.wait_lost()
                lease.check()
            except FencedError as error:
                self.log.ended(call, error)
            await asyncio.sleep(self.ttl / 4)

    async def _take_turns(self) -> None:
        while True:
            names, wait = self.choices.wish(), self.choices.wait()
            call = self.log.asking(names, wait)
            try:
                if self.choices.chance(0.5):
                    await self._explicitly(call, names, wait)
                else:
                    await self._by_with(call, names, wait)
            except (FencedError, asyncio.CancelledError) as error:
                self.log.ended(call, error)
            await asyncio.sleep(self.choices.rest())

    async def _explicitly(self, call: int, names: tuple[str, ...], wait: float | None) -> None:
        asking = asyncio.ensure_future(self.client.acquire(*names, ttl=self.ttl, wait=wait))
        if self.choices.chance(0.4):
            await asyncio.wait([asking], timeout=self.choices.patience())
            if not asking.done():
                self.log.write("cancelling", call=call)
                asking.cancel()
        lease = await asking
        self.log.granted(call, lease)
        with contextlib.suppress(LeaseLost):
            await self._work(call, lease)
        self.log.write("releasing", call=call)
        await lease.release()
        self.log.ended(call)

    async def _by_with(self, call: int, names: tuple[str, ...], wait: float | None) -> None:
        async with self.client.hold_all(names, ttl=self.ttl, wait=wait) as lease:
            self.log.granted(call, lease)
            await self._work(call, lease)
            self.log.write("releasing", call=call)
        self.log.block_left(call, lease.token)

    async def _work(self, call: int, lease: fenced.AsyncLease) -> None:
        until = now() + self.choices.work()
        while (left := until - now()) > 0:
            await asyncio.sleep(min(left, LOOK_SECONDS))
            self.log.look(call, lease)


def _end_with_the_storm() -> None:
    """Exit at the end of standard input: the storm has its other end, which closes even if the storm is killed."""
    sys.stdin.buffer.read()
    os._exit(0)


def main(url: str, folder: str, who: str, colour: str, keep: str, ttl: str, seed: str) -> None:
    signal.signal(signal.SIGINT, _interrupt)
    threading.Thread(target=_end_with_the_storm, daemon=True).start()
    log = EventLog(str(Path(folder) / f"{who}.jsonl"), who)
    choices, kept = Choices(f"{seed}/{who}", float(ttl)), f"kept/{who}" if keep else None
    log.write("start")
    if colour == "asyncio":
        client = fenced.AsyncClient(url, label=who, on_event=log.on_event)
        asyncio.run(AsyncWorker(client, log, choices, float(ttl)).run(kept))
    else:
        Worker(fenced.Client(url, label=who, on_event=log.on_event), log, choices, float(ttl)).run(kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
