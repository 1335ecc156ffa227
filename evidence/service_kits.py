"""The kits and the drills through the service, before each store that several machines can share.

`make test` runs a part of this over PostgreSQL and etcd, and the whole over SQLite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fenced_testkit.servers import EtcdServer, PostgresqlServer, ServiceServer

KITS = {
    "authority_kit": "tests/conformance/authorities/test_service.py",
    "outage_kit": "tests/service/test_outages.py",
}
SCENARIOS = {"sigstop": ("--ttl", "1"), "late-renewal": ("--ttl", "1"), "storm": ("--seconds", "20")}
BEST_EFFORT = ("--guarantee", "best-effort")
"""Some versions of etcd are no more than that."""


def kit(path: str, store: str) -> dict[str, Any]:
    """How many checks passed, and the names of those that did not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", path, "-k", store, f"--junit-xml={report}"],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "FENCED_WHOLE_KIT": "1"},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        case.get("name")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"checks": len(cases), "failed": failed}


def drill(scenario: str, url: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fenced", "drill", scenario, "--json", "--authority", url, "--seed", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    return {key: found[key] for key in ("verdict", "overtaken", "refused", "lost_updates") if key in found}


def run() -> dict[str, Any]:
    found: dict[str, Any] = {}
    servers: dict[str, PostgresqlServer | EtcdServer] = {
        "postgresql": PostgresqlServer(),
        "etcd": EtcdServer(),
    }
    for store, server in servers.items():
        found[store] = {name: kit(path, store) for name, path in KITS.items()}
        with server, ServiceServer(store=server.url(), options=BEST_EFFORT) as instance:
            found[store]["drills"] = {
                scenario: drill(scenario, instance.url(), *options) for scenario, options in SCENARIOS.items()
            }
    return found
