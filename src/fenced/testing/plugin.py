"""The pytest fixture `overtaken`: `pytest_plugins = ["fenced.testing.plugin"]` in conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fenced.testing.late import LateHolder, overtake


@pytest.fixture
def overtaken() -> Callable[..., LateHolder]:
    """Stop the worker under test past its ttl: `overtaken([...], authority=..., guard=..., table=..., name=...)`."""
    return overtake
