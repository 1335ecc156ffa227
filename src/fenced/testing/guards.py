"""The guard kit: every guard decides as the pure function does, atomically with the effect."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from dataclasses import replace

from fenced.errors import (
    REFUSALS,
    AlreadyApplied,
    Conflict,
    Contended,
    DuplicateStamp,
    FencedError,
    ForeignRealm,
    InvalidStamp,
    Misconfigured,
    Misuse,
    OutOfOrder,
    Overtaken,
    ReusedToken,
    StaleToken,
    Uncovered,
    Unsupported,
)
from fenced.stores.memory.guard import MemoryValues
from fenced.testing import abilities
from fenced.testing.inputs import BAD_NAMES, BAD_STAMPS, ODD_NAMES
from fenced.testing.kit import NAME, Check, Checks, GuardHarness, by, ensure, has, is_at, raises, stamp, until
from fenced.testing.vectors import Case, cases
from fenced.values.contracts import NamedValues, Versioned
from fenced.values.decision import RULES, Mark, Rule
from fenced.values.model import SEQ_MAX, TOKEN_MAX, Credential, Stamp

check: Checks[GuardHarness] = Checks()


# Rule retry, the default.


@check()
async def the_newer_token_wins(h: GuardHarness) -> None:
    """The first, an equal and a higher token are admitted; a lower one is refused and leaves no trace."""
    guard = await h.guard()
    await guard.write(by(33), NAME, b"A")
    await guard.write(by(33, 2), NAME, b"A again")
    await guard.write(by(34), NAME, b"B")
    error = await raises(StaleToken, guard.write(by(33, 3), NAME, b"zombie"))
    ensure(isinstance(error, Overtaken), "one except for lost and stale")
    ensure(
        error.name == NAME and error.mark == 34 and error.holder == by(34).stamps[0].grant,
        "says who overtook",
    )
    ensure(error.stamp == by(33, 3).stamps[0] and error.retry == "no", "never to be retried")
    await is_at(guard, NAME, b"B", 34)


@check()
async def announcing_fences_before_anything_is_written(h: GuardHarness) -> None:
    """Fence before you read: once the new holder has announced, the old one's write is refused."""
    guard = await h.guard()
    await guard.write(by(5), NAME, b"A")
    await guard.announce(by(6, 0))
    await raises(StaleToken, guard.write(by(5, 2), NAME, b"too late"))
    await guard.announce(by(6, 0))
    await raises(StaleToken, guard.announce(by(5, 0)))
    await is_at(guard, NAME, b"A", 6)
    found = await guard.read(by(7, 0), NAME)
    ensure(found.value == b"A", "a fenced read reads")
    await raises(StaleToken, guard.write(by(6), NAME, b"late"))
    await is_at(guard, NAME, b"A", 7)


@check()
async def a_refused_or_failed_write_leaves_no_trace(h: GuardHarness) -> None:
    """The mark rises exactly with the effect: not by a refusal, not by a conflict."""
    guard = await h.guard()
    version = await guard.write(by(5), NAME, b"A")
    await raises(Conflict, guard.write(by(6), NAME, b"B", expect=version + 1))
    mark = 6 if has(h, "announces-separately") else 5
    await is_at(guard, NAME, b"A", mark)
    await raises(Uncovered, guard.write(by(9, 1, "other"), NAME, b"B"))
    await is_at(guard, NAME, b"A", mark)
    ensure(await guard.mark("other") is None, "nor under the stamp's own name")


@check()
async def compare_and_set_together_with_the_token(h: GuardHarness) -> None:
    """`expect` and the token are checked separately; a stale token is reported first."""
    guard = await h.guard()
    first = await guard.write(by(5), NAME, b"A", expect=0)
    second = await guard.write(by(5, 2), NAME, b"B", expect=first)
    await raises(Conflict, guard.write(by(5, 3), NAME, b"C", expect=first))
    await raises(StaleToken, guard.write(by(4), NAME, b"Z", expect=second))
    ensure(await guard.peek(NAME) == Versioned(b"B", second), "the second write stands")


