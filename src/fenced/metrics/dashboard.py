"""A dashboard for Grafana, and what Prometheus is told to read, from the table."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fenced.metrics.table import TABLE, Metric

ROWS = (
    ("Refusals and losses", ("refusals_total", "unstamped_total", "lost_total", "token_gap", "mark_above_last_token")),
    ("Leases", ("grants_total", "acquire_seconds", "hold_seconds", "held", "waiting", "contended_total",
                "not_granted_total", "renewal_used_ratio", "jeopardy_total", "queue_longest", "queue_stuck_seconds")),
    ("Guards", ("guard_stage", "guard_wrong", "guard_override_age_seconds", "let_through_total", "guard_pending")),
    ("Service, proxy, exporter", ("requests_total", "errors_total", "store_seconds", "proxy_own_answers_total",
                                  "proxy_waiting", "certificate_seconds", "up", "look_age_seconds")),
)  # fmt: skip
WIDTH, HEIGHT = 8, 7
"""Of a panel: a third of the 24 columns."""


def panel_expression(metric: Metric) -> str:
    """What a panel of this metric shows."""
    labels = ", ".join(label for label in metric.labels if label != "source")
    match metric.kind:
        case "counter":
            return (
                f"sum by ({labels}) (rate({metric.name}[5m]))" if labels else f"sum(rate({metric.name}[5m]))"
            )
        case "histogram":
            return f"histogram_quantile(0.99, sum by (le) (rate({metric.name}_bucket[5m])))"
    return f"max by ({', '.join(filter(None, ('target', 'instance', labels)))}) ({metric.name})"


def panels() -> Iterator[tuple[str, Metric]]:
    """Each metric that has a panel, with the title of its row."""
    by_name = {metric.name: metric for metric in TABLE}
    for title, names in ROWS:
        for name in names:
            yield title, by_name[f"fenced_{name}"]


def dashboard() -> str:
    """As JSON. Grafana asks for the data source when it is imported."""
    shown: list[dict[str, object]] = []
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    row, x, y = "", 0, 0
    for title, metric in panels():
        if title != row:
            y += HEIGHT if row else 0
            row, x = title, 0
            shown.append({"type": "row", "title": title, "collapsed": False, "panels": [], "id": len(shown) + 1,
                          "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
            y += 1
        elif x == 24:
            x, y = 0, y + HEIGHT
        unit = {"seconds": "s", "ratio": "percentunit"}.get(metric.unit, "short")
        shown.append({
            "type": "timeseries", "title": metric.meaning, "description": metric.name, "datasource": source,
            "id": len(shown) + 1, "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []}, "options": {},
            "targets": [{"refId": "A", "datasource": source, "expr": panel_expression(metric)}],
        })  # fmt: skip
        x += WIDTH
    board = {
        "title": "fenced", "uid": "fenced", "tags": ["fenced"], "schemaVersion": 38, "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"}, "panels": shown,
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
    }  # fmt: skip
    return json.dumps(board, indent=1) + "\n"


SCRAPE = """# FencedCannotLook watches every job whose name begins with `fenced`.
global: {scrape_interval: 15s}
rule_files: [alerts.yml]
scrape_configs:
- job_name: fenced-exporter
  static_configs: [{targets: ['127.0.0.1:9464']}]
- job_name: fenced-service
  static_configs: [{targets: ['127.0.0.1:8700']}]
- job_name: fenced-service-with-tokens
  scheme: https
  authorization: {credentials_file: /etc/prometheus/fenced.token}  # a token with the right observe
  tls_config: {ca_file: /etc/prometheus/fenced-ca.crt}
  static_configs: [{targets: ['leases1:8700', 'leases2:8700']}]
- job_name: fenced-proxy
  static_configs: [{targets: ['127.0.0.1:8933']}]  # its --admin port
- job_name: fenced-programs
  static_configs: [{targets: ['127.0.0.1:8000']}]  # where your program shows its Recorder
"""
