"""What must not cross a fork: leases, threads, and above all SQLite's idea of which locks it holds.

SQLite keeps that per process, and a child inherits it: a connection that the child opens to the same file would
take no real lock, and its commits could go into a log that others have deleted. So before a fork every
transaction of ours is let to its end, and every connection is closed.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Protocol

FORK_PATIENCE_SECONDS = 10.0


class Forkable(Protocol):
    def _before_fork(self) -> None:
        """In the parent: close what a child must not inherit. No transaction is under way."""

    def _forked(self) -> None:
        """In the child: forget what belongs to the parent."""


class _Gate:
    """Whoever uses an SQLite connection of ours is inside; a fork waits until nobody is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._shut:
                self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: not self._inside, FORK_PATIENCE_SECONDS)

    def reopen(self) -> None:
        with self._changed:
            self._shut = False
            self._changed.notify_all()


_gate = _Gate()
_registered: weakref.WeakSet[Forkable] = weakref.WeakSet()


def register(thing: Forkable) -> None:
    """Call its `_before_fork` and `_forked` at every fork while it lives."""
    _registered.add(thing)


def enter() -> None:
    """About to use a connection of ours; waits while a fork is under way."""
    _gate.enter()


def leave() -> None:
    _gate.leave()


def _before() -> None:
    _gate.shut()
    for thing in list(_registered):
        thing._before_fork()


def _in_child() -> None:
    global _gate  # noqa: PLW0603 - the inherited one may be locked by a thread that is not here
    _gate = _Gate()
    for thing in list(_registered):
        try:
            thing._forked()
        except Exception:  # noqa: BLE001 - the others are called whatever one of them raises
            sys.excepthook(*sys.exc_info())


def _in_parent() -> None:
    _gate.reopen()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
