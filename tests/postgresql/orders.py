"""A guarded table of orders, for tests of the guard's functions."""

from __future__ import annotations

from typing import Any

import psycopg

from fenced.sql import Guard

ORDERS = Guard(table="orders", name="orders/{id}")
ONE, TWO = "orders/1", "orders/2"


def prepare(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE orders (id integer PRIMARY KEY, qty integer NOT NULL DEFAULT 0)")
    connection.execute("INSERT INTO orders SELECT id FROM generate_series(1, 9) AS id")
    ORDERS.install(connection, mode="require")
