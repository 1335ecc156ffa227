"""Log lines about outages and refusals: few, and enough."""

from __future__ import annotations

import logging

import pytest

from fenced.errors import Misuse, Unavailable
from fenced.runtime.logs import QUIET_SECONDS, LimitedLog, OutageLog
from fenced.values.lines import LINES_MAX, LINES_SECONDS

LOG = logging.getLogger("fenced.test")


def test_an_outage_has_a_line_when_it_begins_and_one_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    outages = OutageLog(LOG, "the store", lambda: now)
    outages.note([Misuse("the request is wrong")])
    outages.worked()
    assert not caplog.messages, "quiet as long as it works"
    for _ in range(100):  # it comes and goes
        now += 0.2
        outages.note(["done", Unavailable("postgresql://app:secret@db/leases cannot be reached")])
        outages.note(["done"])
    assert caplog.messages == ["the store cannot be used: postgresql://***@db/leases cannot be reached"]
    now += QUIET_SECONDS
    outages.note([Misuse("the request is wrong")])
    outages.note(["done"])
    assert caplog.messages[1:] == ["the store works again; it had failed 100 times in 20 s"]
    outages.failed(ValueError("x"))
    assert caplog.messages[2:] == ["the store cannot be used: ValueError: x"]


def test_refusals_have_a_bounded_number_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limited = LimitedLog(LOG, lambda: now)
    for number in range(100):
        limited.warning(f"refused {number}")
    assert caplog.messages == [f"refused {number}" for number in range(LINES_MAX)]
    now = LINES_SECONDS
    limited.warning("refused again")
    assert caplog.messages[LINES_MAX:] == ["refused again (90 more like this before it)"]
