"""The statements that are sent, from `queries.sql`."""

from __future__ import annotations

from pathlib import Path

from fenced import sqlfile

HERE = Path(__file__).parent
SQL = {name: text.encode() for name, text in sqlfile.load(HERE / "queries.sql").items()}
