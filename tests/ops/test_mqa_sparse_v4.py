"""mqa_sparse over V4's rows: a window and entries, their pages, scales and NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openmla.cache.format import get_format
from openmla.ops import mqa_sparse
from openmla.testing import SparseCase, poisoned_memory
from tests.ops.contract import backends, check_attention, run_or_skip
from tests.ops.mqa_sparse_cases import FAR, NEAR, SINKS, V4

SLOW = pytest.mark.slow_interpreted


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("H", [5, pytest.param(80, marks=SLOW)])
def test_edge_rows_behind_a_window(H: int, backend: str, device: str) -> None:
    """V4's rows: odd lists, and tables with holes, take nothing from the window."""
    second = replace(FAR, K=70)
    inputs = SparseCase("edges", (7,), (600,), NEAR, second, sink=SINKS, H=H, **V4).make(device)
    rows, row_lens = inputs["rows_2"], inputs["row_lens_2"]
    past = inputs["block_table_2"].shape[1] * second.BS
    odd = torch.tensor([-1, past, -(2**31), 2**31 - 1, past + 1, -77, -2] * 10, device=device)
    rows[0] = odd.int()
    rows[1, 5:9] = rows[1, 4]
    rows[2, ::2] = odd[::2].int()
    row_lens[3] = 0
    row_lens[4] = second.K + 1000
    row_lens[5] = -3
    check_attention(mqa_sparse, inputs, backend)
    inputs["block_table"][0, 1] = -1
    inputs["block_table_2"][0, 1] = inputs["cache_2"].shape[0]
    check_attention(mqa_sparse, inputs, backend)


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("H", [16, pytest.param(200, marks=SLOW)])
def test_v4_pages_may_be_padded(H: int, backend: str, device: str) -> None:
    """To multiples of 576 bytes, as engines have them; nothing of the padding is read."""
    inputs = SparseCase("padded", (1, 2), (700, 3), NEAR, FAR, H=H, sink=SINKS, **V4).make(device)
    expected = run_or_skip(mqa_sparse, inputs, backend)
    padded = inputs.clone()
    for name in ("cache", "cache_2"):
        N, BS, W = inputs[name].shape
        page = get_format("fp8_dsv4").page_width(512, BS)
        assert page > BS * W
        pages = torch.full((N, page), 255, dtype=torch.uint8, device=device)
        padded.tensors[name] = pages[:, : BS * W].unflatten(1, (BS, W))
        padded.tensors[name].copy_(inputs[name])
    for one, other in zip(padded.run(mqa_sparse, backend=backend), expected, strict=True):
        assert torch.equal(one, other)


def v4_scales(cache: Tensor) -> Tensor:
    """The scale bytes of V4's pages, [N, BS, 7]."""
    N, BS, _ = cache.shape
    return cache.view(N, -1)[:, BS * 576 :].view(N, BS, 8)[..., :7]


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("shift", [40, -40])
@pytest.mark.parametrize("H", [5, pytest.param(80, marks=SLOW)])
def test_v4_scales_may_be_large_or_small(H: int, shift: int, backend: str, device: str) -> None:
    """Powers of two: with queries as much smaller the same weights, with outputs as much larger."""
    inputs = SparseCase("scales", (8,), (700,), NEAR, FAR, H=H, sink=SINKS, **V4).make(device)
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    for name in ("cache", "cache_2"):
        scales = v4_scales(inputs[name])
        scales[scales != 255] += shift % 256
    inputs["q_latent"][..., :448] *= 2.0**-shift
    actual, actual_lse = inputs.run(mqa_sparse, backend=backend)
    assert torch.equal(actual_lse, lse)
    assert torch.equal(actual[..., :448], out[..., :448] * 2.0**shift)
    assert torch.equal(actual[..., 448:], out[..., 448:])


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("H", [5, 200])
@pytest.mark.parametrize("what", ["scale", "rope"])
def test_nan_of_a_v4_row_is_seen(what: str, H: int, backend: str, device: str) -> None:
    """A row marked as NaN, or with NaN in what is stored as it is; other tokens do not see it."""
    inputs = SparseCase("nan", (1, 1), (700, 650), NEAR, FAR, H=H, **V4).make(device)
    entry = int(inputs["rows_2"][0, 70])
    block = int(inputs["block_table_2"][0, entry // 64])
    if what == "scale":
        v4_scales(inputs["cache_2"])[block, entry % 64] = 255
    else:
        N = inputs["cache_2"].shape[0]
        inputs["cache_2"].view(N, -1)[block, (entry % 64) * 576 + 450 :][:2] = 255
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    assert lse[0].isnan().all()
    assert out[0, :, :448].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("H", [2, pytest.param(600, marks=SLOW)])
def test_v4_offsets_beyond_int32(H: int, backend: str, device: str) -> None:
    """Rows past byte 2^31 of a cache. Memory is reserved, hardly any of it is touched."""
    case = SparseCase("far", (1,), (300,), NEAR, replace(FAR, K=50), H=H, **V4)
    near = case.make(device)
    cache, table = near["cache_2"], near["block_table_2"]
    with poisoned_memory(False):
        pool = torch.empty((60_000, *cache.shape[1:]), dtype=torch.uint8, device=device)
    assert pool.numel() > 2**31
    moved = len(pool) - len(cache)
    pool[moved:] = cache
    far = near.clone()
    far.tensors["cache_2"] = pool
    far.tensors["block_table_2"] = table.where((table < 0) | (table >= len(cache)), table + moved)
    far["block_table_2"][table >= len(cache)] = len(pool)
    expected = run_or_skip(mqa_sparse, near, backend)
    for one, other in zip(far.run(mqa_sparse, backend=backend), expected, strict=True):
        assert torch.equal(one, other)
