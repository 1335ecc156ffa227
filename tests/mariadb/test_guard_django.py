"""Django's own transactions over the MariaDB guard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fenced_testkit.servers import MariadbServer


def test_django(mariadb_server: MariadbServer) -> None:
    where = [mariadb_server.host, str(mariadb_server.port), mariadb_server.create_database()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.mariadb.django_program", *where],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["as expected"], done.stderr
