"""Two nodes of MariaDB that replicate to each other by Galera."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fenced.drills.relay.ports import HOST, free_port
from fenced_testkit.servers.base import MissingProgram, Startable
from fenced_testkit.servers.mariadb import MariadbServer

PROVIDER = Path("/usr/lib/galera/libgalera_smm.so")
PACKAGE = "galera-4"
_TRANSFER = f"""#!/bin/sh
# Galera calls this to copy a node's files. The nodes here begin with the same files, so there is nothing to copy: the
# joiner says where it is, and gets from the donor what was written since.
while [ $# -gt 0 ]; do
  case $1 in --role) role=$2 ;; --gtid) gtid=$2 ;; esac
  shift
done
if [ "$role" = joiner ]; then echo "ready {HOST}:1/nothing"; echo "$FENCED_STATE"; else echo "done $gtid"; fi
"""


class GaleraNode(MariadbServer):
    """One node. Its files and the address of the cluster are given by `GaleraCluster`."""

    name = "galera"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings)
        self.group_port = free_port()
        self._transfer_port = free_port()
        self.donor: GaleraNode | None = None
        self.state = ""
        """The last transaction of the donor that is in these files."""

    def prepare(self) -> None:
        if not PROVIDER.exists():
            raise MissingProgram(f"{PROVIDER} is not here; this does it: apt-get install -y {PACKAGE}")
        super().prepare()
        program = self.folder / "wsrep_sst_nothing"
        program.write_text(_TRANSFER)
        program.chmod(0o755)

    def begin_with_the_files_of(self, donor: GaleraNode) -> None:
        """Join its cluster, from the point at which it was stopped."""
        shutil.copytree(donor.data, self.data)
        lines = (donor.data / "grastate.dat").read_text().splitlines()
        saved = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.donor, self.state = donor, f"{saved['uuid']}:{saved['seqno']}"

    def command(self) -> list[str]:
        ports = {
            "base_port": str(self.group_port),
            "gmcast.listen_addr": f"tcp://{HOST}:{self.group_port}",
            "ist.recv_addr": f"{HOST}:{self._transfer_port}",
        }
        cluster = {
            "wsrep_on": "ON",
            "wsrep_provider": str(PROVIDER),
            "wsrep_provider_options": ";".join(f"{name}={value}" for name, value in ports.items()),
            "wsrep_cluster_address": f"gcomm://{f'{HOST}:{self.donor.group_port}' if self.donor else ''}",
            "wsrep_node_address": HOST,
            "wsrep_sst_method": "nothing",
            "binlog_format": "ROW",
            "innodb_autoinc_lock_mode": "2",
        }
        path = os.pathsep.join([str(self.folder), os.environ.get("PATH", os.defpath)])
        program = [part for part in super().command() if not part.startswith("--init-file=")]
        options = [f"--{name}={value}" for name, value in cluster.items()]
        return ["/usr/bin/env", f"PATH={path}", f"FENCED_STATE={self.state}", *program, *options]

    def answers(self) -> bool:
        return super().answers() and self.execute("SHOW STATUS LIKE 'wsrep_ready'") == [("wsrep_ready", "ON")]


class GaleraCluster(Startable):
    """Two nodes with the same settings. `nodes[0]` made the cluster, and the other one joined it."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.nodes = [GaleraNode(settings) for _ in range(2)]

    @property
    def running(self) -> bool:
        return any(node.running for node in self.nodes)

    def start(self) -> None:
        first, second = self.nodes
        first.start()
        first.stop()
        second.begin_with_the_files_of(first)
        first.start()
        second.start()

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.close()
