"""Which keys may sign stamps, and whether stamps must be signed."""

from __future__ import annotations

from fenced.guards.postgresql import install
from fenced.guards.postgresql.install import LOCK_TIMEOUT
from fenced.guards.postgresql.operating import PostgresqlOperator
from fenced.guards.shared.spec import Spec
from fenced.proofs import HmacKey, VerifyingKey, check_key_id
from fenced.rollout import KeyView

_LIMIT = f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"


class KeyOperator(PostgresqlOperator):
    """The keys of one database, on a psycopg connection."""

    async def add_key(self, key: VerifyingKey) -> None:
        """From now on stamps that it signed are proven. The secret travels as a parameter, in no statement's text."""
        secret = key.secret if isinstance(key, HmacKey) else key.public
        call = "SELECT fenced_guard.add_key(%s, %s, %s)"
        await self._within(_LIMIT, lambda: self._session.run(call, (key.id, key.kind, secret)), commit=True)

    async def revoke_key(self, key_id: str) -> None:
        """From now on its proofs count no more."""
        await self._change(f"SELECT fenced_guard.revoke_key('{check_key_id(key_id)}')")

    async def keys(self) -> list[KeyView]:
        """Those that are, and those that were, in the order they came."""
        select = "SELECT id, kind, added, revoked FROM fenced_guard.key ORDER BY added, id"
        rows = await self._within("SET TRANSACTION READ ONLY", lambda: self._session.run(select))
        return [KeyView(*row) for row in rows]

    async def require_proofs(self, required: bool) -> None:
        """Require proofs, or stop requiring them; the same transaction replaces the triggers of every guard."""
        await self._within(_LIMIT, lambda: self._require(required), commit=True)

    async def _require(self, required: bool) -> None:
        await self._session.run(f"SELECT fenced_guard.require_proofs({bool(required)})")
        guards = await self._session.run(
            "SELECT guard, template, rule, epoch, mandatory FROM fenced_guard.guard ORDER BY guard"
        )
        for table, template, rule, epoch, mandatory in guards:
            spec = Spec(table, template, rule, epoch)
            for statement in await install.script(spec, None, self._session, mandatory=mandatory):
                await self._session.run(statement)
