"""Somebody else's program as the late holder: it is stopped past its ttl, overtaken, and goes on.

`fenced drill --holder` and `fenced.testing.late` are this. The program takes its lease over HTTP itself, or it gets a
stamp as from `fenced run`: then the drill renews until the program is stopped, as its `fenced run` would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenced.client import registry
from fenced.client.faces import Client
from fenced.client.leases import Lease
from fenced.drills.bound import bound
from fenced.drills.processes import PATIENCE_SECONDS, START_SECONDS, CouldNotRun, descendants
from fenced.drills.programs import NotShown, relay_to, starved
from fenced.errors import FencedError, NotGranted, Unsupported
from fenced.guards.engine import Engine
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.clocks import now
from fenced.values.contracts import Operator
from fenced.values.model import Ask, Granted, Holder, Stamp, grant_id
from fenced.values.rollout import Decision

_POLL_SECONDS = 0.01
_RECORDS = 1000
ITSELF = "itself"
START = "start"


@dataclass(frozen=True, slots=True)
class LateHolder:
    """What became of a program that was overtaken."""

    name: str
    token: int
    newer: int
    """The token of the holder that overtook it."""
    refused: tuple[Decision, ...]
    """The guard's records of its refusals."""
    counted: int
    """Refusals that the guard counted meanwhile; also those of which nobody was there to make a record."""
    status: int
    """The exit status of the program; -N: signal N."""
    output: str
    before: object = None
    """What the check found when the newer holder had taken over, before the program went on."""
    after: object = None
    """What it found when the program had ended."""

    @property
    def verdict(self) -> str:
        """Broken if the program changed anything late. Held only if the guard refused it."""
        if self.before != self.after:
            return "broken"
        return "held" if self.refused or self.counted else "inconclusive"

    @property
    def sentence(self) -> str:
        match self.verdict:
            case "broken":
                change = f"{self.before} became {self.after}"
                return f"The program changed something after token {self.newer} had been seen: {change}."
            case "held":
                late = f"with token {self.token} after token {self.newer} had been seen"
                return f"The program wrote {late}, and was refused."
        return (
            f"The guard refused nothing of token {self.token}, and nothing changed: did the program write after it "
            f"went on? Its status was {self.status}."
        )


@dataclass(frozen=True, slots=True)
class Outside:
    """A program of somebody else, and where it works."""

    command: Sequence[str]
    authority: str
    guard: str
    """The database whose guard refuses."""
    name: str
    table: str | None = None
    """The guarded table, for the records; None: all."""
    ttl: float = 1.0
    takes_lease: bool = False
    """It takes its lease itself, over HTTP, from FENCED_AUTHORITY; else it reads FENCED_STAMP."""
    stop_at: str = START
    """When it is stopped: at its `start`, when it stops `itself` (SIGSTOP), or when its output has this text."""
    fault: str = "sigstop"
    """Or `cpu-starvation`, or `partition`: its address of the authority is a relay, which is cut."""
    check: Callable[[Any], object] | None = None
    """Called with an operator's connection to the database: what must not change."""
    environment: dict[str, str] = field(default_factory=dict)

    def overtake(self) -> LateHolder:
        with contextlib.ExitStack() as stack:
            return _Run(self, stack).run()


