"""The kit through the service: over SQLite and memory, with clients whose requests reach two instances by turns."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fenced.registry import BUILT_IN
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, Colour, run
from tests.colours import alternating
from tests.service.instances import Instances, OverMemory, OverSqlite, running

BACKEND = "http"


@pytest.fixture(scope="module")
def instances() -> Iterator[Instances]:
    with running() as started:
        yield started


@pytest.mark.xdist_group("service")
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_service(
    check: Check[AuthorityHarness], colour: Colour, instances: Instances, tmp_path: Path
) -> None:
    run(check, lambda runtime: OverSqlite(runtime, instances, tmp_path), colour)


@pytest.mark.xdist_group("service")
@pytest.mark.parametrize(("check", "colour"), alternating(AUTHORITY_CHECKS))
def test_service_over_memory(check: Check[AuthorityHarness], colour: Colour, instances: Instances) -> None:
    run(check, lambda runtime: OverMemory(runtime, instances), colour)


def test_the_same_class_serves_tls_and_unix_sockets() -> None:
    """They differ in the socket only: tests/service."""
    table = BUILT_IN["fenced.authorities"]
    assert table["https"] == table["fenced+unix"] == table[BACKEND]
