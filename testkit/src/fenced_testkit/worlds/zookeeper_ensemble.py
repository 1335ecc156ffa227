"""How the members of an in-memory ZooKeeper ensemble agree: one leader orders the log, a majority confirms it.

Members send each other messages over links that delay them but keep their order. A member that is cut off, or frozen,
for longer than the sync limit leaves its leader and closes its clients' connections. The ensemble picks the next leader
among the members that can reach each other: the one with the newest epoch, and then the longest log. Sessions survive;
their timers restart there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from functools import partial

from fenced_testkit.runtime.world import Process, World
from fenced_testkit.worlds.zookeeper_member import Member, Request
from fenced_testkit.worlds.zookeeper_tree import (
    CLOSE_SESSION,
    CONTAINER_OWNER,
    CREATE_SESSION,
    DELETE_CONTAINER,
    SESSION_EXPIRED,
    SESSION_MOVED,
    SYNC,
    Entry,
    Ids,
    Outcome,
    Session,
    Tree,
    packed,
)

ELECTION_SECONDS = 0.2
EPOCH_SECONDS = 1.7e9
"""The leader's wall clock when the world begins."""
CONTAINER_BEATS = 40
"""How often, in half ticks, the leader deletes containers that have become empty."""


class PeerLink:
    """The connection of a follower to its leader. After one lost message nothing more arrives on it."""

    def __init__(self, leader: Replica, follower: Replica) -> None:
        self.leader = leader
        self.follower = follower
        self.last_message = leader.world.now
        """When the leader last received a reply from the follower."""
        self.confirmed = 0
        """How many entries of the leader's log the follower has; 0 until it has joined."""
        self._broken = False
        self._arrives = {leader: 0.0, follower: 0.0}

    def send(self, to: Replica, call: Callable[[], None]) -> None:
        self._broken = self._broken or self.leader.cut or self.follower.cut
        if self._broken:
            return
        process = to.process
        # Never before an earlier message: order is kept.
        self._arrives[to] = max(self._arrives[to], to.world.now + to.ensemble.delay(self.follower))
        to.world.at(self._arrives[to], lambda: process.deliver(lambda: self._arrived(to, call)))

    def _arrived(self, to: Replica, call: Callable[[], None]) -> None:
        current = to.links.get(self.follower) if to is self.leader else to.link
        if current is self:  # otherwise the receiver has left this link meanwhile
            call()


class SessionTable:
    """The leader's table of sessions: when they expire, and which member serves them."""

    def __init__(self, replica: Replica, known: dict[int, Session]) -> None:
        self._replica = replica
        self._timeouts: dict[int, float] = {}
        self.owners: dict[int, Replica] = {}
        self.expires: dict[int, float] = {}
        for session, (timeout, _) in known.items():
            self.add(session, timeout)

    def add(self, session: int, timeout: int) -> None:
        self._timeouts[session] = timeout / 1000
        self.expires[session] = 0.0
        self.touch(session)

    def touch(self, session: int) -> None:
        """A sign of life of a session: postpone its expiry. Sessions expire on ticks."""
        if session in self.expires and session not in self._replica.ensemble.lapsed:
            tick = self._replica.ensemble.tick
            end = self._replica.world.now + self._timeouts[session]
            self.expires[session] = (math.floor(end / tick) + 1) * tick

    def refuses(self, session: int, by: Replica) -> int:
        """Why a request of this session, received by that member, must not be carried out; 0: it may."""
        if session not in self.expires:
            return SESSION_EXPIRED
        return 0 if self.owners.setdefault(session, by) is by else SESSION_MOVED

    def expired(self) -> list[int]:
        now = self._replica.world.now + 1e-6  # they end on a tick, not on the half tick after it
        return [session for session, end in self.expires.items() if end <= now]


