"""What authorities behind a pool of connections share: asks of unknown outcome, and the attempts that wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fenced.leases.rules import made_final
from fenced.net.pool import Pool
from fenced.values.contracts import Authority
from fenced.values.model import Ask, AskAnswer, Waiting, grant_id


class WaitingAttempts(dict[str, None]):
    """The public ids of a client's attempts that wait, in their order: whoever begins to listen checks them all."""

    async def asked(
        self,
        ask: Ask,
        send: Callable[[Ask, str, float], Awaitable[AskAnswer]],
        authority: Authority,
        pool: Pool[Any],
        until: float,
    ) -> AskAnswer:
        """Send an ask, and note whether it waits. Busy is final, also if a request of the pool broke meanwhile."""
        public, broken = grant_id(ask.secret), pool.broken
        if ask.wait:
            # Before it is sent: a listener that begins meanwhile checks it, too.
            self[public] = None
        answer: AskAnswer | None = None
        try:
            answer = await send(ask, public, until)
        finally:
            if not isinstance(answer, Waiting):
                self.pop(public, None)
        # The count is of the whole pool: a request of another attempt that broke costs a needless withdrawal at most.
        return answer if broken == pool.broken else await made_final(answer, ask, authority, until)
