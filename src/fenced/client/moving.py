"""Moving to another authority while programs run: which step comes next, and how it is done.

A guard trusts one realm at a time, so each guard decides by itself when the old authority's stamps stop counting. The
order of a move: first raise the new authority's floor far above every old token, then let one guard after the other
adopt the new realm, and then check.

Nothing records how far a move has come. Each step is chosen from what the stores say now, and may be repeated. So a
move that was killed, at whatever point, is finished by starting it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fenced.errors import Contended, Misconfigured, Misuse
from fenced.values.contracts import LAG_SECONDS, MODE_LAG, Authority, Marks, Operator, Runtime
from fenced.values.model import TOKEN_MAX, NameView, Standing

GAP = 2**40
"""How far above the old tokens the new ones begin. The old authority continues to grant: while the guards are adopting,
and afterwards to programs that still point at it. Its tokens stay below the new ones for a million million grants."""
NOTICED_SECONDS = 1.5 * LAG_SECONDS
"""After which every guard object with the trait `mode-lag` has read the realm again; longer, as clocks differ."""
PAUSE_SECONDS = 0.5
"""Between two tries to adopt, so that the writers that queued behind the first one get through."""


@dataclass(frozen=True, slots=True)
class GuardTrust:
    """What a move needs to know of a guarded database."""

    url: str
    realm: str | None
    """The realm that it trusts; None: none yet, and it will trust the realm of the first announcement."""
    highest: int
    max_jump: int | None = None
    waiting: tuple[tuple[str, int], ...] = ()
    """Outboxes, and how many messages wait in each: with stamps of the authority that was trusted so far."""


@dataclass(frozen=True, slots=True)
class RaiseFloor:
    """Make every later token of the new authority greater than this."""

    above: int


@dataclass(frozen=True, slots=True)
class AdoptRealm:
    """Let this guard trust the new authority, and no other."""

    guard: int
    """Its place among the guards."""


MoveStep = RaiseFloor | AdoptRealm


def next_step(old: Standing, new: Standing, guards: Sequence[GuardTrust]) -> MoveStep | None:
    """The next step of a move; None when it is complete. Misconfigured or Misuse if there is no safe step."""
    _refuse_strangers(old, new, guards)
    left = [guard for guard in guards if guard.realm != new.realm]
    # Not the marks of guards that trust the new realm: its own tokens may be among them.
    old_highest = max((old.last_token, *(guard.highest for guard in left)))
    enough = max((guard.highest for guard in guards), default=0)
    if left:
        # Half of the gap is enough: the old authority may have granted since the floor was raised.
        enough = max(enough, old_highest + GAP // 2)
    if new.last_token < enough:
        above = max(old_highest + GAP, enough)
        if above >= TOKEN_MAX:
            raise Misconfigured(
                f"too few tokens are left above {old_highest}, the highest of the old authority"
            )
        _refuse_jumps(left, above)
        return RaiseFloor(above)
    _refuse_jumps(left, new.last_token)
    return AdoptRealm(guards.index(left[0])) if left else None


def _refuse_strangers(old: Standing, new: Standing, guards: Sequence[GuardTrust]) -> None:
    if old.realm == new.realm:
        raise Misuse(f"both addresses are the same authority, realm {old.realm}")
    for guard in guards:
        if guard.realm not in (None, old.realm, new.realm):
            raise Misconfigured(
                f"{guard.url} trusts realm {guard.realm}, which is neither the old authority's ({old.realm}) nor the "
                f"new one's ({new.realm}): find the authority that it belongs to with fenced authority show URL"
            )


def _refuse_messages(old: Standing, guards: Sequence[GuardTrust]) -> None:
    """Misconfigured if messages wait that the guards of their consumers would refuse after the move."""
    for guard in guards:
        if guard.realm == old.realm and guard.waiting:
            found = ", ".join(f"{count} in {table}" for table, count in guard.waiting)
            raise Misconfigured(
                f"{guard.url}: messages with stamps of the old authority wait in an outbox: {found}. A guard that "
                "trusts the new one refuses them. Stop the producers, relay what waits, let the consumers empty their "
                "queues, and move then; or pass --leave-messages"
            )


def _refuse_jumps(left: Sequence[GuardTrust], last: int) -> None:
    """Misconfigured if a guard would refuse the token after `last` for its `max_jump`."""
    for guard in left:
        if guard.max_jump is not None and 0 < guard.highest < last + 1 - guard.max_jump:
            raise Misconfigured(
                f"{guard.url} refuses tokens more than max_jump ({guard.max_jump}) above its highest mark "
                f"({guard.highest}), and the new authority's begin at {last + 1}: run fenced guard trust URL "
                "--max-jump off, move, write once, and set it again"
            )


@dataclass(frozen=True, slots=True)
class Moved:
    """A complete move, as the stores showed it at the end."""

    old: Standing
    new: Standing
    guards: tuple[GuardTrust, ...]
    held: tuple[NameView, ...]
    """Names that are still held or waited for in the old authority."""


async def move(
    old: Authority,
    new: Authority,
    guards: Sequence[Marks],
    runtime: Runtime,
    *,
    patience: float,
    guarantee: str = "strict",
    leave_messages: bool = False,
    on_step: Callable[[MoveStep], None] = lambda step: None,
) -> Moved:
    """Make the guards trust `new` instead of `old`. A guard that is busy is tried again for `patience` seconds.

    It returns when all programs that use the guards judge by the new realm: guards with the trait `mode-lag` notice it
    within a second. Misconfigured if the tokens of `new` could repeat and the guarantee is strict, or if messages wait
    in an outbox, unless they are to be left there. `on_step` is called after each step.
    """
    while True:
        old_standing = await old.open(create=False)
        trusts = [await _trust_of(guard) for guard in guards]
        # Read last: it covers every token of the new authority that was found among the marks.
        new_standing = await new.open()
        step = next_step(old_standing, new_standing, trusts)
        if step is None:
            # Also if there was nothing left to do: an earlier run may have ended right after the last adoption.
            if any(MODE_LAG in guard.traits for guard in guards):
                await runtime.wait(runtime.wakeup(), runtime.now() + NOTICED_SECONDS)
            held = tuple(await old.survey())
            return Moved(old_standing, new_standing, tuple(trusts), held)
        if not leave_messages:
            _refuse_messages(old_standing, trusts)
        if new_standing.doubts and guarantee == "strict":
            raise Misconfigured(
                f"{new.url} cannot promise that tokens never repeat: {'; '.join(new_standing.doubts)}. Change that, or "
                "accept it, here and in every program: --guarantee best-effort"
            )
        if isinstance(step, RaiseFloor):
            await new.raise_floor(step.above)
        else:
            await _adopt(guards[step.guard], new_standing.realm, runtime, patience)
        on_step(step)


async def _trust_of(guard: Marks) -> GuardTrust:
    # The realm first: if that is the new one, no old token can raise a mark any more, and the highest mark is final
    # except for new tokens.
    status = await guard.operate(lambda operator: operator.status())
    waiting = await guard.operate(lambda operator: operator.waiting_messages())
    return GuardTrust(guard.url, status.realm, await guard.highest(), status.max_jump, tuple(waiting.items()))


async def _adopt(guard: Marks, realm: str, runtime: Runtime, patience: float) -> None:
    until = runtime.now() + patience

    async def adopt(operator: Operator) -> None:
        await operator.adopt(realm)

    while True:
        try:
            return await guard.operate(adopt)
        except Contended as error:
            # Nothing has changed: the guard waited for writers of the old authority, for a limited time, and gave up.
            now = runtime.now()
            if now >= until:
                raise Contended(
                    f"{guard.url}: {error}. A transaction keeps its guard from adopting the new authority; nothing is "
                    "lost: run the same command again"
                ) from error
            await runtime.wait(runtime.wakeup(), min(until, now + PAUSE_SECONDS))
