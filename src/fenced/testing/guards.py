"""The guard kit: every guard decides as the pure function does, atomically with the effect."""

from __future__ import annotations

import random
from collections.abc import Awaitable

from fenced.contracts import Guard, Versioned
from fenced.decision import RULES, Mark, Mode, in_canary
from fenced.errors import (
    AlreadyApplied,
    Conflict,
    Contended,
    DuplicateStamp,
    FencedError,
    ForeignRealm,
    InvalidStamp,
    MissingStamp,
    Misuse,
    OutOfOrder,
    Overtaken,
    ReusedToken,
    StaleToken,
    Uncovered,
)
from fenced.guards.memory import MemoryGuard
from fenced.model import TOKEN_MAX, Stamp
from fenced.testing.inputs import BAD_NAMES, BAD_STAMPS, ODD_NAMES
from fenced.testing.kit import Checks, GuardHarness, ensure, raises, stamp, until

check: Checks[GuardHarness] = Checks()
CHECKS = check

NAME = "orders/42"


async def _is(guard: Guard, name: str, value: str | None, token: int | None) -> None:
    """The value and the mark are these, and nothing else happened."""
    found, mark = await guard.peek(name), await guard.mark(name)
    ensure(found.value == value, f"the value of {name} is {value!r}, not {found.value!r}")
    ensure((mark.token if mark else None) == token, f"the mark of {name} is {token}, not {mark}")


# Rule retry, the default.


@check()
async def the_newer_token_wins(h: GuardHarness) -> None:
    """First admitted, equal admitted, higher admitted; lower refused, and nothing of it is seen."""
    guard = await h.guard()
    await guard.write(stamp(33), NAME, "A")
    await guard.write(stamp(33, 2), NAME, "A again")
    await guard.write(stamp(34), NAME, "B")
    error = await raises(StaleToken, guard.write(stamp(33, 3), NAME, "zombie"))
    ensure(isinstance(error, Overtaken), "one except for lost and stale")
    ensure(error.name == NAME and error.mark == 34 and error.holder == stamp(34).grant, "says who overtook")
    ensure(error.stamp == stamp(33, 3) and error.retry == "no", "never to be retried")
    await _is(guard, NAME, "B", 34)


@check()
async def announcing_fences_before_anything_is_written(h: GuardHarness) -> None:
    """Fence before you read: once the new holder has announced, the old one's write is refused."""
    guard = await h.guard()
    await guard.write(stamp(5), NAME, "A")
    await guard.announce(stamp(6, 0))
    await raises(StaleToken, guard.write(stamp(5, 2), NAME, "too late"))
    await guard.announce(stamp(6, 0))
    await raises(StaleToken, guard.announce(stamp(5, 0)))
    await _is(guard, NAME, "A", 6)
    found = await guard.read(stamp(7, 0), NAME)
    ensure(found.value == "A", "a fenced read reads")
    await raises(StaleToken, guard.write(stamp(6), NAME, "late"))
    await _is(guard, NAME, "A", 7)


@check()
async def a_refused_or_failed_write_leaves_no_trace(h: GuardHarness) -> None:
    """The mark rises exactly with the effect: not by a refusal, not by a conflict."""
    guard = await h.guard()
    version = await guard.write(stamp(5), NAME, "A")
    await raises(Conflict, guard.write(stamp(6), NAME, "B", expect=version + 1))
    mark = 6 if h.announces_apart else 5
    await _is(guard, NAME, "A", mark)
    await raises(Uncovered, guard.write(stamp(9, 1, "other"), NAME, "B"))
    await _is(guard, NAME, "A", mark)
    ensure(await guard.mark("other") is None, "nor under the stamp's own name")


@check()
async def compare_and_set_together_with_the_token(h: GuardHarness) -> None:
    """`expect` and the token are two questions with two answers; stale is said first."""
    guard = await h.guard()
    first = await guard.write(stamp(5), NAME, "A", expect=0)
    second = await guard.write(stamp(5, 2), NAME, "B", expect=first)
    await raises(Conflict, guard.write(stamp(5, 3), NAME, "C", expect=first))
    await raises(StaleToken, guard.write(stamp(4), NAME, "Z", expect=second))
    ensure(await guard.peek(NAME) == Versioned("B", second), "the second write stands")


