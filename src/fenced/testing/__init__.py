"""Conformance kits: what every authority and every guard must do, as plain checks that do not need pytest.

Write a harness for a backend (`AuthorityHarness`, `GuardHarness`) and run `AUTHORITY_CHECKS` or `GUARD_CHECKS` with
`run`, once in each colour. `LOOP_CHECKS` need no more than the authority's `Address`; run each in an event loop. Other
packages can run the same checks on their backends. A backend behind a network also runs the checks of `fenced_testkit`,
on a server that they break on purpose.
"""

from fenced.testing import authorities, clients, counting, guards, loops, operating, wandering
from fenced.testing.kit import COLOURS, AuthorityHarness, Check, CheckFailed, GuardHarness, run
from fenced.testing.loops import Address
from fenced.values.contracts import Colour

AUTHORITY_CHECKS: list[Check[AuthorityHarness]] = [
    *authorities.CHECKS,
    *counting.CHECKS,
    *operating.CHECKS,
    *wandering.CHECKS,
    *clients.CHECKS,
]
GUARD_CHECKS: list[Check[GuardHarness]] = [*guards.CHECKS]
LOOP_CHECKS: list[Check[Address]] = [*loops.CHECKS]

__all__ = [
    "AUTHORITY_CHECKS",
    "COLOURS",
    "GUARD_CHECKS",
    "LOOP_CHECKS",
    "Address",
    "AuthorityHarness",
    "Check",
    "CheckFailed",
    "Colour",
    "GuardHarness",
    "run",
]


def __dir__() -> list[str]:
    return __all__
