"""The door: a store of marks judges each request before the program runs.

Written once for both colours. The program's effect is not part of the store's step, so the door also keeps the requests
of this process in order (`running.py`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from fenced.errors import (
    AlreadyApplied,
    Conflict,
    Contended,
    FencedError,
    Indeterminate,
    Misconfigured,
    MissingStamp,
    Misuse,
    Refused,
    Uncovered,
    shown,
)
from fenced.guards.answers import RECORDS_MAX, error_for
from fenced.http.bodies import RememberedBody
from fenced.http.kept import HAPPENED, Asked, KeptReply, LastOperation
from fenced.http.receiving import Received, Replayed
from fenced.http.running import OVERTIME_SECONDS, Cut, RunningRequest, RunningRequests
from fenced.net.problems import error_from
from fenced.values.contracts import NamedValues, Runtime, Versioned
from fenced.values.decision import RULES, Mark, Mode, Rule, Ruling, Verdict, judge, mode_of, rule_on
from fenced.values.model import Credential, Stamp
from fenced.values.rollout import Decision

PATIENCE_SECONDS = 30.0
"""How long a request waits for older ones of the same name that still run."""
MODE_SECONDS = 1.0
"""How old the modes may be by which the door rules on requests that the store does not see."""
TRIES = 10


@dataclass(slots=True)
class Visit:
    """A request that was admitted, or that the mode lets through. `running` None: it has no stamp to be ordered by."""

    running: RunningRequest | None = None
    credential: Credential | None = None
    body: RememberedBody | None = None
    last: LastOperation | None = None
    """Under rules `once` and `sequenced`: the note in the store that this operation has begun."""
    version: int = 0
    replaced: bytes = b""
    """The note that this one has replaced; empty if there was none."""


class Door:
    """Judges requests by a store, and keeps the order of the requests that it admits."""

    def __init__(
        self,
        store: NamedValues,
        runtime: Runtime,
        *,
        rule: Rule = "retry",
        patience: float = PATIENCE_SECONDS,
        overtime: float = OVERTIME_SECONDS,
    ) -> None:
        if rule not in RULES:
            raise Misuse(f"a rule is {', '.join(RULES)}, not {shown(rule)}")
        if not overtime > 0:
            raise Misuse(f"overtime is a positive number of seconds, not {shown(overtime)}")
        self.store = store
        self.rule: Rule = rule
        self.records: deque[Decision] = deque(maxlen=RECORDS_MAX)
        self.counted: Counter[tuple[str, str, str]] = Counter()
        self.running = RunningRequests(runtime, one_at_a_time=rule != "retry", overtime=overtime)
        self._runtime = runtime
        self._patience = patience
        self._modes: tuple[float, list[tuple[str, Mode]]] | None = None

    async def open(self) -> None:
        """Open the store. Misconfigured if the receiver cannot use it."""
        await self.store.open()
        if self.rule != "retry":
            status = await self.store.operate(lambda operator: operator.status())
            if any(guard.rule != "retry" for guard in status.guards):
                raise Misconfigured(
                    f"{self.store.url}: the receiver applies rule {self.rule} itself; its store needs rule retry"
                )

    async def enter(
        self,
        received: Received | Refused,
        names: tuple[str, ...] | None,
        *,
        about: str,
        reads: bool = False,
        cut: Cut | None = None,
    ) -> Visit:
        """Admit a request, or raise its refusal. `about`: the path, for requests whose names are not known.

        `reads`: the method is safe. The request announces its stamp, and then sees the effects of all older requests.
        `cut`: ends what it does with its client, if a newer token waits for too long.
        """
        if isinstance(received, Refused):
            await self._rule(Verdict(received.kind), received, names, None, about)
            return Visit()
        stamp = received.stamp
        if names is None:
            if not reads:
                says = "no name is known for this path, so no stamp covers it"
                error = Uncovered(f"{shown(about)}: {says}", stamp=stamp)
                await self._rule(Verdict.UNCOVERED, error, None, stamp, about)
            return Visit()
        credential = received.credential(names)
        if stamp is None or credential is None:
            says = "the request carries no stamp, and the mode is require"
            missing = MissingStamp(f"{names[0]}: {says}", name=names[0])
            await self._rule(Verdict.MISSING, missing, names, None, about)
            return Visit()
        running = self.running.begin(names, stamp.token, reads=reads, cut=cut)
        try:
            if reads or self.rule == "retry":
                await self.store.announce(credential)
                await self.running.wait_for_older(running, self._patience)
                return Visit(running, credential)
            return await self._admit(running, credential, stamp, received)
        except BaseException:
            self.running.end(running)
            raise

    async def upgrade(self, about: str) -> None:
        """Rule on a request to leave HTTP, as for a WebSocket. No stamp covers what follows: Uncovered."""
        says = "no lease covers what goes over a WebSocket, or another protocol; send each operation as a request"
        await self._rule(Verdict.UNCOVERED, Uncovered(f"{shown(about)}: {says}"), None, None, about)

    async def _admit(
        self, running: RunningRequest, credential: Credential, stamp: Stamp, received: Received
    ) -> Visit:
        """Admit an operation under rule `once` or `sequenced`."""
        if len(running.names) != 1:
            raise Misuse(f"rule {self.rule} takes one name for each request; names= has returned several")
        found = await self.store.read(credential, running.names[0])  # this announces
        await self.running.wait_for_older(running, self._patience)
        return await self._begin(Visit(running, credential, received.body), stamp, received, found)

    def leave(self, visit: Visit) -> None:
        """The program has answered, or has failed."""
        if visit.running is not None:
            self.running.end(visit.running)

    async def keep(self, visit: Visit, status: int, reply: KeptReply | None) -> None:
        """Note that the program has answered, with its reply if that can be kept.

        2xx: it has happened. 3xx and 4xx, and a problem document that asks for a repeat, say that nothing happened, so
        the note is taken back, and the repeat runs: what a stranger without credentials was answered does not bind the
        owner of the stamp. Any other answer says nothing, and leaves the note that the operation has begun.

        If the note cannot be written, the answer goes out all the same: the program has run. A repeat then gets
        Indeterminate, which is true for whoever missed the answer.
        """
        if visit.last is None or visit.credential is None:
            return
        if status in HAPPENED:
            note = visit.last.answered(reply, visit.body).packed()
        elif status < 500 or (reply is not None and _asks_for_a_repeat(reply)):
            note = visit.replaced
        else:
            return
        # Safe: `expect` compares, so this replaces the operation's own note and never that of a later one.
        with suppress(FencedError):
            await self.store.write(visit.credential, visit.credential.names[0], note, expect=visit.version)

    async def _begin(self, visit: Visit, stamp: Stamp, received: Received, found: Versioned) -> Visit:
        """Judge by the rule, and note that the operation begins. One step, because the note replaces what was read."""
        assert visit.credential is not None
        name, current, asked = visit.credential.names[0], False, received.asked()
        for _ in range(TRIES):
            last = LastOperation.unpacked(found.value) if found.value else None
            mark = last.mark if last else None
            repeats = last is not None and last.is_of(stamp)
            judged = judge(mark, stamp, name=name, rule=self.rule, realm=None)
            if not repeats and judged.verdict is Verdict.ADMIT and judged.mark is not None:
                begun = LastOperation(judged.mark, asked)
                with suppress(Conflict):  # another process has written meanwhile: judge again
                    visit.version = await self.store.write(
                        visit.credential, name, begun.packed(), expect=found.version
                    )
                    visit.last, visit.replaced = begun, found.value or b""
                    return visit
            elif current:
                if last is not None and repeats:
                    raise await _repeated(last, name, asked, received.body)
                await self._rule_on_write(judged.verdict, name, stamp, mark)
                return visit
            # What was read may be older than the end of a request that this one has waited for.
            found, current = await self.store.read(visit.credential, name), True
        raise Contended(f"{name}: other processes were quicker {TRIES} times; try again")

    async def _rule_on_write(self, verdict: Verdict, name: str, stamp: Stamp, mark: Mark | None) -> None:
        if verdict in (Verdict.STALE, Verdict.REUSED):
            return  # the store has ruled on these, and let them through
        error = error_for(verdict, name=name, stamp=stamp, mark=mark, tells=False)
        await self._rule(verdict, error, (name,), stamp, name, mark)

    async def _rule(
        self,
        verdict: Verdict,
        error: FencedError,
        names: tuple[str, ...] | None,
        stamp: Stamp | None,
        about: str,
        mark: Mark | None = None,
    ) -> None:
        """Raise the error if the mode refuses it; count and record it as every guard does."""
        name = names[0] if names else None
        mode = mode_of(name or about, await self._current_modes())
        ruling = rule_on(verdict, mode, name or about)
        self.counted[verdict.value, ruling.value, str(mode)] += 1
        if ruling is not Ruling.COUNT:
            at = datetime.fromtimestamp(time.time(), UTC)  # noqa: TID251 - for people who read the record
            self.records.append(
                Decision.about(at, self.store.url, name, stamp, mark, verdict, ruling, str(mode))
            )
        if ruling is Ruling.REFUSE:
            raise error

    async def _current_modes(self) -> list[tuple[str, Mode]]:
        now = self._runtime.now()
        if self._modes is None or now - self._modes[0] > MODE_SECONDS:
            found = await self.store.modes()
            self._modes = now, [(pattern, Mode.parse(mode)) for pattern, mode in found.items()]
        return self._modes[1]


def _asks_for_a_repeat(reply: KeptReply) -> bool:
    """Whether a reply is a problem document that says: nothing happened, try again."""
    types = [value for name, value in reply.headers if name.lower() == "content-type"]
    error = error_from(reply.status, types[0], reply.body) if types else None
    return error is not None and error.retry in ("later", "transaction")


async def _repeated(last: LastOperation, name: str, asked: Asked, body: RememberedBody | None) -> FencedError:
    reply = await last.reply_to(asked, body)
    if reply is not None:
        return Replayed(reply)
    if last.done:
        kept = "was not kept" if last.reply is None else "is for a caller with other credentials"
        return AlreadyApplied(f"{name}: this operation was applied before; its reply {kept}")
    return Indeterminate(
        f"{name}: this operation was begun before, and has not been answered: it may have happened or not; "
        "look at the resource before you begin another operation"
    )
