"""An etcd cluster in memory: members that speak gRPC, elect leaders, lag, freeze and lose contact; leases that expire.

It keeps etcd's promises: transactions and plain reads are linearizable, a watch misses nothing, a lease lasts at
least its ttl and longer after an election. It does what etcd may do: a request during an election fails, whether or
not it was carried out; a lagging member answers serializable reads from old state; leases are deleted late.

Not modelled: users, quotas, snapshots, members that join or leave, nested transactions, and a leader that answers for a
while after it was deposed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fenced.stores.etcd.wire import http2
from fenced.stores.etcd.wire.protobuf import data, fields, integer, message, raw, signed, whole
from fenced_testkit.worlds.etcd_store import (
    UNIMPLEMENTED,
    EtcdFailed,
    EtcdStore,
    EtcdTxn,
    KeyChange,
    in_range,
)
from fenced_testkit.worlds.grpc import GrpcCall, GrpcServerConnection

VERSION = "3.6.0"
CLUSTER = 0x66656E63656431
ELECTION_SECONDS = 1.0
EXPIRY_CHECK_SECONDS = 0.5
"""How often a leader looks for expired leases."""
UNAVAILABLE = 14
NO_LEADER = "etcdserver: no leader"
LEADER_CHANGED = (
    "etcdserver: leader changed",
    "etcdserver: request timed out, possibly due to previous leader failure",
)

Timer = Callable[[float, Callable[[], None]], None]
Deliver = Callable[[Callable[[], None]], None]


class ClientEnd(Protocol):
    """The server's end of a client's connection."""

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


@dataclass
class MemberWatch:
    key: bytes
    end: bytes
    next: int
    """The first revision that the watch has not processed."""
    puts: bool
    deletes: bool

    def wants(self, change: KeyChange) -> bool:
        wanted = self.deletes if change.put is None else self.puts
        return wanted and change.revision >= self.next and in_range(change.key, self.key, self.end)


@dataclass(eq=False)
class EtcdClientConnection:
    """One client's connection at one member: its calls, and by their streams the watches in them."""

    end: ClientEnd
    grpc: GrpcServerConnection = field(default_factory=GrpcServerConnection)
    watches: dict[int, dict[int, MemberWatch]] = field(default_factory=dict)

    reading: bool = False
    """Bytes that are produced while the client's bytes are processed; they are sent together."""
    out: bytes = b""

    def send(self, data: bytes = b"") -> None:
        self.out += self.grpc.out + data
        self.grpc.out = b""
        if self.out and not self.reading:
            out, self.out = self.out, b""
            self.end.send(out)


@dataclass
class _PendingRequest:
    """A request that waits for a leader."""

    member: EtcdMember
    run: Callable[[], None]
    fail: Callable[[int, str], None]


