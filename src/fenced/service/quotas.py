"""What one client may use: its rate, and the leases of its token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fenced.service.access import EVERYBODY, Principal
from fenced.service.bodies import BatchBody, ReleaseBody, RenewBody, WithdrawBody
from fenced.service.limits import KEEPING_TIMES, Limits, Rates, TokenLeases, retry_after
from fenced.service.operations import Work
from fenced.service.replies import NotAdmitted, plain
from fenced.service.requests import Call
from fenced.values.model import Ask, BatchAnswer

KEEPING = (RenewBody, ReleaseBody, WithdrawBody)


class Quotas:
    """Those of all clients of one instance. Used in the loop's thread only."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.rates = Rates()
        self._leases = TokenLeases()

    def check_rate(self, call: Call, by: Principal | None = None, body: object = None) -> None:
        """NotAdmitted if this client has to wait, because its requests are limited. `by` is None: nobody knows it.

        A request counts as all of its attempts. Renewals and ends of leases are counted separately: other requests of
        the same client must not cost it a lease.
        """
        rate = (by and by.rate) or self._limits.rate
        if rate is None:
            return
        host = call.client or "unix"
        client = f"unknown {host}" if by is None else f"address {host}" if by is EVERYBODY else by.id
        kind, cost = _counted(body)
        seconds = self.rates.wait(
            f"{kind} {client}", rate * KEEPING_TIMES if kind == "keeping" else rate, cost
        )
        if seconds > 0:
            later = f"nothing happened; try again in {seconds:.3g} seconds"
            raise NotAdmitted(plain(429, "Too many requests", later), ("retry-after", retry_after(seconds)))

    def check_leases(self, by: Principal, work: Work) -> None:
        """NotAdmitted if this token would have too many leases and places in queues."""
        if by is EVERYBODY:
            return
        most = self._limits.leases_each if by.leases is None else by.leases
        asks = {each.secret: each.ttl for each in work.operations if isinstance(each, Ask)}
        if asks and not self._leases.admit(by.id, asks, most):
            later = f"it has {most} leases and places in queues, or would have more; nothing happened"
            raise NotAdmitted(plain(429, "This token has too many leases", later), ("retry-after", "1"))

    def note_leases(self, by: Principal, work: Work, found: Sequence[BatchAnswer] | Exception) -> None:
        if by is not EVERYBODY and not isinstance(found, Exception):
            self._leases.answered(by.id, work.operations, found)


def _counted(body: object) -> tuple[Literal["keeping", "other"], int]:
    """In which bucket of a client a request is counted, and as how many."""
    if isinstance(body, BatchBody):
        keeps = all(item.ask is None for item in body.do)
        return "keeping" if keeps else "other", max(1, len(body.do))
    if isinstance(body, RenewBody):
        return "keeping", max(1, len(body.attempts))
    return "keeping" if isinstance(body, KEEPING) else "other", 1
