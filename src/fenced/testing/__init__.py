"""Conformance kits: what every authority and every guard must do, as plain checks that know no pytest.

Bind a backend by a harness (`AuthorityHarness`, `GuardHarness`) and run `AUTHORITY_CHECKS` or `GUARD_CHECKS`
with `run`, once in each colour; what is behind a network passes `OUTAGE_CHECKS` too, on a server that is broken
on purpose (`fenced.testing.servers`, `fenced.testing.faults`). Third parties run the same checks as we do.
"""

from fenced.contracts import Colour
from fenced.testing import authorities, clients, guards, outages
from fenced.testing.kit import COLOURS, AuthorityHarness, Check, CheckFailed, GuardHarness, run
from fenced.testing.outages import OutageHarness

AUTHORITY_CHECKS: list[Check[AuthorityHarness]] = [*authorities.CHECKS, *clients.CHECKS]
GUARD_CHECKS: list[Check[GuardHarness]] = [*guards.CHECKS]
OUTAGE_CHECKS: list[Check[OutageHarness]] = [*outages.CHECKS]

__all__ = [
    "AUTHORITY_CHECKS",
    "COLOURS",
    "GUARD_CHECKS",
    "OUTAGE_CHECKS",
    "AuthorityHarness",
    "Check",
    "CheckFailed",
    "Colour",
    "GuardHarness",
    "OutageHarness",
    "run",
]
