"""The usual case of an ask and of a release, each as one request: a script that is a whole transaction.

It does what the lease algorithm would do for one name that is free, and for a lease that has not expired. If the rows
are in any other state it changes nothing, and the algorithm decides. Tests run the kit with these scripts and without.
"""

from __future__ import annotations

from collections.abc import Sequence

from fenced.leases.rows import NS, names_json, remember
from fenced.leases.rules import holder_text
from fenced.stores.mariadb.authority.rows import SQL, listed, lock_query
from fenced.stores.mariadb.authority.session import LeaseSession, LeaseTransaction
from fenced.stores.mariadb.wire.connection import literal
from fenced.values.model import TOKEN_MAX, Ask, Granted, Released


async def take(
    session: LeaseSession, todo: LeaseTransaction, ask: Ask, public: str, until: float
) -> Granted | None:
    """Grant one name that nobody holds or waits for."""
    if len(ask.names) > 1 or session.weakened(todo):
        return None
    ttl, (name,) = int(ask.ttl * NS), ask.names
    over = ttl + int(ask.lock_delay * NS)
    ours = {"id": literal(public), "namespace": todo.namespace, "name": literal(name)}
    taken = SQL["take_free"].format(
        **ours,
        names=literal(names_json(ask.names)),
        ttl=ttl,
        lock_delay=over - ttl,
        over=over + remember(ttl),
        holder=literal(holder_text(ask.holder)),
        floor=todo.floor,
        lineage=literal(session.lineage),
        start=session.settings.start,
        token_max=TOKEN_MAX,
    )
    # The name is locked first: the number is greater than that of every earlier grant, and the clock is read after.
    script = [lock_query(todo.namespace, ask.names), SQL["number"], taken, SQL["taken"].format(**ours)]
    results = await session.shorten(script, todo, until)
    if results is None or not results[2].changed:
        todo.committing = False
        return None
    return Granted(todo.floor + results[1].insert_id, ask.ttl, ask.ttl)


async def give(
    session: LeaseSession, todo: LeaseTransaction, public: str, names: Sequence[str], until: float
) -> Released | None:
    """Release a lease that has not expired."""
    ours = {"id": literal(public), "namespace": todo.namespace}
    # The names are locked first, so that the clock is read after whatever changed the lease meanwhile.
    script = [
        lock_query(todo.namespace, names),
        SQL["end_held"].format(**ours, remember=remember(0)),
        SQL["given"].format(**ours, names=listed(names)),
    ]
    results = await session.shorten(script, todo, until)
    if results is None or not results[1].changed:
        todo.committing = False
        return None
    return Released()
