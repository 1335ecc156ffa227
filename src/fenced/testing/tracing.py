"""Writes a trace: an authority that notes every call about leases, and its answer, as one line of a file."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from fenced.errors import FencedError, Indeterminate, Misconfigured
from fenced.testing.lives import TracedCall
from fenced.testing.trace import answered, begun, line_of, opened_line
from fenced.values.contracts import Authority, Runtime
from fenced.values.model import (
    Ask,
    AskAnswer,
    BatchAnswer,
    BatchOperation,
    Release,
    ReleaseAnswer,
    Renewal,
    RenewAnswer,
    Standing,
    Withdrawal,
)

T = TypeVar("T")


class TraceFile:
    """The file of one process. Each line is written whole, at the end, and not synced."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise Misconfigured(f"the trace {path} cannot be written: {error.strerror}") from None
        self._opened: set[str] = set()

    def opened(self, namespace: str, authority: Authority, standing: Standing, now: float) -> None:
        if namespace not in self._opened:
            self._opened.add(namespace)
            traits = [trait.key for trait in authority.traits]
            self._write(opened_line(namespace, traits, standing.last_token, now))

    def note(self, call: TracedCall, namespace: str) -> None:
        self._write(line_of(call, namespace))

    def _write(self, line: str) -> None:
        """A full disk ends the trace, and no lease."""
        data = line.encode()
        try:
            if os.write(self._file, data) != len(data):
                raise OSError
        except OSError:
            os.close(self._file)
            self._write = lambda line: None  # type: ignore[method-assign]


class TracedAuthority:
    """The authority itself, with the calls about leases noted when they end. Everything else passes through."""

    def __init__(self, real: Authority, file: TraceFile, runtime: Runtime, namespace: str) -> None:
        self._real, self._file, self._runtime, self._namespace = real, file, runtime, namespace

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        return self._many if name == "many" else found

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        now = self._runtime.now()
        standing = await self._real.open(create=create, until=until)
        self._file.opened(self._namespace, self._real, standing, now)
        return standing

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        [answer] = await self._noted([ask], lambda: _one(self._real.ask(ask, until)))
        return answer

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return await self._noted(
            [Renewal(secret) for secret in secrets], lambda: self._real.renew(secrets, until)
        )

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        release = Release(secret, keep)
        [answer] = await self._noted([release], lambda: _one(self._real.release(secret, until, keep=keep)))
        return answer

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        [answer] = await self._noted([Withdrawal(secret)], lambda: _one(self._real.withdraw(secret, until)))
        return answer

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        call = TracedCall("force", "", self._runtime.now(), names=(name,), token=token)
        try:
            return await self._real.force_release(name, token, until)
        finally:
            self._file.note(call, self._namespace)

    async def _many(
        self, operations: Sequence[BatchOperation], until: float | None = None
    ) -> list[BatchAnswer]:
        many = cast("Any", self._real).many
        return await self._noted(operations, lambda: many(operations, until))

    async def _noted(
        self, operations: Sequence[BatchOperation], work: Callable[[], Awaitable[list[T]]]
    ) -> list[T]:
        calls = [begun(operation, self._runtime.now()) for operation in operations]
        outcomes: Sequence[object] = [None] * len(calls)
        try:
            outcomes = found = await work()
        except FencedError as error:
            outcomes = [error] * len(calls)
            raise
        finally:
            # Nothing has happened after any other error of the contract. Cancelled: nobody knows.
            now = self._runtime.now()
            for call, outcome in zip(calls, outcomes, strict=True):
                if not isinstance(outcome, FencedError) or isinstance(outcome, Indeterminate):
                    answered(call, outcome, now)
                    self._file.note(call, self._namespace)
        return found


async def _one(answer: Awaitable[T]) -> list[T]:
    return [await answer]


def traced(
    make: Callable[[Runtime, str], Authority], path: str | Path
) -> Callable[[Runtime, str], Authority]:
    """A maker of authorities whose calls about leases are noted in this file."""
    file = TraceFile(path)

    def made(runtime: Runtime, namespace: str) -> Authority:
        return cast("Authority", TracedAuthority(make(runtime, namespace), file, runtime, namespace))

    return made
