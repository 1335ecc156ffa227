"""Conformance kits: what every authority and every guard must do, as plain checks that know no pytest.

Bind a backend by a harness (`AuthorityHarness`, `GuardHarness`) and run `authorities.CHECKS` or
`guards.CHECKS` with `run`, once in each colour. Third parties run the same checks as we do.
"""

from fenced.testing.kit import AuthorityHarness, Check, CheckFailed, GuardHarness, run

__all__ = ["AuthorityHarness", "Check", "CheckFailed", "GuardHarness", "run"]
