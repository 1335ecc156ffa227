"""The framework of the kits: checks, harnesses, and running a check in either colour."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from fenced.core.acquiring import LeaseEngine
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.contracts import Authority, Colour, NamedValues, Runtime, Trait
from fenced.values.decision import Rule
from fenced.values.model import Ask, Credential, Granted, Holder, Stamp

COLOURS: tuple[Colour, ...] = ("blocking", "asyncio")


class CheckFailed(AssertionError):
    """A backend failed a check. Not a plain `assert`, which `python -O` removes."""


def ensure(condition: object, message: str) -> None:
    if not condition:
        raise CheckFailed(message)


async def raises(kind: type[BaseException] | tuple[type[BaseException], ...], work: Awaitable[object]) -> Any:
    """The error that `work` raises; CheckFailed if it raises none or another one."""
    try:
        result = await work
    except kind as error:
        return error
    except Exception as error:
        raise CheckFailed(f"expected {_named(kind)}, not {type(error).__name__}: {error}") from error
    raise CheckFailed(f"expected {_named(kind)}, but the call returned {result!r}")


def _named(kind: type[BaseException] | tuple[type[BaseException], ...]) -> str:
    return " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))


class AuthorityHarness(Protocol):
    """How the kit handles one backend: a fresh store, several clients of it, and its clock."""

    @property
    def runtime(self) -> Runtime: ...

    async def authority(self, namespace: str = "default") -> Authority:
        """One more client of the same store, opened."""

    async def pass_time(self, seconds: float) -> None:
        """Let `seconds` pass on the authority's clock, by moving that clock or by sleeping."""

    async def restart(self) -> None:
        """Stop the store and start it again. Clients that were made before are not used afterwards."""

    async def close(self) -> None: ...


class GuardHarness(Protocol):
    """How the kit handles one guard: a fresh resource, and a way to write to it without the guard."""

    runtime: Runtime

    @property
    def traits(self) -> tuple[Trait, ...]:
        """The traits of the guards that it makes. They choose the checks."""

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        """The guard on this harness's resource, opened."""

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        """A new guard object on the same resource, opened, after a restart of everything that can be restarted.

        `rule`: the one that it names, as a program does. None: it names none.
        """

    async def write_raw(self, name: str, value: bytes) -> bool:
        """Write without a stamp and without the guard's interface; False if the resource refused."""

    async def close(self) -> None: ...


def has(harness: GuardHarness, key: str) -> bool:
    """Whether the harness's guards have this trait."""
    return any(trait.key == key for trait in harness.traits)


class Harness(Protocol):
    """What the harnesses of all kits share."""

    async def close(self) -> None: ...


H = TypeVar("H", bound=Harness)
Body = Callable[[H], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Check(Generic[H]):
    """One promise, as a coroutine function over a harness."""

    name: str
    promise: str
    body: Body[H]
    trait: str | None = None
    """The ability that it needs. A backend without this trait must pass `lacking` instead."""
    lacking: Body[H] | None = None


class Checks(list[Check[H]]):
    """A kit: its checks in the order they are written."""

    def __call__(
        self, *, trait: str | None = None, lacking: Body[H] | None = None
    ) -> Callable[[Body[H]], Body[H]]:
        def register(body: Body[H]) -> Body[H]:
            self.append(Check(body.__name__, (body.__doc__ or "").strip(), body, trait, lacking))
            return body

        return register


def run(check: Check[H], make: Callable[[Runtime], H], colour: Colour) -> None:
    """Run one check on a fresh harness, in one colour."""
    if colour == "blocking":
        step(_run(check, make, BlockingRuntime()))
    else:
        asyncio.run(_run_asyncio(check, make))


async def _run_asyncio(check: Check[H], make: Callable[[Runtime], H]) -> None:
    runtime = AioRuntime()
    try:
        await _run(check, make, runtime)
    finally:
        runtime.close()


async def _run(check: Check[H], make: Callable[[Runtime], H], runtime: Runtime) -> None:
    harness = make(runtime)
    try:
        lacks = check.lacking is not None and not has(cast("GuardHarness", harness), check.trait or "")
        await (check.lacking if lacks and check.lacking else check.body)(harness)
    finally:
        await harness.close()


# Building blocks of checks.

_numbers = itertools.count(1)


def asking(
    runtime: Runtime, *names: str, ttl: float = 10.0, wait: bool = False, lock_delay: float = 0.0
) -> Ask:
    """A new attempt of a new holder."""
    number = next(_numbers)
    holder = Holder(f"{number:032x}", f"holder-{number}", "host", number)
    return Ask(runtime.secret(), tuple(sorted(names)), ttl, holder, wait, lock_delay)


async def granted(authority: Authority, ask: Ask) -> Granted:
    answer = await authority.ask(ask)
    ensure(isinstance(answer, Granted), f"expected a grant, not {answer}")
    assert isinstance(answer, Granted)
    return answer


def lease_engine(authority: Authority, runtime: Runtime, **options: Any) -> LeaseEngine:
    """The real client core over an authority, with a long `patience`: a busy machine may answer slowly.

    It takes a server as it is: which versions and settings are strict is not the kits' question.
    """
    number = next(_numbers)
    options = {"patience": 5.0, "guarantee": "best-effort", **options}
    return LeaseEngine(
        authority, runtime, Holder(f"{number:032x}", f"engine-{number}", "host", number), **options
    )


REALM = "00000000000000aa"
NAME = "orders/42"


def stamp(
    token: int, seq: int | None = 1, *names: str, grant: str | None = None, realm: str = REALM
) -> Stamp:
    """A stamp like one that a lease with this token makes."""
    return Stamp(realm, tuple(sorted(names or (NAME,))), token, seq, grant or f"{token:032x}")


def by(
    token: int, seq: int | None = 1, *names: str, grant: str | None = None, realm: str = REALM
) -> Credential:
    """The credential of an operation with that stamp."""
    return Credential((stamp(token, seq, *names, grant=grant, realm=realm),))


async def is_at(guard: NamedValues, name: str, value: bytes | None, token: int | None) -> None:
    """Ensure that the name has this value and this mark."""
    found, mark = await guard.peek(name), await guard.mark(name)
    ensure(found.value == value, f"the value of {name} is {value!r}, not {found.value!r}")
    ensure((mark.token if mark else None) == token, f"the mark of {name} is {token}, not {mark}")


async def until(runtime: Runtime, condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until other threads or tasks make the condition true; CheckFailed if they do not in time."""
    limit = runtime.now() + seconds
    while not condition():
        ensure(runtime.now() < limit, f"within {seconds} s: {what}")
        await runtime.wait(runtime.wakeup(), min(limit, runtime.now() + 0.005))