class InMemoryEtcd:
    """All members. `now` and `at` are the clock and the timers of the world, whose randomness is `rng`."""

    def __init__(self, size: int, now: Callable[[], float], at: Timer, rng: random.Random) -> None:
        self.now, self.at, self.rng = now, at, rng
        self.store = EtcdStore()
        self.term = 2
        self.leader: EtcdMember | None = None
        self.expiry_delay_max = EXPIRY_CHECK_SECONDS
        """How late a leader may delete an expired lease; a busy one takes longer."""
        self.members = [EtcdMember(self, number) for number in range(1, size + 1)]
        self.leader = self.members[0]
        self._pending: list[_PendingRequest] = []

    # Leaders.

    def has_quorum(self) -> bool:
        return 2 * sum(member.in_contact for member in self.members) > len(self.members)

    def has_leader(self) -> bool:
        return self.leader is not None and self.leader.in_contact and self.has_quorum()

    def lost_contact(self) -> None:
        """A member is frozen, down or cut off. If that leaves no leader, the others elect one after a while."""
        if not self.has_leader():
            term = self.term
            self.at(self.now() + ELECTION_SECONDS, lambda: self._elect(term))

    def found_contact(self) -> None:
        if self.has_leader():
            self._carry_out_pending()
        else:
            self.lost_contact()

    def _elect(self, term: int) -> None:
        if self.has_leader() or self.term != term:
            return
        candidates = [member for member in self.members if member.in_contact]
        if self.has_quorum():
            self.lead(self.rng.choice(candidates))
        else:  # each time a member comes back, another election is planned
            self.leader = None
            self._fail_pending(NO_LEADER)
            for member in candidates:
                member.lose_leader()

    def lead(self, member: EtcdMember) -> None:
        """Make this member the leader. Pending requests fail; some of them are carried out."""
        self.term += 1
        self.leader = member
        self.store.prolong_all(self.now(), self.rng.uniform(0.0, ELECTION_SECONDS))
        self._fail_pending(self.rng.choice(LEADER_CHANGED))

    def disturb(self, member: EtcdMember) -> None:
        """Make this member the leader after a short election, during which requests fail."""
        self.leader = None
        self.at(
            self.now() + self.rng.uniform(0.0, 0.2),
            lambda: self.lead(member) if self.leader is None else None,
        )

    # Requests that need the leader.

    def submit(self, member: EtcdMember, run: Callable[[], None], fail: Callable[[int, str], None]) -> None:
        """Carry out a request now, or when the member is in contact with a leader; or let it fail."""
        if member.in_contact and self.has_leader():
            run()
        elif member.knows_no_leader:
            fail(UNAVAILABLE, NO_LEADER)
        else:
            self._pending.append(_PendingRequest(member, run, fail))

    def _carry_out_pending(self) -> None:
        pending, self._pending = self._pending, []
        for each in pending:
            self.submit(each.member, each.run, each.fail)

    def _fail_pending(self, why: str) -> None:
        pending, self._pending = self._pending, []
        for each in pending:
            each.fail(UNAVAILABLE, why)
            if why != NO_LEADER and self.rng.random() < 0.5:
                each.run()  # its call has ended, so nobody gets its reply

    def forget_pending(self, member: EtcdMember) -> None:
        self._pending = [each for each in self._pending if each.member is not member]

    # Commits and leases.

    def committed(self) -> None:
        for member in self.members:
            member.learn()

    def grant(self, request: bytes) -> bytes:
        reply = self.store.grant(request, self.now())
        self._plan_expiry(_number(request, 2))
        return reply

    def _plan_expiry(self, lease: int) -> None:
        """Delete a lease some time after it has expired, unless it is kept alive. Only a leader does that."""
        share = self.rng.random()

        def expire() -> None:
            found = self.store.leases.get(lease)
            if found is None:
                return
            # By the delay of now: a leader that was slow when the lease was made is not slow for ever.
            if found.expires + share * self.expiry_delay_max <= self.now() and self.has_leader():
                self.store.revoke(lease)
                self.committed()
            else:
                look = found.expires + share * EXPIRY_CHECK_SECONDS
                self.at(max(look, self.now() + EXPIRY_CHECK_SECONDS / 5), expire)

        self.at(self.store.leases[lease].expires + share * EXPIRY_CHECK_SECONDS, expire)


