"""What must not survive a fork: connections, threads, leases. Whoever has some is told in the child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def _forked(self) -> None:
        """In a forked child: forget what belongs to the parent, without closing it."""


_told: weakref.WeakSet[Forkable] = weakref.WeakSet()


def tell(thing: Forkable) -> None:
    """Call `thing._forked()` in every child that is forked while it lives."""
    _told.add(thing)


def _after_fork() -> None:
    for thing in list(_told):
        thing._forked()


os.register_at_fork(after_in_child=_after_fork)
