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
        match operation:
            case Ask():
                return ask(operation), []
            case Renewal(secret):
                return algorithm.renew([grant_id(secret)])[0], []
            case Withdrawal(secret):
                return algorithm.withdraw(secret)
            case Release(secret, keep):
                return algorithm.release(secret, keep)
    except FencedError as error:
        return error, []
    raise Misuse(f"not an operation of a batch: {type(operation).__name__}")
