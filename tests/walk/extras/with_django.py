# walk: './fenced[django,postgresql]'
"""A guarded transaction in Django."""

import os

import django
from django.conf import settings
from django.db import connection
from psycopg.conninfo import conninfo_to_dict

import fenced

place = conninfo_to_dict(os.environ["DATABASE_URL"])
names = {"NAME": "dbname", "USER": "user", "HOST": "host", "PORT": "port"}
database = {django: place.get(libpq, "") for django, libpq in names.items()}
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}})
django.setup()

from fenced.django import atomic  # noqa: E402 - settings first

orders = fenced.sql.Guard(table="orders", name="orders/{id}")
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE orders (id int PRIMARY KEY, qty int); INSERT INTO orders VALUES (42, 10)")
orders.install(connection, mode="require")
leases = fenced.Client("sqlite:///leases.db")
with leases.hold("orders/42") as lease, atomic(orders, lease), connection.cursor() as cursor:
    cursor.execute("UPDATE orders SET qty = 7 WHERE id = 42")
