"""Your own worker, stopped past its ttl and overtaken, and what the guard refused of it: for tests of programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fenced.drills.outside import START, LateHolder, Outside

__all__ = ["LateHolder", "overtake"]


def overtake(
    command: Sequence[str],
    *,
    authority: str,
    guard: str,
    table: str,
    name: str,
    ttl: float = 1.0,
    stop_at: str = START,
    takes_lease: bool = False,
    fault: Literal["sigstop", "cpu-starvation", "partition"] = "sigstop",
    check: Callable[[Any], object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LateHolder:
    """Run `command` as the holder of `name`, stop it past its ttl, let another holder take over, and let it go on.

    The command finds its lease in FENCED_STAMP, as under `fenced run`; with `takes_lease` it takes one itself, from
    FENCED_AUTHORITY. `stop_at`: its `start`, `itself` (it sends itself SIGSTOP where it is most dangerous), or a text
    of its output. `check` is called with a connection to the guard's database before and after the late part, and must
    find the same. Raises `fenced.drills.programs.NotShown` if the command was never late, because it ended before.
    """
    return Outside(
        command,
        authority,
        guard,
        name,
        table,
        ttl,
        takes_lease,
        stop_at,
        fault,
        check,
        dict(environment or {}),
    ).overtake()


def __dir__() -> list[str]:
    return __all__
