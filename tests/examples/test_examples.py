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
    "convergent.py": r"read: \[b'1 apple', b'apples'\]\n"
    r"between the stores: read again later\n"
    r"read: \[b'2 apples, 3 pears', b'apples, pears'\]\n",
    "django_command.py": r"status 0: billed under token 1\nstatus 75: the other machine has it\ninvoices: 1\n",
    "election.py": r"(the message of an earlier term was refused\n){2}3 processes have led, one after the other\n",
    "fastapi_orders.py": r"answers: \[(200, ){9}412\]\nleft: 1\n",
    "once.py": r"machine \d migrates under token 1\n",
    "other_locks.py": r"the stopped holder was refused; left: 9\n",
    "permits.py": r"at most [23] of 3 seats were taken, and all but the killed one were served\n"
    r"a reader reads b'version 1'\nthe late writer was refused\n",
    "replicas.py": r"a stale replica was rebuilt\nthe deposed primary: StaleToken\n"
    r"the log has all that was acknowledged, once: True\n",
    "rq_jobs.py": r"order 42 is charged\n",
    "without_a_guard.py": r"waited for 0.3 s, if the bounds hold\nheld by node-b\n"
    r"(pager: token 1 is stale: 2 has been seen\n){2}",
}
"""What each example prints, as one regular expression."""
NEEDS = {
    "celery_tasks.py": "AMQP_URL",
    "django_command.py": "DATABASE_URL",
    "other_locks.py": "ZOOKEEPER",
    "rq_jobs.py": "REDIS_URL",
}


def examples() -> list[object]:
    return [
        pytest.param(path.name, marks=[pytest.mark.xdist_group("rabbitmq")] * ("celery" in path.name))
        for path in sorted(EXAMPLES.glob("*.py"))
    ]


@pytest.mark.parametrize("name", examples())
def test_an_example_runs(name: str, request: pytest.FixtureRequest) -> None:
    addresses = {
        "AMQP_URL": "rabbitmq_url",
        "DATABASE_URL": "postgresql_url",
        "REDIS_URL": "redis_url",
        "ZOOKEEPER": "zookeeper_url",
    }
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
