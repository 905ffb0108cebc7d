"""mqa_paged with e4m3 queries: every backend against float64, what is refused."""

from __future__ import annotations

import pytest
import torch

from openmla.errors import ShapeError
from openmla.ops import mqa_paged
from openmla.testing import PagedCase
from tests.ops.contract import backends, check_e4m3, slow_interpreted
from tests.ops.mqa_paged_cases import E4M3, E4M3_CASES, EACH

SLOW = [str(case) for case in E4M3_CASES if case.C == 512][1:]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mqa_paged"))
@pytest.mark.parametrize("case", slow_interpreted(E4M3_CASES, SLOW), ids=str)
def test_contract(case: PagedCase, backend: str, device: str) -> None:
    check_e4m3(mqa_paged, case.make(device), backend)
