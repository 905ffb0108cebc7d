"""mqa_paged with e4m3 queries: every backend against float64, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from openmla import hardware
from openmla.backends import Problem, why_not
from openmla.errors import ShapeError, UnsupportedError
from openmla.ops import mqa_paged
from openmla.testing import PagedCase
from tests.ops.contract import backends, broken, check_e4m3, slow_interpreted
from tests.ops.declared import check_declaration
from tests.ops.mqa_paged_cases import E4M3, E4M3_CASES, EACH

SLOW = [str(case) for case in E4M3_CASES if case.C == 512][1:]
BASE = PagedCase("base", (1, 2), (33, 70), **E4M3, **EACH)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mqa_paged"))
@pytest.mark.parametrize("case", slow_interpreted(E4M3_CASES, SLOW), ids=str)
def test_contract(case: PagedCase, backend: str, device: str) -> None:
    check_e4m3(mqa_paged, case.make(device), backend)


def test_reference_equals_loops() -> None:
    """Python floats, one key at a time, every scale where it belongs."""
    inputs = PagedCase("loops", (1, 2), (5, 3), H=2, **E4M3, **EACH).make()
    out, lse = inputs.run(mqa_paged, backend="reference")
    scale, C = inputs.scalars["scale"], inputs.scalars["C"]
    queries = inputs["q_latent"].double() * inputs["q_scale"].double()[..., None]
    keys = inputs["cache"].double() * inputs["kv_scale"].double()
    for t, (b, seen) in enumerate([(0, 5), (1, 2), (1, 3)]):
        rows = [keys[int(inputs["block_table"][b, j // 16]), j % 16] for j in range(seen)]
        for h in range(2):
            logits = [scale * float(torch.dot(queries[t, h], row)) for row in rows]
            expected = math.log(sum(map(math.exp, logits)))
            assert math.isclose(lse[t, h], expected, rel_tol=1e-5, abs_tol=1e-5)
            row = sum(math.exp(s - expected) * row[:C] for s, row in zip(logits, rows, strict=True))
            torch.testing.assert_close(out[t, h].double(), row, rtol=5e-3, atol=5e-3)


def test_scales_are_used(device: str) -> None:
    """Twice the scale and half the softmax scale: the same answer."""
    inputs = BASE.make(device)
    wanted = inputs.run(mqa_paged, backend="auto")
    other = broken(inputs, q_scale=lambda scale: 2 * scale, scale=inputs.scalars["scale"] / 2)
    for found, expected in zip(other.run(mqa_paged, backend="auto"), wanted, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_scale": lambda _: None}, "q_scale must be given with queries of torch.float8_e4m3fn"),
        ({"q_scale": lambda _: 0.5}, "q_scale must be a tensor, got float."),
        ({"q_scale": lambda s: s.double()}, "q_scale must be float32 on cpu, got torch.float64"),
        ({"q_scale": lambda s: s[:2]}, r"q_scale must be \[\] or \[T, H\] with T=3, H=4, got \(2"),
        ({"q_latent": lambda q: q.bfloat16()}, "q_scale must be None for queries of torch.bf"),
    ],
)  # fmt: skip
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=f"mqa_paged: {message}"):
        broken(BASE.make(), **changes).run(mqa_paged, backend="auto")


def test_rows_of_16_bits() -> None:
    case = PagedCase("bf16", (1,), (9,), dtype=torch.float8_e4m3fn, **EACH)
    with pytest.raises(ShapeError, match="queries over a bf16 cache must be 16 bits or wider"):
        case.make().run(mqa_paged, backend="auto")


def test_chips_without_fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, whoever is asked; the portable kernel says the same."""
    asked = Problem("mqa_paged", "cuda", (8, 0), dtype=torch.float8_e4m3fn, format="fp8", H=16,
                    D=576, C=512, BS=64, tokens=1, max_query_len=1)  # fmt: skip
    if why_not(asked, "triton") is not None:  # Triton is installed
        assert "SM89" in str(why_not(asked, "triton"))
    monkeypatch.setattr("openmla.ops._queries.capability", lambda _: (8, 0))
    monkeypatch.setattr(hardware, "capability", lambda _: (8, 0))
    from openmla.ops._queries import check_chip

    with pytest.raises(UnsupportedError, match="SM89 or newer, which multiply fp8, got SM80"):
        check_chip("mqa_paged", torch.device("cuda"))


def test_declaration(device: str) -> None:
    check_declaration(mqa_paged, BASE.make(device), "")
