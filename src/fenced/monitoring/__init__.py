"""What Prometheus needs beyond the numbers of processes: the exporter, alerts, the dashboard."""
