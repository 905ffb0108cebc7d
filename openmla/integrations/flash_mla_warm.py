"""warm(): compile the drop-ins' kernels before an engine's first request."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from openmla.cache.format import get_format
from openmla.errors import ConfigError
from openmla.integrations import deep_gemm, flash_mla
from openmla.ops._queries import E4M3

PREFILL_TOKENS = 256  # from here on prefill runs the kernels for many tokens


def warm(
    num_heads: int,
    *,
    head_dim: int = 576,
    head_dim_v: int = 512,
    kv_format: str = "bf16",
    page_size: int = 64,
    max_requests: int = 1,
    max_query_len: int = 1,
    max_keys: int = 16384,
    topk: int = 0,
    index_heads: int = 0,
    index_head_dim: int = 128,
    device: torch.device | str = "cuda",
) -> None:
    """Compile the kernels that calls of these sizes run.

    By default that is dense decoding over rows of `kv_format`, one of openmla.FORMATS; with `topk`
    it is decoding and prefill over lists instead. With `index_heads` also DeepGEMM's logits, over
    packed and over paged keys: an engine whose model selects keys calls both drop-ins.
    """
    sizes = {
        "num_heads": num_heads, "head_dim": head_dim, "head_dim_v": head_dim_v,
        "page_size": page_size, "max_requests": max_requests, "max_query_len": max_query_len,
        "max_keys": max_keys,
    }  # fmt: skip
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"warm: {name} must be a positive integer, got {value!r}.")
    device = torch.device(device)
    with torch.inference_mode():
        for B, n in sorted({*product((1, max_requests), (1, max_query_len))}):
            if topk:
                _decode_lists(B, n, num_heads, head_dim, head_dim_v, kv_format, page_size, topk,
                              device)  # fmt: skip
            else:
                for keys in sorted({n, max(n, max_keys)}):
                    _decode(B, n, keys, num_heads, head_dim, head_dim_v, kv_format, page_size,
                            device)  # fmt: skip
            if index_heads:
                _paged_logits(B, n, index_heads, index_head_dim, page_size, device)
        for T in (1, PREFILL_TOKENS):
            if topk:
                rows = torch.zeros(PREFILL_TOKENS, 1, head_dim, dtype=torch.bfloat16, device=device)
                listed = torch.zeros(T, 1, topk, dtype=torch.int32, device=device)
                q = rows.new_zeros(T, num_heads, head_dim)
                flash_mla.flash_mla_sparse_fwd(q, rows, listed, 1.0, head_dim_v)
            if index_heads:
                _packed_logits(T, index_heads, index_head_dim, device)


def _pages(kv_format: str, D: int, page_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A block of zeros, and queries for it without tokens."""
    layout = get_format(kv_format, "latent")
    pages = torch.zeros(1, page_size, 1, layout.width(D), dtype=torch.uint8, device=device)
    if not layout.packed:
        pages = pages.to(layout.dtype)
    plain = not layout.packed and not layout.scaled
    dtype = layout.dtype if plain else torch.bfloat16
    return pages, torch.zeros(0, dtype=dtype, device=device)


def _decode(
    B: int, n: int, keys: int, H: int, D: int, C: int, kv_format: str, BS: int, device: torch.device
) -> None:
    pages, like = _pages(kv_format, D, BS, device)
    table = torch.zeros(B, -(-keys // BS), dtype=torch.int32, device=device)
    lens = torch.full((B,), keys, dtype=torch.int32, device=device)
    q = like.new_zeros(B, n, H, D)
    for queries in (q, q.to(E4M3)) if kv_format == "fp8" else (q,):
        flash_mla.flash_mla_with_kvcache(
            queries, pages, table, lens, C, flash_mla.get_mla_metadata()[0], causal=True
        )


def _decode_lists(
    B: int, n: int, H: int, D: int, C: int, kv_format: str, BS: int, K: int, device: torch.device
) -> None:
    pages, like = _pages(kv_format, D, BS, device)
    listed = torch.zeros(B, n, K, dtype=torch.int32, device=device)
    flash_mla.flash_mla_with_kvcache(
        like.new_zeros(B, n, H, D), pages, None, None, C, flash_mla.get_mla_metadata()[0],
        indices=listed,
    )  # fmt: skip


def _packed_logits(T: int, HI: int, DI: int, device: torch.device) -> None:
    q = torch.zeros(T, HI, DI, device=device).to(E4M3)
    keys = torch.zeros(PREFILL_TOKENS, DI, device=device).to(E4M3)
    scales, weights = torch.ones(PREFILL_TOKENS, device=device), torch.zeros(T, HI, device=device)
    starts = torch.zeros(T, dtype=torch.int32, device=device)
    deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, starts, starts + PREFILL_TOKENS)


def _paged_logits(B: int, n: int, HI: int, DI: int, BS: int, device: torch.device) -> None:
    q = torch.zeros(B, n, HI, DI, device=device).to(E4M3)
    pages = torch.zeros(1, BS, 1, DI + 4, dtype=torch.uint8, device=device)
    weights = torch.zeros(B * n, HI, device=device)
    table = torch.zeros(B, -(-n // BS), dtype=torch.int32, device=device)
    lens = torch.full((B,), n, dtype=torch.int32, device=device)
    deep_gemm.fp8_paged_mqa_logits(q, pages, weights, lens, table, None, n)
