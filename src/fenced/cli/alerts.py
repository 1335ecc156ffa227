"""`fenced alerts`: what Prometheus and Grafana are configured with."""

from __future__ import annotations

import click

RUNBOOKS = "https://example.invalid/docs/runbooks/alerts"


@click.command()
@click.argument("what", type=click.Choice(["rules", "scrape", "dashboard"]), default="rules")
@click.option("--short", is_flag=True, help="Rules with windows of seconds, to try them.")
@click.option(
    "--runbooks",
    metavar="URL",
    default=RUNBOOKS,
    show_default=True,
    help="Where you have docs/runbooks/alerts.md; each alert links to its section.",
)
def alerts(what: str, short: bool, runbooks: str) -> None:
    """Print the rules of the alerts for Prometheus; or a configuration that reads the metrics, or a dashboard.

    \b
    Example:
      fenced alerts --runbooks https://wiki.example/fenced-runbooks >alerts.yml && promtool check rules alerts.yml
    """
    from fenced.metrics.alerts import SHORT, WINDOWS, rules
    from fenced.metrics.dashboard import SCRAPE, dashboard

    match what:
        case "scrape":
            click.echo(SCRAPE, nl=False)
        case "dashboard":
            click.echo(dashboard(), nl=False)
        case _:
            click.echo(rules(runbooks, SHORT if short else WINDOWS), nl=False)
