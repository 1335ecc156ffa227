"""The upkeep of guards: the history, the audit, marks, limits and old records."""

from __future__ import annotations

from collections.abc import Iterator

import click

from fenced.cli.guard_options import addressed, clock, jsonable, limit_option, only_table_option, why_option
from fenced.cli.options import authority_option, json_option, namespace_option, opened
from fenced.cli.output import plain, write_json, write_table
from fenced.client.reaching import operate
from fenced.errors import Contended
from fenced.runtime.blocking import step
from fenced.values.contracts import Authority, Operator
from fenced.values.durations import duration
from fenced.values.rollout import Change, DatabaseStatus, Decision, several


@click.command()
@addressed()
@only_table_option
@limit_option
@json_option
def history(words: tuple[str], table: str | None, limit: int, as_json: bool) -> None:
    """Show what operators did, the newest last.

    \b
    Example:
      fenced guard history --table orders
    """
    changes = operate(words[0], lambda operator: operator.history(table, limit))
    if as_json:
        write_json(jsonable(changes))
    elif changes:
        titles = ("TIME", "WHO", "APPLICATION", "TABLE", "WHAT")
        write_table(titles, [_change(change) for change in changes], frozenset())
    else:
        click.echo("the history is empty", err=True)


def _change(change: Change) -> list[str]:
    what = " ".join((change.what, *_details(change.detail)))
    return [clock(change.at), change.who, change.application or "-", change.guard or "-", what]


def _details(detail: dict[str, object]) -> Iterator[str]:
    if "after" in detail:
        yield f"{_shown(detail.get('before'))} -> {_shown(detail['after'])}"
    for key, value in detail.items():
        if key not in ("before", "after") and value is not None:
            yield f"{key}={_shown(value)}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_shown(item)}" for key, item in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return repr(value) if isinstance(value, str) and " " in value else str(value)


@click.command()
@addressed()
@only_table_option
@limit_option
@json_option
def records(words: tuple[str], table: str | None, limit: int, as_json: bool) -> None:
    """Show the audit, the newest last.

    Refusals, would-be refusals, writes without a stamp.

    \b
    Examples:
      fenced guard records --table orders --limit 100
      fenced guard records --json --limit 10000 | jq '.[] | select(.verdict == "stale")'
    """
    entries = operate(words[0], lambda operator: operator.records(table, limit))
    if as_json:
        write_json(jsonable(entries))
    elif entries:
        titles = "TIME TABLE NAME VERDICT DONE MODE TOKEN MARK WHO APPLICATION ADDRESS PROCESS"
        write_table(titles.split(), [_entry(entry) for entry in entries], frozenset({6, 7, 11}))
    else:
        click.echo("there are no records", err=True)


_DONE = {"refuse": "refused", "admit": "admitted"}


def _entry(entry: Decision) -> list[str]:
    return [
        clock(entry.at),
        entry.guard or "-",
        entry.name or "-",
        entry.verdict.replace("_", " "),
        _DONE.get(entry.ruling, "let through"),
        entry.mode,
        "-" if entry.token is None else str(entry.token),
        "-" if entry.mark is None else str(entry.mark),
        entry.who or "-",
        entry.application or "-",
        entry.address or "-",
        "-" if entry.pid is None else str(entry.pid),
    ]


@click.command("grant-monitor")
@addressed("ROLE")
@click.option("--revoke", is_flag=True, help="Take the right away again.")
@json_option
def grant_monitor(words: tuple[str, str], revoke: bool, as_json: bool) -> None:
    """Let ROLE read the guards.

    For monitoring: ROLE can run status, records, history and key list, and can change nothing. It sees names and the
    beginnings of statements, but no secrets. Later upgrades and guards are included.

    \b
    Examples:
      fenced guard grant-monitor postgresql://owner@db.internal/shop grafana
      fenced guard grant-monitor grafana --revoke
    """
    dsn, role = words
    operate(dsn, lambda operator: operator.grant_monitor(role, revoke=revoke))
    if as_json:
        write_json({"role": role, "monitor": not revoke})
    else:
        click.echo(f"{plain(role)} may {'no longer ' if revoke else ''}read the guards of this database")


@click.command()
@addressed()
@click.option(
    "--partition",
    metavar="NAME",
    default="aws",
    show_default=True,
    help="The partition of AWS, such as aws-cn or aws-us-gov.",
)
def policy(words: tuple[str], partition: str) -> None:
    """Print a bucket policy for S3.

    The policy denies a PUT without a condition, and every deletion, of guarded objects, for everybody. It stops blind
    overwrites. It does not make the guard mandatory: whoever sends the current ETag passes, with any body. Nothing is
    sent to the store.

    \b
    Example:
      fenced guard policy s3://shop/guarded > policy.json
      aws s3api put-bucket-policy --bucket shop --policy file://policy.json
    """
    write_json(operate(words[0], lambda operator: operator.policy(partition)))
    click.echo(
        "caution: it stops blind overwrites and deletions; whoever sends the current ETag passes. Putting it replaces "
        "the bucket's policy: merge the statements if there is one",
        err=True,
    )


@click.command()
@addressed("NAME")
@why_option
@json_option
def reset(words: tuple[str, str], why: str | None, as_json: bool) -> None:
    """Delete the mark of NAME.

    For a name that a wrong token has blocked: afterwards any token is admitted. Only the mark refuses stale
    holders of NAME, so make sure that none is left.

    \b
    Example:
      fenced guard reset orders/42 --why 'token invented by a test, ticket 4711'
    """
    if why is None:
        raise click.UsageError("say why: --why TEXT")
    dsn, name = words
    token = operate(dsn, lambda operator: operator.reset(name, why))
    if as_json:
        write_json({"name": name, "reset": token is not None, "token": token})
    elif token is None:
        click.echo(f"{plain(name)} has no mark; nothing was done")
    else:
        click.echo(f"{plain(name)}: mark {token} was deleted; any token is admitted next")


