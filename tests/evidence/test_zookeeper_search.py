"""The search for two holders on ZooKeeper: it finds none in what ships, and finds a planted bug."""

import pytest

from evidence.zookeeper_search import BrokenPromise, search
from tests.simulation.bugs_zookeeper import EventsAreBelieved, made_with


def test_no_name_has_two_holders(zookeeper_url: str) -> None:
    counts = search(zookeeper_url, 5)
    assert counts["rounds"] == 5 and counts["grants"] > 20 and counts["waits"] > 20


def test_a_waiter_that_believes_events_is_found(zookeeper_url: str) -> None:
    with pytest.raises(BrokenPromise):
        # Two holders, or a token that falls because the wrong one was granted first.
        search(zookeeper_url, 5, made_with("attempts", EventsAreBelieved))
