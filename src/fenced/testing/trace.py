"""Traces: an automaton, written from the contract of authorities, that checks what one was seen to answer.

    fenced serve --trace decisions.jsonl ...
    python -m fenced.testing.trace decisions.jsonl      # of several instances: all their files

It decides nothing. It reads the calls of all clients, and asks of each answer whether any authority with these traits
could have given it. Where only the clients' side was seen, a decision was made at some moment between the sending of
the call and its answer: then what the clients saw must be explainable. If the moments of the decisions are known, every
answer must be the right one. A deviation is never a false alarm; late answers hide some.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fenced.testing.lives import HELD, NEVER, OVER, Deviation, Life, Promises, TracedCall, lives_of
from fenced.values import timing
from fenced.values.model import (
    Ask,
    Busy,
    Ended,
    Gone,
    Granted,
    Kept,
    Release,
    Released,
    Renewal,
    Waiting,
    grant_id,
)

UNSEEN_SECONDS = timing.TTL_MAX + timing.LOCK_DELAY_MAX
"""For how long attempts from before a trace may keep a name taken."""


class Trace:
    """The calls about one namespace. `begin` and `answered` write them down; `check` raises Deviation."""

    def __init__(self, promises: Promises) -> None:
        self.promises = promises
        self.calls: list[TracedCall] = []
        self.forgiven = -NEVER
        """When the store last lost what it may lose: nothing that it said before counts."""
        self.unseen_until = -NEVER
        """Until then, attempts that are not in the trace may have kept names taken."""

    def begin(self, operation: object, now: float) -> TracedCall:
        """A client sends this call: an Ask, Renewal, Release or Withdrawal."""
        call = begun(operation, now)
        self.calls.append(call)
        return call

    def attempts(self) -> list[Life]:
        found: dict[str, list[TracedCall]] = defaultdict(list)
        # Python's sort is stable: decisions of one moment keep their order.
        for call in sorted(self.calls, key=lambda call: call.sent):
            if call.op != "force":
                found[call.attempt].append(call)
        return [self._life(calls) for calls in found.values()]

    def _life(self, calls: Sequence[TracedCall]) -> Life:
        return Life(calls, self.promises, calls[0].sent < self.forgiven)

    def check(self) -> int:
        """How many answers were checked."""
        attempts = self.attempts()
        for attempt in attempts:
            _Consistency(attempt, self.promises).check()
        lives = [self._life(calls) for attempt in attempts for calls in lives_of(attempt.calls)]
        self._note_forced(lives)
        seen = [life for life in lives if life.asks]
        check_tokens(seen, self.promises)
        queues = {name: NameTrace(name, of) for name, of in by_name(seen).items()}
        for queue in queues.values():
            queue.check_grants()
        for life in seen:
            check_refusals(life, [queues[name] for name in life.names], self.unseen_until)
        return sum(call.answer != "" for call in self.calls)

    def _note_forced(self, lives: Sequence[Life]) -> None:
        forced: dict[int, float] = {}
        for call in sorted(self.calls, key=lambda call: call.sent):
            if call.op == "force":
                forced.setdefault(call.token, call.sent)
        for life in lives:
            life.forced_from = forced.get(life.token, NEVER)


def begun(operation: object, now: float) -> TracedCall:
    secret: str = operation.secret  # type: ignore[attr-defined]
    match operation:
        case Ask():
            return TracedCall(
                "ask",
                grant_id(secret),
                now,
                names=operation.names,
                ttl=operation.ttl,
                lock_delay=operation.lock_delay,
            )
        case Renewal():
            return TracedCall("renew", grant_id(secret), now)
        case Release():
            return TracedCall("release", grant_id(secret), now, keep=operation.keep)
    return TracedCall("withdraw", grant_id(secret), now)


def answered(call: TracedCall, answer: object, now: float) -> None:
    """Note the answer. One that is none of these, such as an error, leaves the outcome unknown."""
    match answer:
        case Granted(token, remaining, ttl):
            call.answer, call.token, call.remaining = "granted", token, min(remaining, ttl)
        case Waiting():
            call.answer = "waiting"
        case Busy():
            call.answer = "busy"
        case Kept(remaining):
            call.answer, call.remaining = "kept", remaining
        case Released():
            call.answer = "released"
        case Ended(reason):
            call.answer, call.reason = "ended", reason
        case Gone():
            call.answer = "gone"
        case _:
            return
    call.at = now


def by_name(lives: Iterable[Life]) -> dict[str, list[Life]]:
    found: dict[str, list[Life]] = defaultdict(list)
    for life in lives:
        for name in life.names:
            found[name].append(life)
    return found


class _Consistency:
    """The answers to one attempt, one after the other; of all its lives, since its end is remembered over some."""

    def __init__(self, life: Life, promises: Promises) -> None:
        self.life, self.promises = life, promises

    def check(self) -> None:
        life = self.life
        for place, call in enumerate(life.calls):
            if call.answer:
                # Decided before this one was sent.
                earlier = [each for each in life.calls[:place] if each.at <= call.sent]
                self._check(call, earlier)
        for calls in lives_of(life.calls):
            tokens = {call.token for call in calls if call.answer == "granted"}
            if len(tokens) > 1:
                raise Deviation(f"{life.id[:6]} has two tokens: {sorted(tokens)}")

    def _check(self, call: TracedCall, earlier: Sequence[TracedCall]) -> None:
        life, over = self.life, [each for each in earlier if each.answer in OVER]
        remembered = over and call.sent < self._over_from(over[0]) + timing.remember_for(life.ttl)
        if call.answer in (*HELD, "waiting"):
            if remembered and not life.forgiven:
                raise Deviation(f"{call}: it was over at {over[0].at:.4f}")
            if call.op == "renew" and life.asks and life.asked > call.at:
                raise Deviation(f"{call}: it had not asked")
            self._check_expiry(call, earlier)
        if call.answer == "ended":
            self._check_reason(call, over)
        alive = not over and not life.forgiven and life.left_from > call.at
        lost = call.answer == "gone" or (call.answer == "ended" and call.reason == "expired")
        until = life.alive_until(call.sent)
        if lost and alive and until > call.at:
            raise Deviation(f"{call}: it lives until {until:.4f}")
        if call.answer == "gone" and remembered and not self.promises.forgets and self.promises.exact:
            raise Deviation(f"{call}: it was forgotten too early")

    def _over_from(self, told: TracedCall) -> float:
        """It ended when its client was told so; or before, by itself."""
        expired = self.life.alive_until(told.at)
        return told.at if expired == -NEVER else min(told.at, expired)

    def _check_reason(self, call: TracedCall, over: Sequence[TracedCall]) -> None:
        life = self.life
        if call.reason == "settled" and not self.promises.forgets:
            raise Deviation(f"{call}: this authority knows nothing of settled attempts")
        sent = {each.op for each in life.calls if each.sent <= call.at}
        asked_for = {"released": {"release"}, "withdrawn": {"withdraw"}}.get(call.reason, sent)
        refused = any(each.answer == "busy" for each in life.calls)  # then the authority itself withdraws
        if not asked_for & sent and not refused:
            raise Deviation(f"{call}: nobody has asked for that")

    def _check_expiry(self, call: TracedCall, earlier: Sequence[TracedCall]) -> None:
        """If the moments are known: what had expired by then must not live."""
        if not self.promises.exact:
            return
        held = [each.at + each.remaining for each in earlier if each.answer in HELD]
        waited = [
            each.at + self.promises.place(self.life.ttl) for each in earlier if each.answer == "waiting"
        ]
        if held or waited:
            expired = max(held or waited) + self.promises.slack(self.life.ttl)
            if expired < call.sent < expired + timing.remember_for(self.life.ttl):
                raise Deviation(f"{call}: it had expired at {expired:.4f}")


def check_tokens(lives: Sequence[Life], promises: Promises) -> None:
    """A token has one owner, and is greater than every token that was handed out before."""
    granted = [life for life in lives if life.token]
    owners: dict[tuple[str, int], Life] = {}
    for life in granted:
        for scope in life.names if promises.per_name else ("",):
            if (other := owners.setdefault((scope, life.token), life)).id != life.id:
                raise Deviation(f"token {life.token} was granted to {other.id[:6]} and to {life.id[:6]}")
    since: Callable[[Life], float] = lambda life: life.asked if promises.per_name else life.granted_from  # noqa: E731
    handed_out = Highest((life.granted_by, life.token, life) for life in granted)
    for life in granted:
        before = handed_out.before(since(life), life)
        if before is not None and before.token > life.token:
            raise Deviation(
                f"{life.id[:6]} was granted token {life.token} by a request of {since(life):.4f}, "
                f"and {before.id[:6]} had been told {before.token} at {before.granted_by:.4f}"
            )


class Highest:
    """Of values at moments, the highest at or before a moment."""

    def __init__(self, items: Iterable[tuple[float, float, Life]]) -> None:
        ordered = sorted(items, key=lambda item: item[0])
        self._moments = [moment for moment, _, _ in ordered]
        # Two of them: one may be the life that is asked about.
        self._two: list[list[tuple[float, Life]]] = []
        best: list[tuple[float, Life]] = []
        for _, value, life in ordered:
            best = sorted([*best, (value, life)], key=lambda item: -item[0])[:2]
            self._two.append(best)

    def before(self, moment: float, but: Life, *, at: bool = False) -> Life | None:
        """Whose value is the highest before this moment (`at`: or at it); another life than this one."""
        place = (bisect_right if at else bisect_left)(self._moments, moment)
        return next((life for _, life in self._two[place - 1] if life is not but), None) if place else None


class NameTrace:
    """The attempts at one name."""

    def __init__(self, name: str, lives: Sequence[Life]) -> None:
        self.name, self.lives = name, lives
        self._waiting = Highest((life.queued_by, life.waits_until, life) for life in lives)
        self._blocking = Highest((life.asked, life.blocks_until, life) for life in lives)

    def check_grants(self) -> None:
        """One holder at a time, also by lock_delay and keep; tokens in the order of grants; first come first served."""
        granted = sorted((life for life in self.lives if life.token), key=lambda life: life.token)
        longest: Life | None = None
        for life in granted:
            if longest is not None and life.granted_by < longest.free_from:
                raise Deviation(
                    f"{self.name} was granted to {life.id[:6]} (token {life.token}) by {life.granted_by:.4f}, "
                    f"but {longest.id[:6]} (token {longest.token}) keeps it until {longest.free_from:.4f}"
                )
            if longest is None or life.free_from > longest.free_from:
                longest = life
            ahead = self._waiting.before(life.asked, life)
            if ahead is not None and ahead.waits_until > life.granted_by:
                raise Deviation(
                    f"{self.name} was granted to {life.id[:6]} at {life.granted_by:.4f}, which first asked at "
                    f"{life.asked:.4f}; {ahead.id[:6]} waits for it since {ahead.queued_by:.4f}"
                )
        for one, other in itertools.pairwise(granted):
            if other.granted_by < one.granted_from:
                raise Deviation(
                    f"{self.name}: token {other.token} was granted by {other.granted_by:.4f}, "
                    f"before token {one.token}, which was granted after {one.granted_from:.4f}"
                )

    def may_be_taken(self, call: TracedCall, by: float, life: Life) -> bool:
        """Whether any other attempt, that had asked by then, may have been in the way when this call was decided."""
        other = self._blocking.before(by, life, at=True)
        return other is not None and other.blocks_until >= call.sent


def check_refusals(life: Life, queues: Sequence[NameTrace], unseen_until: float) -> None:
    """Busy, and waiting, only if not free."""
    for call in life.calls:
        if call.op != "ask" or call.answer not in ("busy", "waiting") or call.sent < unseen_until:
            continue  # a renewal of a place grants nothing, and is told that it waits
        if life.promises.sessions and call.answer == "waiting" and life.queued_by < call.sent:
            continue  # the first of a queue waits until its session is confirmed
        # A waiter waits for those that were there when it was queued, and for nobody who came later.
        by = min(call.at, life.queued_by)
        if not any(queue.may_be_taken(call, by, life) for queue in queues):
            raise Deviation(f"{call}: {', '.join(life.names)} was free")


# Files. A line is one decision, or says that an authority was opened.


def line_of(call: TracedCall, namespace: str) -> str:
    found: dict[str, Any] = {"namespace": namespace}
    for key in call.__slots__:
        value = getattr(call, key)
        if key == "sent" or (value not in ("", (), 0) and value != NEVER):
            found[key] = round(value, 6) if isinstance(value, float) else value
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n"


def opened_line(namespace: str, traits: Iterable[str], last_token: int, now: float) -> str:
    """The first line of a process about a namespace."""
    found = {"namespace": namespace, "opened": round(now, 6), "last_token": last_token, "traits": [*traits]}
    return json.dumps(found, separators=(",", ":")) + "\n"


def read(lines: Iterable[str]) -> dict[str, Trace]:
    """The traces of all namespaces. Lines of several files may be mixed."""
    found: dict[str, Trace] = {}
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            name = fields.pop("namespace")
            if "opened" in fields:
                trace = found.setdefault(name, Trace(Promises.of(fields["traits"])))
                if fields["last_token"]:
                    # Decisions that a killed process had made, and not yet noted, are not in its trace.
                    trace.forgiven = max(trace.forgiven, fields["opened"])
                    trace.unseen_until = max(trace.unseen_until, fields["opened"] + UNSEEN_SECONDS)
            else:
                found[name].calls.append(call_of(fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} is none of a trace: {error!r}") from None
    return found


def call_of(fields: dict[str, Any]) -> TracedCall:
    for key, value in fields.items():
        wanted = (
            list if key == "names" else str if key in ("op", "attempt", "answer", "reason") else int | float
        )
        if not isinstance(value, wanted):
            raise ValueError(f"{key} is {value!r}")
    return TracedCall(**fields | {"names": tuple(fields.get("names", ()))})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m fenced.testing.trace", description="Check traces of fenced serve."
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", type=Path, help="of all instances before one store"
    )
    options = parser.parse_args(arguments)
    try:
        with_lines = [path.read_text().splitlines() for path in options.files]
        traces = read(itertools.chain(*with_lines))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    checked = 0
    for name, trace in traces.items():
        try:
            checked += trace.check()
        except Deviation as deviation:
            sys.stderr.write(f"namespace {name}: {deviation}\n")
            return 1
    attempts = sum(len(trace.attempts()) for trace in traces.values())
    sys.stdout.write(f"{checked:,} answers about {attempts:,} attempts, no deviation\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
