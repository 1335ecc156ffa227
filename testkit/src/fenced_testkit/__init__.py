"""The laboratory of fenced: servers to start and break, servers in memory, simulated worlds, and the outage kits.

A backend behind a network runs `OUTAGE_CHECKS` or `GUARD_OUTAGE_CHECKS` (with `fenced.testing.run`, once in each
colour), on a server that the checks break on purpose (`fenced_testkit.servers`, `fenced.drills.relay`).
"""

from fenced.testing import Check
from fenced_testkit import guard_outages, outages
from fenced_testkit.guard_outages import GuardFailoverHarness, GuardOutageHarness
from fenced_testkit.outages import OutageHarness

OUTAGE_CHECKS: list[Check[OutageHarness]] = [*outages.CHECKS]
GUARD_OUTAGE_CHECKS: list[Check[GuardOutageHarness]] = [*guard_outages.CHECKS]
GUARD_FAILOVER_CHECKS: list[Check[GuardFailoverHarness]] = [*guard_outages.FAILOVER_CHECKS]

__all__ = [
    "GUARD_FAILOVER_CHECKS",
    "GUARD_OUTAGE_CHECKS",
    "OUTAGE_CHECKS",
    "GuardFailoverHarness",
    "GuardOutageHarness",
    "OutageHarness",
]


def __dir__() -> list[str]:
    return __all__
