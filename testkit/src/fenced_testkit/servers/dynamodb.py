"""Emulators of DynamoDB: dynoxide, from npm, which keeps its data on the disk; or moto, from PyPI, which does not."""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

from fenced_testkit.servers.base import MissingProgram, Server, find_program

TABLE = "fenced"
REGION = "us-east-1"
KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": REGION}
"""What a client needs in its environment; the emulators accept any keys."""
_SIGNED = f"AWS4-HMAC-SHA256 Credential=any/20260101/{REGION}/dynamodb/aws4_request, SignedHeaders=host, Signature=0"
_MOTO = """
import io, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

moto = DomainDispatcherApplication(create_backend_app)
one_at_a_time = threading.Lock()  # moto checks a condition and writes in two steps

def app(environ, start_response):
    # Nobody waits, with the lock, for a request whose sender has gone.
    environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    with one_at_a_time:
        return moto(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)
"""

Emulator = Literal["dynoxide", "moto"]


class DynamoServer(Server):
    """One server with one table for guards, and a table `stock` with the partition key `id`."""

    name = "dynamodb"

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, emulator: Emulator | None = None
    ) -> None:
        """`emulator`: dynoxide if it is installed, and otherwise moto."""
        super().__init__(folder)
        self._dynoxide = "" if emulator == "moto" else _dynoxide(emulator is not None)
        self.durable = bool(self._dynoxide)
        """Whether what it has acknowledged is there after a restart."""

    def command(self) -> list[str]:
        if self._dynoxide:
            data = str(self.folder / "tables.db")
            return [self._dynoxide, "--host", self.host, "--port", str(self.port), "--db-path", data]
        return [sys.executable, "-c", _MOTO, str(self.port)]

    def answers(self) -> bool:
        return all(self._create(table, key) for table, key in ((TABLE, "name"), ("stock", "id")))

    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url(self, prefix: str) -> str:
        """The address of a guard below a prefix of its table. The keys are in the environment: `KEYS`."""
        return f"dynamodb://{TABLE}/{prefix}?endpoint={self.endpoint()}&region={REGION}"

    def _create(self, table: str, key: str) -> bool:
        about = {
            "TableName": table,
            "KeySchema": [{"AttributeName": key, "KeyType": "HASH"}],
            "AttributeDefinitions": [{"AttributeName": key, "AttributeType": "S"}],
            "BillingMode": "PAY_PER_REQUEST",
        }
        status, reply = self._send("CreateTable", about)
        return status == 200 or "ResourceInUseException" in str(reply.get("__type"))

    def _send(self, operation: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        headers = {
            "X-Amz-Target": f"DynamoDB_20120810.{operation}",
            "Content-Type": "application/x-amz-json-1.0",
            "Authorization": _SIGNED,
            "X-Amz-Date": "20260101T000000Z",
        }
        try:
            connection.request("POST", "/", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException):
            return 0, {}
        finally:
            connection.close()


def _dynoxide(needed: bool) -> str:
    try:
        return find_program("dynoxide", "dynoxide", Path(sys.executable).parent)
    except MissingProgram:
        if needed:
            raise MissingProgram(
                "dynoxide is not installed here; this does it: npm install -g dynoxide"
            ) from None
        return ""