@check()
async def one_token_one_grant(h: GuardHarness) -> None:
    """The same token from another grant is an authority that lost its history: refused and told apart."""
    guard = await h.guard()
    await guard.write(stamp(5), NAME, "A")
    twin = stamp(5, 1, grant="f" * 32)
    await raises(ReusedToken, guard.write(twin, NAME, "B"))
    await raises(ReusedToken, guard.announce(twin))
    await _is(guard, NAME, "A", 5)


@check()
async def a_stamp_counts_for_its_own_names(h: GuardHarness) -> None:
    """What is leased is what is fenced: no other name, however alike."""
    guard = await h.guard()
    for alike in ("orders", "orders/4", "orders/42/1", "Orders/42"):
        await raises(Uncovered, guard.write(stamp(5, 1, alike), NAME, "A"))
    await guard.write(stamp(5, 1, NAME, "orders/43"), NAME, "A")
    ensure(await guard.mark("orders/43") is None, "the other name is untouched")


@check()
async def one_authority_until_told_otherwise(h: GuardHarness) -> None:
    """The first realm is trusted; another one is foreign until an operator adopts it, then only that."""
    guard = await h.guard()
    await guard.write(stamp(5), NAME, "A")
    foreign = stamp(50, realm="00000000000000bb")
    await raises(ForeignRealm, guard.write(foreign, NAME, "B"))
    await raises(ForeignRealm, guard.announce(foreign))
    await _is(guard, NAME, "A", 5)
    await guard.adopt("00000000000000bb")
    await guard.write(foreign, NAME, "B")
    await raises(ForeignRealm, guard.write(stamp(51), NAME, "C"))
    await _is(guard, NAME, "B", 50)


@check()
async def tokens_compare_exactly(h: GuardHarness) -> None:
    """2**53 - 1 and its neighbour are different numbers; more than that is no stamp."""
    guard = await h.guard()
    await guard.write(stamp(TOKEN_MAX), NAME, "last")
    await raises(StaleToken, guard.write(stamp(TOKEN_MAX - 1), NAME, "one below"))
    await guard.write(stamp(9, 1, "b"), "b", "nine")
    await guard.write(stamp(10, 1, "b"), "b", "ten, not a text below nine")
    for bad in (0, -1, TOKEN_MAX + 1, 2**63):
        await raises(InvalidStamp, guard.write(stamp(1)._replace(token=bad), "c", "bad"))
    await _is(guard, NAME, "last", TOKEN_MAX)


@check()
async def a_stamp_without_seq(h: GuardHarness) -> None:
    """What a child process was given is good for rule retry."""
    guard = await h.guard()
    await guard.write(stamp(5, None), NAME, "child")
    await raises(StaleToken, guard.write(stamp(4, None), NAME, "old child"))
    await _is(guard, NAME, "child", 5)


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
async def bad_names_are_not_written(h: GuardHarness) -> None:
    """What is not a name is refused before anything happens."""
    guard = await h.guard(mode="observe")
    for bad in BAD_NAMES:
        await raises(Misuse, guard.write(None, bad, "x"))
        await raises(Misuse, guard.peek(bad))
    for name in ODD_NAMES:
        await guard.write(stamp(5, 1, name), name, name)
    for name in ODD_NAMES:
        ensure((await guard.peek(name)).value == name, f"{name!r} has a value of its own")


# The other rules.


@check()
async def rule_once(h: GuardHarness) -> None:
    """One operation a grant: announcing is none, a second write is a duplicate, also of the same stamp."""
    guard = await h.guard("once")
    await guard.announce(stamp(5, 0))
    await guard.read(stamp(5, 0), NAME)
    await guard.write(stamp(5, 1), NAME, "the one")
    for seq in (1, 2):
        await raises(DuplicateStamp, guard.write(stamp(5, seq), NAME, "again"))
    await guard.announce(stamp(5, 0))
    await raises(DuplicateStamp, guard.write(stamp(5, 3), NAME, "announcing again gives nothing back"))
    await guard.write(stamp(6, 1), NAME, "next")
    await raises(StaleToken, guard.write(stamp(5, 4), NAME, "zombie"))
    for none in (None, 0):
        await raises(InvalidStamp, guard.write(stamp(7, none), NAME, "a write needs a seq"))
    ensure((await guard.peek(NAME)).value == "next", "the one write of the newest grant")


