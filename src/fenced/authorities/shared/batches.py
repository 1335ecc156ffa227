"""One operation of a batch on the rows of a store."""

from __future__ import annotations

from collections.abc import Callable

from fenced.authorities.shared.rows import AttemptRow, LeaseAlgorithm
from fenced.errors import FencedError, Misuse
from fenced.model import (
    Ask,
    AskAnswer,
    BatchAnswer,
    BatchOperation,
    Release,
    Renewal,
    Withdrawal,
    grant_id,
)


def carry_out(
    algorithm: LeaseAlgorithm, operation: BatchOperation, ask: Callable[[Ask], AskAnswer]
) -> tuple[BatchAnswer, list[AttemptRow]]:
    """Its answer, and the waiters to notify after the commit. Its error is its answer, and undoes nothing of others.

    The algorithm refuses an operation before it changes anything for it.
    """
    try:
        if isinstance(operation, Ask):
            return ask(operation), []
        if isinstance(operation, Release):
            return algorithm.release(operation.secret, operation.keep)
        if isinstance(operation, Renewal):
            return algorithm.renew([grant_id(operation.secret)])[0], []
        if isinstance(operation, Withdrawal):
            return algorithm.withdraw(operation.secret)
    except FencedError as error:
        return error, []
    raise Misuse(f"not an operation of a batch: {type(operation).__name__}")
