"""Two ranks for all cases that need them: starting them takes longer than the cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.processes import Processes


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Processes]:
    ranks = Processes(2)
    yield ranks
    ranks.close()
