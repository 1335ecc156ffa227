"""Drills whose histories are known, and what `fenced explain` tells of them: `python -m evidence.explained [DRILL]`.

Twelve drills, with leases and values in SQLite and PostgreSQL by turns: holders, tokens, refusals and the outcome of
each name are compared with the drill's own history.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

from fenced_testkit.servers import PostgresqlServer

SCENARIOS = (
    *(
        "sigstop",
        "gc-pause",
        "check-then-write",
        "crash",
        "network-delay",
        "delayed-write",
        "partition",
        "late-renewal",
    ),
    *("authority-down", "expiry-race", "read-visibility", "storm"),
)
PAIRS = (
    ("sqlite", "sqlite"),
    ("postgresql", "postgresql"),
    ("postgresql", "sqlite"),
    ("sqlite", "postgresql"),
)
STORM = ("--seconds", "8", "--holders", "4", "--names", "2")


def drilled(scenario: str, authority: str, guard: str) -> dict[str, Any]:
    more = STORM if scenario == "storm" else ()
    return _printed("drill", scenario, "--authority", authority, "--guard", guard, "--seed", "7", *more)


def explained(name: str, authority: str, guard: str) -> dict[str, Any]:
    return _printed("explain", name, "--authority", authority, "--guard", guard, "--since", "9m")


def _printed(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fenced", *words, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if not ended.stdout:
        raise RuntimeError(ended.stderr)
    return dict(json.loads(ended.stdout))


def differences(drill: dict[str, Any], account: dict[str, Any]) -> list[str]:
    """How an account differs from what a drill has seen. Empty: it is right, and claims no more."""
    name, found = account["name"], []
    granted = {each["token"]: each["holder"] for each in drill["grants"] if each["name"] == name}
    leases = {each["token"]: each["holder"]["label"].removeprefix("drill ") for each in account["leases"]}
    if wrong := {token: who for token, who in granted.items() if leases.get(token) != who}:
        found.append(f"holders: {wrong} are {[leases.get(token) for token in wrong]}")
    told = Counter(each["token"] for each in account["events"] if each["kind"] == "refused")
    stale = [each for each in drill["operations"] if each["name"] == name and each["decision"] == "refused"]
    if told != (happened := Counter(each["token"] for each in stale)):
        found.append(f"refusals by token: {dict(told)}, and there were {dict(happened)}")
    for each in {each["token"]: each for each in stale}.values():
        late = f"drill {granted[each['token']]} ("
        if not any(
            says.startswith(late) and f"token {each['token']})" in says for says in account["concluded"]
        ):
            found.append(f"nobody says that {late}...) was late with token {each['token']}")
    if drill["verdict"] == "held" and "LET" in "".join(account["concluded"]):
        found.append("a guard that held is said to have let something through")
    ends = {each["token"] for each in account["events"] if each["kind"] in ("expired", "released", "revoked")}
    if lost := {token for token in granted if token not in ends} - {max(granted, default=0)}:
        found.append(f"the ends of {sorted(lost)} are not told")
    return found


def main() -> None:
    with PostgresqlServer() as server, tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for scenario, (leases, values) in zip(SCENARIOS, itertools.cycle(PAIRS), strict=False):
            if sys.argv[1:] and scenario not in sys.argv[1:]:
                continue
            turn = f"{folder}/{scenario}-{leases}-{values}"
            authority, guard = (
                server.url(server.create_database())
                if store == "postgresql"
                else f"sqlite:///{turn}-{what}.db"
                for store, what in ((leases, "leases"), (values, "values"))
            )
            drill = drilled(scenario, authority, guard)
            wrong = [
                says
                for name in drill["names"]
                for says in differences(drill, explained(name, authority, guard))
            ]
            refused = sum(each["decision"] == "refused" for each in drill["operations"])
            told = "right" if not wrong else "; ".join(wrong)
            row = (scenario, leases, values, drill["verdict"], len(drill["grants"]), refused, told)
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