class EtcdMember:
    """One member. Pass it the bytes of its clients; it replies through their `ClientEnd`s.

    `deliver` runs a callback in its process: set it to that of a simulated process, which may be paused or dead.
    """

    def __init__(self, cluster: InMemoryEtcd, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.deliver: Deliver = lambda call: call()
        self.lag = 0.0
        """By how many seconds it applies commits later than the leader."""
        self.applied = cluster.store.revision
        self._away: set[int] = set()
        """The reasons why it is not in contact with the others."""
        self._lost_leader = False
        self._clients: dict[ClientEnd, EtcdClientConnection] = {}

    # Faults.

    @property
    def in_contact(self) -> bool:
        return not self._away

    @property
    def knows_no_leader(self) -> bool:
        return self._lost_leader or (self.in_contact and self.cluster.leader is None)

    def leave(self, why: int) -> None:
        """It is frozen, down or cut off: no message passes between it and the others."""
        self._away.add(why)
        self.cluster.lost_contact()
        self.cluster.at(self.cluster.now() + ELECTION_SECONDS, self._notice)

    def _notice(self) -> None:
        if not self.in_contact:
            self.lose_leader()

    def come_back(self, why: int) -> None:
        self._away.discard(why)
        if self.in_contact:
            self._lost_leader = False
            self.cluster.found_contact()
            self.learn()

    def lose_leader(self) -> None:
        """It knows no leader: end the streams that demand one."""
        self._lost_leader = not self.in_contact
        for client in list(self._clients.values()):
            for stream in list(client.watches):
                self._finish(client, stream, UNAVAILABLE, NO_LEADER)

    def crash(self) -> None:
        """Its connections are gone, with the calls on them."""
        self.cluster.forget_pending(self)
        self._clients.clear()

    def send_goaway(self) -> None:
        for client in self._clients.values():
            client.send(client.grpc.goes_away())

    def learn(self) -> None:
        """Apply commits after this member's lag. A member without contact applies them later."""
        revision = self.cluster.store.revision
        if not self.in_contact:
            return
        if self.lag:
            when = self.cluster.now() + self.lag
            self.cluster.at(when, lambda: self.deliver(lambda: self._apply(revision)))
        else:
            self._apply(revision)

    def _apply(self, revision: int) -> None:
        if revision <= self.applied or not self.in_contact:
            return
        self.applied = revision
        for client in list(self._clients.values()):
            self._notify(client)

    # Requests of clients.

    def on_bytes(self, end: ClientEnd, data: bytes) -> None:
        client = self._clients.setdefault(end, EtcdClientConnection(end))
        client.reading = True
        try:
            for call in client.grpc.receive(data):
                self._take(client, call)
        except http2.MalformedFrame:
            end.close()
            self.on_close(end)
        client.reading = False
        client.send()

    def on_close(self, end: ClientEnd) -> None:
        self._clients.pop(end, None)

    def _take(self, client: EtcdClientConnection, call: GrpcCall) -> None:
        if call.cancelled:
            client.watches.pop(call.stream, None)
            return
        if self.knows_no_leader and call.headers.get("hasleader") == "true":
            self._finish(client, call.stream, UNAVAILABLE, NO_LEADER)
        elif call.path == "/etcdserverpb.Watch/Watch":
            client.watches.setdefault(call.stream, {})
            for request in call.messages:
                self._watch(client, call.stream, request)
        elif call.path == "/etcdserverpb.Lease/LeaseKeepAlive":
            for request in call.messages:
                self._serve(client, call, request)
            if call.ended:
                self._submit(client, call.stream, lambda: self._finish(client, call.stream))
        elif call.messages:
            self._serve(client, call, call.messages[0], last=True)
        elif call.ended:
            self._finish(client, call.stream, http2.UNKNOWN, "a call without a request")

    def _serve(
        self, client: EtcdClientConnection, call: GrpcCall, request: bytes, *, last: bool = False
    ) -> None:
        """Reply to one request after the leader has agreed and this member has applied the writes."""
        stream, (local, work) = call.stream, self._work(call.path, request)

        def run() -> None:
            before = self.cluster.store.revision
            try:
                body = work()
            except EtcdFailed as error:
                self._finish(client, stream, error.code, error.text)
                return
            reply = self._header(self.applied if local else self.cluster.store.revision) + body
            if self.lag and last and self.cluster.store.revision > before:
                self.cluster.at(self.cluster.now() + self.lag, lambda: answer(reply))
            else:
                answer(reply)
            if self.cluster.store.revision > before:
                self.cluster.committed()

        def answer(reply: bytes) -> None:
            self._send(client, client.grpc.reply(stream, reply))
            if last:
                self._finish(client, stream)

        if local:
            run()
        else:
            self._submit(client, stream, run)

    def _submit(self, client: EtcdClientConnection, stream: int, run: Callable[[], None]) -> None:
        self.cluster.submit(self, run, lambda code, text: self._finish(client, stream, code, text))

    def _work(self, path: str, request: bytes) -> tuple[bool, Callable[[], bytes]]:
        """Whether this member serves a request without asking the leader, and the function that carries it out."""
        cluster, store = self.cluster, self.cluster.store
        match path.rpartition("/")[2]:
            case "Txn":
                txn = EtcdTxn(request)
                if txn.is_serializable:
                    return True, lambda: store.as_of(self.applied).txn(txn)
                return False, lambda: store.txn(txn)
            case "LeaseGrant":
                return False, lambda: cluster.grant(request)
            case "LeaseRevoke":
                return False, lambda: store.revoke(_number(request, 1))
            case "LeaseKeepAlive":
                return False, lambda: store.keep_alive(request, cluster.now())
            case "LeaseTimeToLive":
                return False, lambda: store.time_to_live(request, cluster.now())
            case "Compact":
                return False, lambda: store.compact(request)
            case "Status":
                return True, lambda: data(2, VERSION.encode())
        return True, lambda: _unknown(path)

    def _header(self, revision: int) -> bytes:
        header = integer(1, CLUSTER) + integer(2, self.number) + integer(3, revision)
        return message(1, header + integer(4, self.cluster.term))

    def _send(self, client: EtcdClientConnection, data: bytes) -> None:
        self.deliver(lambda: client.send(data) if client.end in self._clients else None)

    def _finish(
        self, client: EtcdClientConnection, stream: int, code: int = http2.OK, text: str = ""
    ) -> None:
        client.watches.pop(stream, None)
        self._send(client, client.grpc.finish(stream, code, text))

    # Watches.

    def _watch(self, client: EtcdClientConnection, stream: int, request: bytes) -> None:
        ((kind, part),) = fields(request)
        watches, wanted = client.watches[stream], dict(fields(raw(part)))
        if kind == 2:
            watch = signed(whole(wanted.get(1, 0)))
            if watches.pop(watch, None) is not None:
                self._send_watch(client, stream, watch, integer(4, 1))
            return
        watch, key, end = signed(whole(wanted.get(7, 0))), raw(wanted.get(1, b"")), raw(wanted.get(2, b""))
        if watch in watches or (end and not in_range(key, key, end)):
            self._send_watch(client, stream, -1, integer(3, 1) + integer(4, 1))
            return
        filters = {byte for number, value in fields(raw(part)) if number == 5 for byte in raw(value)}
        start = signed(whole(wanted.get(3, 0))) or self.applied + 1
        watches[watch] = MemberWatch(key, end, start, 0 not in filters, 1 not in filters)
        self._send_watch(client, stream, watch, integer(3, 1))
        compacted = self.cluster.store.compacted
        if start < compacted:
            watches[watch].puts = watches[watch].deletes = (
                False  # its id stays in use until the client cancels it
            )
            self._send_watch(client, stream, watch, integer(4, 1) + integer(5, compacted))
        self._notify(client)

    def _notify(self, client: EtcdClientConnection) -> None:
        """Send what this member has applied and the watches have not seen."""
        for stream, watches in client.watches.items():
            for watch, wanted in watches.items():
                changes = self.cluster.store.since(wanted.next) if wanted.next <= self.applied else []
                seen = [each for each in changes if each.revision <= self.applied and wanted.wants(each)]
                wanted.next = max(wanted.next, self.applied + 1)
                if seen:
                    events = b"".join(message(11, each.written()) for each in seen)
                    self._send_watch(client, stream, watch, events)

    def _send_watch(self, client: EtcdClientConnection, stream: int, watch: int, body: bytes) -> None:
        reply = self._header(self.applied) + integer(2, watch) + body
        self._send(client, client.grpc.reply(stream, reply))


def _unknown(path: str) -> bytes:
    raise EtcdFailed(UNIMPLEMENTED, f"unknown method {path}")


def _number(request: bytes, which: int) -> int:
    return signed(whole(dict(fields(request)).get(which, 0)))
