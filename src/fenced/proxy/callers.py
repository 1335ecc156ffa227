"""Who sends requests without a stamp, and who is refused: so that a rollout finds the programs that it forgot."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

CALLERS_MAX = 1000
"""How many callers are remembered; those that were silent for longest go first."""
AGENT_LENGTH_MAX = 200
"""How much of a User-Agent is remembered."""


class Caller(NamedTuple):
    """A program, as far as a request shows it."""

    address: str
    """Of the other side of the connection: of a load balancer, if there is one in between."""
    agent: str
    """The User-Agent."""

    @classmethod
    def of(cls, address: str, agent: bytes) -> Caller:
        shown = "".join(sign if sign.isprintable() else "?" for sign in agent.decode("latin-1"))
        return cls(address, shown[:AGENT_LENGTH_MAX])


@dataclass(slots=True)
class _Noted:
    count: int
    last: datetime
    name: str


class CallerRecords:
    """How often each caller was refused, or passed without a stamp; and when, about which name, the last time was."""

    def __init__(self) -> None:
        self._noted: OrderedDict[tuple[Caller, str, str], _Noted] = OrderedDict()

    def note(self, caller: Caller, kind: str, ruling: str, name: str, at: datetime) -> None:
        key = caller, kind, ruling
        noted = self._noted.get(key)
        count = noted.count + 1 if noted is not None else 1
        self._noted[key] = _Noted(count, at, name)
        self._noted.move_to_end(key)
        if len(self._noted) > CALLERS_MAX:
            self._noted.popitem(last=False)

    def lines(self) -> Iterator[str]:
        """A JSON document for each caller and kind; the one of the last request comes last."""
        for (caller, kind, ruling), noted in self._noted.items():
            document = {
                "kind": kind,
                "ruling": ruling,
                "count": noted.count,
                "address": caller.address,
                "agent": caller.agent,
                "last": noted.last.isoformat(timespec="milliseconds"),
                "name": noted.name,
            }
            yield json.dumps(document) + "\n"
