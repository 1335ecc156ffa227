"""Call a user callback; report its exception to `sys.excepthook` instead of letting it end the keeper."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def call_user_callback(call: Callable[..., Any], *args: object) -> None:
    """Call it; report an exception to `sys.excepthook`, as `threading` does for a thread of the program."""
    try:
        call(*args)
    except Exception:  # noqa: BLE001 - the callback is the user's and may raise anything
        sys.excepthook(*sys.exc_info())
