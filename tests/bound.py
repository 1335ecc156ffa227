"""A guard together with a client, for stories that use one client: its methods are the guard's, on that client."""

from __future__ import annotations

from functools import partial
from typing import Any


class Bound:
    def __init__(self, guard: Any, client: Any) -> None:
        self.guard = guard
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self.guard, name), self.client)