@check()
async def one_token_one_grant(h: GuardHarness) -> None:
    """The same token from another grant means that the authority lost its history: refused as ReusedToken."""
    guard = await h.guard()
    await guard.write(by(5), NAME, b"A")
    twin = by(5, 1, grant="f" * 32)
    await raises(ReusedToken, guard.write(twin, NAME, b"B"))
    await raises(ReusedToken, guard.announce(twin))
    await is_at(guard, NAME, b"A", 5)


@check()
async def an_operation_is_judged_by_its_own_stamp(h: GuardHarness) -> None:
    """One guard object serves several holders. What it admitted before admits nobody but the same lease."""
    guard = await h.guard()
    await guard.write(by(5), NAME, b"A")
    holder = by(6, 0)
    grant = holder.stamps[0].grant
    for _ in range(2):  # the second announcement changes no mark
        await guard.announce(holder)
    for error, other in (
        (StaleToken, by(5, 0)),
        (StaleToken, by(5, 0, grant=grant)),
        (ReusedToken, by(6, 0, grant="f" * 32)),
        (ForeignRealm, by(6, 0, grant=grant, realm="00000000000000bb")),
        (Uncovered, replace(by(6, 0, "other", grant=grant), names=(NAME,))),
    ):
        await raises(error, guard.announce(other))
        await guard.announce(holder)
    await is_at(guard, NAME, b"A", 6)


@check()
async def a_stamp_counts_for_its_own_names(h: GuardHarness) -> None:
    """A stamp covers exactly the names of its lease, and no similar name."""
    guard = await h.guard()
    for alike in ("orders", "orders/4", "orders/42/1", "Orders/42"):
        await raises(Uncovered, guard.write(by(5, 1, alike), NAME, b"A"))
    await guard.write(by(5, 1, NAME, "orders/43"), NAME, b"A")
    ensure(await guard.mark("orders/43") is None, "the other name is untouched")


@check()
async def one_authority_until_another_is_adopted(h: GuardHarness) -> None:
    """The first realm is trusted; another one is foreign until an operator adopts it, then only that."""
    guard = await h.guard()
    first, foreign = by(5), by(50, realm="00000000000000bb")
    await guard.write(first, NAME, b"A")
    for work in (guard.write(foreign, NAME, b"B"), guard.announce(foreign)):
        says = str(await raises(ForeignRealm, work))
        realms = (first.stamps[0].realm, foreign.stamps[0].realm)
        ensure(all(realm in says for realm in realms), f"the message names both realms: {says}")
    await is_at(guard, NAME, b"A", 5)
    await guard.adopt("00000000000000bb")
    await raises(ForeignRealm, guard.write(by(5, 2), NAME, b"the holder of the mark, too"))
    await guard.write(foreign, NAME, b"B")
    await raises(ForeignRealm, guard.write(by(51), NAME, b"C"))
    await is_at(guard, NAME, b"B", 50)


@check()
async def tokens_compare_exactly(h: GuardHarness) -> None:
    """2**53 - 1 and 2**53 - 2 are different tokens; a larger number is no stamp."""
    guard = await h.guard()
    await guard.write(by(TOKEN_MAX), NAME, b"last")
    await raises(StaleToken, guard.write(by(TOKEN_MAX - 1), NAME, b"one below"))
    await guard.write(by(9, 1, "b"), "b", b"nine")
    await guard.write(by(10, 1, "b"), "b", b"ten, not a text below nine")
    for bad in (0, -1, TOKEN_MAX + 1, 2**63):
        await raises(InvalidStamp, guard.write(by(bad, 1, "c"), "c", b"bad"))
    await is_at(guard, NAME, b"last", TOKEN_MAX)


