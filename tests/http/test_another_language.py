"""A client that is not ours, written from the page, agrees with the vectors over a real connection."""

import json
import subprocess
from pathlib import Path

from fenced.testing import vectors
from tests.http.origin import Origin


def test_a_client_in_node_agrees_with_the_vectors() -> None:
    rows = json.loads(vectors.PATH.read_text())["http"]
    with Origin() as origin:
        done = subprocess.run(
            ["node", Path(__file__).with_name("client.mjs"), origin.url, vectors.PATH],
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(rows["requests"]) + len(rows["verdicts"]["rows"]) + 8
