"""Call a user callback; report its exception to `sys.excepthook` instead of letting it end the keeper."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def call_user_callback(call: Callable[..., Any], *args: object) -> None:
    """Call it; an exception goes to `sys.excepthook`, like one in a thread of the program."""
    try:
        call(*args)
    except Exception:  # noqa: BLE001 - whatever it is, it is not ours
        sys.excepthook(*sys.exc_info())
