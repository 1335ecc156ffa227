# walk: './fenced[celery]'
"""A task that is delivered twice, in this process."""

from celery import Celery, Task

import fenced
from fenced.celery import once_per_task

leases = fenced.Client("sqlite:///leases.db")
app = Celery(broker="memory://")
ran: list[tuple[int, int]] = []


@app.task(bind=True)
@once_per_task(lambda: leases, covers="orders/{order}")
def charge(self: Task, turn: fenced.Lease, order: int) -> None:
    ran.append((order, turn.token))


for _ in range(2):
    charge.apply([42], task_id="one")
assert ran == [(42, 1)], ran
leases.close()
