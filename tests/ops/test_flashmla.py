"""The flashmla adapter's border, against a stand-in that keeps that package's conventions."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends import Problem, choose_backend, why_not
from openmla.backends.flashmla import mqa_sparse as adapter
from openmla.backends.reference import mqa_sparse as reference
from openmla.cache.format import FORMATS
from openmla.errors import ShapeError, UnsupportedError
from openmla.ops import Segment
from openmla.testing import poison

ONE = torch.tensor(1.0)
FITS = Problem(
    op="mqa_sparse",
    device="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    format="fp8_ds_mla",
    H=64,
    D=576,
    C=512,
    kinds=("slots",),
)


def stand_in(
    q: Tensor,
    k_cache: Tensor,
    block_table: None,
    cache_seqlens: None,
    head_dim_v: int,
    metadata: object,
    *,
    softmax_scale: float,
    causal: bool,
    is_fp8_kvcache: bool,
    indices: Tensor,
    attn_sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """flash_mla_with_kvcache by its documentation, for tokens that are sequences of one."""
    assert metadata == "metadata" and not causal and is_fp8_kvcache
    assert indices.dtype == torch.int32 and indices.shape[2] % 64 == 0 and indices.shape[1] == 1
    assert k_cache.shape[2:] == (1, 656) and q.is_contiguous() and indices.is_contiguous()
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    assert ((indices >= -1) & (indices < num_slots)).all()  # there: an unchecked read
    B, S, H, _ = q.shape
    out = torch.zeros(B, S, H, head_dim_v, dtype=q.dtype)
    lse = torch.full((B, H, S), torch.inf)
    for b in range(B):
        slots = indices[b, 0][indices[b, 0] >= 0].long()
        if slots.numel() == 0:
            continue
        rows = FORMATS["fp8_ds_mla"].read(k_cache[:, :, 0], slots, ONE, torch.float32, 576)
        logits = softmax_scale * (q[b, 0].float() @ rows.T)
        lse[b, :, 0] = logits.logsumexp(-1)
        share = 1.0 if attn_sink is None else 1 / (1 + (attn_sink - lse[b, :, 0]).exp())[:, None]
        out[b, 0] = (logits.softmax(-1) @ rows[:, :head_dim_v] * share).to(q.dtype)
    return out, lse


@pytest.fixture(autouse=True)
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("flash_mla")
    package.flash_mla_with_kvcache = stand_in
    package.get_mla_metadata = lambda *_: ("metadata", None)
    monkeypatch.setitem(sys.modules, "flash_mla", package)


@pytest.mark.parametrize("with_sink", [False, True])
def test_conversions(with_sink: bool) -> None:
    """Padding to 64 entries, -1 for all that does not count, lse turned and its sign for empty."""
    torch.manual_seed(0)
    N, BS, T, H, K = 6, 16, 5, 64, 70
    pages = poison((N, BS, 656), torch.uint8)
    rows = torch.randn(40, 576)
    slots = torch.randperm(N * BS)[:40]
    FORMATS["fp8_ds_mla"].write(pages, slots, rows, ONE)
    listed = slots[torch.randint(40, (T, K))].int()
    listed[0, ::3] = -1
    listed[1, 5] = N * BS + 3
    listed[1, 6] = -7
    lens = torch.tensor([K, 30, 0, 1, K], dtype=torch.int32)
    segment = Segment(pages, ONE, "fp8_ds_mla", "slots", rows=listed, row_lens=lens)
    bounds = torch.tensor([0, 3, 4], dtype=torch.int32)  # the last token is padding
    q = torch.randn(T, H, 576).bfloat16()
    sink = torch.linspace(-3, 3, H) if with_sink else None
    positions = torch.zeros(T, dtype=torch.int64)
    call = (q, bounds, positions, (segment,), sink)
    out, lse = adapter.run(*call, C=512, scale=0.05, run_length=0)
    wanted_out, wanted_lse = reference.run(*call, C=512, scale=0.05, run_length=0)
    assert out.shape == (T, H, 512) and lse.shape == (T, H)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, wanted_out, rtol=2e-2, atol=2e-2)
    assert (lse[[2, 4]] == -torch.inf).all() and not out[[2, 4]].any()


def test_odd_pages_are_told() -> None:
    """The kernel loads 16 bytes at a time; elsewhere it would read wrongly or stop."""
    pages = torch.zeros(2, 656 + 5, dtype=torch.uint8)[:, :656].unflatten(1, (1, 656))
    rows = torch.zeros(1, 4, dtype=torch.int32)
    lens = torch.ones(1, dtype=torch.int32)
    segment = Segment(pages, ONE, "fp8_ds_mla", "slots", rows=rows, row_lens=lens)
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    call = (torch.zeros(1, 64, 576).bfloat16(), bounds, torch.zeros(1), (segment,), None)
    with pytest.raises(ShapeError, match="pages must lie at multiples of 16 bytes for flashmla"):
        adapter.run(*call, C=512, scale=1.0, run_length=0)


def test_no_tokens() -> None:
    segment = Segment(
        torch.zeros(1, 1, 656, dtype=torch.uint8),
        ONE,
        "fp8_ds_mla",
        "slots",
        rows=torch.zeros(0, 4, dtype=torch.int32),
        row_lens=torch.zeros(0, dtype=torch.int32),
    )
    call = (torch.zeros(0, 64, 576).bfloat16(), torch.zeros(1, dtype=torch.int32), torch.zeros(0))
    out, lse = adapter.run(*call, (segment,), None, C=512, scale=1.0, run_length=0)
    assert out.shape == (0, 64, 512) and lse.shape == (0, 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"capability": (10, 0)}, None),
        ({"device": "cpu", "capability": None}, "needs SM90 or SM100, this is cpu"),
        ({"capability": (8, 9)}, "needs SM90 or SM100, this is SM89"),
        ({"capability": (12, 0)}, "needs SM90 or SM100, this is SM120"),
        ({"format": "bf16"}, "reads fp8_ds_mla, whose scales it does not round, not bf16"),
        ({"D": 160, "C": 128}, "needs rows of 512 + 64, this is 128 + 32"),
        ({"H": 16}, "needs 64 or 128 heads, this is 16"),
        ({"dtype": torch.float16}, "takes bf16 queries, this is torch.float16"),
        ({"kinds": ("window", "slots")}, "takes one segment of slots, this is window and slots"),
    ],
)
def test_reasons(changes: dict[str, Any], reason: str | None) -> None:
    from dataclasses import replace

    assert adapter.why_not(replace(FITS, **changes)) == reason


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by name, before anything is imported; asking for it by name tells why not."""
    monkeypatch.setattr("openmla.backends.requirements.find_spec", lambda name: None)
    assert why_not(FITS, "flashmla") == "package flash_mla is not installed"
    choose_backend.cache_clear()
    assert choose_backend(FITS) == "reference"
    with pytest.raises(UnsupportedError) as error:
        choose_backend(FITS, "flashmla")
    assert str(error.value).splitlines() == [
        "mqa_sparse: backend 'flashmla' cannot run this problem:",
        "  flashmla   package flash_mla is not installed",
        "  gluon      package triton is not installed",
        "  triton     package triton is not installed",
        "  reference  can",
    ]
    choose_backend.cache_clear()
