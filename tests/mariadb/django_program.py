"""A program that uses Django on MariaDB, run in a process of its own: a process has one configuration of Django.

python -m tests.mariadb.django_program HOST PORT DATABASE
"""

from __future__ import annotations

import sys
from typing import Any

import django
import pytest
from django.conf import settings
from django.db import IntegrityError, InternalError, connection, models, transaction
from django.db.models import F

import fenced
import fenced.django
from fenced.sql import Guard, refusal
from fenced.testing.kit import stamp


def main(host: str, port: str, database: str) -> None:
    engine = {"ENGINE": "django.db.backends.mysql", "USER": "root", "CONN_MAX_AGE": None}
    settings.configure(DATABASES={"default": {**engine, "HOST": host, "PORT": port, "NAME": database}})
    django.setup()

    class Order(models.Model):  # type: ignore[misc]
        qty: Any = models.IntegerField()

        class Meta:
            app_label = "shop"

    with connection.schema_editor() as editor:
        editor.create_model(Order)
    Order.objects.create(id=42, qty=0)
    Order.objects.create(id=43, qty=0)
    guard = Guard(table="shop_order", name="orders/{id}")
    guard.install(connection, mode="require")
    orders = Order.objects.filter(id=42)
    for seq in (1, 2):
        with fenced.django.atomic(guard, stamp(5, seq)):
            orders.update(qty=F("qty") + 1)
    with pytest.raises(InternalError, match="carries no stamp") as error:
        orders.update(qty=9)
    assert isinstance(refusal(error.value), fenced.MissingStamp)
    with pytest.raises(fenced.StaleToken, match="4 is stale: 5"), fenced.django.atomic(guard, stamp(4)):
        raise AssertionError
    with pytest.raises(fenced.Uncovered, match="orders/43"), fenced.django.atomic(guard, stamp(5, 3)):
        Order.objects.filter(id=43).update(qty=9)
    with pytest.raises(IntegrityError), fenced.django.atomic(guard, stamp(5, 4)):
        Order.objects.create(id=43, qty=9)
    with pytest.raises(ZeroDivisionError), fenced.django.atomic(guard, stamp(5, 5)):
        orders.update(qty=F("qty") + 1)
        raise ZeroDivisionError
    with pytest.raises(InternalError, match="carries no stamp"):
        orders.update(qty=9)
    with transaction.atomic(), guard.announce_within(connection, stamp(6)):
        orders.update(qty=F("qty") + 1)
    guard.set_mode(connection, "enforce")
    orders.update(qty=F("qty") + 1)
    assert list(Order.objects.order_by("id").values_list("qty", flat=True)) == [4, 0]
    print("as expected")


if __name__ == "__main__":
    main(*sys.argv[1:])
