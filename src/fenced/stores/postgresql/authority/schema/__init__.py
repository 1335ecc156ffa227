"""The authority's schema in a database."""

from __future__ import annotations

from pathlib import Path

from fenced.values.schema import SqlSchema

SCHEMA = SqlSchema(
    "fenced",
    Path(__file__).parent,
    version=2,
    readable_by=1,
    files=("versions", "basics", "leases", "operators", "looking"),
)
