"""The functions of FlashMLA's package flash_mla, on every device and backend that openmla supports.

Names, arguments, defaults, return values, layouts and conventions are those of its release before
Hopper, dense decoding and V3.2's and V4's caches were removed, and of sgl-flash-mla, which keeps
them: lse is natural and +inf where a query sees no key, an index of -1 is skipped. Schedules are
accepted but not needed. install() makes `import flash_mla` find this module.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from openmla.cache.format import FORMATS
from openmla.errors import OpenMLAError
from openmla.integrations import drop_in
from openmla.integrations import flash_mla_fused as fused_norm_rope_attn_rope_cast
from openmla.integrations.drop_in import DropInError, kept, refused, starts
from openmla.integrations.flash_mla_plan import PLAIN, Plan, plan_of
from openmla.integrations.flash_mla_schedule import (
    FlashMLASchedMeta,
    check_schedule,
    get_mla_decoding_metadata,
    get_mla_metadata,
)
from openmla.integrations.later import Later
from openmla.ops import Segment, mqa_paged, mqa_sparse
from openmla.ops._queries import E4M3, EIGHT_BITS, multiplies_fp8, out_dtype

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
    "install",
    "uninstall",
    "warm",
]

OFFERED = [each for each in __all__ if each.startswith(("flash_mla_", "get_", "has_"))]
SUBMODULES = ("flash_mla_interface", "fused_norm_rope_attn_rope_cast")
__version__ = "1.0.0+openmla"

# The names of the ops' arguments in this API.
NAMES = {
    "q_latent": "q",
    "cache": "k_cache",
    "seq_lens": "cache_seqlens",
    "rows": "indices",
    "row_lens": "topk_length",
    "sink": "attn_sink",
    "kv_scale": "descale_k",
    "scale": "softmax_scale",
    "C": "head_dim_v",
}
NAMES_OF_PROMPTS = {**NAMES, "cache": "kv", "scale": "sm_scale", "C": "d_v"}
LARGEST_CHUNK = 2**26  # gathered values held at once to compute max_logits


def install(*, force: bool = False) -> bool:
    """Make `import flash_mla` find this module. Returns whether it does.

    If the original is installed it is kept, unless `force`. Raises once a flash_mla has been
    imported, because its importers would keep it.
    """
    return drop_in.install(__name__, "flash_mla", *SUBMODULES, force=force)


def uninstall() -> None:
    """Undo install()."""
    drop_in.uninstall(__name__, "flash_mla", *SUBMODULES)


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"flash_mla: {name} is not part of openmla's drop-in, which has {', '.join(OFFERED)}."
    )


def has_legacy() -> bool:
    """Whether use_legacy=True is accepted. It is, and has no effect."""
    return True


def flash_mla_with_kvcache(
    q: Tensor,  # [b, s_q, h_q, d]
    k_cache: Tensor,  # [num_blocks, page_block_size, h_k, d or bytes]
    block_table: Tensor | None,  # [b, max_blocks] i32
    cache_seqlens: Tensor | None,  # [b] i32
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,  # [b, s_q, topk] i32, slots; -1: none
    attn_sink: Tensor | None = None,  # [h_q] f32
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,  # [b] i32
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,  # [1] f32
    descale_k: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # out [b, s_q, h_q, head_dim_v], lse [b, h_q, s_q] f32
    """Latent attention of s_q tokens of each request: over all its keys by block_table, or with
    `indices` over the listed keys of one or two caches.

    Cache rows are 16-bit, of 656 bytes (V3.2) or 584 bytes (V4), or fp8 with a scale. Any number of
    heads and any page size work; lists also work with 16-bit rows. `out` is filled and returned.
    """
    try:
        # everything that depends on shapes and dtypes only, cached across similar calls
        plan = (plan_of if type(q) is Tensor and not is_compiling() else plan_of.__wrapped__)(
            q.shape, q.dtype, k_cache.shape, k_cache.dtype, causal, is_fp8_kvcache, kv_format,
            enable_batch_invariant,
            None if block_table is None else block_table.shape,
            None if cache_seqlens is None else cache_seqlens.shape,
            None if indices is None else indices.shape,
            None if topk_length is None else topk_length.shape,
            None if extra_k_cache is None else (extra_k_cache.shape, extra_k_cache.dtype),
            None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape,
            None if extra_topk_length is None else extra_topk_length.shape,
            attn_sink is not None, descale_q is not None, descale_k is not None,
        )  # fmt: skip
        check_schedule(tile_scheduler_metadata, num_splits, plan.shape)
        B, n, H, _, _ = plan.dims
        _check_out("flash_mla_with_kvcache", out, (B, n, H, head_dim_v), q)
        scale = plan.scale if softmax_scale is None else softmax_scale
        if indices is None:
            assert block_table is not None and cache_seqlens is not None
            result = _dense(
                plan, q, k_cache, block_table, cache_seqlens, head_dim_v, scale, descale_q,
                descale_k,
            )  # fmt: skip
        else:
            result = _listed(
                plan, q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache,
                extra_topk_length, attn_sink, head_dim_v, scale, descale_k,
            )  # fmt: skip
    except OpenMLAError as error:
        raise refused("flash_mla_with_kvcache", error, NAMES) from error
    if type(tile_scheduler_metadata) is FlashMLASchedMeta:
        tile_scheduler_metadata.fill(plan.shape)
    return result if out is None else (out.copy_(result[0]), result[1])


def flash_mla_sparse_fwd(
    q: Tensor,  # [s_q, h_q, d]
    kv: Tensor,  # [s_kv, 1, d]
    indices: Tensor,  # [s_q, 1, topk] i32; outside 0..s_kv-1: none
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,  # [h_q] f32
    topk_length: Tensor | None = None,  # [s_q] i32
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # out [s_q, h_q, d_v], max_logits, lse [s_q, h_q]
    """Latent attention of each token over the rows of kv that it lists.

    max_logits, -inf where a token has no row, are computed on first access. With return_log2_lse
    True both statistics are in base 2, with False they are None. `out` is filled and returned.
    """
    try:
        shape, named = kv.shape, indices.shape
        if len(shape) != 3 or len(named) != 3 or shape[1] != 1 or named[1] != 1:
            raise DropInError(
                "flash_mla_sparse_fwd: kv and indices must be [s_kv, 1, d] and [s_q, 1, topk], "
                f"got {tuple(shape)} and {tuple(named)}."
            )
        if kv.dtype != q.dtype or kv.dtype not in PLAIN:
            raise DropInError(
                f"flash_mla_sparse_fwd: q and kv must be of one dtype of 16 or 32 bits, got "
                f"{q.dtype} and {kv.dtype}."
            )
        (T, _, K), (S, _, D) = named, shape
        _check_out("flash_mla_sparse_fwd", out, (*q.shape[:2], d_v), q)
        listed = indices.view(T, K)
        one, begins, zeros, all_of_them, _ = kept(_listed_constants, q, q.shape[0], K, 0)
        lens = all_of_them if topk_length is None else topk_length
        segment = Segment(kv.view(1, S, D), one, PLAIN[kv.dtype], "slots", None, listed, lens)
        made, lse = mqa_sparse(q, begins, zeros, segment, None, attn_sink, C=d_v, scale=sm_scale)
        out = made if out is None else out.copy_(made)
    except OpenMLAError as error:
        raise refused("flash_mla_sparse_fwd", error, NAMES_OF_PROMPTS) from error
    if return_log2_lse is False:
        return out, None, None
    unit = math.log2(math.e) if return_log2_lse else 1.0
    # a traced graph does not compute unused values anyway
    wanted = (q, kv, listed, lens)
    if is_compiling():
        largest = _max_logits(*wanted, sm_scale * unit)
    else:
        largest = Later(lse.shape, _max_logits, wanted, sm_scale * unit)
    lse = _as_theirs(lse)
    return out, largest, lse.mul_(unit) if return_log2_lse else lse


def _check_out(where: str, out: Tensor | None, shape: tuple[int, ...], q: Tensor) -> None:
    """Check that a caller's buffer can take the result, before anything runs."""
    if out is None:
        return
    dtype = out_dtype(q.dtype)
    if not isinstance(out, Tensor) or (out.shape, out.dtype, out.device) != (
        shape, dtype, q.device,
    ):  # fmt: skip
        got = type(out).__name__
        if isinstance(out, Tensor):
            got = f"{tuple(out.shape)} of {out.dtype} on {out.device}"
        raise DropInError(
            f"{where}: out must be a tensor of {tuple(shape)} of {dtype} on {q.device}, got {got}."
        )


