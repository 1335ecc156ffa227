"""Traces: every rule of the automaton refuses what breaks it, and a real service under a storm deviates nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fenced.errors import Misconfigured
from fenced.testing.lives import Deviation, Promises, TracedCall
from fenced.testing.trace import Trace, line_of, main, opened_line
from fenced.testing.tracing import TraceFile
from fenced.values import timing
from fenced_testkit.servers import ServiceServer

A, B, C = "a" * 32, "b" * 32, "c" * 32


def asks(who: str, sent: float, answer: str, token: int = 0, **more: Any) -> TracedCall:
    values: dict[str, Any] = {
        "names": ("x",),
        "ttl": 10.0,
        "remaining": 10.0 if token else 0.0,
        "at": sent + 0.1,
    } | more
    return TracedCall("ask", who, sent, answer=answer, token=token, **values)


def call(op: str, who: str, sent: float, answer: str, **more: Any) -> TracedCall:
    values: dict[str, Any] = {"at": sent + 0.1, "answer": answer}
    return TracedCall(op, who, sent, **values | more)


GOOD = (
    asks(A, 0.0, "granted", 1, lock_delay=5.0),
    asks(B, 1.0, "waiting"),
    call("renew", A, 3.0, "kept", remaining=10.0),
    asks(C, 3.5, "busy"),
    call("renew", B, 8.0, "waiting"),
    call("renew", B, 13.0, "waiting"),
    call("release", A, 14.0, "ended", reason="expired"),
    asks(B, 18.5, "granted", 2),
    call("release", B, 20.0, "released", keep=3.0),
    asks("d" * 32, 23.5, "granted", 3),
)
BAD: dict[str, tuple[TracedCall, ...]] = {
    "keeps it until": (*GOOD[:7], asks(B, 16.0, "granted", 2)),  # lock_delay
    "but bbbbbb": (*GOOD[:9], asks(C, 21.0, "granted", 3)),  # keep
    "was granted to aaaaaa and to": (*GOOD[:7], asks(B, 18.5, "granted", 1)),
    "had been told": (asks(A, 0.0, "granted", 5, names=("y",)), asks(B, 1.0, "granted", 4)),
    "has two tokens": (GOOD[0], asks(A, 1.0, "granted", 2)),
    "waits for it since": (
        *GOOD[:2],
        call("release", A, 4.0, "released"),
        asks(C, 5.0, "granted", 2),
    ),
    "was free": (*GOOD[:9], asks("e" * 32, 24.0, "busy")),
    "it was over": (*GOOD[:9], call("renew", B, 20.5, "kept", remaining=10.0)),
    "it lives until": (GOOD[0], call("renew", A, 2.0, "ended", reason="expired")),
    "nobody has asked for that": (GOOD[0], call("renew", A, 2.0, "ended", reason="released")),
    "knows nothing of settled": (GOOD[0], call("release", A, 12.0, "ended", reason="settled")),
    "it had not asked": (call("renew", A, 0.0, "kept", remaining=9.0), asks(A, 1.0, "granted", 1)),
}


def checked(calls: tuple[TracedCall, ...], **options: Any) -> int:
    trace = Trace(Promises.of(options.pop("traits", ["namespace-order"]), **options))
    trace.calls += [replace(each) for each in calls]
    return trace.check()


def test_a_right_trace_passes() -> None:
    assert checked(GOOD) == len(GOOD)


@pytest.mark.parametrize("why", BAD)
def test_a_wrong_trace_is_refused(why: str) -> None:
    with pytest.raises(Deviation, match=why):
        checked(BAD[why])


def test_the_traits_decide_what_is_allowed() -> None:
    settled = BAD["knows nothing of settled"]
    assert checked(settled, traits=["namespace-order", "settled-forgotten"])
    queued = (
        asks(C, -5.0, "granted", 1),
        asks(B, 0.0, "waiting"),
        asks(A, 1.0, "granted", 5, names=("y",)),
        call("release", C, 4.0, "released"),
        asks(B, 6.0, "granted", 4),
    )
    with pytest.raises(Deviation, match="had been told"):
        checked(queued)
    assert checked(queued, traits=["per-name-order"])
    assert checked(queued, copies=True), "a copy of its first ask may have been granted before the other one"
    asked_again = (*queued[:3], asks(B, 3.5, "waiting"), *queued[3:])
    with pytest.raises(Deviation, match="had been told"):
        checked(asked_again, copies=True)


def test_an_answer_that_never_came_explains_others() -> None:
    unanswered = replace(GOOD[0], answer="", token=0, at=float("inf"))
    assert checked((unanswered, GOOD[3]))


def test_a_moment_that_is_known_leaves_no_doubt() -> None:
    """An expired lease was renewed. Seen from its client alone, its renewal may have been decided in time."""
    late = (asks(A, 0.0, "granted", 1, at=0.0), call("renew", A, 10.05, "kept", remaining=10.0, at=10.05))
    assert checked(late)
    with pytest.raises(Deviation, match="it had expired"):
        checked(late, exact=True)


def test_an_attempt_that_was_forgotten_begins_anew() -> None:
    """A waiter's place lapsed so long ago that the end was forgotten right after a renewal had been told of it."""
    late = 1.0 + timing.remember_for(10.0) + 100.0
    told = (
        asks(A, 0.0, "granted", 1),
        asks(B, 1.0, "waiting"),
        call("release", A, 2.0, "released"),
        call("renew", B, late, "ended", reason="expired"),
    )
    anew = (*told, asks(B, late + 1.0, "granted", 2), asks(C, late + 2.0, "waiting"))
    assert checked(anew) == len(anew)
    with pytest.raises(Deviation, match="was free"):
        checked((*told, asks(C, late + 2.0, "waiting")))


