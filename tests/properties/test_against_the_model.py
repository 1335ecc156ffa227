"""Every authority gives the answers of the reference model, through any story that Hypothesis invents."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fenced.errors import FencedError
from fenced.runtime.blocking import BlockingRuntime
from fenced.stores.memory.authority import MemoryStore
from fenced.stores.sqlite.authority.authority import SqliteAuthority
from fenced.values.model import Ask, Busy, Granted, Holder, Kept, NameView, Waiting
from fenced_testkit.stepped import Stepped

NAMES = ["a", "b", "c"]
SECRETS = [f"{i:032x}" for i in range(6)]
HOLDER = Holder("0" * 32, "label", "host", 1)


def plain(answer: object) -> object:
    """An answer without what may differ: rounding, and how early a waiter is told to look again."""
    match answer:
        case Waiting(check_in, ahead, held_by):
            return ("waiting", check_in <= 1e-9, ahead, held_by.token if held_by else None)
        case Granted(token, remaining, ttl):
            return ("granted", token, round(remaining, 6), ttl)
        case Busy(ahead, held_by):
            return ("busy", ahead, held_by and (held_by.token, round(held_by.remaining, 6)))
        case Kept(remaining):
            return ("kept", round(remaining, 6))
        case NameView():
            held = answer.held_by
            waiters = [(w.names, round(w.remaining, 6)) for w in answer.waiters]
            return (
                answer.name,
                held and (held.token, round(held.remaining, 6)),
                round(answer.free_in, 6),
                waiters,
            )
        case _:
            return answer


class AgainstTheModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.now_ns = 10**12
        path = Path(self._folder.name) / "leases.db"
        self.store = Stepped(SqliteAuthority(path, BlockingRuntime(), clock=lambda: self.now_ns))
        self.model = Stepped.over(MemoryStore(lambda: self.now_ns / 1e9))
        self.opened = False

    @initialize()
    def open(self) -> None:
        self.store.open()
        self.opened = True

    def teardown(self) -> None:
        self.store.close()
        self._folder.cleanup()

    def both(self, real: object, model: object) -> None:
        outcomes = []
        for call in (real, model):
            try:
                outcomes.append(call())  # type: ignore[operator]
            except FencedError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], outcomes

    @rule(
        secret=st.sampled_from(SECRETS),
        names=st.sets(st.sampled_from(NAMES), min_size=1, max_size=2),
        ttl=st.sampled_from([1.0, 1.0, 1.0, 30.0]),
        wait=st.booleans(),
        delay=st.sampled_from([0.0, 0.0, 2.0]),
    )
    def ask(self, secret: str, names: set[str], ttl: float, wait: bool, delay: float) -> None:
        ask = Ask(secret, tuple(sorted(names)), ttl, HOLDER, wait, delay)
        self.both(lambda: plain(self.store.ask(ask)), lambda: plain(self.model.ask(ask)))

    @rule(secrets=st.lists(st.sampled_from(SECRETS), max_size=6, unique=True))
    def renew(self, secrets: list[str]) -> None:
        self.both(
            lambda: [plain(a) for a in self.store.renew(secrets)],
            lambda: [plain(a) for a in self.model.renew(secrets)],
        )

    @rule(secret=st.sampled_from(SECRETS), keep=st.sampled_from([0.0, 0.0, 2.0]))
    def release(self, secret: str, keep: float) -> None:
        self.both(
            lambda: self.store.release(secret, keep=keep), lambda: self.model.release(secret, keep=keep)
        )

    @rule(secret=st.sampled_from(SECRETS))
    def withdraw(self, secret: str) -> None:
        self.both(lambda: self.store.withdraw(secret), lambda: self.model.withdraw(secret))

    @rule(name=st.sampled_from(NAMES), behind=st.sampled_from([0, 0, 1]))
    def force_release(self, name: str, behind: int) -> None:
        held_by = self.model.observe(name).held_by
        token = held_by.token - behind if held_by is not None else 1
        self.both(
            lambda: self.store.force_release(name, token), lambda: self.model.force_release(name, token)
        )

    @rule(above=st.integers(0, 40))
    def raise_floor(self, above: int) -> None:
        self.both(lambda: self.store.raise_floor(above), lambda: self.model.raise_floor(above))

    @rule(milliseconds=st.sampled_from([10, 400, 1000, 1001, 2500, 11_000, 700_000]))
    def pass_time(self, milliseconds: int) -> None:
        """What is over is forgotten at once, on both sides: SQLite also sweeps by itself, the model does not."""
        self.now_ns += milliseconds * 10**6
        self.both(self.store.tidy, self.model.tidy)

    @invariant()
    def the_same_picture(self) -> None:
        if self.opened:
            self.both(
                lambda: [plain(view) for view in self.store.survey(limit=100)],
                lambda: [plain(view) for view in self.model.survey(limit=100)],
            )


AgainstTheModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAgainstTheModel = AgainstTheModel.TestCase