@check()
async def rule_sequenced(h: GuardHarness) -> None:
    """Gaps are normal, the same operation again is done already, an earlier one is out of order."""
    guard = await h.guard("sequenced")
    await guard.announce(stamp(5, 0))
    await guard.write(stamp(5, 1), NAME, "1")
    await guard.write(stamp(5, 4), NAME, "4")
    await raises(AlreadyApplied, guard.write(stamp(5, 4), NAME, "4 again"))
    await raises(OutOfOrder, guard.write(stamp(5, 3), NAME, "3"))
    await guard.announce(stamp(5, 0))
    await raises(OutOfOrder, guard.write(stamp(5, 2), NAME, "announcing resets nothing"))
    await guard.write(stamp(6, 1), NAME, "next holder starts at 1")
    await raises(StaleToken, guard.write(stamp(5, 9), NAME, "zombie"))
    await raises(InvalidStamp, guard.write(stamp(7, None), NAME, "a write needs a seq"))
    ensure((await guard.peek(NAME)).value == "next holder starts at 1", "the newest")


@check()
async def a_repeated_stamp_is_harmless(h: GuardHarness) -> None:
    """A write whose reply was lost is sent again as it is: retry applies it once more, sequenced does not."""
    for rule, applied in (("retry", True), ("sequenced", False)):
        guard = await h.guard(rule)  # type: ignore[arg-type]
        first = stamp(5, 1, rule)
        before = await guard.write(first, rule, "once")
        if applied:
            ensure(await guard.write(first, rule, "once") == before + 1, "applied again, the same value")
        else:
            await raises(AlreadyApplied, guard.write(first, rule, "once"))
            ensure((await guard.peek(rule)).version == before, "not applied again")


@check()
async def several_names_all_or_none(h: GuardHarness) -> None:
    """One transaction over several names: one refusal refuses it whole; one seq covers it whole."""
    for rule in RULES:
        guard = await h.guard(rule)
        a, b = f"{rule}/a", f"{rule}/b"
        await guard.write_many(stamp(5, 1, a, b), {a: "1", b: "1"})
        await guard.write(stamp(7, 1, b), b, "newer")
        await raises(StaleToken, guard.write_many(stamp(6, 1, a, b), {a: "2", b: "2"}))
        await _is(guard, a, "1", 5)
        await _is(guard, b, "newer", 7)
        await raises(Uncovered, guard.write_many(stamp(8, 1, a), {a: "3", b: "3"}))
        await _is(guard, a, "1", 5)


@check()
async def agrees_with_the_decision(h: GuardHarness) -> None:
    """Long random stories, judged by the reference guard: the same answers, values and marks throughout."""
    for rule in RULES:
        guard = await h.guard(rule)
        model = MemoryGuard(rule=rule)
        rng = random.Random(f"agree {rule}")
        names = [f"{rule}/{letter}" for letter in "ab"]
        for index in range(150):
            await _same_step(rng, guard, model, names, index)
        for name in names:
            ensure(_bare(await guard.mark(name)) == _bare(await model.mark(name)), f"the mark of {name}")
            ensure(await guard.peek(name) == await model.peek(name), f"the value of {name}")


