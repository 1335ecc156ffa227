"""A management command, started on two machines at once: it runs on one, and the other says who has it.

DATABASE_URL=postgresql://... python examples/django_command.py
"""

import os
import subprocess
import sys
import tempfile
from typing import Any

import django
from django.conf import settings
from django.core.management import CommandParser
from django.db import connection
from psycopg.conninfo import conninfo_to_dict

import fenced

place = conninfo_to_dict(os.environ["DATABASE_URL"])
names = {"NAME": "dbname", "USER": "user", "HOST": "host", "PORT": "port"}
database = {key: place.get(libpq, "") for key, libpq in names.items()}
LEASES = {"URL": os.environ.get("LEASES", ""), "LABEL": os.environ.get("MACHINE", "")}
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}},
    FENCED={"default": LEASES},
)
django.setup()

import fenced.django  # noqa: E402 - settings first

invoices = fenced.sql.Guard(table="invoices", name="billing")  # one name for the whole table


class Command(fenced.django.HeldCommand):
    lease = "billing"
    guards = (invoices,)  # announced before the command begins, so what it reads is fenced
    at_least_for = 60

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--amount", type=int, default=100)

    def handle_held(self, lease: fenced.Lease, *args: Any, **options: Any) -> None:
        with fenced.django.atomic(invoices, lease), connection.cursor() as cursor:
            cursor.execute("INSERT INTO invoices VALUES (%s, %s)", [lease.token, options["amount"]])
        self.stdout.write(f"billed under token {lease.token}")


def main() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE invoices (token bigint PRIMARY KEY, amount int)")
    invoices.install(connection, mode="require")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        words = [sys.executable, __file__, "bill"]
        machines = [
            subprocess.Popen(
                words,
                env={**os.environ, "LEASES": f"sqlite:///{folder}/leases.db", "MACHINE": f"machine {number}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        ended = [(machine.communicate(), machine.returncode) for machine in machines]
    for (out, _), status in sorted(ended, key=lambda each: each[1]):
        print(f"status {status}: {out.strip() or 'the other machine has it'}")
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM invoices")
        print("invoices:", cursor.fetchone()[0])


if __name__ == "__main__":
    if sys.argv[1:] == ["bill"]:
        command = Command()
        command.run_from_argv(["manage.py", "bill"])
    else:
        main()
