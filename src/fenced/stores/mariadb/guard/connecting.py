"""Connections of operators."""

from __future__ import annotations

from typing import Any

import pymysql

from fenced.stores.mariadb.address import MariadbAddress
from fenced.stores.mariadb.guard.refusals import wrapped

CONNECT_SECONDS = 10


def connect(dsn: str) -> Any:
    """A blocking connection, for an operator. Creates nothing."""
    address = MariadbAddress(dsn)
    failed: Exception | None = None
    for endpoint in address.endpoints:
        place: dict[str, Any] = (
            {"unix_socket": endpoint}
            if isinstance(endpoint, str)
            else {"host": endpoint[0], "port": endpoint[1]}
        )
        try:
            return pymysql.connect(
                **place,
                user=address.user,
                password=(address.password or "").encode(),
                database=address.database,
                charset="utf8mb4",
                autocommit=True,
                program_name="fenced guard",
                connect_timeout=CONNECT_SECONDS,
                ssl=address.context if address.tls else None,
                ssl_disabled=not address.tls,
            )
        except pymysql.Error as error:
            failed = error
    assert failed is not None
    raise wrapped(failed) from failed
