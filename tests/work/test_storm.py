"""The storm of claims in a short form, and its judge: the planted bug, that nothing is refused, is seen."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import fenced
from evidence.claim_storm import RUNS, Field, judge, storm


def field(engine: str, request: pytest.FixtureRequest, tmp_path: Path, *, guarded: bool = True) -> Field:
    if engine == "sqlite":
        return Field("sqlite", f"{tmp_path}/data.db", f"sqlite:///{tmp_path}/leases.db", guarded)
    url = request.getfixturevalue("new_mariadb" if engine == "mariadb" else "new_database")()
    return Field(engine, url, url, guarded)


@pytest.mark.parametrize("engine", ["postgresql", "sqlite", "mariadb"])
def test_every_row_has_one_accepted_finish(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found = storm(field(engine, request, tmp_path), jobs=150, processes=2, workers=2)
    assert (found["accepted"], found["too_many"], found["unfinished"], found["overwritten"]) == (150, 0, 0, 0)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("engine", ["postgresql", "sqlite", "mariadb"])
def test_the_judge_sees_a_late_finish_that_is_not_refused(
    engine: str, guarded: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The storm's one dangerous moment, without chance: a worker is late, and another one has the row."""
    where = field(engine, request, tmp_path, guarded=guarded)
    where.prepare(1)
    with contextlib.closing(where.connect()) as db, fenced.Client(where.authority) as client:
        with RUNS.worker(client) as first:
            (late,) = first.claim_many(db)
        with RUNS.worker(client) as second:
            (now,) = second.claim_many(db)
            now.finish(db, status="done", output=now.token)
            with pytest.raises(fenced.StaleToken) if guarded else contextlib.nullcontext():
                late.finish(db, status="done", output=late.token)
    found = judge(where)
    assert (found["too_many"] > 0, found["overwritten"] > 0) == (not guarded, not guarded)