@click.command()
@addressed("REALM")
@json_option
def adopt(words: tuple[str, str], as_json: bool) -> None:
    """Trust only the authority with this REALM.

    To change the authority of a guard that is in use: fenced authority move, which also raises the floor.

    \b
    Example:
      fenced guard adopt 5d1c9a30b2f4e678
    """
    dsn, realm = words
    operate(dsn, lambda operator: operator.adopt(realm))
    if as_json:
        write_json({"realm": realm})
    else:
        click.echo(f"only realm {realm} is trusted from now on")


def _number_or_off(context: click.Context, option: click.Parameter, text: str | None) -> float | str | None:
    if text is None or text == "off":
        return text
    try:
        return float(text.removesuffix("%")) if option.name == "sample" else int(text)
    except ValueError:
        raise click.BadParameter("a number, or off", context, option) from None


@click.command()
@addressed()
@click.option(
    "--max-jump", callback=_number_or_off, metavar="N|off", help="How far a token may be above a mark."
)
@click.option(
    "--sample",
    callback=_number_or_off,
    metavar="PERCENT|off",
    help="How many of the admitted operations are recorded.",
)
@click.option(
    "--patience",
    type=duration(0.001, 86_400.0),
    metavar="TIME",
    help="How long a successor waits before the server ends an older transaction.",
)
@json_option
def trust(
    words: tuple[str],
    max_jump: int | str | None,
    sample: float | str | None,
    patience: float | None,
    as_json: bool,
) -> None:
    """Show or change which stamps guards believe.

    Also how many admitted operations they record, and how long a successor waits.

    \b
    Examples:
      fenced guard trust --max-jump 1000000
      fenced guard trust --sample 0.1
      fenced guard trust --patience 30
    """
    change: dict[str, float | None] = {}
    if max_jump is not None:
        change["max_jump"] = None if isinstance(max_jump, str) else max_jump
    if sample is not None:
        change["sample"] = 0.0 if isinstance(sample, str) else sample / 100
    if patience is not None:
        change["patience"] = patience

    async def changed(operator: Operator) -> DatabaseStatus:
        await operator.trust(change)
        return await operator.status()

    found = operate(words[0], changed)
    if as_json:
        shown = {
            "realm": found.realm,
            "max_jump": found.max_jump,
            "sample": found.sample,
            "proof": found.proof,
            "patience": found.patience,
        }
        write_json(shown)
        return
    click.echo(f"realm     {found.realm or '(none yet: the first stamped write decides)'}")
    click.echo(f"max jump  {'off' if found.max_jump is None else found.max_jump}")
    click.echo(f"sample    {f'{100 * found.sample:g} %' if found.sample else 'off'}")
    click.echo(f"proof     {'required' if found.proof else 'off'}")
    click.echo(f"patience  {found.patience:g} s")


@click.command()
@addressed()
@authority_option
@namespace_option
@json_option
def forget(words: tuple[str], url: str, namespace: str, as_json: bool) -> None:
    """Delete the marks of unused names.

    A mark stays after its lease is over, to refuse late holders. This command asks the authority for its oldest
    live token and deletes the marks below it. From then on the guard refuses every token below it, for all names.

    \b
    Example:
      fenced guard forget postgresql://owner@db.internal/shop --authority postgresql://db.internal/leases
    """
    with opened(url, namespace) as authority:
        realm, below = oldest_live_token(authority)
    dropped = operate(words[0], lambda operator: operator.drop_marks(realm, below))
    if as_json:
        write_json({"below": below, "dropped": dropped})
    else:
        click.echo(
            f"deleted {several(dropped, 'mark')} below token {below}; every token below it is refused from now on"
        )


def oldest_live_token(authority: Authority) -> tuple[str, int]:
    """The realm, and a token below which no lease is live or ever will be. The last token is read before the survey:
    leases granted during the survey have greater tokens."""
    standing = step(authority.open(create=False))
    oldest, after = standing.last_token + 1, ""
    early = any(trait.key == "per-name-order" for trait in authority.traits)
    while page := step(authority.survey(after=after)):
        for view in page:
            if view.held_by is not None:
                oldest = min(oldest, view.held_by.token)
            if view.waiters and early:
                raise Contended(
                    f"{view.name} has a waiter, and this authority has already minted its token (per-name-order); "
                    "try again when there is no waiter"
                )
        after = page[-1].name
    return standing.realm, oldest


@click.command()
@addressed()
@click.option(
    "--keep", type=click.IntRange(min=0), default=10_000, show_default=True, help="Records kept one by one."
)
@json_option
def tidy(words: tuple[str], keep: int, as_json: bool) -> None:
    """Add up old records.

    Also deletes expired overrides, and writes into the history how many decisions could not be recorded. Guards
    add up old records while they write new ones; run this for a guard that writes none.

    \b
    Example:
      fenced guard tidy --keep 1000
    """
    done = operate(words[0], lambda operator: operator.tidy(keep))
    if as_json:
        write_json(done)
        return
    click.echo(
        f"{several(done['summed'], 'record')} added up, {several(done['overrides'], 'expired override')} deleted"
    )
    if done["unrecorded"]:
        click.echo(
            f"{several(done['unrecorded'], 'decision')} could not be recorded; the history has the number"
        )
