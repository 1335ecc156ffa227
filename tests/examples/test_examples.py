"""Every program in examples/ runs, and says what its page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "apscheduler_jobs.py": r"each tick ran once: True\n",
    "celery_tasks.py": r"charged: \[\(1,\), \(1,\)\]\n",
    "claims.py": r"the late worker was refused\n20 of 20 rows are right\n",
    "election.py": r"(the message of an earlier term was refused\n){2}3 processes have led, one after the other\n",
    "once.py": r"machine \d migrates under token 1\n",
    "replicas.py": r"the deposed primary was refused\n\(b'one', b'two', b'three'\)\n",
    "rq_jobs.py": r"order 42 is charged\n",
}
"""What each example prints, as one regular expression."""
NEEDS = {"celery_tasks.py": "AMQP_URL", "rq_jobs.py": "REDIS_URL"}


def examples() -> list[object]:
    return [
        pytest.param(path.name, marks=[pytest.mark.xdist_group("rabbitmq")] * ("celery" in path.name))
        for path in sorted(EXAMPLES.glob("*.py"))
    ]


@pytest.mark.parametrize("name", examples())
def test_an_example_runs(name: str, request: pytest.FixtureRequest) -> None:
    addresses = {"AMQP_URL": "rabbitmq_url", "REDIS_URL": "redis_url"}
    told = {key: request.getfixturevalue(addresses[key]) for key in addresses if NEEDS.get(name) == key}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **told},
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SAYS[name], done.stdout), (done.stdout, done.stderr)