class _Run:
    def __init__(self, outside: Outside, stack: contextlib.ExitStack) -> None:
        self._outside = outside
        self._stack = stack
        self._authority = registry.authority(outside.authority, BlockingRuntime())
        stack.callback(lambda: step(self._authority.close()))
        self._realm = step(self._authority.open()).realm
        self._engine: Engine = registry.engine(outside.guard)
        self._db = self._engine.connect(outside.guard)
        stack.callback(self._db.close)
        self._secret = ""
        self._renew_at = 0.0
        self._relay: Any = None
        self._fault = stack.enter_context(contextlib.ExitStack())

    def run(self) -> LateHolder:
        outside = self._outside
        counted = self._counted()
        token, environment = self._grant() if not outside.takes_lease else (0, {})
        environment |= {"FENCED_NAME": outside.name, "FENCED_AUTHORITY": self._address()}
        environment |= {"FENCED_GUARD": outside.guard, "FENCED_TTL": f"{outside.ttl:g}"}
        with self._started(environment | outside.environment) as (process, output):
            token = token or self._token_of(process, output)
            self._stop(process, output)
            newer = self._overtaken(token)
            before = self._checked()
            self._fault.close()
            try:
                status = process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                raise NotShown(
                    f"the program did not end within {PATIENCE_SECONDS:g} s after it went on"
                ) from None
            refused = tuple(
                each for each in self._records() if each.token == token and each.ruling == "refuse"
            )
            said = output.read_text(errors="replace")
            made = self._counted() - counted
            return LateHolder(
                outside.name, token, newer.token, refused, made, status, said, before, self._checked()
            )

    def _address(self) -> str:
        if self._outside.fault != "partition":
            return self._outside.authority
        address, self._relay = relay_to(self._outside.authority)
        self._stack.callback(self._relay.stop)
        return address

    def _grant(self) -> tuple[int, dict[str, str]]:
        """A lease for the program, as `fenced run` takes it."""
        runtime = BlockingRuntime()
        self._secret = runtime.secret()
        holder = Holder(runtime.secret(), "drill", os.uname().nodename, os.getpid())
        answer = step(
            self._authority.ask(Ask(self._secret, (self._outside.name,), self._outside.ttl, holder))
        )
        if not isinstance(answer, Granted):
            raise CouldNotRun(f"{self._outside.name} is taken: {answer}")
        stamp = Stamp(self._realm, (self._outside.name,), answer.token, None, grant_id(self._secret))
        self._stack.callback(lambda: step(self._authority.release(self._secret)))
        self._renew_at = now() + self._outside.ttl / 3
        return answer.token, {"FENCED_STAMP": str(stamp), "FENCED_TOKEN": str(answer.token)}

    @contextlib.contextmanager
    def _started(self, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        with tempfile.TemporaryDirectory(prefix="fenced-drill-") as folder:
            output = Path(folder) / "output"
            with open(output, "wb") as sink:
                process = subprocess.Popen(
                    bound(self._outside.command),
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            try:
                yield process, output
            finally:
                _signal(process.pid, signal.SIGKILL)
                process.wait()

    def _token_of(self, process: subprocess.Popen[bytes], output: Path) -> int:
        """The token of the lease that the program has taken itself."""

        def look() -> int:
            held_by = step(self._authority.observe(self._outside.name)).held_by
            return held_by.token if held_by is not None else 0

        token: int = self._until(look, process, output, f"took a lease on {self._outside.name}")
        return token

    def _stop(self, process: subprocess.Popen[bytes], output: Path) -> None:
        at = self._outside.stop_at
        if at == ITSELF:
            what = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT

            def stopped() -> bool:
                found = os.waitid(os.P_PID, process.pid, what)
                return found is not None and found.si_code == os.CLD_STOPPED

            self._until(stopped, process, output, "stopped itself")
        elif at != START:
            self._until(lambda: at in output.read_text(errors="replace"), process, output, f"printed {at!r}")
        if self._relay is not None:
            self._relay.black_hole(drop=True)
        elif self._outside.fault == "cpu-starvation":
            self._fault.enter_context(starved(process.pid))
        else:
            _signal(process.pid, signal.SIGSTOP)
            self._fault.callback(_signal, process.pid, signal.SIGCONT)

    def _until(
        self, truth: Callable[[], Any], process: subprocess.Popen[bytes], output: Path, what: str
    ) -> Any:
        """What `truth` returns, as soon as it is true; the lease is renewed meanwhile."""
        # The program may have to be compiled first, as Java's sources.
        patience = START_SECONDS + PATIENCE_SECONDS
        until = now() + patience
        while not (found := truth()):
            if process.poll() is not None:
                last = output.read_text(errors="replace").strip().splitlines()[-1:]
                said = "".join(f": {line}" for line in last)
                raise NotShown(f"the program ended (status {process.returncode}) before it {what}{said}")
            if now() > until:
                raise NotShown(f"within {patience:g} s the program never {what}")
            if self._secret and now() > self._renew_at:
                step(self._authority.renew([self._secret]))
                self._renew_at = now() + self._outside.ttl / 3
            time.sleep(_POLL_SECONDS)
        return found

    def _overtaken(self, token: int) -> Lease:
        """The lease of the newer holder, which it has announced at the guard."""
        outside = self._outside
        client = Client(outside.authority, label="drill B", guarantee="best-effort")
        self._stack.enter_context(client)
        try:
            lease = client.acquire(
                outside.name, ttl=max(outside.ttl, 5.0), wait=outside.ttl + PATIENCE_SECONDS
            )
        except NotGranted as error:  # it was slowed, and renewed in time all the same
            raise NotShown(f"the program was not late: {error}") from error
        self._stack.callback(lease.release)
        if lease.token <= token:
            raise CouldNotRun(f"the authority granted token {lease.token} after {token}")
        try:
            self._announce(lease)
        except FencedError as error:
            raise CouldNotRun(f"token {lease.token} could not be announced at the guard: {error}") from error
        return lease

    def _announce(self, lease: Lease) -> None:
        from fenced.sql import Guard

        Guard(table=self._outside.table or "any", name=self._outside.name).announce(self._db, lease)

    def _checked(self) -> object:
        return None if self._outside.check is None else self._outside.check(self._db)

    def _operator(self) -> Operator:
        return self._engine.operator(self._db)

    def _records(self) -> list[Decision]:
        try:
            return step(self._operator().records(self._outside.table, _RECORDS))
        except Unsupported:
            return []

    def _counted(self) -> int:
        guards = step(self._operator().status(self._outside.table)).guards
        return sum(each.refused or 0 for each in guards)


def _signal(pid: int, number: signal.Signals) -> None:
    """To a process and all that it has started; those that are gone need none."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