class Replica:
    """One member's log and tree, and its part in the agreement."""

    def __init__(self, ensemble: Ensemble, number: int) -> None:
        self.ensemble = ensemble
        self.world = ensemble.world
        self.number = number
        self.process = Process(self.world, f"zk{number}")
        self.member = Member(self)
        self.log: list[Entry] = []
        self.applied = 0
        """How many entries of the log are in the tree: those that are committed, as far as this member knows."""
        self.tree = Tree()
        self.epoch = 0
        self.cut = False
        self._zxid = 0
        self._stop()

    def _stop(self) -> None:
        self.leading = self.serving = False
        self.link: PeerLink | None = None
        self.links: dict[Replica, PeerLink] = {}
        self.last_message = self.world.now
        self.touched: dict[int, None] = {}
        self.sessions = SessionTable(self, {})
        self._syncs: list[tuple[int, PeerLink | None, Request]] = []

    def leave(self) -> None:
        """Neither lead nor follow any more: clients must find another member, and this one must find a leader."""
        for link in [*self.links.values(), *filter(None, [self.link])]:
            other = link.follower if self.leading else link.leader
            link.send(other, partial(other._left, link))
        self._stop()
        self.member.drop_all()

    def _left(self, link: PeerLink) -> None:
        """The other end of this link has closed it."""
        if self.link is link:
            self.leave()
        else:
            self.links.pop(link.follower, None)

    def crash(self) -> None:
        self.process.crash()
        self.leave()

    def restart(self) -> None:
        """Start again with the log and the tree that are on its disk."""
        self.process = Process(self.world, self.process.name)
        self._stop()

    @property
    def reachable(self) -> bool:
        return self.process.alive and not self.process.paused and not self.cut

    # Called by the member.

    def negotiated(self, timeout: int) -> int:
        return max(timeout, round(2000 * self.ensemble.tick))

    def new_session(self) -> tuple[int, bytes]:
        rng = self.world.rng
        return self.number << 56 | rng.getrandbits(48), rng.randbytes(16)

    def touch(self, session: int) -> bool:
        """A request has arrived. False: this is the leader, and it is ending that session."""
        if self.leading:
            self.sessions.touch(session)
            return session in self.sessions.expires
        self.touched[session] = None  # reported to the leader with the reply to its next ping
        return True

    def forward(self, request: Request, session: int, ids: Ids) -> None:
        if self.leading:
            self._order(self, None, request, session, ids)
        elif (link := self.link) is not None:
            link.send(link.leader, lambda: link.leader._order(self, link, request, session, ids))

    def revalidate(self, session: int, password: bytes, then: Callable[[bool], None]) -> None:
        """Ask the leader whether this session still exists; from then on this member serves it."""
        if self.leading:
            then(self._validated(session, password, self))
        elif (link := self.link) is not None:

            def ask() -> None:
                valid = link.leader._validated(session, password, self)
                link.send(self, lambda: then(valid))

            link.send(link.leader, ask)

    def _validated(self, session: int, password: bytes, by: Replica) -> bool:
        known = self.tree.sessions.get(session)
        if known is None or known.password != password or session not in self.sessions.expires:
            return False
        if session in self.ensemble.lapsed:
            return False
        self.sessions.owners[session] = by
        self.sessions.touch(session)
        return True

    # The leader's part.

    def lead(self, epoch: int) -> None:
        self._stop()
        self.leading, self.epoch = True, epoch
        self._serve_if_joined()

    def _serve_if_joined(self) -> None:
        """With a majority of followers the leader serves: its whole log is committed, and every session goes on."""
        if 1 + sum(link.confirmed > 0 for link in self.links.values()) < self.ensemble.majority:
            return
        self._apply(len(self.log))
        self.tree.zxid = self._zxid = self.epoch << 32
        self.serving = True
        self.sessions = SessionTable(self, self.tree.sessions)
        for link in self.links.values():
            self._let_serve(link)

    def _let_serve(self, link: PeerLink) -> None:
        if link.confirmed:
            link.send(link.follower, partial(link.follower._serve, self.applied, self.epoch << 32))

    def _joined(self, link: PeerLink, length: int) -> None:
        link.confirmed = length + 1  # so that an empty log counts, too
        if self.serving:
            self._let_serve(link)
            self._commit()
        else:
            self._serve_if_joined()

    def _order(self, by: Replica, link: PeerLink | None, request: Request, session: int, ids: Ids) -> None:
        """Give a request its place in the log."""
        if request.kind == SYNC:
            self._syncs.append((len(self.log), link, request))
            self._answer_syncs()
            return
        denied = 0
        if request.kind == CREATE_SESSION:
            self.sessions.add(session, struct.unpack_from(">i", request.body)[0])
            self.sessions.owners[session] = by
        else:
            denied = self.sessions.refuses(session, by)
        if request.kind == CLOSE_SESSION and not denied:
            del self.sessions.expires[session]
        self._propose(Entry(0, 0, session, request.kind, request.body, ids, denied, request))

    def _propose(self, entry: Entry) -> None:
        self._zxid += 1
        entry.zxid, entry.time = self._zxid, round(1000 * (EPOCH_SECONDS + self.world.now))
        self.log.append(entry)
        for link in self.links.values():
            link.send(link.follower, partial(link.follower._receive, link, entry))
        self._commit()

    def _confirmed(self, link: PeerLink, length: int) -> None:
        link.confirmed = length + 1
        self._commit()

    def _commit(self) -> None:
        """Apply the entries that a majority has, and let the followers apply them."""
        lengths = sorted([len(self.log), *(link.confirmed - 1 for link in self.links.values())], reverse=True)
        lengths += [0] * self.ensemble.majority
        if (length := lengths[self.ensemble.majority - 1]) > self.applied:
            self._apply(length)
            for link in self.links.values():
                if link.confirmed:
                    link.send(link.follower, partial(link.follower._apply, length))
            self._answer_syncs()

    def _answer_syncs(self) -> None:
        """Reply to a follower's sync after all earlier entries. A leader replies to its own clients at once."""
        waiting, self._syncs = self._syncs, []
        for length, link, request in waiting:
            outcome = Outcome(0, request.body)
            if link is None:
                self.member.answered(request, outcome)
            elif self.applied >= length:
                link.send(link.follower, partial(link.follower.member.answered, request, outcome))
            else:
                self._syncs.append((length, link, request))

    def beat(self, count: int) -> None:
        """Every half tick: close links that were silent for too long, and expire sessions."""
        patience = self.ensemble.sync_limit * self.ensemble.tick
        if not self.leading or not self.serving:
            if (self.leading or self.link is not None) and self.world.now - self.last_message > patience:
                self.leave()
            return
        for link in list(self.links.values()):
            if self.world.now - link.last_message > patience:
                del self.links[link.follower]
            else:
                link.send(link.follower, partial(link.follower._pinged, link))
        if 1 + sum(link.confirmed > 0 for link in self.links.values()) < self.ensemble.majority:
            self.leave()
            return
        for session in self.sessions.expired():
            del self.sessions.expires[session]
            self._propose(Entry(0, 0, session, CLOSE_SESSION, b""))
        if count % CONTAINER_BEATS == 0:
            for path, node in list(self.tree.nodes.items()):
                if node.owner == CONTAINER_OWNER and node.created and not node.children:
                    self._propose(Entry(0, 0, 0, DELETE_CONTAINER, packed(path.encode())))

    def _on_pong(self, link: PeerLink, touched: Iterable[int]) -> None:
        link.last_message = self.world.now
        for session in touched:
            self.sessions.touch(session)

    # The follower's part.

    def follow(self, leader: Replica) -> None:
        """Copy the leader's log beyond our own committed part, then every later entry."""
        self._stop()
        self.link = link = leader.links[self] = PeerLink(leader, self)
        link.send(self, partial(self._copy, link, leader.epoch, leader.log[self.applied :]))

    def _copy(self, link: PeerLink, epoch: int, entries: list[Entry]) -> None:
        self.epoch, self.last_message = epoch, self.world.now
        self.log[self.applied :] = entries
        link.send(link.leader, partial(link.leader._joined, link, len(self.log)))

    def _serve(self, length: int, zxid: int) -> None:
        self._apply(length)
        self.tree.zxid = max(self.tree.zxid, zxid)
        self.serving = True

    def _receive(self, link: PeerLink, entry: Entry) -> None:
        self.log.append(entry)
        link.send(link.leader, partial(link.leader._confirmed, link, len(self.log)))

    def _apply(self, length: int) -> None:
        while self.applied < length:
            entry = self.log[self.applied]
            self.applied += 1
            self.member.applied(entry, self.tree.apply(entry))

    def _pinged(self, link: PeerLink) -> None:
        self.last_message = self.world.now
        touched, self.touched = self.touched, {}
        link.send(link.leader, partial(link.leader._on_pong, link, touched))


