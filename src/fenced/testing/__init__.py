"""Conformance kits: what every authority and every guard must do, as plain checks that do not need pytest.

Write a harness for a backend (`AuthorityHarness`, `GuardHarness`) and run `AUTHORITY_CHECKS` or `GUARD_CHECKS` with
`run`, once in each colour. Other packages can run the same checks on their backends. A backend behind a network also
runs the checks of `fenced_testkit`, on a server that they break on purpose.
"""

from fenced.testing import authorities, clients, counting, guards, operating, wandering
from fenced.testing.kit import COLOURS, AuthorityHarness, Check, CheckFailed, GuardHarness, run
from fenced.values.contracts import Colour

AUTHORITY_CHECKS: list[Check[AuthorityHarness]] = [
    *authorities.CHECKS,
    *counting.CHECKS,
    *operating.CHECKS,
    *wandering.CHECKS,
    *clients.CHECKS,
]
GUARD_CHECKS: list[Check[GuardHarness]] = [*guards.CHECKS]

__all__ = [
    "AUTHORITY_CHECKS",
    "COLOURS",
    "GUARD_CHECKS",
    "AuthorityHarness",
    "Check",
    "CheckFailed",
    "Colour",
    "GuardHarness",
    "run",
]


def __dir__() -> list[str]:
    return __all__
