"""`fenced help`: a command's help, or the table of exit statuses."""

from __future__ import annotations

import click

from fenced.cli import exits


@click.command("help")
@click.argument("topic", required=False)
@click.pass_context
def help_(ctx: click.Context, topic: str | None) -> None:
    """Explain a command, or the exit statuses.

    \b
    Examples:
      fenced help run
      fenced help exits
    """
    root = ctx.find_root()
    if topic == "exits":
        click.echo(exits.text())
    elif topic is None:
        click.echo(root.get_help())
    else:
        assert isinstance(root.command, click.Group)
        _, command, _ = root.command.resolve_command(root, [topic])
        assert command is not None
        with click.Context(command, info_name=topic, parent=root) as context:
            click.echo(command.get_help(context))
