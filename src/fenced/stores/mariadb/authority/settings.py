"""A server and its settings, as every new connection reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fenced.errors import Misconfigured, Unavailable
from fenced.stores.mariadb.wire.connection import Result

VARIABLES = (
    "version read_only super_read_only innodb_read_only innodb_flush_log_at_trx_commit innodb_flush_method "
    "innodb_doublewrite debug_no_sync log_bin sync_binlog server_id server_uuid gtid_domain_id wsrep_on "
    "group_replication_group_name group_replication_single_primary_mode rpl_semi_sync_master_wait_point "
    "rpl_semi_sync_source_wait_point"
).split()
STATUS = (
    "wsrep_cluster_state_uuid Slaves_connected Rpl_semi_sync_master_status Rpl_semi_sync_source_status "
    "Innodb_redo_log_enabled"
).split()
_OLDEST = {"MariaDB": (10, 6), "MySQL": (8, 0)}


def _shown(what: str, names: list[str]) -> str:
    return f"SHOW GLOBAL {what} WHERE Variable_name IN ({', '.join(map(repr, names))})"


QUERIES = ("SELECT UUID_SHORT() >> 24", _shown("VARIABLES", VARIABLES), _shown("STATUS", STATUS))
"""The first tells one start of one server from all others, as `floor` does; it is cheap enough for every grant."""


@dataclass(frozen=True, slots=True)
class MariadbSettings:
    """What a lease's guarantee depends on."""

    start: int
    """Of which start of which server this is told."""
    found: Mapping[str, str]

    @classmethod
    def of(cls, results: list[Result]) -> MariadbSettings:
        ((start,),), *shown = (result.rows for result in results)
        found = {str(name): str(value) for rows in shown for name, value in rows}
        return cls(int(start), found)

    @property
    def product(self) -> str:
        return "MariaDB" if "mariadb" in self.found["version"].lower() else "MySQL"

    def _is(self, name: str, *values: str) -> bool:
        return self.found.get(name, "").upper() in values

    @property
    def _galera(self) -> bool:
        return self._is("wsrep_on", "ON", "1")

    def lineage(self, made: object) -> str:
        """Which history this is. `made`: when the table of numbers was made here."""
        if self._galera:
            return f"galera/{self.found.get('wsrep_cluster_state_uuid', '')}"
        server = self.found.get("server_uuid") or f"{self.found['server_id']}/{self.found['gtid_domain_id']}"
        return f"{server}/{made}"

    def check(self, where: str) -> None:
        """Raise if leases cannot be kept here."""
        version = self.found["version"]
        numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2])
        oldest = _OLDEST[self.product]
        if numbers < oldest:
            raise Misconfigured(
                f"{where} is {self.product} {version}; leases need {'.'.join(map(str, oldest))} or later"
            )
        for name in ("super_read_only", "read_only", "innodb_read_only"):
            if self.found.get(name, "OFF").upper() not in ("OFF", "0", "NO_LOCK_NO_ADMIN"):
                raise Unavailable(f"{where} is a replica, or set to read only ({name}); name the primary")

    def doubts(self) -> tuple[str, ...]:
        """How tokens could repeat here."""
        found = []
        flush, sync = self.found["innodb_flush_log_at_trx_commit"], self.found.get("sync_binlog", "1")
        if flush not in ("1", "3"):
            found.append(
                f"innodb_flush_log_at_trx_commit is {flush}: a power cut may lose acknowledged tokens (set it to 1)"
            )
        if self._is("log_bin", "ON", "1") and sync != "1":
            found.append(
                f"sync_binlog is {sync}: after a power cut the server undoes what it had acknowledged and is missing "
                "in the binary log (set it to 1)"
            )
        if self._is("innodb_doublewrite", "OFF", "0", "DETECT_ONLY"):
            found.append("innodb_doublewrite is off: a power cut may damage the tables (set it to ON)")
        if (
            self._is("innodb_flush_method", "NOSYNC", "LITTLESYNC")
            or self._is("debug_no_sync", "ON", "1")
            or self._is("Innodb_redo_log_enabled", "OFF")
        ):
            found.append(
                "the server does not sync its files (innodb_flush_method, debug_no_sync, ALTER INSTANCE DISABLE INNODB "
                "REDO_LOG): a power cut may lose acknowledged tokens"
            )
        if self._galera:
            found.append(
                "this is a node of a Galera cluster: rows are locked on one node alone and each node draws numbers of "
                "its own, so tokens can fall (let all clients write to one node)"
            )
        if self.found.get("group_replication_group_name") and self._is(
            "group_replication_single_primary_mode", "OFF", "0"
        ):
            found.append(
                "group replication has several primaries: rows are locked on one of them alone and each draws numbers "
                "of its own, so tokens can fall (group_replication_single_primary_mode = ON)"
            )
        return tuple(found)

    def warnings(self) -> tuple[str, ...]:
        """What a failover would lose. It repeats no token: the new primary has another lineage."""
        after = "The new primary grants nothing until `fenced authority raise`"
        if self.found.get("group_replication_group_name"):
            return (f"group replication: a failover keeps the leases that a majority had received. {after}",)
        if int(self.found.get("Slaves_connected") or 0) == 0 or self._galera:
            return ()
        waits = self._is("rpl_semi_sync_master_wait_point", "AFTER_SYNC")
        if waits and self._is("Rpl_semi_sync_master_status", "ON"):
            return ()
        lost = "its replicas are not waited for, so a failover loses the leases that they had not received"
        return (f"{lost} (semi-synchronous replication with AFTER_SYNC waits for one). {after}",)
