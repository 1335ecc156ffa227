"""Every program in examples/ runs, and says what its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "claims.py": r"the late worker was refused\n20 of 20 rows are right\n",
    "once.py": r"machine \d migrates under token 1\n",
}
"""What each example prints, as one regular expression."""


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_runs(name: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SAYS[name], done.stdout), done.stdout
