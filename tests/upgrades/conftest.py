"""The code of fenced 0.1, and the programs of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upgrades.crew import Crew, unpack_old


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first program compiles it, so all tests that use it are in one group."""
    return unpack_old(tmp_path_factory.mktemp("old"))


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.close()
