"""A guard with a slot for each name: every slot decides by itself, and operators reach all of them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from fenced.errors import ForeignRealm, Misconfigured, Misuse, StaleToken, Unsupported
from fenced.redis import RedisGuard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.redis.guard import slots as slots_module
from fenced.stores.redis.guard.marks import MarkOptions, RedisMarks
from fenced.stores.redis.guard.slots import RedisMarksBySlot
from fenced.stores.redis.guard.values import SLOT_TRAITS, RedisValues
from fenced.stores.redis.wire.finding import SLOTS, slot_of
from fenced.testing import GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.values.contracts import NamedValues, Runtime
from fenced.values.model import Credential, Stamp
from fenced_testkit.servers import RedisServer
from tests.colours import alternating
from tests.conformance.guards.test_redis import Harness
from tests.redis.test_guard import REALM

OTHER_REALM = "00000000000000bb"
RUNTIME = BlockingRuntime()


def stamp(token: int, *names: str, realm: str = REALM) -> Stamp:
    return Stamp(realm, names, token, 1, f"{token:032x}")


class SlotHarness(Harness):
    """Every name is a tag of its own."""

    def __init__(self, runtime: Runtime, server: RedisServer) -> None:
        super().__init__(runtime, server)
        self.traits = SLOT_TRAITS

    async def _open(self, **options: str) -> NamedValues:
        return await super()._open(name="{tag}", **options)

    async def write_raw(self, name: str, value: bytes) -> bool:
        marks: RedisMarksBySlot = self._opened[-1].marks
        self._server.execute("HSET", marks.at([name]).key("value", name), "value", value)
        return True


@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_CHECKS))
def test_the_kit(check: Check[GuardHarness], colour: Colour, redis_server: RedisServer) -> None:
    run(check, lambda runtime: SlotHarness(runtime, redis_server), colour)


@pytest.fixture
def values(redis_url: str, tag: str) -> Iterator[RedisValues]:
    values = RedisValues.at(f"{redis_url}?tag={tag}&name=stock/{{tag}}", RUNTIME)
    yield values
    step(values.close())


def test_operators_reach_every_slot(client: redis.Redis, values: RedisValues, tag: str) -> None:
    """A mode and a realm bind all slots, those that are used for the first time meanwhile, and those of later."""
    guard = RedisGuard(tag=tag, name="stock/{tag}")
    for number in range(3):
        guard.announce(client, stamp(6, f"stock/{number}"))
        with pytest.raises(StaleToken):
            guard.announce(client, stamp(5, f"stock/{number}"))
    marks = values.marks
    step(marks._registered(marks.home, slot_of("3")))  # another process, which has come no further yet
    step(values.set_mode("shadow"))
    for number in range(5):
        guard.announce(client, stamp(5, f"stock/{number}"))
    status = step(values.operate(lambda operator: operator.status())).guards[0]
    assert (status.marks, status.highest, status.wrong) == (5, 6, ())
    assert {count.ruling: count.count for count in status.counts} == {"refuse": 3, "record": 3}
    records = step(values.operate(lambda operator: operator.records(limit=4)))
    assert len(records) == 4 and [each.at for each in records] == sorted(each.at for each in records)
    assert step(values.operate(lambda operator: operator.unset_mode(None, "x"))) is False
    step(values.adopt(OTHER_REALM))
    step(values.set_mode("enforce"))
    for number in range(6):
        with pytest.raises(ForeignRealm):
            guard.announce(client, stamp(7, f"stock/{number}"))
        guard.announce(client, stamp(7, f"stock/{number}", realm=OTHER_REALM))


def test_all_slots_trust_the_same_authority(client: redis.Redis, tag: str) -> None:
    """The first one that was seen in any slot, however the slot was used before."""
    guard = RedisGuard(tag=tag, name="stock/{tag}")
    for name in ("stock/1", "stock/2"):
        with guard.transaction(client, None, name):  # without a lease: nobody is trusted yet
            pass
    with contextlib.suppress(Exception):
        guard.announce(client, stamp(1, "stock/3", realm=OTHER_REALM), "stock/1")  # does not cover it
    guard.announce(client, stamp(5, "stock/1"))
    for name in ("stock/1", "stock/2", "stock/3"):
        for fresh in (guard, RedisGuard(tag=tag, name="stock/{tag}")):
            with pytest.raises(ForeignRealm):
                fresh.announce(client, stamp(9, name, realm=OTHER_REALM))


def test_a_change_that_was_interrupted(client: redis.Redis, values: RedisValues, tag: str) -> None:
    """Status says so, and repeating it completes it."""
    guard = RedisGuard(tag=tag, name="stock/{tag}")
    guard.announce(client, stamp(5, "stock/1"))
    key = values.marks.at(["stock/1"]).key("config")
    before: Any = client.get(key)
    step(values.set_mode("shadow"))
    assert client.get(key) != before
    client.set(key, before)
    status = step(values.operate(lambda operator: operator.status())).guards[0]
    assert status.wrong == ("slots that have not got the last change: 1; repeat it",)
    step(values.set_mode("shadow"))
    assert client.get(key) != before
    client.set(key, before)
    # The next one that comes does it, too.
    RedisGuard(tag=tag, name="stock/{tag}").announce(client, stamp(5, "stock/1"))
    after = client.get(key)
    assert after != before
    slot = values.marks.at(["stock/1"])
    assert slot.unpacked(before).modes == {"*": "enforce"}
    assert not step(values.marks._copy(b"name stock/{tag}\n" + before, slot))  # a slower operator
    assert client.get(key) == after


def test_a_promotion_that_has_lost_a_change(client: redis.Redis, values: RedisValues, tag: str) -> None:
    """The slots have got it: they accept the next one nevertheless."""
    RedisGuard(tag=tag, name="stock/{tag}").announce(client, stamp(5, "stock/1"))
    home, slot = values.marks.home, values.marks.at(["stock/1"])
    lost: Any = client.get(home.key("config"))
    for mode in ("shadow", "observe", "canary(5%)"):
        step(values.set_mode(mode))
    client.set(home.key("config"), lost)
    step(values.set_mode("require"))
    (_, first), (_, second) = step(home.config()), step(slot.config())
    assert first == second and second.modes == {"*": "require"}


def test_names_and_tags(client: redis.Redis, redis_url: str, tag: str) -> None:
    guard = RedisGuard(tag=tag, name="stock/{tag}/left")
    options = MarkOptions(tag, name="stock/{tag}/left")
    assert options.tag_of("stock/4/2/left") == "4/2"
    assert options.slot_of_names(["stock/{4}/left"]) == slot_of("{{4}}:key")
    for wrong in ("stock/left", "stock//left", "other/4/left", "stock/}4/left"):
        with pytest.raises((Unsupported, Misuse)):
            options.tag_of(wrong)
    both = stamp(5, "stock/1/left", "stock/2/left")
    with pytest.raises(Unsupported, match="are in several slots"), guard.transaction(client, both):
        pass
    guard.announce(client, both)  # one slot after the other
    for name in both.names:
        with pytest.raises(StaleToken), guard.transaction(client, stamp(4, name)):
            pass
    for other in (RedisGuard(tag=tag), RedisGuard(tag=tag, name="{tag}")):
        with pytest.raises(Misconfigured, match=r"has name='stock/\{tag\}/left'"):
            other.announce(client, stamp(5, "a"))
    RedisGuard(tag=tag + "one").announce(client, stamp(5, "a"))
    with pytest.raises(Misconfigured, match="has no name: use the same"):
        RedisGuard(tag=tag + "one", name="{tag}").announce(client, stamp(5, "a"))
    for pattern in ("stock", "{tag}{tag}", "{tag}{x}", "}{tag}", 5):
        with pytest.raises(Misuse, match="pattern"):
            RedisGuard(name=pattern)  # type: ignore[arg-type]
    values = RedisValues.at(f"{redis_url}?tag={tag}&name=stock/{{tag}}/left", RUNTIME)
    assert values.url.endswith("name=stock/{tag}/left")
    with pytest.raises(Unsupported):
        step(values.write_many(Credential((both,)), dict.fromkeys(both.names, b"x")))
    step(values.close())


def test_each_slot_has_a_tag_of_the_guard() -> None:
    tags = slots_module._tags()
    assert len(set(tags)) == SLOTS and all(slot_of(f"x{{{tag}}}y") == slot for slot, tag in enumerate(tags))


# The checks can fail.


async def _only_creates(self: RedisMarksBySlot, blob: bytes, marks: RedisMarks) -> bool:
    return (await marks.stored_config())[1] is not None or await copied(self, blob, marks)


copied = RedisMarksBySlot._copy


async def _does_not_register(self: RedisMarksBySlot, home: RedisMarks, slot: int) -> bytes:
    return (await home.config())[0]


PLANTED: dict[str, tuple[str, Any, Callable[..., None]]] = {
    "a mode reaches the guard's own slot only": (
        "_copy",
        _only_creates,
        test_operators_reach_every_slot,
    ),
    "a new slot is not registered": ("_registered", _does_not_register, test_operators_reach_every_slot),
    "each slot trusts whom it sees first": (
        "_is_sound",
        lambda stamp, names: False,
        test_all_slots_trust_the_same_authority,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_checks_can_fail(
    bug: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, wrong, check = PLANTED[bug]
    monkeypatch.setattr(RedisMarksBySlot if hasattr(RedisMarksBySlot, where) else slots_module, where, wrong)
    arguments = {name: request.getfixturevalue(name) for name in inspect.signature(check).parameters}
    with pytest.raises((AssertionError, pytest.fail.Exception, ForeignRealm, StaleToken)):
        check(**arguments)
