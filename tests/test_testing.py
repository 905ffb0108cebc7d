"""The error budget itself: an honest low-precision kernel passes, five kinds of bug do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openmla.ops import mqa_paged
from openmla.testing import (
    PagedCase,
    assert_within_budget,
    budget_used,
    poison,
    poisoned_memory,
    strided,
)

Attended = tuple[Tensor, Tensor]
LENGTHS = (64, 1000, 4096)


def kernel(
    case: PagedCase, *, scale: float = 1.0, skip: int | None = None, splits: int = 4
) -> Attended:
    """A split-key attention as a GPU kernel does it: bf16 operands, float32 sums, a merge."""
    inputs = case.make()
    S = case.seq_lens[0]
    cache, table = inputs["cache"], inputs["block_table"][0]
    positions = torch.arange(S)
    rows = cache[table[positions // case.BS].long(), positions % case.BS]
    if skip is not None:
        rows = torch.cat([rows[:skip], rows[skip + 1 :]])
    q = inputs["q_latent"][0].float()
    outs, lses = [], []
    for part in rows.chunk(splits):
        logits = inputs.scalars["scale"] * scale * (q @ part.float().T)
        largest = logits.amax(-1, keepdim=True)
        weights = (logits - largest).exp()
        total = weights.sum(-1, keepdim=True)
        outs.append((weights.bfloat16().float() @ part[:, : case.C].float()) / total)
        lses.append((largest + total.log()).squeeze(-1))
    lse = torch.stack(lses).logsumexp(0)
    out = sum((o * (x - lse).exp()[:, None] for o, x in zip(outs, lses, strict=True)))
    assert isinstance(out, Tensor)
    return out.bfloat16()[None], lse[None]


def judged(case: PagedCase, actual: Attended) -> None:
    inputs = case.make()
    exact = inputs.double().run(mqa_paged, backend="reference")
    assert_within_budget(actual, exact, inputs.run(mqa_paged, backend="reference"))


def long_decode(S: int) -> PagedCase:
    return PagedCase("", (1,), (S,), H=16, C=512, R=64, BS=64)


@pytest.mark.parametrize("S", LENGTHS)
def test_an_honest_kernel_passes(S: int) -> None:
    judged(long_decode(S), kernel(long_decode(S)))


def _base_2(result: Attended) -> Attended:
    return result[0], result[1] / 0.6931471805599453


def _nan_row(result: Attended) -> Attended:
    result[0][0, 3, 7] = torch.nan
    return result


def _bf16_lse(result: Attended) -> Attended:
    return result[0], result[1].bfloat16().float()


BUGS: dict[str, Callable[[PagedCase], Attended]] = {
    "lost key": lambda case: kernel(case, skip=5),
    "scale off by 2 %": lambda case: kernel(case, scale=1.02),
    "scale off by 0.1 %": lambda case: kernel(case, scale=1.001),
    "lse in base 2": lambda case: _base_2(kernel(case)),
    "lse through bf16": lambda case: _bf16_lse(kernel(case)),
    "a NaN in the output": lambda case: _nan_row(kernel(case)),
}


@pytest.mark.parametrize("S", LENGTHS)
@pytest.mark.parametrize("bug", BUGS)
def test_bugs_do_not_pass(bug: str, S: int) -> None:
    case = long_decode(S)
    with pytest.raises(AssertionError):
        judged(case, BUGS[bug](case))


def test_empty_rows_have_no_tolerance() -> None:
    zero, nothing = torch.zeros(1, 1, 4), torch.full((1, 1), -torch.inf)
    assert budget_used((zero, nothing), (zero, nothing), (zero, nothing)) == (0, 0)
    for out, lse in (
        (zero + 1e-30, nothing),
        (zero, torch.full((1, 1), -1e30)),
        (zero, torch.full((1, 1), torch.inf)),
    ):
        with pytest.raises(AssertionError):
            assert_within_budget((out, lse), (zero, nothing), (zero, nothing))


def test_poison_is_nan_everywhere() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert poison((3,), dtype).float().isnan().all()
    with poisoned_memory():
        assert torch.empty(100).isnan().all()
    view = strided(torch.ones(3, 4, 5))
    assert torch.equal(view, torch.ones(3, 4, 5)) and not view.is_contiguous()
    assert view.stride(-1) == 1