@check()
async def a_seq_is_a_number_that_a_stamp_can_have(h: GuardHarness) -> None:
    """From 0 to 2**53 - 1: any other is no stamp, also of a lease that has the mark and whatever the rule."""
    for rule in RULES:
        guard = await h.guard(rule)
        await guard.write(by(5, SEQ_MAX, rule), rule, b"last")
        for bad in (-1, SEQ_MAX + 1, 2**63):
            for token, name in ((5, rule), (6, rule), (6, f"{rule}/new")):
                await raises(InvalidStamp, guard.write(by(token, bad, name), name, b"bad"))
            ensure(await guard.mark(f"{rule}/new") is None, "nothing was admitted")
        await is_at(guard, rule, b"last", 5)


@check()
async def a_stamp_without_seq(h: GuardHarness) -> None:
    """A stamp without seq, as a child process gets it, is accepted by rule `retry` alone."""
    guard = await h.guard()
    await guard.write(by(5, None), NAME, b"child")
    await raises(StaleToken, guard.write(by(4, None), NAME, b"old child"))
    await is_at(guard, NAME, b"child", 5)


@check()
async def only_canonical_stamps_parse(h: GuardHarness) -> None:
    """One text form, read strictly: the same number in another spelling is no stamp."""
    for bad in BAD_STAMPS:
        await raises(InvalidStamp, _parse(bad))
    for name in ODD_NAMES:
        odd = stamp(5, 1, name)
        ensure(await _parse(str(odd)) == odd, f"there and back: {name!r}")
        ensure(str(odd).isascii() and str(odd).isprintable() and " " not in str(odd), "fit for a header")


async def _parse(text: object) -> Stamp:
    return Stamp.parse(text)


@check()
async def values_are_bytes(h: GuardHarness) -> None:
    """Any bytes are returned unchanged; a str is refused, because the program must choose its encoding."""
    guard = await h.guard()
    for value in (b"", b"\0", b"\xff\xfe", bytes(range(256)), b"x" * 100_000):
        version = await guard.write(by(5), NAME, value)
        ensure(await guard.read(by(5, 0), NAME) == Versioned(value, version), f"{value[:9]!r} there and back")
    await raises(Misuse, guard.write(by(6), NAME, "text"))  # type: ignore[arg-type]
    await is_at(guard, NAME, b"x" * 100_000, 5)


@check()
async def bad_names_are_not_written(h: GuardHarness) -> None:
    """An invalid name raises Misuse before anything is written."""
    guard = await h.guard(mode="observe")
    for bad in BAD_NAMES:
        await raises(Misuse, guard.write(None, bad, b"x"))
        await raises(Misuse, guard.peek(bad))
    for name in ODD_NAMES:
        await guard.write(by(5, 1, name), name, name.encode())
    for name in ODD_NAMES:
        ensure((await guard.peek(name)).value == name.encode(), f"{name!r} has a value of its own")


# The other rules.


@check()
async def rule_once(h: GuardHarness) -> None:
    """One write for each grant: announcing does not count; a second write is a duplicate, even with the same stamp."""
    guard = await h.guard("once")
    await guard.announce(by(5, 0))
    await guard.read(by(5, 0), NAME)
    await guard.write(by(5, 1), NAME, b"the one")
    for seq in (1, 2):
        await raises(DuplicateStamp, guard.write(by(5, seq), NAME, b"again"))
    await guard.announce(by(5, 0))
    await raises(DuplicateStamp, guard.write(by(5, 3), NAME, b"announcing again gives nothing back"))
    await guard.write(by(6, 1), NAME, b"next")
    await raises(StaleToken, guard.write(by(5, 4), NAME, b"zombie"))
    for none in (None, 0):
        await raises(InvalidStamp, guard.write(by(7, none), NAME, b"a write needs a seq"))
    ensure((await guard.peek(NAME)).value == b"next", "the one write of the newest grant")


