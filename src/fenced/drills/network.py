"""Drills of the network: delayed, cut off, late, in the wrong order."""

from __future__ import annotations

from fenced.drills.declared import Cast, Drill
from fenced.drills.history import Findings, History
from fenced.drills.play import Play
from fenced.drills.story import AUTHORITY
from fenced.runtime.clocks import now

WRITES_BEFORE = 1.5
"""So many seconds before its lease ends A sends the write that is held up: it must not give up the call meanwhile."""


def partition(play: Play) -> None:
    play.take("A")
    play.relay("authority").black_hole(drop=True)
    play.begin_fault(
        "is cut off from the authority; it still reaches the database", "cut off from the authority"
    )
    play.take_over()
    play.late_write()
    play.end_fault("is still cut off", "still cut off")
    play.relay("authority").heal()
    play.conclude()


def network_delay(play: Play) -> None:
    play.take("A")
    play.relay("authority").delay(3 * play.ttl)
    play.begin_fault(
        f"needs {3 * play.ttl:g} s for each way to the authority from now on", "the network is slow"
    )
    play.take_over()
    play.end_fault("goes on: the answers to its renewals are still on their way", "waits for its renewals")
    play.late_write()
    play.conclude()


def delayed_write(play: Play) -> None:
    play.take("A")
    play.relay("authority").black_hole()
    play.relay("guard").black_hole()
    play.begin_fault("is behind a network that holds everything up", "the network holds up")
    play.holders.sleep_until(play.expires() - WRITES_BEFORE)
    writing = play.ask("A", "write", "writing", amount=1)
    text = (
        f"sells 1, writes: stock {writing['stock']}, with token {writing['token']}; the network holds it up"
    )
    play.log.add(writing["time"], "A", "A", "held_up", text, "write sent, held up")
    play.take_over()
    delivered = now()
    play.relay("guard").heal()
    play.end_fault("has its network back", "the network is back")
    play.log.add(delivered, "A", "database", "late", "the delayed write arrives", "the write arrives")
    play.late_answer(not_before=delivered)
    play.relay("authority").heal()
    play.conclude()


def late_renewal(play: Play) -> None:
    """The clock of the story: T=0 grant, T=6 renewal sent, T=10 expiry, T=12 it arrives, or later.

    A speaks to the authority directly, without a keeper, so that this one renewal is its only one.
    """
    scale = play.ttl / LATE_RENEWAL.story_seconds
    play.take("A", how="ask")
    zero = play.history.grants[-1].began
    play.holders.sleep_until(zero + 6 * scale)
    sent = play.ask("A", "hold_up_renewal", "renewing")
    text = "T=6: sends its renewal; the network holds it up"
    play.log.add(sent["time"], "A", "A", "held_up", text, "renewal sent, held up")
    play.take_over()
    # B has been granted and has written: from here on the renewal is late, however long the expiry took.
    play.holders.sleep_until(zero + 12 * scale)
    answer = play.ask("A", "renew", "renewed")
    play.log.take("A", answer)
    text = f"T={(answer['began'] - zero) / scale:.0f}: its renewal arrives at last"
    play.log.add(answer["began"], "A", AUTHORITY, "late", text, "the renewal arrives")
    if answer["answer"] == "kept":
        play.log.add(answer["time"], AUTHORITY, "A", "corrupt", "takes it: the lease is REVIVED", "kept")
    else:
        text = f"answers A: the lease is over ({answer['answer']}); nothing is revived"
        play.log.add(answer["time"], AUTHORITY, "A", "ended", text, f"over: {answer['answer']}")
    play.late_write()
    play.conclude()


def reordering(play: Play) -> None:
    play.take("A")
    play.relay("guard").black_hole()
    first = play.ask("A", "write", "writing", amount=1, slowly=True)
    text = f"writes stock {first['stock']} on one connection; the network holds it up"
    play.log.add(first["time"], "A", "A", "held_up", text, "first write, held up")
    play.write("A", 3)
    delivered = now()
    play.relay("guard").heal()
    play.log.add(
        delivered,
        "A",
        "database",
        "late",
        "the first write arrives after the second",
        "the first write arrives",
    )
    play.late_answer(not_before=delivered)
    play.conclude()


