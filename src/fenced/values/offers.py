"""What an authority may offer beside its contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from fenced.values.contracts import Authority, Runtime
from fenced.values.model import BatchAnswer, BatchOperation


class Batches(Protocol):
    """What an authority may offer as well: many operations of many holders in one durable write."""

    endings_are_quick: ClassVar[bool]
    """A write that only ends leases is not synced, so it should not wait for others that are."""

    async def many(
        self, operations: Sequence[BatchOperation], until: float | None = None
    ) -> list[BatchAnswer]:
        """Run the operations in their order; one answer each, the one that it would get alone.

        An error of a single operation is its answer. If this raises Indeterminate, the outcome of all is unknown.
        """


class OffersRenewer(Protocol):
    """What an authority may offer as well: its own renewer, where a second object at the same address will not do."""

    def renewer(self, runtime: Runtime) -> Authority:
        """What renews under another runtime, in threads, what this object was granted. It may be this object itself.

        Called before anything is sent.
        """


class LimitedConnections(Protocol):
    """What an authority may say as well: how many of its operations are under way at once. The others wait."""

    connections: ClassVar[int]
