"""A stand-in for the package flash_mla, by its documentation: what it is given is checked, computed
plainly, and returned as that package returns it. Its schedules know what they were made for."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.cache.format import FORMATS

ONE = torch.tensor(1.0)


@dataclass
class Schedule:
    """Filled by the first call; good for calls of the same shapes."""

    made_for: list[Any] = field(default_factory=list)

    def fill(self, *facts: Any) -> None:
        if not self.made_for:
            self.made_for = list(facts)
            COUNTS["schedules"] += 1
        for made, now in zip(self.made_for, facts, strict=True):
            assert made == now, f"a schedule made for {made} was used for {now}"


COUNTS = {"schedules": 0}


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: None,
    cache_seqlens: None,
    head_dim_v: int,
    tile_scheduler_metadata: Schedule,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    assert use_legacy, "SM90 is on the legacy side"
    assert isinstance(tile_scheduler_metadata, Schedule) and softmax_scale is not None
    assert q.dim() == 4 and q.stride(-1) == 1 and head_dim_v == 512 and q.shape[0] > 0
    assert k_cache.shape[2] == 1
    assert not causal and is_fp8_kvcache and block_table is None and cache_seqlens is None
    assert indices is not None
    parts = [(k_cache, indices)]
    if extra_k_cache is not None:
        assert extra_indices_in_kvcache is not None and q.shape[3] == 512
        parts.append((extra_k_cache, extra_indices_in_kvcache))
    tile_scheduler_metadata.fill(q.shape, *((k.shape[1], i.shape) for k, i in parts))
    return listed(q, parts, softmax_scale, attn_sink)


def listed(
    q: Tensor, parts: list[tuple[Tensor, Tensor]], scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, queries, H, D = q.shape
    format, width = ("fp8_ds_mla", 656) if D == 576 else ("fp8_dsv4", 584)
    assert queries == 1 and H in (64, 128) and q.dtype == torch.bfloat16
    for pages, indices in parts:
        assert pages.dtype == torch.uint8 and pages.shape[2:] == (1, width)
        assert pages.stride(1) == width and pages.stride(0) % 16 == 0
        check_indices(indices, B, 64)
        # there: an unchecked read
        assert ((indices >= -1) & (indices < pages.shape[0] * pages.shape[1])).all()
    assert sink is None or (sink.shape == (H,) and sink.dtype == torch.float32)
    out, lse = q.new_zeros(B, 1, H, 512), torch.full((B, H, 1), torch.inf)
    for b in range(B):
        rows = torch.cat(
            [
                FORMATS[format].read(
                    pages[:, :, 0], named[b, 0][named[b, 0] >= 0].long(), ONE, torch.float32, D
                )
                for pages, named in parts
            ]
        )
        if len(rows):
            out[b, 0], lse[b, :, 0] = attend(q[b, 0], rows, scale, sink)
    return out, lse


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    assert use_legacy and d_v == 512 and topk_length is None
    T, H, D = q.shape
    assert D == 576 and H in (64, 128) and q.dtype == kv.dtype == torch.bfloat16
    assert kv.shape[1:] == (1, D) and kv.stride(-1) == 1 and q.stride(-1) == 1
    check_indices(indices, T, 128)
    out, lse = q.new_zeros(T, H, 512), torch.full((T, H), torch.inf)
    for t in range(T):
        named = indices[t, 0]
        rows = kv[named[(named >= 0) & (named < len(kv))].long(), 0].float()
        if len(rows):
            out[t], lse[t] = attend(q[t], rows, sm_scale, attn_sink)
    return out, torch.full_like(lse, torch.nan), lse


def check_indices(indices: Tensor, T: int, multiple: int) -> None:
    assert indices.dtype == torch.int32 and indices.is_contiguous()
    assert indices.shape[:2] == (T, 1) and indices.shape[2] > 0
    assert indices.shape[2] % multiple == 0


def attend(q: Tensor, rows: Tensor, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = scale * (q.float() @ rows.T)
    lse = logits.logsumexp(-1)
    share = 1.0 if sink is None else torch.sigmoid(lse - sink)[:, None]
    out = (logits.softmax(-1) @ rows[:, :512] * share).to(q.dtype)
    return out, lse.masked_fill(lse.isnan(), torch.inf)  # as where there is no row


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were there, and the CPU an SM90."""
    package: Any = ModuleType("flash_mla")
    package.__spec__ = ModuleSpec("flash_mla", None)
    package.flash_mla_with_kvcache = flash_mla_with_kvcache
    package.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    package.get_mla_metadata = lambda: (Schedule(), None)
    package.has_legacy = lambda: True
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    monkeypatch.setattr("openmla.backends.capability", lambda device: (9, 0))
    monkeypatch.setattr("openmla.backends.flashmla._package._KEPT", {})
    monkeypatch.setitem(COUNTS, "schedules", 0)
