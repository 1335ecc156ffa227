"""The models that are searched: those in which every promise is kept, the two limits, and the planted mistakes."""

from __future__ import annotations

from dataclasses import replace

from fenced.values.decision import ModeName
from tests.proofs.modelled import Setting

HOLDS = (
    Setting("three attempts for one name", 6_049),
    Setting("rule `once`", 7_795, rule="once"),
    Setting("rule `sequenced`, two writes under each lease", 19_637, rule="sequenced", writes=2),
    Setting(
        "rule `retry`, two writes under each of two leases, each with `expect`",
        589,
        leases=("x", "x"),
        writes=2,
        may=frozenset({"expect"}),
    ),
    Setting("two names: one lease over both, one over each", 10_709, leases=("xy", "x", "y")),
    Setting("`lock_delay`, `keep`, and clients that settle", 42_675, may=frozenset({"delay"})),
    Setting("an operator forces holders out", 32_010, may=frozenset({"force"})),
    Setting(
        "the authority is restored from a backup, and nobody notices",
        40_892,
        may=frozenset({"restore"}),
        holder_is_admitted=False,
    ),
    Setting("it is restored, notices, and its floor is raised", 37_019, may=frozenset({"restore", "notice"})),
    Setting("the leases move to another authority", 63_819, may=frozenset({"move"})),
    Setting(
        "two leases; the mode changes between `observe` and `enforce`",
        760,
        leases=("x", "x"),
        modes=("observe", "enforce"),
    ),
    Setting(
        "two leases, a program without a lease, mode `require`",
        598,
        leases=("x", "x"),
        modes=("require",),
        may=frozenset({"unstamped"}),
    ),
)


def unstamped(mode: ModeName) -> Setting:
    return Setting(
        f"a program without a lease, mode `{mode}`",
        leases=("x",),
        modes=(mode,),
        may=frozenset({"unstamped"}),
        counts_observed=True,
    )


LIMITS: dict[str, tuple[Setting, ...]] = {
    "Rule `retry` with two writes under one lease loses the second to a doubled copy of the first: use `sequenced`, "
    "or `expect`.": (Setting("two writes under one lease", leases=("x",), writes=2),),
    "A program without a stamp undoes acknowledged work in every mode below `require`.": tuple(
        unstamped(mode) for mode in ("enforce", "canary", "shadow", "observe")
    ),
    "What a stale holder was allowed to write in `observe` is not kept once `enforce` begins.": (
        Setting("", modes=("observe", "enforce"), counts_observed=True),
    ),
    "After a restore that nobody notices, the present holder may be refused; nothing acknowledged is lost.": (
        Setting("", may=frozenset({"restore"})),
    ),
}
"""What cannot be promised, in the words of the docs, and the models that show it."""

_DELAY, _MOVE = Setting("", may=frozenset({"delay"})), Setting("", may=frozenset({"move"}))
WRONG = (
    Setting("", mistakes=("nobody announces",)),
    Setting("", mistakes=("announcing changes no mark",)),
    Setting("", mistakes=("no tombstone",)),
    Setting("", mistakes=("a renewal revives",)),
    Setting("", leases=("xy", "x", "y"), mistakes=("the first name is enough",)),
    replace(_DELAY, mistakes=("settled frees the name",)),
    replace(_DELAY, mistakes=("settled asks are new",)),
    replace(HOLDS[7], mistakes=("reused is admitted",)),
    replace(_MOVE, mistakes=("no floor",)),
    replace(
        _MOVE,
        holder_is_admitted=False,
        mistakes=("no floor", "the realm is not compared", "reused is admitted"),
    ),
)
