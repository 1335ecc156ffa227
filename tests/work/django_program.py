"""A program that claims rows of a Django model on MariaDB, run in a process of its own.

python -m tests.work.django_program HOST PORT DATABASE
"""

from __future__ import annotations

import sys
from typing import Any

import django
import pytest
from django.conf import settings
from django.db import InternalError, connection, models
from django.db.migrations import CreateModel, Migration
from django.db.migrations.state import ProjectState
from django.db.models import F

import fenced
import fenced.django
from fenced.work import Claims


def main(host: str, port: str, database: str) -> None:
    engine = {"ENGINE": "django.db.backends.mysql", "USER": "root", "CONN_MAX_AGE": None}
    settings.configure(DATABASES={"default": {**engine, "HOST": host, "PORT": port, "NAME": database}})
    django.setup()

    class Order(models.Model):  # type: ignore[misc]
        qty: Any = models.IntegerField()

        class Meta:
            app_label = "shop"

    options: dict[str, Any] = {"name": "orders/{id}", "ready": "qty = 10", "back": {"qty": 10}}
    made = Migration("0001_initial", "shop")
    made.operations = [
        CreateModel("Order", [(field.name, field.clone()) for field in Order._meta.fields]),
        fenced.django.InstallClaims(mode="require", table="shop_order", **options),
    ]
    with connection.schema_editor() as editor:
        made.apply(ProjectState(), editor)
    Order.objects.create(id=42, qty=10)
    Order.objects.create(id=43, qty=10)
    orders = Claims(model=Order, **options)
    with fenced.Client(f"mysql://root@{host}:{port}/{database}") as client, orders.worker(client) as worker:
        with worker.claim() as run, run.transaction():  # type: ignore[union-attr]
            assert run is not None and run.id == 42
            Order.objects.filter(id=42).update(qty=F("qty") + 1)  # announced
            run.finish(None, qty=12)
        assert Order.objects.get(id=42).qty == 12
        with pytest.raises(InternalError, match="carries no stamp"):
            Order.objects.filter(id=42).update(qty=1)
        with worker.claim() as other:
            assert other is not None and other.id == 43
            with pytest.raises(fenced.Uncovered, match="orders/42"), other.transaction():
                Order.objects.filter(id=42).update(qty=1)
        assert other.outcome == "retried"
        assert orders.status().later == 1  # after the back-off
    print("as expected")


if __name__ == "__main__":
    main(*sys.argv[1:])
