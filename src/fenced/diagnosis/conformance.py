"""The authority kit against a live server: in namespaces of its own, and without what a live server cannot be asked.

Nobody may move the clock of such a server, or restart it. So time passes by waiting, and a check that needs a restart,
or more time than PATIENCE_SECONDS, is left out. Namespaces are never deleted, so a few empty ones stay behind.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fenced.client import registry
from fenced.errors import FencedError
from fenced.testing import AUTHORITY_CHECKS, AuthorityHarness, Check, CheckFailed, run
from fenced.values.contracts import Authority, Runtime

PATIENCE_SECONDS = 1.6


class _LeftOutError(Exception):
    """The check needs what nobody may do to a live server."""


class LiveHarness:
    """Clients of a live authority."""

    def __init__(self, url: str, runtime: Runtime, space: str) -> None:
        self.runtime = runtime
        self._url = url
        self._space = space
        self._opened: list[Authority] = []

    async def authority(self, namespace: str = "default") -> Authority:
        made = registry.authority(self._url, self.runtime, f"{self._space}/{namespace}")
        self._opened.append(made)
        await made.open()
        return made

    async def pass_time(self, seconds: float) -> None:
        if seconds > PATIENCE_SECONDS:
            raise _LeftOutError
        await self.runtime.wait(self.runtime.wakeup(), self.runtime.now() + seconds)

    async def restart(self) -> None:
        raise _LeftOutError

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()


def failures(url: str, checks: Sequence[Check[AuthorityHarness]] = AUTHORITY_CHECKS) -> list[str]:
    """One sentence for each check that this authority fails."""
    failed = []
    for check in checks:
        space = f"fenced-doctor/{secrets.token_hex(4)}"
        try:
            run(check, lambda runtime, space=space: LiveHarness(url, runtime, space), "blocking")  # type: ignore[misc]
        except _LeftOutError:
            continue
        except (CheckFailed, FencedError) as error:
            failed.append(f"conformance: {check.name} failed: {error}")
    return failed
