"""`fenced help`: a command's help, or the table of exit statuses."""

from __future__ import annotations

import click

from fenced.cli import exits


@click.command("help")
@click.argument("topic", nargs=-1)
@click.pass_context
def help_(ctx: click.Context, topic: tuple[str, ...]) -> None:
    """Explain a command, or the exit statuses.

    \b
    Examples:
      fenced help run
      fenced help guard mode
      fenced help exits
    """
    if topic == ("exits",):
        click.echo(exits.text())
        return
    context = ctx.find_root()
    for word in topic:
        if not isinstance(context.command, click.Group):
            raise click.UsageError(
                f"{context.command_path} has no commands; see '{context.command_path} --help'"
            )
        _, command, _ = context.command.resolve_command(context, [word])
        assert command is not None
        context = click.Context(command, info_name=word, parent=context)
    click.echo(context.command.get_help(context))
