"""A namespace's counting state: its realm, its lineage, and the offset between revisions and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fenced.errors import Misconfigured
from fenced.leases.rules import no_namespace, tokens_used_up
from fenced.stores.etcd.authority.keys import Keys, Meta
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.stores.etcd.wire.messages import Header, KeyValue, TxnReply, absent, get, put, valued
from fenced.values.model import TOKEN_MAX

WENT_BACK = "!"
"""Prefix of a lineage: a client saw its revision fall."""


class Namespace:
    """Transactions in one namespace. Every reply is checked: which cluster sent it, and whether its revision fell."""

    def __init__(self, wire: EtcdWire, name: str, secret: Callable[[], str]) -> None:
        self.name = name
        self.keys = Keys(name)
        self.meta = Meta("", "", 0)
        self.raw = b""
        self._wire = wire
        self._secret = secret
        self._seen = 0

    @property
    def doubts(self) -> int:
        """Counts requests whose outcome is unknown: they may have been carried out, or may still be."""
        return self._wire.broken

    async def run(self, request: bytes, until: float, *, repeatable: bool = True) -> TxnReply:
        """One transaction."""
        seen = self._seen
        reply = messages.TxnReply(await self._wire.call(messages.TXN, request, until, repeatable=repeatable))
        revision = reply.header.revision
        if revision > self._seen:
            self._seen = revision
        elif revision < seen and self._history(reply.header) is None:
            await self._mark(until)
        return reply

    async def read(self, gets: Sequence[bytes], until: float) -> TxnReply:
        """Read ranges as of one revision; at most as many as fit into one transaction."""
        return await self.run(messages.txn((), gets), until)

    # Lineage.

    async def _mark(self, until: float) -> None:
        """The revision was higher before: no client grants in this namespace until an operator raises the floor."""
        marked = self.meta._replace(lineage=WENT_BACK + self.meta.lineage)
        self._seen = 0
        request = messages.txn([valued(self.keys.meta, self.raw)], [put(self.keys.meta, marked.written())])
        await self.run(request, until)
        self._take(marked.written())

    def _history(self, header: Header) -> str | None:
        """Why this is not the history that the tokens were minted in; None if it is."""
        if self.meta.lineage == str(header.cluster):
            return None
        if self.meta.lineage.startswith(WENT_BACK):
            return "its revision went back: it was restored from a backup, or lost what it had acknowledged"
        return f"its tokens were minted by cluster {self.meta.lineage}, and this is cluster {header.cluster}"

    def refuse_strange(self, header: Header) -> None:
        """Misconfigured under another lineage, or when the tokens are used up."""
        if (why := self._history(header)) is not None:
            raise Misconfigured(
                f"{self._wire.url}: {why}. Tokens that were handed out could come again: find the highest, and "
                "then: fenced authority raise --above N"
            )
        if header.revision + self.meta.offset > TOKEN_MAX:
            raise tokens_used_up()

    def refuse_next(self, header: Header) -> None:
        """The same, before a token is minted."""
        self.refuse_strange(header._replace(revision=max(header.revision, self._seen) + 1))

    def is_new(self, found: KeyValue | None) -> bool:
        """Whether the counting state differs from the one we knew; then remember the new one."""
        if found is None:
            raise Misconfigured(
                f"{self._wire.url}: the counting state of namespace {self.name!r} is gone: restore {self.keys.meta!r}"
            )
        if found.value == self.raw:
            return False
        realm = self.meta.realm
        self._take(found.value)
        if self.meta.realm != realm:
            raise Misconfigured(
                f"{self._wire.url}: namespace {self.name!r} is now of realm {self.meta.realm}, not {realm}: "
                "make a new client"
            )
        return True

    def _take(self, raw: bytes) -> None:
        self.raw, self.meta = raw, Meta.read(raw)

    # Operating.

    async def open(self, create: bool, until: float) -> Header:
        """Read the counting state, or create it."""
        key = self.keys.meta
        reply = await self.read([get(key)], until)
        found = reply.found[0].first
        if found is None:
            if not create:
                raise no_namespace(self._wire.url, self.name)
            new = Meta(self._secret()[:16], str(reply.header.cluster), 0).written()
            nothing = absent(self.keys.start, self.keys.end)
            reply = await self.run(messages.txn([nothing], [put(key, new), get(key)], [get(key)]), until)
            found = reply.found[0].first
        if found is None:
            raise Misconfigured(
                f"{self._wire.url}: the counting state of namespace {self.name!r} is gone, but not its leases: "
                f"restore it, or delete all keys that begin with {self.keys.start!r}"
            )
        self._take(found.value)
        return reply.header

    async def raise_floor(self, above: int, until: float) -> int:
        """Make later tokens greater, and accept this cluster's history."""
        while True:
            reply = await self.read([get(self.keys.meta)], until)
            self.is_new(reply.found[0].first)
            header, meta = reply.header, self.meta
            lineage = str(header.cluster)
            if header.revision + meta.offset >= above and lineage == meta.lineage:
                return header.revision + meta.offset
            offset = max(meta.offset, above - header.revision - 1)  # the write itself takes a revision
            raised = meta._replace(lineage=lineage, offset=offset, raised=meta.raised + 1).written()
            compare = valued(self.keys.meta, self.raw)
            reply = await self.run(messages.txn([compare], [put(self.keys.meta, raised)]), until)
            if reply.succeeded:
                self._take(raised)
                return reply.header.revision + offset
