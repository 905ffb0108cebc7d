"""More ranks than the two that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.processes import Processes


@pytest.fixture(scope="module", params=[3, 4, 8])
def many_ranks(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """For tests marked slow: `make test-parallel` runs them."""
    ranks = Processes(request.param)
    yield ranks
    ranks.close()