def _in_wrong_order(history: History, findings: Findings) -> bool:
    """The first write was decided after the second one had been admitted."""
    later = [each for each in history.writes("admitted") if each.update == "A2"]
    first = [each for each in history.operations if each.update == "A1"]
    return bool(later and first and first[0].began > later[0].time)


def authority_down(play: Play) -> None:
    relay = play.relay("authority")
    play.take("A")
    relay.refuse()
    relay.reset()
    down_since = now()
    play.begin_fault("and everybody else lose the authority: it is down", "the authority is down")
    play.tell("B", "acquire", name=play.name, wait=1.5 * play.ttl)
    play.log.add_asking("B", play.hear("B", "asking"))
    answer = play.hear("B", "not_granted", within=30.0)
    play.log.add(answer["time"], "B", "B", "note", "gets no lease while the authority is down", "no lease")
    play.history.facts["no_grant_while_down"] = answer["why"]
    play.wait_for_expiry(down_since + 1.3 * play.ttl)  # the last renewal cannot have been later than the end
    relay.heal()
    play.end_fault("The authority is back", "the authority is back")
    play.take_over()
    play.late_write()
    play.conclude()


PARTITION = Drill(
    "partition",
    "network partition",
    "A holder is cut off from the authority, but not from the database",
    "A holder is cut off from the authority, and still reaches the database. Is it refused?",
    "A holder that nobody can tell anything goes on writing; only the resource can stop it.",
    partition,
    "A could not learn that it was late. The database refused it.",
    cast={"A": Cast(authority_by_relay=True), "B": Cast()},
    bar="cut off from the authority",
)
NETWORK_DELAY = Drill(
    "network-delay",
    "network delay: a false expiry, not a crash",
    "A slow network ends the lease of a healthy holder",
    "Renewals take three ttls to arrive. Does any of them bring the lease back?",
    "A slow network is enough for two holders at once; a renewal that arrives late must revive nothing.",
    network_delay,
    "The late renewals revived nothing, and the database refused A's write.",
    tokens=(42, 43),
    cast={"A": Cast(authority_by_relay=True), "B": Cast()},
    bar="slow network",
)
DELAYED_WRITE = Drill(
    "delayed-write",
    "a delayed write that arrives after the take-over",
    "A write is held up in the network until another holder has written",
    "A write was sent in time and arrives after the take-over. Is it refused?",
    "The holder did nothing wrong: it wrote while its lease was held. What counts is when the write arrives.",
    delayed_write,
    "A wrote in time, and its write arrived too late. The database refused it.",
    cast={"A": Cast(authority_by_relay=True, guard="by relay"), "B": Cast()},
    bar="held up in the network",
    broken="A's write arrived late and wiped out B's sale.",
)
LATE_RENEWAL = Drill(
    "late-renewal",
    "a renewal that arrives after the lease was granted to another",
    "A renewal arrives after its lease has moved on",
    "A renewal arrives after its lease has moved on. Does anything come back?",
    "A renewal must not create: an authority that takes a late one has two holders.",
    late_renewal,
    "The late renewal revived nothing; the database refused A's write.",
    tokens=(42, 43),
    ttl=2.0,
)
REORDERING = Drill(
    "reordering",
    "network reordering",
    "Two writes of one holder arrive in the wrong order",
    "Two writes of one holder arrive in the wrong order. Does the older one win?",
    "A token orders holders, not the writes of one holder. The rule `sequenced` orders these, too.",
    reordering,
    "The first write arrived after the second, with the same token. Rule `sequenced` refused it.",
    cast={"A": Cast(guard="by both")},
    rule="sequenced",
    happened=_in_wrong_order,
    broken="The older of A's two writes arrived last and won. Under the rules `retry` and `once` that is by design; "
    "a guard with rule `sequenced` refuses it.",
)
AUTHORITY_DOWN = Drill(
    "authority-down",
    "the lock service is down: no tokens",
    "The authority is down, and comes back",
    "The authority is down for longer than a ttl. Is anything granted twice?",
    "Without the authority nobody gets a lease: safety does not suffer, availability does.",
    authority_down,
    "Nobody got a lease while the authority was down; afterwards B's token was newer, and A was refused.",
    cast={"A": Cast(authority_by_relay=True), "B": Cast(authority_by_relay=True)},
    bar="the authority is down",
)
