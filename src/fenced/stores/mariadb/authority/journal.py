"""The statements of one transaction, for an algorithm that calls the verbs of `Rows` one after the other.

The algorithm does not suspend, and each statement to a server is a request. So its verbs write what they do into a
journal. A statement whose answer is not needed waits for the next request. If an answer is missing, the algorithm is
left by `Missing`, the statements that wait are sent together with the one that was asked for, and the algorithm runs
again from its start: what the journal has is not sent again, but answered from there. It is the same algorithm with the
same clock, so it takes the same way. What it will ask for first is sent before it runs; so it mostly runs once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fenced.stores.mariadb.wire.connection import Result

NOTHING = Result((), 0)


class Missing(Exception):
    """The algorithm needs an answer of the server: send `unsent`, `record` the results, and run it again."""


class StatementJournal:
    def __init__(self, known: dict[str, Result]) -> None:
        self._known = known
        """Answers that were fetched in advance. They count until the first statement that changes something."""
        self._entries: list[Result] = []
        self._place = 0
        self.unsent: list[str] = []
        self._ahead: list[str] = []
        self.changes = False
        """Whether there is anything to commit."""

    def rewind(self) -> None:
        """The algorithm starts again."""
        self._place = 0

    def write(self, statement: str) -> None:
        """A statement that changes something; it is sent with the next request."""
        if self._place == len(self._entries):
            self._known.clear()
            self.changes = True
            self.unsent.append(statement)
            self._entries.append(NOTHING)
        self._place += 1

    def read(self, statement: str, ahead: Iterable[str] = (), *, once: bool = False) -> Result:
        """The answer to a statement. If it must be sent, `ahead` are sent, too: they will be asked for soon.

        `once`: it has another answer each time, and nothing is sent with it.
        """
        if self._place == len(self._entries):
            answer = self._known.pop(statement, None) if once else self._known.get(statement)
            if answer is None:
                new = [statement, *(each for each in ahead if each not in self._known)]
                self._ahead = [] if once else new
                self.unsent += new
                raise Missing
            self._entries.append(answer)
        self._place += 1
        return self._entries[self._place - 1]

    def record(self, results: Sequence[Result]) -> None:
        """What came back for `unsent`."""
        asked = len(results) - max(len(self._ahead), 1)
        self._entries.append(results[asked])
        self._known.update(zip(self._ahead, results[asked:], strict=False))
        self.unsent.clear()
        self._ahead = []
