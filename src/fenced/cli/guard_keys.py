"""`fenced guard key`: which keys may sign stamps, and whether stamps must be signed."""

from __future__ import annotations

from pathlib import Path

import click

from fenced.cli.guard_options import addressed, clock, jsonable
from fenced.cli.options import json_option
from fenced.cli.output import write_json, write_table
from fenced.client.reaching import operate
from fenced.proofs import Ed25519Public, HmacKey

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def key() -> None:
    """Manage the keys that sign stamps.

    Also decides whether stamps must be signed.

    \b
    Example:
      fenced guard key add postgresql://owner@db.internal/shop shop-1 --hmac-file proofs.key
    """


@key.command()
@addressed("ID")
@click.option(
    "--hmac-file", type=_FILE, metavar="FILE", help="A shared secret: 32 bytes or more, in hexadecimal."
)
@click.option(
    "--ed25519-public-file",
    "public_file",
    type=_FILE,
    metavar="FILE",
    help="A public key: PEM, or hexadecimal.",
)
@json_option
def add(words: tuple[str, str], hmac_file: Path | None, public_file: Path | None, as_json: bool) -> None:
    """Let the key ID sign stamps, in addition to the other keys. An id is never used again.

    \b
    Examples:
      openssl rand -hex 32 > proofs.key
      fenced guard key add shop-1 --hmac-file proofs.key
      openssl genpkey -algorithm ed25519 -out signing.pem
      openssl pkey -in signing.pem -pubout -out public.pem
      fenced guard key add partner-1 --ed25519-public-file public.pem
    """
    dsn, key_id = words
    if (hmac_file is None) == (public_file is None):
        raise click.UsageError("which key? Pass --hmac-file FILE or --ed25519-public-file FILE")
    made: HmacKey | Ed25519Public
    if hmac_file is not None:
        made = HmacKey.read(key_id, hmac_file)
    else:
        assert public_file is not None
        made = Ed25519Public.read(key_id, public_file)
    operate(dsn, lambda operator: operator.add_key(made))
    if as_json:
        write_json({"key": key_id, "kind": made.kind})
    else:
        click.echo(f"{key_id}: signatures of this {made.kind} key are accepted from now on")


@key.command()
@addressed("ID")
@json_option
def revoke(words: tuple[str, str], as_json: bool) -> None:
    """Stop accepting signatures of the key ID. Marks that they raised stay.

    \b
    Example:
      fenced guard key revoke shop-1
    """
    dsn, key_id = words
    operate(dsn, lambda operator: operator.revoke_key(key_id))
    if as_json:
        write_json({"key": key_id, "revoked": True})
    else:
        click.echo(f"{key_id}: its signatures are no longer accepted")


@key.command("list")
@addressed()
@json_option
def list_(words: tuple[str], as_json: bool) -> None:
    """Show the keys, without their secrets.

    \b
    Example:
      fenced guard key list
    """
    keys = operate(words[0], lambda operator: operator.keys())
    if as_json:
        write_json(jsonable(keys))
    elif keys:
        rows = [
            [one.id, one.kind, clock(one.added), clock(one.revoked) if one.revoked else "-"] for one in keys
        ]
        write_table(("KEY", "KIND", "ADDED", "REVOKED"), rows, frozenset())
    else:
        click.echo("there are no keys", err=True)


@key.command()
@addressed("on|off")
@json_option
def require(words: tuple[str, str], as_json: bool) -> None:
    """Let only signed stamps raise marks (on), or any stamp (off).

    Replaces the triggers of every guard in the database, in one transaction, which locks each table against
    writers. If a lock is not free within 2 seconds, nothing changes: run it again.

    \b
    Example:
      fenced guard key require on
    """
    dsn, wanted = words
    if wanted not in ("on", "off"):
        raise click.UsageError(f"pass on or off, not {wanted}")
    operate(dsn, lambda operator: operator.require_proofs(wanted == "on"))
    if as_json:
        write_json({"proof": wanted == "on"})
    else:
        click.echo("proofs are required" if wanted == "on" else "proofs are not required")
