"""`fenced work ls` on every engine."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from fenced.cli import app
from tests.work.places import Place, claimed


def listed(place: Place, *options: str) -> str:
    done = CliRunner().invoke(app, ["work", "ls", place.dsn, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_it_says_who_has_which_row(place: Place) -> None:
    db = place.prepare()
    db.execute("INSERT INTO runs (id) VALUES (2), (3)")
    worker = place.worker(place.client(label="reporter"))
    claimed(worker, db)
    claimed(worker, db).retry(db, after=3600)
    said = listed(place, "--table", "runs")
    assert "1 ready, 1 later, 1 claimed, 0 dead, next runs/3" in said
    assert "runs/1" in said
    if place.engine == "postgresql" and place.authority == place.data:
        assert "reporter" in said
    (status,) = json.loads(listed(place, "--json"))
    assert [claim["name"] for claim in status["claims"]] == ["runs/1"]


def test_a_table_without_claims_is_named(place: Place) -> None:
    place.prepare()
    done: Any = CliRunner().invoke(app, ["work", "ls", place.dsn, "--table", "orders"])
    assert "claims are not installed on orders" in str(done.exception)
