"""Operations of a batch on the rows of a store."""

from __future__ import annotations

from collections.abc import Sequence

from fenced.errors import FencedError, Misuse
from fenced.leases.rows import AttemptRow, LeaseAlgorithm
from fenced.values.model import Ask, BatchAnswer, BatchOperation, Release, Renewal, Withdrawal, grant_id


def carry_out(
    algorithm: LeaseAlgorithm, operations: Sequence[BatchOperation], wake: str = ""
) -> tuple[list[BatchAnswer], list[AttemptRow]]:
    """Their answers, and the waiters to notify after the commit.

    An operation's error is its answer, and undoes nothing of the others: the algorithm refuses an operation before it
    changes anything for it.
    """
    answers: list[BatchAnswer] = []
    heads: list[AttemptRow] = []
    answer: BatchAnswer
    # The caller has the store's lock, or a transaction, for all of them: nobody sees a state between two operations.
    for operation in operations:
        try:
            if isinstance(operation, Ask):
                answer = algorithm.ask(operation, wake)
            elif isinstance(operation, Release):
                answer, ready = algorithm.release(operation.secret, operation.keep)
                heads += ready
            elif isinstance(operation, Renewal):
                (answer,) = algorithm.renew([grant_id(operation.secret)])
            elif isinstance(operation, Withdrawal):
                answer, ready = algorithm.withdraw(operation.secret)
                heads += ready
            else:
                raise Misuse(f"not an operation of a batch: {type(operation).__name__}")
        except FencedError as error:
            answer = error
        answers.append(answer)
    return answers, heads