@check()
async def rule_sequenced(h: GuardHarness) -> None:
    """Gaps are allowed; the same seq again is AlreadyApplied; a lower one is out of order."""
    guard = await h.guard("sequenced")
    await guard.announce(by(5, 0))
    await guard.write(by(5, 1), NAME, b"1")
    await guard.write(by(5, 4), NAME, b"4")
    await raises(AlreadyApplied, guard.write(by(5, 4), NAME, b"4 again"))
    await raises(OutOfOrder, guard.write(by(5, 3), NAME, b"3"))
    await guard.announce(by(5, 0))
    await raises(OutOfOrder, guard.write(by(5, 2), NAME, b"announcing resets nothing"))
    await guard.write(by(6, 1), NAME, b"next holder starts at 1")
    await raises(StaleToken, guard.write(by(5, 9), NAME, b"zombie"))
    await raises(InvalidStamp, guard.write(by(7, None), NAME, b"a write needs a seq"))
    ensure((await guard.peek(NAME)).value == b"next holder starts at 1", "the newest")


@check()
async def a_repeated_stamp_is_harmless(h: GuardHarness) -> None:
    """A write whose reply was lost is sent again unchanged: rule `retry` applies it again, `sequenced` does not."""
    for rule, applied in (("retry", True), ("sequenced", False)):
        guard = await h.guard(rule)  # type: ignore[arg-type]
        first = by(5, 1, rule)
        before = await guard.write(first, rule, b"once")
        if applied:
            ensure(await guard.write(first, rule, b"once") == before + 1, "applied again, the same value")
        else:
            await raises(AlreadyApplied, guard.write(first, rule, b"once"))
            ensure((await guard.peek(rule)).version == before, "not applied again")


async def _takes_one_name(h: GuardHarness) -> None:
    """Several names cannot be written in one step here: Unsupported, and neither is written."""
    guard = await h.guard()
    await raises(Unsupported, guard.write_many(by(5, 1, "a", "b"), {"a": b"1", "b": b"1"}))
    await is_at(guard, "a", None, None)
    await is_at(guard, "b", None, None)
    await guard.write_many(by(5, 1, "a", "b"), {"a": b"1"})
    await is_at(guard, "a", b"1", 5)


@check(trait="many-names", lacking=_takes_one_name)
async def several_names_all_or_none(h: GuardHarness) -> None:
    """One transaction over several names: one refusal refuses all of it; one seq covers all of it."""
    for rule in RULES:
        guard = await h.guard(rule)
        a, b = f"{rule}/a", f"{rule}/b"
        await guard.write_many(by(5, 1, a, b), {a: b"1", b: b"1"})
        await guard.write(by(7, 1, b), b, b"newer")
        await raises(StaleToken, guard.write_many(by(6, 1, a, b), {a: b"2", b: b"2"}))
        await is_at(guard, a, b"1", 5)
        await is_at(guard, b, b"newer", 7)
        await raises(Uncovered, guard.write_many(by(8, 1, a), {a: b"3", b: b"3"}))
        await is_at(guard, a, b"1", 5)


@check()
async def agrees_with_the_decision(h: GuardHarness) -> None:
    """The shipped vectors, then long random sequences of operations: the same answers as the reference guard."""
    for rule in RULES:
        guard = await h.guard(rule)
        await _decides_as_the_vectors_say(guard, rule)
        model = MemoryValues(rule=rule)
        rng = random.Random(f"agree {rule}")
        names = [f"{rule}/{letter}" for letter in "ab"]
        kinds = KINDS if has(h, "many-names") else ONE_BY_ONE
        for index in range(150):
            await _same_step(rng, guard, model, names, index, kinds)
        for name in names:
            found, due = _bare(await guard.mark(name), rule), _bare(await model.mark(name), rule)
            ensure(found == due, f"the mark of {name} is {due}, not {found}")
            ensure(await guard.peek(name) == await model.peek(name), f"the value of {name}")


KINDS = ("write", "write", "write", "announce", "read", "many", "cas", "mode")
ONE_BY_ONE = ("write", "write", "write", "announce one", "read", "cas", "mode")


