"""The alerts: what is deployed is what is printed, and each fires on its condition in promtool, and only then.

`make evidence ARGS=alerts` lets all of them fire in a real Prometheus.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fenced.metrics.alerts import ALERTS, expression
from fenced.metrics.dashboard import SCRAPE, dashboard, panel_expression, panels
from fenced.metrics.table import BY_NAME
from tests.metrics.servers import promtool

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "monitoring"


def test_the_deployed_alerts_are_those_that_the_command_prints() -> None:
    for what, name in (
        ("rules", "alerts.yml"),
        ("scrape", "prometheus.yml"),
        ("dashboard", "dashboard.json"),
    ):
        printed = subprocess.run(
            [sys.executable, "-m", "fenced", "alerts", what], capture_output=True, text=True, check=True
        )
        assert printed.stdout == (DEPLOY / name).read_text(), (
            f"fenced alerts {what} >deploy/monitoring/{name}"
        )
    promtool("check", "rules", str(DEPLOY / "alerts.yml"))
    promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml"))


def test_alerts_and_panels_name_metrics_of_the_table() -> None:
    texts = [expression(alert) for alert in ALERTS] + [panel_expression(metric) for _, metric in panels()]
    for text in texts:
        for name in re.findall(r"\bfenced_\w+", text):
            assert name.removesuffix("_bucket") in BY_NAME, name
    assert "expr" in dashboard() and "fenced-exporter" in SCRAPE


def test_every_alert_has_a_runbook() -> None:
    page = (ROOT / "docs" / "runbooks" / "alerts.md").read_text()
    for alert in ALERTS:
        section = page.partition(f"\n## {alert.name}\n")[2].partition("\n## ")[0]
        for part in ("What you see", "Why", "What to do", "On purpose"):
            assert f"**{part}.**" in section, f"{alert.name}: {part}"


G = 'guard="g",target="t"'
HONEST = {
    f'fenced_refusals_total{{{G},kind="stale",source="guard"}}': "0+0x60 1+0x60 2+0x60 3+0x60",
    f'fenced_refusals_total{{{G},kind="unrecorded",source="guard"}}': "7+0x240",
    f'fenced_refusals_total{{{G},kind="reused",source="guard"}}': "0+0x240",
    f'fenced_unstamped_total{{{G},ruling="count",source="guard"}}': "12+0x240",
    f'fenced_guard_stage{{{G},pattern="*"}}': "3+0x240",
    'fenced_acquire_seconds_bucket{le="0.005"}': "0+10x240",
    'fenced_acquire_seconds_bucket{le="10"}': "0+10x240",
    'fenced_acquire_seconds_bucket{le="+Inf"}': "0+10x240",
    f"fenced_mark_above_last_token{{{G}}}": "-3+0x240",
    f"fenced_guard_wrong{{{G}}}": "0+0x240",
    f'fenced_guard_override_age_seconds{{{G},pattern="*"}}': "0+30x200",
    'fenced_lost_total{job="j",reason="expired"}': "0+0x120 1+0x120",
    'fenced_keeper_failures_total{job="j"}': "0+0x240",
    'fenced_queue_stuck_seconds{target="t"}': "0 30 60 0 30 0+0x240",
    'fenced_key_age_seconds{key="k"}': "86400+30x240",
    'fenced_certificate_seconds{file="f"}': "2592000-30x240",
    'fenced_up{target="t"}': "1+0x240",
    'up{job="fenced-service"}': "1+0x240",
    'fenced_authority_strict{target="t"}': "1+0x240",
}
"""Two hours in which nothing is wrong: a trickle of refusals, one lost lease, an override of less than two hours."""
WRONG = {
    "FencedRefusalsWithLatency": {
        f'fenced_refusals_total{{{G},kind="stale",source="guard"}}': "0+0x230 5 10 15 20 25 30 35 40 45 50",
        'fenced_acquire_seconds_bucket{le="0.005"}': "0+10x230 2300+0x10",
        'fenced_acquire_seconds_bucket{le="10"}': "0+10x230 2302+5x10",
        'fenced_acquire_seconds_bucket{le="+Inf"}': "0+10x230 2302+5x10",
    },
    "FencedUnstampedWrite": {
        f'fenced_refusals_total{{{G},kind="unrecorded",source="guard"}}': "7+0x230 8+0x10"
    },
    "FencedExpiryRepeats": {'fenced_lost_total{job="j",reason="expired"}': "0+0x220 3+0x20"},
    "FencedFloorMustBeRaised": {f"fenced_mark_above_last_token{{{G}}}": "-3+0x230 4+0x10"},
    "FencedOverrideLeftOn": {f'fenced_guard_override_age_seconds{{{G},pattern="*"}}': "0+31x240"},
    "FencedQueueDoesNotMove": {'fenced_queue_stuck_seconds{target="t"}': "0+30x240"},
    "FencedNotRequired": {
        f'fenced_unstamped_total{{{G},ruling="count",source="guard"}}': "12+0x120 13+0x120"
    },
    "FencedKeyOld": {'fenced_certificate_seconds{file="f"}': "1209700-30x240"},
    "FencedKeeperFailed": {'fenced_keeper_failures_total{job="j"}': "0+0x230 1+0x10"},
    "FencedGuardWrong": {f"fenced_guard_wrong{{{G}}}": "0+0x239 1"},
    "FencedCannotLook": {'fenced_up{target="t"}': "1+0x220 0+0x20"},
    "FencedBestEffort": {'fenced_authority_strict{target="t"}': "0+0x240"},
}


@pytest.mark.parametrize("wrong", ["", *WRONG])
def test_an_alert_fires_on_its_condition(wrong: str, tmp_path: Path) -> None:
    """And no other does, but for one that means the same write."""
    series = "\n".join(
        f"  - {{series: '{name}', values: '{values}'}}"
        for name, values in {**HONEST, **WRONG.get(wrong, {})}.items()
    )
    also = {"FencedNotRequired": "FencedUnstampedWrite"}.get(wrong)
    quiet = [alert.name for alert in ALERTS if alert.name not in (wrong, also)]
    cases = [f"  - {{eval_time: 2h, alertname: {name}, exp_alerts: []}}" for name in quiet]
    case = f"tests:\n- interval: 30s\n  input_series:\n{series}\n  alert_rule_test:\n" + "\n".join(cases)
    (tmp_path / "tests.yml").write_text(
        f"rule_files: [{DEPLOY}/alerts.yml]\nevaluation_interval: 30s\n{case}\n"
    )
    promtool("test", "rules", str(tmp_path / "tests.yml"))
    if wrong:  # promtool has no "some alert": that none fires must be wrong
        fires = case.replace("\n".join(cases), f"  - {{eval_time: 2h, alertname: {wrong}, exp_alerts: []}}")
        (tmp_path / "fires.yml").write_text(
            f"rule_files: [{DEPLOY}/alerts.yml]\nevaluation_interval: 30s\n{fires}\n"
        )
        with pytest.raises(AssertionError, match=rf"alertname:\s*{wrong}"):
            promtool("test", "rules", str(tmp_path / "fires.yml"))
