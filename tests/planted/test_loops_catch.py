"""The loop kit can fail: an AsyncClient that renews in its loop, calls back elsewhere or outlives its end is caught."""

from __future__ import annotations

import asyncio

import pytest

import fenced
from fenced.testing import LOOP_CHECKS, Address, Check, CheckFailed
from tests.planted.bugs import LOOP_BUGS


def is_caught(check: Check[Address], bug: type[fenced.AsyncClient]) -> bool:
    address = Address(f"memory:{bug.__name__}", 0.6, check.name, bug)
    try:
        asyncio.run(check.body(address))
    except (CheckFailed, fenced.LeaseLost, fenced.NotGranted):
        return True
    return False


@pytest.mark.parametrize("bug", LOOP_BUGS, ids=lambda bug: bug.__name__)
def test_loop_bug_is_caught(bug: type[fenced.AsyncClient]) -> None:
    assert any(is_caught(check, bug) for check in LOOP_CHECKS)