def test_a_place_that_was_forgotten_while_its_last_answer_was_under_way_is_another_one() -> None:
    """The client stood still. It was granted nothing meanwhile, and others were; then it asked again."""
    late = 2.0 + timing.remember_for(10.0) + 100.0
    stood_still = (
        asks(A, 0.0, "granted", 1),
        asks(B, 1.0, "waiting"),
        call("renew", B, 2.0, "waiting", at=late),
        call("release", A, 3.0, "released"),
        asks(C, 20.0, "granted", 2),
        call("release", C, 21.0, "released"),
        asks("d" * 32, late, "granted", 3),
        asks(B, late + 1.0, "waiting"),
    )
    assert checked(stood_still) == len(stood_still)
    with pytest.raises(Deviation, match="waits for it since"):
        checked((*stood_still[:4], asks(C, 5.0, "granted", 2)))


def test_an_ask_that_is_tried_again_after_it_was_forgotten_is_granted_anew() -> None:
    """Its client stood still, and others have had the name since."""
    late = timing.remember_for(10.0) + 11.0
    for again, allowed in ((late, True), (late - 20.0, False)):
        anew = (
            asks(A, 0.0, "granted", 1),
            asks(B, 20.0, "granted", 2),
            call("release", B, 21.0, "released"),
            asks(A, again, "granted", 3),
            asks(C, again + 1.0, "busy"),
        )
        if allowed:
            assert checked(anew) == len(anew)
        else:
            with pytest.raises(Deviation, match="has two tokens"):
                checked(anew)


def test_an_end_is_remembered_until_the_attempt_is_made_anew() -> None:
    """Of calls that are under way together some may be told of the old life, and some of the new one."""
    late = 1.0 + 10.0 + timing.remember_for(10.0) + 5.0
    known = asks(B, late, "ended", reason="expired", at=late)
    gone = call("renew", B, late + 1.0, "gone", at=late + 1.0)
    assert checked(
        (asks(A, 0.0, "granted", 1, at=0.0), asks(B, 1.0, "waiting", at=1.0), known, gone), exact=True
    )
    together = (
        asks(A, 0.0, "granted", 1),
        asks(B, 1.0, "waiting"),
        asks("d" * 32, late - 1.0, "granted", 2),
        asks(B, late, "waiting", at=late + 2.0),
        call("renew", B, late + 0.5, "ended", reason="expired"),
    )
    assert checked(together) == len(together)