async def _same_step(rng: random.Random, guard: Guard, model: Guard, names: list[str], index: int) -> None:
    covered = rng.sample(names, rng.choice((1, 1, 2)))
    token = rng.randrange(max(1, index // 5), index // 5 + 4)
    seq: int | None = rng.choice((None, 0, 1, 1, 2, 3))
    grant = rng.choice((None, None, None, "f" * 32))
    carried = None if rng.random() < 0.1 else stamp(token, seq, *covered, grant=grant)
    name, value = rng.choice(names), f"v{index}"
    kind = rng.choice(("write", "write", "write", "announce", "read", "many", "cas", "mode"))
    outcomes = []
    version = (await model.peek(name)).version + rng.choice((0, 0, 1))
    mode = rng.choice(("observe", "shadow", "canary(50%)", "enforce", "enforce", "require"))
    for target in (guard, model):
        outcomes.append(await _outcome(_do(target, kind, carried, names, name, value, version, mode)))
    if kind == "many" and all(isinstance(outcome, str) for outcome in outcomes):
        return  # both refuse; which of several reasons is named first is a matter of order
    ensure(outcomes[0] == outcomes[1], f"step {index}, {kind} {name} with {carried}: {outcomes}")


async def _do(
    guard: Guard,
    kind: str,
    carried: Stamp | None,
    names: list[str],
    name: str,
    value: str,
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
    if kind == "announce":
        await guard.announce(carried)
        return None
    return await guard.read(carried, name)


async def _outcome(work: Awaitable[object]) -> object:
    try:
        return await work
    except FencedError as error:
        return type(error).__name__


def _bare(mark: Mark | None) -> Mark | None:
    """A mark without the operation that set it, which every guard names in its own way."""
    return Mark(mark.token, mark.grant, mark.seq) if mark else None


# Modes.


@check()
async def every_verdict_in_every_mode(h: GuardHarness) -> None:
    """Observe and shadow let everything through and leave the mark alone; enforce and require refuse."""
    guard = await h.guard("sequenced")
    await guard.write(stamp(5, 3), NAME, "start")
    bad: list[tuple[type[FencedError], Stamp | None]] = [
        (StaleToken, stamp(4, 1)),
        (OutOfOrder, stamp(5, 2)),
        (ReusedToken, stamp(5, 4, grant="f" * 32)),
        (Uncovered, stamp(9, 1, "other")),
        (ForeignRealm, stamp(9, realm="00000000000000bb")),
        (InvalidStamp, stamp(5, None)),
        (MissingStamp, None),
    ]
    for text in ("observe", "shadow", "canary(0%)", "canary(100%)", "enforce", "require"):
        await guard.set_mode(text)
        mode = Mode.parse(text)
        for kind, carried in bad:
            refuses = mode.name == "require" if carried is None else mode.refuses(NAME)
            work = guard.write(carried, NAME, f"{text} {kind.__name__}")
            if refuses:
                await raises(kind, work)
            else:
                await work
                ensure((await guard.peek(NAME)).value == f"{text} {kind.__name__}", "let through")
            mark = await guard.mark(NAME)
            ensure(mark is not None and (mark.token, mark.seq) == (5, 3), f"{text}: the mark stays")


@check()
async def would_refuse_is_counted_and_recorded(h: GuardHarness) -> None:
    """Observe counts, shadow records in full, a refusal is recorded although it was rolled back."""
    guard = await h.guard()
    await guard.write(stamp(5), NAME, "A")
    await guard.set_mode("observe")
    await guard.write(stamp(4), NAME, "B")
    await guard.write(None, NAME, "C")
    tally = await guard.tally()
    ensure(tally == {("stale", "observe"): 1, ("missing", "observe"): 1}, f"counted: {tally}")
    ensure(await guard.records() == [], "observe records nothing")
    await guard.set_mode("shadow")
    await guard.write(stamp(4), NAME, "D")
    await guard.write(None, NAME, "E")
    await guard.set_mode("enforce")
    await raises(StaleToken, guard.write(stamp(4), NAME, "F"))
    records = await guard.records()
    said = [(r.verdict.value, r.ruling.value, r.mode) for r in records]
    ensure(
        said
        == [("stale", "record", "shadow"), ("missing", "record", "shadow"), ("stale", "refuse", "enforce")],
        f"{said}",
    )
    ensure(all(r.name == NAME and r.mark is not None and r.mark.token == 5 for r in records), "name and mark")
    ensure(records[-1].stamp == stamp(4), "with the stamp")


@check()
async def a_canary_is_a_share_of_names(h: GuardHarness) -> None:
    """The same names at every guard; a larger share contains the smaller."""
    guard = await h.guard(mode="canary(40%)")
    names = [f"orders/{i}" for i in range(30)]
    refused = set()
    for name in names:
        await guard.write(stamp(5, 1, name), name, "A")
        try:
            await guard.write(stamp(4, 1, name), name, "zombie")
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
    for name, refuses in (
        ("new/1", True),
        ("old/1", False),
        ("old/paid/1", True),
        ("old", True),
        ("oddx1", True),
        ("odd[x]?", False),
    ):
        await guard.write(stamp(5, 1, name), name, "A")
        work = guard.write(stamp(4, 1, name), name, "zombie")
        if refuses:
            await raises(StaleToken, work)
        else:
            await work
    for bad in ("", "canary", "canary(5)", "canary(-1%)", "canary(101%)", "canary(nan%)", "ENFORCE", None, 5):
        await raises(Misuse, guard.set_mode(bad))  # type: ignore[arg-type]


@check()
async def writers_that_never_heard_of_us(h: GuardHarness) -> None:
    """Mandatory: a plain write goes through in observe and is refused in require. Cooperative: it goes through."""
    guard = await h.guard(mode="observe")
    ensure(await h.write_raw(NAME, "plain"), "observe lets it through")
    await guard.set_mode("enforce")
    ensure(await h.write_raw(NAME, "plain too"), "so does enforce")
    await guard.set_mode("require")
    ensure(
        await h.write_raw(NAME, "never") is not h.mandatory, "require refuses it if the guard is mandatory"
    )
    ensure(
        (await guard.peek(NAME)).value == ("plain too" if h.mandatory else "never"),
        "and nothing is seen of it",
    )
    await guard.write(stamp(5), NAME, "stamped")
    ensure(await h.write_raw(NAME, "after") is not h.mandatory, "the stamp is not left for the next writer")


# Reading, racing, lasting.


@check()
async def onlookers_see_nothing_older(h: GuardHarness) -> None:
    """`peek(at_least)` refuses to show a state older than one the onlooker has heard of."""
    guard = await h.guard()
    await raises(Contended, guard.peek(NAME, at_least=1))
    await guard.write(stamp(5), NAME, "A")
    ensure((await guard.peek(NAME, at_least=5)).value == "A", "seen")
    await raises(Contended, guard.peek(NAME, at_least=6))


@check()
async def racing_writers_leave_the_highest(h: GuardHarness) -> None:
    """Many writers at once, tokens in any order: the mark and the value are the highest one's."""
    guard = await h.guard()
    tokens = list(range(1, 25))
    random.Random(7).shuffle(tokens)
    finished: list[tuple[int, str]] = []

    async def write(token: int) -> None:
        try:
            await guard.announce(stamp(token, 0))
            await guard.write(stamp(token, 1), NAME, str(token))
            finished.append((token, "admitted"))
        except StaleToken:
            finished.append((token, "refused"))

    tasks = [h.runtime.spawn(lambda token=token: write(token), "race") for token in tokens]  # type: ignore[misc]
    await until(h.runtime, lambda: len(finished) == len(tokens), 30.0, "all have tried")
    for task in tasks:
        await task.join()
    ensure((24, "admitted") in finished, "the highest is admitted, whenever it came")
    await _is(guard, NAME, "24", 24)


@check()
async def marks_last(h: GuardHarness) -> None:
    """After a restart the mark is where it was, and the zombie is still refused."""
    guard = await h.guard()
    await guard.write(stamp(5), NAME, "A")
    await guard.announce(stamp(6, 0))
    again = await h.reopen()
    await _is(again, NAME, "A", 6)
    await raises(StaleToken, again.write(stamp(5, 2), NAME, "zombie"))
    await raises(ForeignRealm, again.write(stamp(9, realm="00000000000000bb"), NAME, "foreign"))


@check()
async def the_highest_mark_is_known(h: GuardHarness) -> None:
    """What an authority must be raised above: the highest token of all names, not the latest, not a refused one."""
    guard = await h.guard()
    ensure(await guard.highest() == 0, "no mark, no token")
    await guard.announce(stamp(9, 0, "a"))
    await guard.write(stamp(5), NAME, "A")
    await raises(Uncovered, guard.write(stamp(99, 1, "other"), NAME, "B"))
    ensure(await guard.highest() == 9, "of all names")
    await guard.write(stamp(10, 1, "b"), "b", "ten, not a text below nine")
    ensure(await guard.highest() == 10, "as a number")


@check()
async def rules_are_the_guards_not_the_writers(h: GuardHarness) -> None:
    """A guard knows its own rule after a restart."""
    guard: Guard = await h.guard("once")
    await guard.write(stamp(5, 1), NAME, "A")
    again = await h.reopen()
    await raises(DuplicateStamp, again.write(stamp(5, 2), NAME, "B"))
