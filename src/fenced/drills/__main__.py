"""`python -m fenced.drills` is `fenced drill`."""

from __future__ import annotations

from fenced.drills.command import drill

drill(prog_name="fenced drill")
