"""The guard kit, continued: modes, the audit, and abilities. A guard must refuse what it does not declare."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from fenced.errors import (
    Conflict,
    FencedError,
    ForeignRealm,
    ForgedStamp,
    InvalidStamp,
    MissingStamp,
    Misuse,
    OutOfOrder,
    ReusedToken,
    StaleToken,
    Uncovered,
    Unsupported,
)
from fenced.proofs import HmacKey
from fenced.testing.kit import NAME, REALM, Checks, GuardHarness, by, ensure, has, is_at, raises, stamp
from fenced.values.contracts import NamedValues, Operator
from fenced.values.decision import Mode, Ruling, in_canary
from fenced.values.model import Credential
from fenced.values.rollout import Decision

check: Checks[GuardHarness] = Checks()
CHECKS = check

KEY = HmacKey("kit-1", b"k" * 32)
OTHER_KEY = HmacKey("kit-2", b"o" * 32)
OPERATIONS: dict[str, tuple[object, ...]] = {
    "status": (),
    "records": (),
    "history": (),
    "unset_mode": (None, "x*"),
    "override": ("t", "*", 60.0, "why"),
    "end_overrides": ("t", None),
    "reset": (NAME, "why"),
    "drop_marks": (REALM, 5),
    "trust": ({},),
    "tidy": (),
    "keys": (),
    "add_key": (KEY,),
    "revoke_key": ("kit-1",),
    "require_proofs": (True,),
}
"""The methods of an operator, with arguments."""


# Modes.


@check()
async def every_verdict_in_every_mode(h: GuardHarness) -> None:
    """Observe and shadow let everything through and leave the mark alone; enforce and require refuse."""
    guard = await h.guard("sequenced")
    await guard.write(by(5, 3), NAME, b"start")
    bad: list[tuple[type[FencedError], Credential | None]] = [
        (StaleToken, by(4, 1)),
        (OutOfOrder, by(5, 2)),
        (ReusedToken, by(5, 4, grant="f" * 32)),
        (Uncovered, by(9, 1, "other")),
        (ForeignRealm, by(9, realm="00000000000000bb")),
        (InvalidStamp, by(5, None)),
        (MissingStamp, None),
    ]
    for text in ("observe", "shadow", "canary(0%)", "canary(100%)", "enforce", "require"):
        await guard.set_mode(text)
        mode = Mode.parse(text)
        for kind, carried in bad:
            refuses = mode.name == "require" if carried is None else mode.refuses(NAME)
            value = f"{text} {kind.__name__}".encode()
            work = guard.write(carried, NAME, value)
            if refuses:
                await raises(kind, work)
            else:
                await work
                ensure((await guard.peek(NAME)).value == value, "let through")
            mark = await guard.mark(NAME)
            ensure(mark is not None and (mark.token, mark.seq) == (5, 3), f"{text}: the mark stays")


@check()
async def would_refuse_is_counted_and_recorded(h: GuardHarness) -> None:
    """Observe counts, shadow records in full, a refusal is recorded although it was rolled back."""
    guard = await h.guard()
    await guard.write(by(5), NAME, b"A")
    await guard.set_mode("observe")
    await guard.write(by(4), NAME, b"B")
    await guard.write(None, NAME, b"C")
    counted = await _counted(guard)
    ensure(counted == {("stale", "observe"): 1, ("missing", "observe"): 1}, f"counted: {counted}")
    ensure(await _recorded(guard) == [], "observe records nothing")
    await guard.set_mode("shadow")
    await guard.write(by(4), NAME, b"D")
    await guard.write(None, NAME, b"E")
    await guard.set_mode("enforce")
    await raises(StaleToken, guard.write(by(4), NAME, b"F"))
    records = await _recorded(guard)
    said = [(r.verdict.value, r.ruling.value, r.mode) for r in records]
    ensure(
        said
        == [("stale", "record", "shadow"), ("missing", "record", "shadow"), ("stale", "refuse", "enforce")],
        f"{said}",
    )
    ensure(all(r.name == NAME and r.mark == 5 for r in records), "name and mark")
    ensure(records[-1].stamp == str(stamp(4)) and records[-1].token == 4, "with the stamp")


@check(trait="audit-lags")
async def decisions_outlive_their_object(h: GuardHarness) -> None:
    """What a guard object has refused is counted and recorded for others, at the latest when it is closed."""
    guard = await h.guard()
    await guard.write(by(5), NAME, b"A")
    for _ in range(3):
        await raises(StaleToken, guard.write(by(4), NAME, b"late"))
    await guard.close()
    other = await h.reopen()
    counted, records = await _counted(other), await _recorded(other)
    ensure(counted == {("stale", "enforce"): 3}, f"counted: {counted}")
    ensure([(each.name, each.mark, each.token) for each in records] == [(NAME, 5, 4)] * 3, f"{records}")
    await raises(StaleToken, other.write(by(4), NAME, b"late"))
    ensure(await _counted(other) == {("stale", "enforce"): 4}, "its own ones are added")


async def _counted(guard: NamedValues) -> Counter[tuple[str, str]]:
    counts = await guard.operate(lambda operator: operator.counts())
    counted: Counter[tuple[str, str]] = Counter()
    for count in counts:
        counted[count.verdict, count.mode] += count.count
    return counted


async def _recorded(guard: NamedValues) -> list[Decision]:
    """The decisions that a mode records; a guard may also keep those that it only counts."""
    records = await guard.operate(lambda operator: operator.records())
    return [record for record in records if record.ruling in (Ruling.RECORD, Ruling.REFUSE)]


@check()
async def a_canary_is_a_share_of_names(h: GuardHarness) -> None:
    """Every guard chooses the same names; a larger share contains the smaller."""
    guard = await h.guard(mode="canary(40%)")
    names = [f"orders/{i}" for i in range(30)]
    refused = set()
    for name in names:
        await guard.write(by(5, 1, name), name, b"A")
        try:
            await guard.write(by(4, 1, name), name, b"zombie")
        except StaleToken:
            refused.add(name)
    ensure(refused == {name for name in names if in_canary(name, 40)}, "exactly those of the hash")
    ensure(0 < len(refused) < 30, "some and not all")
    ensure(refused >= {name for name in names if in_canary(name, 20)}, "the smaller share is inside")


@check()
async def modes_go_by_name_pattern(h: GuardHarness) -> None:
    """The longest matching pattern counts; `*` is the only special character."""
    guard = await h.guard(mode="enforce")
    await guard.set_mode("observe", "old/*")
    await guard.set_mode("enforce", "old/paid/*")
    await guard.set_mode("observe", "odd[x]?")
    ensure(
        await guard.modes()
        == {"*": "enforce", "old/*": "observe", "old/paid/*": "enforce", "odd[x]?": "observe"},
        "the modes are known",
    )
    for name, refuses in (
        ("new/1", True),
        ("old/1", False),
        ("old/paid/1", True),
        ("old", True),
        ("oddx1", True),
        ("odd[x]?", False),
    ):
        await guard.write(by(5, 1, name), name, b"A")
        work = guard.write(by(4, 1, name), name, b"zombie")
        if refuses:
            await raises(StaleToken, work)
        else:
            await work
    for bad in ("", "canary", "canary(5)", "canary(-1%)", "canary(101%)", "canary(nan%)", "ENFORCE", None, 5):
        await raises(Misuse, guard.set_mode(bad))  # type: ignore[arg-type]


@check()
async def a_new_mode_binds_every_guard_object(h: GuardHarness) -> None:
    """A mode that one process sets binds other processes at once, or a little later with the trait `mode-lag`."""
    guard, other = await h.guard(), await h.guard()
    await guard.write(by(5), NAME, b"A")
    for mode, refuses in (("shadow", False), ("enforce", True), ("observe", False)):
        await guard.set_mode(mode)
        limit = h.runtime.now() + 30.0
        while await _is_refused(other) is not refuses:
            ensure(has(h, "mode-lag") and h.runtime.now() < limit, f"{mode} is found by the other")
            await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.05)


@check()
async def guard_objects_see_each_other(h: GuardHarness) -> None:
    """What one guard object has read or written earlier decides nothing after another one has written."""
    one, other = await h.guard(), await h.guard()
    version = await one.write(by(5), NAME, b"A")
    version = await other.write(by(5, 2), NAME, b"B", expect=version)
    ensure((await one.read(by(5, 0), NAME)).value == b"B", "a read after another object's write")
    version = await other.write(by(5, 3), NAME, b"C", expect=version)
    await raises(Conflict, one.write(by(5, 4), NAME, b"D", expect=version - 1))
    version = await other.write(by(5, 5), NAME, b"E", expect=version)
    version = await one.write(by(5, 6), NAME, b"F", expect=version)
    await other.announce(by(6, 0))
    await raises(StaleToken, one.announce(by(5, 0)))
    await other.announce(by(7, 0))
    await raises(StaleToken, one.write(by(6), NAME, b"late"))
    await one.write(by(8), NAME, b"G")
    await raises(StaleToken, other.read(by(7, 0), NAME))
    await is_at(other, NAME, b"G", 8)


async def _is_refused(guard: NamedValues) -> bool:
    try:
        await guard.write(by(4), NAME, b"zombie")
    except StaleToken:
        return True
    return False


async def _a_plain_write_goes_through(h: GuardHarness) -> None:
    """Without the trait `mandatory`, a program that does not use the guard is not stopped."""
    guard = await h.guard(mode="require")
    ensure(await h.write_raw(NAME, b"plain"), "nothing stops it")
    ensure((await guard.peek(NAME)).value == b"plain", "and it is seen")


@check(trait="mandatory", lacking=_a_plain_write_goes_through)
async def writers_that_do_not_use_the_guard(h: GuardHarness) -> None:
    """Mandatory: a plain write goes through in observe and is refused in require. Cooperative: it goes through."""
    guard = await h.guard(mode="observe")
    ensure(await h.write_raw(NAME, b"plain"), "observe lets it through")
    await guard.set_mode("enforce")
    ensure(await h.write_raw(NAME, b"plain too"), "so does enforce")
    await guard.set_mode("require")
    ensure(not await h.write_raw(NAME, b"never"), "require refuses it")
    ensure((await guard.peek(NAME)).value == b"plain too", "and nothing of it is seen")
    await guard.write(by(5), NAME, b"stamped")
    ensure(not await h.write_raw(NAME, b"after"), "the stamp is not left for the next writer")


# Abilities: a guard refuses what it does not declare.


async def _lacks(h: GuardHarness, carried: Credential) -> None:
    """Unsupported for every fenced operation with this credential, and no trace of it."""
    guard = await h.guard()
    await raises(Unsupported, guard.announce(carried))
    await raises(Unsupported, guard.read(carried, NAME))
    await raises(Unsupported, guard.write(carried, NAME, b"A"))
    await is_at(guard, NAME, None, None)


async def _takes_no_proof(h: GuardHarness) -> None:
    await _lacks(h, replace(by(5), proofs=(KEY.sign(stamp(5)).text,)))
    guard = await h.guard()
    await raises(Unsupported, guard.operate(lambda operator: operator.add_key(KEY)))


@check(trait="proofs", lacking=_takes_no_proof)
async def a_proof_is_never_dropped(h: GuardHarness) -> None:
    """A guard checks a proof or raises Unsupported; if it requires proofs, it refuses a stamp without one."""
    guard = await h.guard()
    await guard.operate(lambda operator: operator.add_key(KEY))
    await guard.operate(lambda operator: operator.require_proofs(True))
    for carried in (by(5), replace(by(5), proofs=(OTHER_KEY.sign(stamp(5)).text,))):
        await raises(ForgedStamp, guard.announce(carried))
        await raises(ForgedStamp, guard.write(carried, NAME, b"B"))
    await is_at(guard, NAME, None, None)
    proven = replace(by(5), proofs=(KEY.sign(stamp(5)).text,))
    await guard.announce(proven)
    await guard.write(proven, NAME, b"A")
    ensure((await guard.read(proven, NAME)).value == b"A", "a proven read reads")
    await is_at(guard, NAME, b"A", 5)


async def _takes_one_lease(h: GuardHarness) -> None:
    await _lacks(h, Credential((stamp(5), stamp(6, 1, "other"))))


@check(trait="several-leases", lacking=_takes_one_lease)
async def several_leases_in_one_operation(h: GuardHarness) -> None:
    """Each name is judged by the stamp that covers it."""
    guard = await h.guard()
    both = Credential((stamp(5), stamp(6, 1, "other")))
    await guard.write_many(both, {NAME: b"A", "other": b"B"})
    await is_at(guard, NAME, b"A", 5)
    await is_at(guard, "other", b"B", 6)
    await guard.write(by(7, 1, "other"), "other", b"newer")
    await raises(StaleToken, guard.write_many(both, {NAME: b"C", "other": b"C"}))
    await is_at(guard, NAME, b"A", 5)


async def _asks_no_authority(h: GuardHarness) -> None:
    await _lacks(h, replace(by(5), still_held=True))


@check(trait="still-held", lacking=_asks_no_authority)
async def still_held_is_never_dropped(h: GuardHarness) -> None:
    """If no authority in the same database can be asked, the write is refused, not let through."""
    guard = await h.guard()
    await raises(FencedError, guard.write(replace(by(5), still_held=True), NAME, b"A"))
    await is_at(guard, NAME, None, None)


@check()
async def operators_learn_what_is_lacking(h: GuardHarness) -> None:
    """What an operator cannot do with this guard raises Unsupported, with a message that names the guard."""
    guard = await h.guard()
    kind = await guard.operate(_kind)
    for name, arguments in OPERATIONS.items():
        if await guard.operate(partial(_inherits, name)):
            error = await raises(Unsupported, guard.operate(partial(_try, name, arguments)))
            ensure(str(error).startswith(kind), f"{name}: {error}")


async def _kind(operator: Operator) -> str:
    return operator.kind


async def _try(name: str, arguments: tuple[object, ...], operator: Operator) -> None:
    await getattr(operator, name)(*arguments)


async def _inherits(name: str, operator: Operator) -> bool:
    return getattr(type(operator), name) is getattr(Operator, name)
