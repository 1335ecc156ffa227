"""What `hold` and `try_hold` return: the block that holds a lease. What the colours do at a loss differs."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from fenced.client.announcing import Announces, wrong_colour
from fenced.client.leases import AsyncLease, Lease, LeaseBase
from fenced.core.acquiring import LeaseEngine
from fenced.core.holding import GrantState
from fenced.errors import Misuse, NotGranted
from fenced.runtime.blocking import step

if TYPE_CHECKING:
    from fenced.client.faces import AsyncClient, Client, ClientBase
    from fenced.client.scope import BodyScope

L = TypeVar("L")


class Acquirable(Protocol):
    """What a context acquires when it is entered: a `LeaseRequest`, or something made of several."""

    async def granted_by(self, engine: LeaseEngine) -> GrantState: ...


class _LeaseContextBase:
    """What both contexts share: the request, and whether entering returns None instead of raising NotGranted."""

    def __init__(
        self,
        client: ClientBase,
        request: Acquirable,
        guards: tuple[Announces, ...],
        *,
        optional: bool = False,
    ) -> None:
        self._client = client
        self._request = request
        self._guards = guards
        self._optional = optional

    def _note_loss(self, lease: LeaseBase, exc: BaseException | None) -> None:
        """A body that raised hides that its lease was lost as well."""
        if exc is not None and lease.lost_reason is not None:
            exc.add_note(
                f"the lease of {', '.join(lease.names)} (token {lease.token}) was lost: {lease.lost_reason}"
            )

    async def _acquire(self, lease: LeaseBase | None) -> GrantState | None:
        if lease is not None:
            raise Misuse("this context was entered before; call hold() again")
        try:
            return await self._request.granted_by(self._client._engine)
        except NotGranted:
            if self._optional:
                return None
            raise


class LeaseContext(_LeaseContextBase, Generic[L]):
    """Returned by `hold` and `try_hold`; can be entered once."""

    _client: Client
    _lease: Lease | None = None

    def __enter__(self) -> L:
        grant = step(self._acquire(self._lease))
        if grant is None:
            return cast(L, None)
        try:
            lease = self._lease = Lease(grant, self._client)
            for guard in self._guards:
                if (unfinished := guard.announce(lease)) is not None:
                    raise wrong_colour(guard, unfinished)
        except BaseException:
            step(self._client._engine.release_at_exit(grant, raised=True))
            raise
        return cast(L, lease)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._lease
        if lease is not None and isinstance(exc, GeneratorExit):
            lease._engine.let_expire(lease._grant)
        elif lease is not None:
            self._note_loss(lease, exc)
            try:
                step(lease._engine.release_at_exit(lease._grant, raised=exc is not None))
            finally:  # even if the release is interrupted, the keeper must stop renewing
                lease._engine.keeper.drop(lease._grant.secret)


class AsyncLeaseContext(_LeaseContextBase, Generic[L]):
    """Returned by `hold` and `try_hold`; can be entered once. If the lease is lost, the body is cancelled."""

    _client: AsyncClient
    _lease: AsyncLease | None = None
    _scope: BodyScope

    async def __aenter__(self) -> L:
        grant = await self._acquire(self._lease)
        if grant is None:
            return cast(L, None)
        from fenced.client.scope import BodyScope

        lease = self._lease = AsyncLease(grant, self._client)
        self._scope = BodyScope()
        try:
            for guard in self._guards:
                announcing = guard.announce(lease)
                if not inspect.isawaitable(announcing):
                    raise wrong_colour(guard, announcing)
                await announcing
        except BaseException:
            await lease._engine.release_at_exit(lease._grant, raised=True)
            raise
        self._scope.enter(lease._grant)
        return cast(L, lease)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._lease
        if lease is None:
            return
        ours = self._scope.leave(exc)
        if isinstance(exc, GeneratorExit):
            lease._engine.let_expire(lease._grant)
            return
        self._note_loss(lease, exc if not ours else None)
        await lease._engine.release_at_exit(lease._grant, raised=exc is not None)
        if ours:
            raise lease._grant.lost_error() from exc
