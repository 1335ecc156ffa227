# walk: './fenced[sqlalchemy,postgresql]'
"""A blocking Session where greenlet is not installed. SQLAlchemy needs greenlet for asyncio only."""

import importlib.util
import os

import sqlalchemy as sa
from sqlalchemy.orm import Session

import fenced

assert importlib.util.find_spec("greenlet") is None, "this environment cannot show what it is for"
URL = os.environ["DATABASE_URL"]
engine = sa.create_engine(URL.replace("postgresql:", "postgresql+psycopg:"))
orders = fenced.sql.Guard(table="orders", name="orders/{id}")
with Session(engine) as session:
    session.execute(sa.text("CREATE TABLE orders (id int PRIMARY KEY, qty int)"))
    session.execute(sa.text("INSERT INTO orders VALUES (42, 10)"))
    session.commit()
    orders.install(session, mode="require")
with fenced.Client(URL).hold("orders/42") as lease, Session(engine) as session:
    with orders.transaction(session, lease):
        session.execute(sa.text("UPDATE orders SET qty = 7 WHERE id = 42"))
    assert session.scalar(sa.text("SELECT qty FROM orders")) == 7
