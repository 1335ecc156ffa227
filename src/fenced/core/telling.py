"""Calling what the program gave us: an error in there is its own, and must not take a keeper with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def tell(call: Callable[..., Any], *args: object) -> None:
    """Call it; an exception goes to `sys.excepthook`, as one in a thread of the program's would."""
    try:
        call(*args)
    except Exception:  # noqa: BLE001 - whatever it is, it is not ours
        sys.excepthook(*sys.exc_info())