def test_an_operator_may_end_a_lease() -> None:
    forced = TracedCall("force", "", 2.0, names=("x",), token=1)
    with pytest.raises(Deviation, match="keeps it until"):
        checked((GOOD[0], asks(B, 2.1, "granted", 3)))
    assert checked((GOOD[0], forced, asks(B, 2.1, "granted", 3)))


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="cannot be written"):
        TraceFile(tmp_path / "missing" / "trace")


MUTATIONS: dict[str, Callable[[list[dict[str, Any]]], None]] = {}


def mutation(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[list[dict[str, Any]]], None]:
    MUTATIONS[change.__name__] = change
    return change


def grants(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("answer") == "granted"]


@mutation
def the_last_token_is_the_first_one(lines: list[dict[str, Any]]) -> None:
    grants(lines)[-1]["token"] = grants(lines)[0]["token"]


@mutation
def a_token_falls(lines: list[dict[str, Any]]) -> None:
    grants(lines)[-1]["token"] = 0.5


@mutation
def a_lease_lasts_longer(lines: list[dict[str, Any]]) -> None:
    names = [line["names"] for line in grants(lines)]
    first = next(at for at, each in enumerate(names) if each in names[at + 1 :])
    attempt = grants(lines)[first]["attempt"]
    lines[:] = [line for line in lines if line.get("attempt") != attempt or line is grants(lines)[first]]
    grants(lines)[first]["remaining"] = 3600.0


@mutation
def an_ended_lease_is_renewed(lines: list[dict[str, Any]]) -> None:
    over = next(line for line in lines if line.get("answer") == "released")
    later = over["at"] + 0.001
    lines.append({**over, "op": "renew", "answer": "kept", "remaining": 0.3, "sent": later, "at": later})


@mutation
def a_free_name_is_busy(lines: list[dict[str, Any]]) -> None:
    last = lines[-1]["at"] + 100
    lines.append(
        {**lines[1], "attempt": "f" * 32, "answer": "busy", "names": ["free"], "sent": last, "at": last}
    )


@pytest.mark.xdist_group("service")
def test_a_service_under_a_storm_deviates_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "decisions.jsonl"
    with ServiceServer(options=("--trace", str(trace))) as server:
        storm = ["drill", "storm", "--json", "--seconds", "3", "--holders", "4", "--names", "2"]
        storm += ["--authority", server.url()]
        done = subprocess.run([sys.executable, "-m", "fenced", *storm], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert main([str(trace)]) == 0, capsys.readouterr().err
    assert "no deviation" in capsys.readouterr().out
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(grants(lines)) > 20
    for name, change in MUTATIONS.items():
        mutated = json.loads(json.dumps(lines))
        change(mutated)
        trace.write_text("".join(json.dumps(line) + "\n" for line in mutated))
        assert main([str(trace)]) == 1, name
        assert "namespace default: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        '{"namespace": "default"}',
        '{"namespace": "x", "op": "renew", "attempt": "a", "sent": 1}',  # of a namespace that nobody has opened
        "[]",
        "torn {",
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").write_text(opened_line("default", ["namespace-order"], 0, 0.0) + line + "\n")
    assert main([str(tmp_path / "trace")]) == 2
    assert "line 2 is none of a trace" in capsys.readouterr().err


def test_a_restart_may_have_lost_the_last_lines(tmp_path: Path) -> None:
    """A release that was decided, and not noted before the process was killed, is no deviation of its successor."""
    file = tmp_path / "trace"
    lines = [opened_line("default", ["namespace-order"], 0, 0.0), line_of(GOOD[0], "default")]
    after = line_of(asks(B, 2.0, "granted", 2), "default")
    file.write_text("".join([*lines, after]))
    assert main([str(file)]) == 1
    file.write_text("".join([*lines, opened_line("default", ["namespace-order"], 1, 1.0), after]))
    assert main([str(file)]) == 0
