"""Claims on rows of the program's own tables: a worker takes a row, and the database refuses a worker that was late.

    runs = fenced.work.Claims(table="runs", name="runs/{id}", ready="status = 'pending'", back={"status": "pending"})
    runs.install(db, mode="require")
    with runs.worker(client) as worker, worker.claim(db) as run:
        if run:
            run.finish(db, status="done", output=compute(run["input"]))

The row is the mark, and the worker's one lease shows that it is alive. If a worker stalls, another one is given its
rows; what the first one still writes is refused. `AsyncClaims` is the same for asyncio.
"""

from __future__ import annotations

from fenced.guards.claims import ClaimView, WorkStatus
from fenced.work.aio import (
    AsyncClaimContext,
    AsyncClaimedRow,
    AsyncClaims,
    AsyncClaimTransaction,
    AsyncClaimWorker,
)
from fenced.work.blocking import ClaimContext, ClaimedRow, Claims, ClaimTransaction, ClaimWorker

__all__ = [
    "AsyncClaimContext",
    "AsyncClaimTransaction",
    "AsyncClaimWorker",
    "AsyncClaimedRow",
    "AsyncClaims",
    "ClaimContext",
    "ClaimTransaction",
    "ClaimView",
    "ClaimWorker",
    "ClaimedRow",
    "Claims",
    "WorkStatus",
]


def __dir__() -> list[str]:
    return __all__