async def _same_step(
    rng: random.Random,
    guard: NamedValues,
    model: NamedValues,
    names: list[str],
    index: int,
    kinds: tuple[str, ...],
) -> None:
    covered = rng.sample(names, rng.choice((1, 1, 2)))
    token = rng.randrange(max(1, index // 5), index // 5 + 4)
    seq: int | None = rng.choice((None, 0, 1, 1, 2, 3))
    grant = rng.choice((None, None, None, "f" * 32))
    carried = None if rng.random() < 0.1 else by(token, seq, *covered, grant=grant)
    name, value = rng.choice(names), f"v{index}".encode()
    kind = rng.choice(kinds)
    outcomes = []
    version = (await model.peek(name)).version + rng.choice((0, 0, 1))
    mode = rng.choice(("observe", "shadow", "canary(50%)", "enforce", "enforce", "require"))
    for target in (guard, model):
        outcomes.append(await _outcome(_do(target, kind, carried, names, name, value, version, mode)))
    if kind == "many" and all(isinstance(outcome, str) for outcome in outcomes):
        return  # both refuse; which of several reasons is reported may differ
    ensure(outcomes[0] == outcomes[1], f"step {index}, {kind} {name} with {carried}: {outcomes}")


async def _do(
    guard: NamedValues,
    kind: str,
    carried: Credential | None,
    names: list[str],
    name: str,
    value: bytes,
    version: int,
    mode: str,
) -> object:
    if kind == "mode":
        await guard.set_mode(mode, name if version % 2 else "*")
        return None
    if kind == "many":
        await guard.write_many(carried, dict.fromkeys(names, value))
        return None
    if kind == "cas":
        return await guard.write(carried, name, value, expect=version)
    if kind == "write" or carried is None:
        return await guard.write(carried, name, value)
    if kind in ("announce", "announce one"):
        await guard.announce(carried if kind == "announce" else replace(carried, names=(name,)))
        return None
    return await guard.read(carried, name)


async def _decides_as_the_vectors_say(guard: NamedValues, rule: Rule) -> None:
    """Each order of tokens, grants and seqs: the same verdict, and the mark rises or stays."""
    # An operation here never goes on, so its id is new. Announcements are the same under every rule; seqs do not
    # count under retry, and a seq of 0 is none.
    chosen = {
        (case.mark_token, case.mark_grant, case.mark_seq, case.seq, case.announce): case
        for case in cases()
        if case.rule == rule and case.token == 10 and case.operation is None and not _is_bad(case)
        if case.seq == 1 or (rule != "retry" and case.seq is not None)
        if not case.announce or (rule == "sequenced" and case.seq == 0)
    }
    for number, case in enumerate(chosen.values()):
        await _decides(guard, case, f"{rule}/{number}")


def _is_bad(case: Case) -> bool:
    return not case.covered or not case.proven or case.guard_realm != case.stamp_realm


async def _decides(guard: NamedValues, case: Case, name: str) -> None:
    if case.mark is not None:
        before = by(case.mark.token, case.mark.seq, name, grant=case.mark.grant)
        await (guard.write(before, name, b"before") if case.mark.seq else guard.announce(before))
    carried = by(10, case.seq, name, grant=case.grant)
    work: Awaitable[object] = guard.announce(carried) if case.announce else guard.write(carried, name, b"x")
    outcome = await _outcome(work)
    due = AlreadyApplied if case.verdict == "applied" else REFUSALS.get(case.verdict)
    ensure(outcome == due.__name__ if due else not isinstance(outcome, str), f"{case}: {outcome}")
    seq = 0 if case.announce else case.seq or 0
    risen = Mark(10, case.grant or "", seq) if case.rises else case.mark
    found = await guard.mark(name)
    ensure(_bare(found, case.rule) == _bare(risen, case.rule), f"{case}: the mark is {found}")


async def _outcome(work: Awaitable[object]) -> object:
    try:
        return await work
    except FencedError as error:
        return type(error).__name__


def _bare(mark: Mark | None, rule: str) -> Mark | None:
    """A mark without the operation that set it, which every guard names in its own way.

    Under `retry` without the seq: seqs do not count, and a guard need not keep them.
    """
    return Mark(mark.token, mark.grant, 0 if rule == "retry" else mark.seq) if mark else None


# Reading, racing, lasting.


@check()
async def onlookers_see_nothing_older(h: GuardHarness) -> None:
    """`peek(at_least)` refuses to show a state that is older than that token."""
    guard = await h.guard()
    await raises(Contended, guard.peek(NAME, at_least=1))
    await guard.write(by(5), NAME, b"A")
    ensure((await guard.peek(NAME, at_least=5)).value == b"A", "seen")
    await raises(Contended, guard.peek(NAME, at_least=6))


@check()
async def racing_writers_leave_the_highest(h: GuardHarness) -> None:
    """Many writers at once, tokens in any order: the mark and the value of the highest token remain."""
    guard = await h.guard()
    tokens = list(range(1, 25))
    random.Random(7).shuffle(tokens)
    finished: list[tuple[int, str]] = []

    async def write(token: int) -> None:
        try:
            await guard.announce(by(token, 0))
            await guard.write(by(token, 1), NAME, str(token).encode())
            finished.append((token, "admitted"))
        except StaleToken:
            finished.append((token, "refused"))

    tasks = [h.runtime.spawn(lambda token=token: write(token), "race") for token in tokens]  # type: ignore[misc]
    await until(h.runtime, lambda: len(finished) == len(tokens), 30.0, "all have tried")
    for task in tasks:
        await task.join()
    ensure((24, "admitted") in finished, "the highest is admitted, whenever it came")
    await is_at(guard, NAME, b"24", 24)


@check()
async def marks_last(h: GuardHarness) -> None:
    """After a restart the mark is unchanged, and an old token is still refused."""
    guard = await h.guard()
    await guard.write(by(5), NAME, b"A")
    await guard.announce(by(6, 0))
    again = await h.reopen()
    await is_at(again, NAME, b"A", 6)
    await raises(StaleToken, again.write(by(5, 2), NAME, b"zombie"))
    await raises(ForeignRealm, again.write(by(9, realm="00000000000000bb"), NAME, b"foreign"))


@check()
async def the_highest_mark_is_known(h: GuardHarness) -> None:
    """`highest` is the highest admitted token of all names, not the latest and not a refused one."""
    guard = await h.guard()
    ensure(await guard.highest() == 0, "no mark, no token")
    await guard.announce(by(9, 0, "a"))
    await guard.write(by(5), NAME, b"A")
    await raises(Uncovered, guard.write(by(99, 1, "other"), NAME, b"B"))
    ensure(await guard.highest() == 9, "of all names")
    await guard.write(by(10, 1, "b"), "b", b"ten, not a text below nine")
    ensure(await guard.highest() == 10, "as a number")


@check()
async def rules_are_the_guards_not_the_writers(h: GuardHarness) -> None:
    """After a restart a guard keeps its rule, and gives no operation the id of an earlier one."""
    guard: NamedValues = await h.guard("once")
    await guard.write(by(5, 1), NAME, b"A")
    again = await h.reopen()
    await raises(DuplicateStamp, again.write(by(5, 2), NAME, b"B"))


@check()
async def a_rule_that_is_not_installed(h: GuardHarness) -> None:
    """A program that names another rule than the installed one gets Misconfigured before anything is written."""
    for installed, others in (("retry", ("sequenced", "once")), ("sequenced", ("retry",))):
        guard: NamedValues = await h.guard(installed)  # type: ignore[arg-type]
        await guard.write(by(5, 1), NAME, b"A")
        for asked in others:
            says = str(await raises(Misconfigured, _written_by(h, asked)))  # type: ignore[arg-type]
            ensure(installed in says and asked in says, f"the message names both rules: {says}")
        await _written_by(h, installed)  # type: ignore[arg-type]
        again = await h.reopen()
        await is_at(again, NAME, b"B", 5)
        repeat = again.write(by(5, 2), NAME, b"C")  # who names none gets the installed one
        await (repeat if installed == "retry" else raises(AlreadyApplied, repeat))


async def _written_by(h: GuardHarness, rule: Rule) -> None:
    """Of a program that names this rule: open, and the second write of the grant."""
    guard = await h.reopen(rule)
    await guard.write(by(5, 2), NAME, b"B")


CHECKS: list[Check[GuardHarness]] = [*check, *abilities.CHECKS]
