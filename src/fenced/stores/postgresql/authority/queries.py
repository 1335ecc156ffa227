"""The statements of `queries.sql`, by name."""

from __future__ import annotations

from pathlib import Path

from fenced.values import sqlfile

HERE = Path(__file__).parent
SQL = {name: text.encode() for name, text in sqlfile.load(HERE / "queries.sql").items()}
