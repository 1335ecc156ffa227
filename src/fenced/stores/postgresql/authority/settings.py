"""The settings of a server and a database, as every new connection reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fenced.errors import Misconfigured, Unavailable


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a lease's guarantee depends on."""

    encoding: str
    isolation: str
    messages: str
    fsync: str
    full_page_writes: str
    recovery: str

    @classmethod
    def of(cls, row: Sequence[bytes | None]) -> Settings:
        return cls(*((value or b"").decode() for value in row))

    def check(self, where: str) -> None:
        """Raise if leases cannot work with these settings."""
        if self.encoding != "UTF8":
            raise Misconfigured(f"{where}: the database's encoding is {self.encoding}; names need UTF8")
        if self.isolation != "read committed":
            raise Misconfigured(
                f"{where}: default_transaction_isolation is {self.isolation!r}; for this role or database, "
                "set it to 'read committed'"
            )
        if self.messages in ("error", "fatal", "panic"):
            raise Misconfigured(
                f"{where}: client_min_messages is {self.messages!r}, which hides that a commit was not replicated; for "
                "this role or database, set it to 'warning' or lower"
            )
        if self.recovery == "t":
            raise Unavailable(f"{where} is a standby; name the primary")

    def doubts(self) -> tuple[str, ...]:
        """How tokens could repeat here."""
        found = []
        if self.fsync != "on":
            found.append(
                "fsync is off: a power cut may lose acknowledged tokens (postgresql.conf: fsync = on)"
            )
        if self.full_page_writes != "on":
            found.append(
                "full_page_writes is off: a power cut may damage the counter "
                "(postgresql.conf: full_page_writes = on)"
            )
        return tuple(found)
