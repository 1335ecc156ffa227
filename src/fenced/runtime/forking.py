"""Fork handlers: a child must not inherit leases, threads, or SQLite's table of the locks that it holds.

SQLite keeps that table per process, and a child inherits it. A connection that the child then opens to the same file
would take no real lock, and its commits could go into a log that others have deleted. So a fork waits until our
SQLite transactions have ended (at most ten seconds), and closes every connection first.
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
        """In the parent: close what a child must not inherit. No transaction is running."""

    def _forked(self) -> None:
        """In the child: drop what belongs to the parent."""


class _Gate:
    """Counts the threads that use one of our SQLite connections; a fork waits until there are none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # used without the condition's methods where every write passes
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._lock:
            # Counted under the lock under which a fork shuts: either the fork sees this thread and waits for it, or
            # this thread sees that it is shut. `reopen` wakes it.
            while self._shut:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._shut:
                self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._shut = True
            # `wait_for` lets go of the lock meanwhile, so those inside can leave. A thread that is inside and forks
            # itself waits for the whole patience, and then forks.
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
    """Call before using an SQLite connection; waits while a fork is in progress."""
    _gate.enter()


def leave() -> None:
    _gate.leave()


def _before() -> None:
    _gate.shut()
    for thing in list(_registered):
        thing._before_fork()


def _in_child() -> None:
    global _gate  # noqa: PLW0603 - a thread that the child does not have may hold the inherited lock
    _gate = _Gate()
    for thing in list(_registered):
        try:
            thing._forked()
        except Exception:  # noqa: BLE001 - the others are called whatever one of them raises
            sys.excepthook(*sys.exc_info())


def _in_parent() -> None:
    _gate.reopen()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
