"""Conformance kits: what every authority and every guard must do, as plain checks that do not need pytest.

Write a harness for a backend (`AuthorityHarness`, `GuardHarness`) and run `AUTHORITY_CHECKS` or `GUARD_CHECKS` with
`run`, once in each colour. A backend behind a network also runs `OUTAGE_CHECKS` or `GUARD_OUTAGE_CHECKS`, on a server
that the checks break on purpose (`fenced.testing.servers`, `fenced.testing.faults`). Other packages can run the same
checks on their backends.
"""

from fenced.contracts import Colour
from fenced.testing import (
    authorities,
    clients,
    counting,
    guard_outages,
    guards,
    operating,
    outages,
    wandering,
)
from fenced.testing.guard_outages import GuardFailoverHarness, GuardOutageHarness
from fenced.testing.kit import COLOURS, AuthorityHarness, Check, CheckFailed, GuardHarness, run
from fenced.testing.outages import OutageHarness

AUTHORITY_CHECKS: list[Check[AuthorityHarness]] = [
    *authorities.CHECKS,
    *counting.CHECKS,
    *operating.CHECKS,
    *wandering.CHECKS,
    *clients.CHECKS,
]
GUARD_CHECKS: list[Check[GuardHarness]] = [*guards.CHECKS]
OUTAGE_CHECKS: list[Check[OutageHarness]] = [*outages.CHECKS]
GUARD_OUTAGE_CHECKS: list[Check[GuardOutageHarness]] = [*guard_outages.CHECKS]
GUARD_FAILOVER_CHECKS: list[Check[GuardFailoverHarness]] = [*guard_outages.FAILOVER_CHECKS]

__all__ = [
    "AUTHORITY_CHECKS",
    "COLOURS",
    "GUARD_CHECKS",
    "GUARD_FAILOVER_CHECKS",
    "GUARD_OUTAGE_CHECKS",
    "OUTAGE_CHECKS",
    "AuthorityHarness",
    "Check",
    "CheckFailed",
    "Colour",
    "GuardFailoverHarness",
    "GuardHarness",
    "GuardOutageHarness",
    "OutageHarness",
    "run",
]


def __dir__() -> list[str]:
    return __all__