def warm(num_heads: int, **sizes: Any) -> None:
    """Compile the kernels for calls of these sizes, before the first request. See
    help(openmla.integrations.flash_mla_warm.warm) for the sizes."""
    from openmla.integrations.flash_mla_warm import warm

    warm(num_heads, **sizes)


def _dense(
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    C: int,
    scale: float,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
) -> tuple[Tensor, Tensor]:
    (B, n, H, D, G), ((format, as_bytes),) = plan.dims, plan.pages
    # a single token sees all keys either way
    causal, tokens = n > 1 and plan.shape[5], n
    if causal and q.device.type == "cpu" and bool((cache_seqlens < n).any()):
        # the op does not support causal requests shorter than their tokens: make each token a
        # request
        block_table, cache_seqlens = _by_token(block_table, cache_seqlens, n)
        B, tokens, causal = B * n, 1, False
    one, begins = kept(_dense_constants, q, B, tokens)
    unit = one if descale_k is None else descale_k.reshape(())
    q_scale, unscaled, dtype = None, None, out_dtype(q.dtype)
    if q.dtype == E4M3:
        by = None if descale_q is None else descale_q.reshape(())
        if format in EIGHT_BITS and (q.is_cpu or multiplies_fp8(q.device)):
            q_scale = one if by is None else by
        elif by is None:
            q = q.to(torch.bfloat16)  # exact
        elif FORMATS[format].scaled:  # exact: keys' scale includes both, outputs are divided by one
            q, unit, unscaled = q.to(torch.bfloat16), unit * by, by
        else:  # these rows support no other scale
            q = q.to(torch.float32) * by
    parts = []
    for g in range(G):
        pages = k_cache.select(2, g)
        heads = q if G == 1 else q[:, :, g * (H // G) : (g + 1) * (H // G)]
        parts.append(
            mqa_paged(
                heads.reshape(-1, H // G, D), pages.view(torch.uint8) if as_bytes else pages,
                unit, block_table, cache_seqlens, begins, q_scale, format=format, C=C, scale=scale,
                causal=causal, max_query_len=tokens, run_length=plan.run_length,
            )
        )  # fmt: skip
    out, lse = parts[0] if G == 1 else map(partial(torch.cat, dim=1), zip(*parts, strict=True))
    out = out.view(-1, n, H, C).to(dtype)
    if unscaled is not None:
        out = out.div_(unscaled)
    if n == 1:
        return out, _as_theirs(lse).view(-1, H, 1)
    return out, _as_theirs(lse.view(-1, n, H).transpose(1, 2).contiguous())


def _by_token(block_table: Tensor, seqlens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Make every token a request over the keys that it sees."""
    before = torch.arange(n - 1, -1, -1, dtype=seqlens.dtype, device=seqlens.device)
    lens = (seqlens[:, None] - before).clamp_min(0).flatten()
    return block_table.repeat_interleave(n, 0), lens


def _listed(
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    extra_k_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_topk_length: Tensor | None,
    sink: Tensor | None,
    C: int,
    scale: float,
    descale_k: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, n, H, D, _ = plan.dims
    T, (K, extra_K) = B * n, plan.widths
    one, begins, zeros, lens, extra_lens = kept(_listed_constants, q, T, K, extra_K)
    unit = one if descale_k is None else descale_k.reshape(())
    format, as_bytes = plan.pages[0]
    if topk_length is not None:
        lens = topk_length if n == 1 else topk_length.repeat_interleave(n, output_size=T)
    pages = k_cache.squeeze(2)  # takes a third of the time of view()
    first = Segment(
        pages.view(torch.uint8) if as_bytes else pages, unit, format, "slots", None,
        indices.reshape(T, K), lens,
    )  # fmt: skip
    second = None
    if extra_k_cache is not None:
        assert extra_indices is not None
        format, as_bytes = plan.pages[1]
        if extra_topk_length is not None:
            extra_lens = (
                extra_topk_length
                if n == 1
                else extra_topk_length.repeat_interleave(n, output_size=T)
            )
        pages = extra_k_cache.squeeze(2)
        second = Segment(
            pages.view(torch.uint8) if as_bytes else pages, unit, format, "slots", None,
            extra_indices.reshape(T, extra_K), extra_lens,
        )  # fmt: skip
    out, lse = mqa_sparse(
        q.reshape(T, H, D), begins, zeros, first, second, sink, C=C, scale=scale,
        run_length=plan.run_length,
    )  # fmt: skip
    lse = _as_theirs(lse)
    if n == 1:
        return out.view(B, 1, H, C), lse.view(B, H, 1)
    return out.view(B, n, H, C), lse.view(B, n, H).transpose(1, 2)


def _as_theirs(lse: Tensor) -> Tensor:
    """FlashMLA's convention for lse: +inf where there is no key, in one launch; NaN is kept."""
    return torch.nan_to_num_(lse, math.nan, math.inf, math.inf)


def _dense_constants(device: torch.device, B: int, n: int) -> tuple[Tensor, Tensor]:
    """A scale of 1, and the start of each request."""
    return torch.ones((), dtype=torch.float32, device=device), starts(device, B, n)


def _listed_constants(device: torch.device, T: int, K: int, extra_K: int) -> tuple[Tensor, ...]:
    """_dense_constants() with all tokens as one request; their positions, which slots do not need;
    the full lengths of the lists of both caches."""
    full = partial(torch.full, (T,), dtype=torch.int32, device=device)
    zeros = torch.zeros(T, dtype=torch.int64, device=device)
    return *_dense_constants(device, 1, T), zeros, full(K), full(extra_K)


def _max_logits(q: Tensor, kv: Tensor, listed: Tensor, lens: Tensor, scale: float) -> Tensor:
    """The largest logit of each token and head, computed with plain PyTorch."""
    rows = kv.select(1, 0)
    (T, K), (S, D) = listed.shape, rows.shape
    found = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    if S == 0 or K == 0:
        return found
    columns = torch.arange(K, device=q.device)
    step = max(LARGEST_CHUNK // (K * max(D, q.shape[1])), 1)
    for start in range(0, T, step):
        chunk = slice(start, start + step)
        named = listed[chunk].long()
        valid = (named >= 0) & (named < S) & (columns < lens[chunk, None])
        seen = rows[named.where(valid, 0)].float()  # [n, K, D]
        logits = scale * (q[chunk].float() @ seen.mT)
        found[chunk] = logits.masked_fill(~valid[:, None], -math.inf).amax(-1)
    return found
