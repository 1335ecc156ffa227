"""Which clients may work with a stored schema: one rule and one sentence for all stores.

A schema has two numbers: its version, and the oldest version that a client must know to work with it. A change that
only adds leaves the second number as it is, so that old and new clients work side by side during a rolling upgrade.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from fenced import __version__
from fenced.errors import Misconfigured

if TYPE_CHECKING:
    from pathlib import Path

RELEASE: Final = __version__


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of a store, as it is stored there."""

    version: int
    readable_by: int
    """The oldest schema version that a client must know."""
    release: str = ""
    """The fenced that stored it."""


def parsed_schema(stored: Mapping[str, Any]) -> Schema:
    """The schema from the fields of a key-value store. `schema` is the oldest version that a client must know: 0.1
    compares it.

    Later versions add `version` and `release`. A client that rewrites the fields must keep those that it does not know.
    """
    oldest = int(stored["schema"])
    return Schema(int(stored.get("version", oldest)), oldest, str(stored.get("release", "")))


def check_readable(where: str, stored: Schema, known: int) -> None:
    """Misconfigured if a client that knows schema `known` is too old for this one."""
    if stored.readable_by > known:
        needed = f"fenced {stored.release} or later" if stored.release else "a later fenced"
        raise Misconfigured(
            f"{where} has schema {stored.version}, which a client can use if it knows schema {stored.readable_by} or "
            f"later; this fenced {RELEASE} knows {known}: install {needed}"
        )


def is_older(release: str, other: str) -> bool:
    """Whether a release comes before another one."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(".") if part.isdigit()]

    return numbers(release) < numbers(other)


@dataclass(frozen=True, slots=True)
class Installed:
    """The schema of a database, and a digest of its functions."""

    schema: Schema
    functions: str = ""


V0_1 = Installed(Schema(1, 1, "0.1"))
"""0.1 stored no version; its schema has a function `version()`, and no function `installed()`."""


# The functions run with their owner's rights. So they could not use what a superuser, or a member of the owner, has
# created in an upgrade or an installation. The sequence of a column follows its table.
_OWNED = """DO $fenced$ DECLARE
  o record;
BEGIN
  FOR o IN
    WITH s AS (SELECT oid, nspowner FROM pg_namespace WHERE nspname = '{schema}' AND pg_has_role(nspowner, 'MEMBER'))
    SELECT format('TABLE %s', c.oid::regclass) AS object, s.nspowner, c.relowner AS owner
    FROM pg_class c JOIN s ON s.oid = c.relnamespace WHERE c.relkind IN ('r', 'S') AND NOT EXISTS (
      SELECT 1 FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype IN ('a', 'i'))
    UNION ALL
    SELECT format('FUNCTION %s', p.oid::regprocedure), s.nspowner, p.proowner
    FROM pg_proc p JOIN s ON s.oid = p.pronamespace
  LOOP
    IF o.owner <> o.nspowner AND pg_has_role(o.owner, 'USAGE') THEN
      EXECUTE format('ALTER %s OWNER TO %s', o.object, o.nspowner::regrole);
    END IF;
  END LOOP;
END $fenced$"""


@dataclass(frozen=True)
class SqlSchema:
    """A schema of a PostgreSQL database: tables by forward migrations, functions replaced as a whole.

    `tables_1.sql` made the tables of fenced 0.1; each later `tables_N.sql` leads from version N - 1 to N. The other
    files hold functions, each with CREATE OR REPLACE. An upgrade runs the migrations that are missing, and replaces
    the functions if their text has changed. So a function can be corrected without a migration.
    """

    name: str
    folder: Path
    version: int
    readable_by: int
    """The oldest version that a client must know. Raised by a migration that old clients cannot work with."""
    files: tuple[str, ...]

    @cached_property
    def functions(self) -> str:
        """The statements that create or replace all functions."""
        return "\n".join((self.folder / f"{name}.sql").read_text() for name in self.files)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.functions.encode()).hexdigest()[:16]

    def tables(self, after: int = 0) -> list[str]:
        """The migrations from a version to ours."""
        return [
            (self.folder / f"tables_{number}.sql").read_text()
            for number in range(after + 1, self.version + 1)
        ]

    def needs_upgrade(self, found: Installed | None) -> bool:
        """Whether an upgrade would change something. It never replaces what a later fenced has installed."""
        if found is None or found.schema.version < self.version:
            return True
        later = found.schema.version > self.version or is_older(RELEASE, found.schema.release)
        return not later and found.functions != self.digest

    def upgrade(self, found: Installed | None) -> list[str]:
        """The statements, for one transaction, that bring the schema from `found` to our version."""
        if not self.needs_upgrade(found):
            return []
        version = found.schema.version if found else 0
        return [
            self._unchanged(version),
            *self.tables(version),
            self.functions,
            (
                f"UPDATE {self.name}.schema SET version = {self.version}, readable_by = {self.readable_by}, "
                f"release = '{RELEASE}', functions = '{self.digest}'"
            ),
            self.owned,
        ]

    @property
    def owned(self) -> str:
        """Gives the tables, sequences and functions of the schema to the schema's owner."""
        return _OWNED.format(schema=self.name)

    def _unchanged(self, version: int) -> str:
        """Fails if another session has upgraded since we looked. Its lock lasts until COMMIT: one upgrade at a time."""
        return (
            "DO $fenced$ DECLARE\n  v_version integer := 0;\nBEGIN\n"
            f"  PERFORM pg_advisory_xact_lock(hashtextextended('{self.name}.schema', 0));\n"
            f"  IF to_regclass('{self.name}.schema') IS NOT NULL THEN\n"
            f"    SELECT version INTO v_version FROM {self.name}.schema;\n"
            f"  ELSIF to_regprocedure('{self.name}.version()') IS NOT NULL THEN v_version := 1; END IF;\n"
            f"  IF v_version <> {version} THEN\n"
            "    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',\n"
            f"      MESSAGE = 'fenced: another session has upgraded the schema {self.name} in between; try again';\n"
            "  END IF;\nEND $fenced$"
        )
