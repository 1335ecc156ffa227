"""Celery tasks that run once for each task id, however often the broker delivers them.

    @app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
    @once_per_task(leases, covers="orders/{order}")  # leases(): the Client of this worker process
    def charge(self, turn, order):
        with orders.transaction(db, turn) as tx:  # a guard refuses a delivery that was overtaken
            ...

A lease alone is not enough: the second delivery of a task would run it again, after the first one has ended.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fenced.client import registry

try:
    from celery import Task
    from celery.exceptions import Ignore
except ImportError as error:
    raise registry.needs_package(__name__, error) from error

from fenced.client.decorating import HeldFunction, templated
from fenced.client.faces import Client
from fenced.errors import (
    Contended,
    FencedError,
    Indeterminate,
    LeaseLost,
    Misuse,
    NotGranted,
    Overtaken,
    Refused,
    Unavailable,
)
from fenced.values import timing
from fenced.values.timing import Seconds

__all__ = ["once_per_task"]


def __dir__() -> list[str]:
    return __all__


DAY = 86_400.0
log = logging.getLogger("fenced")


def once_per_task(
    client: Callable[[], Client],
    *,
    covers: str | None = None,
    ttl: Seconds = timing.TTL_DEFAULT,
    wait: Seconds | None = None,
    keep: Seconds = DAY,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator below `@app.task(bind=True)`: the function gets the lease of its turn after `self`.

    `client`: a function that returns the client of this process, made after the worker has forked. `covers`: a further
    name of the lease, filled from the arguments of the call. `wait`: how long a delivery waits while another one runs
    the task, by default 4/3 of the ttl; then it comes back after the ttl, and that is no retry. `keep`: for
    how long a repeated delivery is recognised; longer than the broker's visibility timeout and the retries of the task.
    """
    ttl = timing.check_ttl(ttl)
    waits = ttl * 4 / 3 if wait is None else wait

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        held = HeldFunction(function, *templated(covers or "nothing"), is_method=True)

        @functools.wraps(function)
        def call(self: Task, /, *args: Any, **kwargs: Any) -> Any:
            names = held.request((self, *args), kwargs).names if covers else ()
            try:
                with ExitStack() as stack:
                    try:
                        once = client().once(
                            f"celery/{_id(self)}", 1, keep=keep, ttl=ttl, wait=waits, covers=names
                        )
                        turn = stack.enter_context(once)
                    except (NotGranted, Unavailable, Indeterminate, Contended) as busy:
                        raise _later(self, ttl, busy) from busy
                    if turn is None:
                        raise Ignore  # done before: this delivery is acknowledged, and its result stays as it was
                    return function(*held.arguments(turn, (self, *args)), **kwargs)
            except (Refused, LeaseLost) as refused:
                raise _refused(self, refused) from refused

        call.__signature__ = held.signature  # type: ignore[attr-defined]  # Celery checks the arguments of delay() by it
        return call

    return decorate


def _id(task: Task) -> str:
    if not isinstance(task, Task) or task.request.id is None:
        raise Misuse(
            "a task that runs once for each task id needs bind=True, and an id: call it by delay(), "
            "apply_async() or apply()"
        )
    return str(task.request.id)


def _later(task: Task, seconds: float, busy: FencedError) -> Ignore:
    """This delivery ends, and comes back: nothing has run here, and nobody knows whether the other one will end well.

    Not by `retry()`, which would count against the retries that the task has for failures of its own.
    """
    log.info("task %s comes back after %g s: %s", task.request.id, seconds, busy)
    retries = task.request.retries
    task.signature_from_request(task.request, countdown=seconds, retries=retries).apply_async()
    return Ignore(str(busy))


def _refused(task: Task, error: Refused | LeaseLost) -> Ignore:
    """What ends a delivery whose write was refused. Never a retry: Ignore passes even `autoretry_for`."""
    if isinstance(error, Overtaken):
        log.warning("a delivery of task %s was overtaken, another one runs it: %s", task.request.id, error)
    else:
        log.error("task %s was refused: %s", task.request.id, error, exc_info=error)
        stored = not task.ignore_result
        task.backend.mark_as_failure(task.request.id, error, request=task.request, store_result=stored)
    return Ignore(str(error))