class Ensemble:
    """One member, or three."""

    def __init__(self, world: World, count: int = 3, *, tick: float = 0.2, sync_limit: int = 5) -> None:
        self.world = world
        self.tick = tick
        self.sync_limit = sync_limit
        """After this many silent ticks a leader and a follower close their link."""
        self.majority = count // 2 + 1
        self.lag = 0.0
        """How much longer messages between members may take."""
        self.lapsed: set[int] = set()
        """Sessions that ended long ago. The leader has yet to find that out."""
        self.replicas = [Replica(self, number) for number in range(1, count + 1)]
        self._elect(0.0)
        self._beat(1)

    def delay(self, _follower: Replica) -> float:
        rng = self.world.rng
        return 0.0002 + rng.random() * 0.001 + (rng.random() ** 3 * self.lag if self.lag else 0.0)

    def _beat(self, count: int) -> None:
        self.world.after(self.tick / 2, partial(self._beat, count + 1))
        for replica in self.replicas:
            if replica.process.alive and not replica.process.paused:
                replica.beat(count)
        self._elect(ELECTION_SECONDS)

    def _elect(self, patience: float) -> None:
        """Members without a leader join the current one, or a majority of them elects a new one."""
        now = self.world.now
        looking = [
            each
            for each in self.replicas
            if each.reachable
            and not each.leading
            and each.link is None
            and now - each.last_message >= patience
        ]
        leaders = [each for each in self.replicas if each.leading and each.reachable]
        leader = max(leaders, key=lambda each: each.epoch, default=None)
        if leader is None and len(looking) >= self.majority:
            # As ZooKeeper's votes are compared: first by epoch. A member that has missed an epoch may have a longer
            # log, of proposals that the leader of that epoch has discarded.
            leader = max(
                looking, key=lambda each: (each.epoch, each.log[-1].zxid if each.log else 0, each.number)
            )
            leader.lead(max(each.epoch for each in looking) + 1)
        for each in looking:
            if leader is not None and each is not leader and each.epoch <= leader.epoch:
                each.follow(leader)

    def lapse(self) -> None:
        """Let every session be over."""
        for replica in self.replicas:
            self.lapsed.update(replica.tree.sessions, replica.sessions.expires)
            replica.sessions.expires = dict.fromkeys(replica.sessions.expires, 0.0)

    def leader(self) -> Replica | None:
        return next(
            (each for each in self.replicas if each.leading and each.serving and each.reachable), None
        )
