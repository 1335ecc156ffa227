"""The kit through the service, with clients whose requests reach two instances by turns.

The whole of it over the ledger and SQLite; over PostgreSQL and etcd what differs, and the whole in `make evidence`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from fenced.client.registry import BUILT_IN
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, Colour, run
from fenced.values import timing
from fenced_testkit.servers import EtcdServer, PostgresqlServer
from tests.colours import alternating, named
from tests.etcd.aging import SCALE
from tests.service.instances import Instances, OverLedger, OverSqlite, running
from tests.service.stores import OverEtcd, OverPostgresql

BACKEND = "http"
WHAT_A_SERVICE_ADDS = (
    "opening_again_disturbs_nothing",
    "a_batch_is_answered_one_by_one",
    "a_release_wakes_the_head",
    "several_names_all_or_none",
    "odd_names_are_names",
    "force_release_spares_a_holder_that_the_operator_has_not_seen",
    "a_waiter_is_granted_elsewhere",
    "a_client_dies_and_its_attempts_wander_on",
    "an_attempt_that_ended_elsewhere",
    "no_update_is_lost_under_contention",
)
"""Over a store that has passed the whole kit itself: attempts that wander, waiting, odd names, many clients at once."""
NOT_OVER_ETCD = (
    # The second instance does not know when an attempt was renewed at the first: it ends with its etcd lease, up to
    # a ttl late. docs/authorities/etcd.md
    "a_lease_ends_by_its_own_ttl",
    # Twenty times as long as the kit says, their delays are longer than the service accepts.
    "a_release_may_keep_its_names_taken",
    "lock_delay_outlives_the_memory_of_its_attempt",
)
WHOLE = bool(os.environ.get("FENCED_WHOLE_KIT"))
"""Set by `make evidence ARGS=service_kits`: every check in both colours. That is a minute of CPU."""


def chosen(*names: str, without: tuple[str, ...] = ()) -> list[ParameterSet]:
    """These checks, taken in turn in one colour each; or the whole kit."""
    if not WHOLE:
        return alternating(named(AUTHORITY_CHECKS, *names))
    checks = [check for check in AUTHORITY_CHECKS if check.name not in without]
    return alternating(checks) + alternating(checks, COLOURS[::-1])


@pytest.fixture(scope="module")
def instances() -> Iterator[Instances]:
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def database(postgresql_server: PostgresqlServer) -> str:
    return postgresql_server.url(postgresql_server.create_database())


@pytest.mark.xdist_group("service")
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_service(
    check: Check[AuthorityHarness], colour: Colour, instances: Instances, tmp_path: Path
) -> None:
    run(check, lambda runtime: OverLedger(runtime, instances, tmp_path), colour)


@pytest.mark.xdist_group("service")
@pytest.mark.parametrize(("check", "colour"), alternating(AUTHORITY_CHECKS))
def test_service_over_sqlite(
    check: Check[AuthorityHarness], colour: Colour, instances: Instances, tmp_path: Path
) -> None:
    run(check, lambda runtime: OverSqlite(runtime, instances, tmp_path), colour)


@pytest.mark.xdist_group("service")
@pytest.mark.parametrize(("check", "colour"), chosen(*WHAT_A_SERVICE_ADDS))
def test_service_over_postgresql(
    check: Check[AuthorityHarness],
    colour: Colour,
    instances: Instances,
    postgresql_server: PostgresqlServer,
    database: str,
) -> None:
    run(check, lambda runtime: OverPostgresql(runtime, instances, postgresql_server, database), colour)


@pytest.mark.xdist_group("service")
@pytest.mark.parametrize(("check", "colour"), chosen(*WHAT_A_SERVICE_ADDS, without=NOT_OVER_ETCD))
def test_service_over_etcd(
    check: Check[AuthorityHarness],
    colour: Colour,
    instances: Instances,
    etcd_server: EtcdServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What bounds the time that a waiter may be silent counts the kit's seconds too.
    monkeypatch.setattr(timing, "WAITER_TTL_MAX", timing.WAITER_TTL_MAX * SCALE)
    run(check, lambda runtime: OverEtcd(runtime, instances, etcd_server), colour)


def test_the_same_class_serves_tls_and_unix_sockets() -> None:
    """They differ in the socket only: tests/service."""
    table = BUILT_IN["fenced.authorities"]
    assert table["https"] == table["fenced+unix"] == table[BACKEND]
