"""The functions of FlashMLA's package flash_mla, on every device and backend of ours.

Names, arguments, defaults, return values, layouts and conventions are those of its release before
Hopper, dense decoding and V3.2's and V4's caches were removed, and of sgl-flash-mla, which keeps
them: lse is natural and +inf where a query sees no key, an index of -1 is skipped. Schedules are
accepted and not needed. install() makes `import flash_mla` find this module.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from openmla.cache.format import FORMATS, GROUP
from openmla.errors import OpenMLAError, UnsupportedError
from openmla.integrations import drop_in
from openmla.integrations.drop_in import DropInError, kept, refused, starts
from openmla.integrations.flash_mla_schedule import (
    FlashMLASchedMeta,
    check_schedule,
    get_mla_decoding_metadata,
    get_mla_metadata,
)
from openmla.integrations.later import Later
from openmla.ops import Segment, mqa_paged, mqa_sparse
from openmla.plan.types import FIXED_RUN

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
    "install",
    "uninstall",
]

__version__ = "1.0.0+openmla"

PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PACKED = {"V32": "fp8_ds_mla", "V32_NO_ROPE": "fp8_ds_mla", "V4": "fp8_dsv4"}
BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
# How the ops' arguments are called here.
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
LARGEST_CHUNK = 2**26  # values of gathered rows held at once, where max_logits are computed


def install(*, force: bool = False) -> bool:
    """Let `import flash_mla` find this module; returns whether it does.

    Where the original is installed it stays, unless `force`. Once a flash_mla is imported this is
    refused: whoever has it would keep it.
    """
    return drop_in.install(__name__, "flash_mla", "flash_mla_interface", force=force)


def uninstall() -> None:
    """Undo install()."""
    drop_in.uninstall(__name__, "flash_mla", "flash_mla_interface")


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"flash_mla: {name} is not part of openmla's drop-in, which has {', '.join(__all__[1:6])}."
    )


def has_legacy() -> bool:
    """Whether use_legacy=True is taken: it is, and changes nothing."""
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
) -> tuple[Tensor, Tensor]:  # out [b, s_q, h_q, head_dim_v], lse [b, h_q, s_q] f32
    """Latent attention of s_q tokens of each request: over all its keys by block_table, or with
    `indices` over listed ones of one or two caches.

    Caches are of 16 bits, of 656 bytes a row (V3.2), 584 (V4), or fp8 with a scale. Any number of
    heads, any page size; lists also of 16-bit rows.
    """
    try:
        if q.dim() != 4 or k_cache.dim() != 4:
            raise DropInError(
                "flash_mla_with_kvcache: q and k_cache must have 4 dimensions, got "
                f"{tuple(q.shape)} and {tuple(k_cache.shape)}."
            )
        B, n, H, D = q.shape
        _, page, G, _ = k_cache.shape
        scale = D**-0.5 if softmax_scale is None else softmax_scale
        shape = (
            B, n, H, page, G, causal, _is_fp8(k_cache, is_fp8_kvcache),
            None if indices is None else indices.shape[-1],
            None if extra_k_cache is None else extra_k_cache.shape[1],
            None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
            enable_batch_invariant,
        )  # fmt: skip
        check_schedule(tile_scheduler_metadata, num_splits, shape)
        run_length = FIXED_RUN if enable_batch_invariant else 0
        if indices is None:
            others = (attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length)
            _check_none("without indices", *others, extra_topk_length)
            result = _dense(
                q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal, run_length,
                kv_format, descale_q, descale_k,
            )  # fmt: skip
        else:
            _check_none("with indices", causal or None, descale_q)
            parts = [_segment(q, k_cache, indices, topk_length, kv_format, descale_k, "")]
            if extra_k_cache is None:
                _check_none("without extra_k_cache", extra_indices_in_kvcache, extra_topk_length)
            else:
                parts.append(
                    _segment(
                        q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, kv_format,
                        descale_k, "extra_",
                    )
                )  # fmt: skip
            result = _listed(q, parts, attn_sink, head_dim_v, scale, run_length)
    except OpenMLAError as error:
        raise refused("flash_mla_with_kvcache", error, NAMES) from error
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        tile_scheduler_metadata.fill(shape)
    return result


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
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # out [s_q, h_q, d_v], max_logits, lse [s_q, h_q]
    """Latent attention of each token over the rows of kv that it lists.

    max_logits, -inf where a token has no row, are computed when they are looked at. With
    return_log2_lse True both statistics are of base 2, with False they are None.
    """
    try:
        if kv.dim() != 3 or indices.dim() != 3 or kv.shape[1] != 1 or indices.shape[1] != 1:
            raise DropInError(
                "flash_mla_sparse_fwd: kv and indices must be [s_kv, 1, d] and [s_q, 1, topk], "
                f"got {tuple(kv.shape)} and {tuple(indices.shape)}."
            )
        if kv.dtype != q.dtype or kv.dtype not in PLAIN:
            raise DropInError(
                f"flash_mla_sparse_fwd: q and kv must be of one dtype of 16 or 32 bits, got "
                f"{q.dtype} and {kv.dtype}."
            )
        listed = indices.select(1, 0)
        T, K = q.shape[0], indices.shape[2]
        lens = kept(_full, q, T, K) if topk_length is None else topk_length
        rows = kv.select(1, 0).unsqueeze(0)
        segment = Segment(rows, kept(_one, q), PLAIN[kv.dtype], "slots", None, listed, lens)
        out, lse = mqa_sparse(
            q, kept(starts, q, 1, T), kept(_zeros, q, T), segment, None, attn_sink, C=d_v,
            scale=sm_scale,
        )  # fmt: skip
    except OpenMLAError as error:
        raise refused("flash_mla_sparse_fwd", error, NAMES_OF_PROMPTS) from error
    if return_log2_lse is False:
        return out, None, None
    unit = math.log2(math.e) if return_log2_lse else 1.0
    sources = [q, kv, indices] if topk_length is None else [q, kv, indices, topk_length]
    make = partial(_max_logits, q, kv.select(1, 0), listed, lens, sm_scale * unit)
    # in a traced graph what nobody reads is not computed anyway
    largest = make() if torch.compiler.is_compiling() else Later(lse.shape, make, sources)
    lse = _as_theirs(lse)
    return out, largest, lse.mul_(unit) if return_log2_lse else lse


def _is_fp8(k_cache: Tensor, said: bool | None) -> bool:
    eight_bits = k_cache.dtype in BYTES
    if said is not None and said != eight_bits:
        raise DropInError(
            f"flash_mla_with_kvcache: is_fp8_kvcache must be {eight_bits} for a k_cache of "
            f"{k_cache.dtype}, got {said}."
        )
    return eight_bits


# What must be None in which calls, for the message.
NONE = {
    "without indices": (
        "attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length"
    ),
    "with indices": "causal, descale_q",
    "without extra_k_cache": "extra_indices_in_kvcache, extra_topk_length",
}


def _check_none(where: str, *given: object) -> None:
    for name, each in zip(NONE[where].split(", "), given, strict=True):
        if each is not None:
            raise DropInError(
                f"flash_mla_with_kvcache: {name} must not be given {where}, got "
                f"{each if each is True else type(each).__name__}."
            )


def _dense(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    C: int,
    scale: float,
    causal: bool,
    run_length: int,
    kv_format: str | None,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if block_table is None or cache_seqlens is None:
        raise DropInError(
            "flash_mla_with_kvcache: block_table and cache_seqlens must be given without indices."
        )
    (B, n, H, D), G = q.shape, k_cache.shape[2]
    if block_table.shape[:1] != (B,) or cache_seqlens.shape != (B,):
        raise DropInError(
            f"flash_mla_with_kvcache: block_table and cache_seqlens must be of the {B} requests of "
            f"q, got {tuple(block_table.shape)} and {tuple(cache_seqlens.shape)}."
        )
    if G == 0 or H % G:
        raise DropInError(
            f"flash_mla_with_kvcache: heads of q must be a multiple of those of k_cache, got {H} "
            f"and {G}."
        )
    format = _format_of(k_cache.dtype, k_cache.shape[3], D, kv_format)
    unit = _scale_of(descale_k, q)
    wide = q.dtype == torch.float8_e4m3fn
    if wide:  # exact; their scale goes to the keys, whose values are mended at the end
        q, unit = q.to(torch.bfloat16), unit * _scale_of(descale_q, q)
    elif descale_q is not None:
        raise DropInError(
            f"flash_mla_with_kvcache: descale_q must be None for q of {q.dtype}, which is not fp8."
        )
    # one token sees all keys either way
    causal = causal and n > 1
    tokens = n
    if causal and q.device.type == "cpu" and bool((cache_seqlens < n).any()):
        # the op takes no causal request that is shorter than its tokens: each is its own then
        block_table, cache_seqlens = _by_token(block_table, cache_seqlens, n)
        B, tokens, causal = B * n, 1, False
    begins = kept(starts, q, B, tokens)
    parts = []
    for g in range(G):
        pages = k_cache.select(2, g)
        heads = q if G == 1 else q[:, :, g * (H // G) : (g + 1) * (H // G)]
        parts.append(
            mqa_paged(
                heads.reshape(-1, H // G, D),
                pages.view(torch.uint8) if format in PACKED.values() else pages,
                unit, block_table, cache_seqlens, begins, format=format, C=C, scale=scale,
                causal=causal, max_query_len=tokens, run_length=run_length,
            )
        )  # fmt: skip
    out, lse = parts[0] if G == 1 else map(partial(torch.cat, dim=1), zip(*parts, strict=True))
    out = out.view(-1, n, H, C)
    if wide and descale_q is not None:
        out = out.div_(descale_q)
    if n == 1:
        return out, _as_theirs(lse).view(-1, H, 1)
    return out, _as_theirs(lse.view(-1, n, H).transpose(1, 2).contiguous())


def _by_token(block_table: Tensor, seqlens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Every token a request, of the keys that it sees."""
    before = torch.arange(n - 1, -1, -1, dtype=seqlens.dtype, device=seqlens.device)
    lens = (seqlens[:, None] - before).clamp_min(0).flatten()
    return block_table.repeat_interleave(n, 0), lens


def _segment(
    q: Tensor,
    cache: Tensor,
    indices: Tensor | None,
    topk_length: Tensor | None,
    kv_format: str | None,
    descale_k: Tensor | None,
    which: str,
) -> Segment:
    """A cache and the rows of it that each token lists."""
    B, n, _, D = q.shape
    if cache.dim() != 4 or cache.shape[2] != 1:
        raise DropInError(
            f"flash_mla_with_kvcache: {which}k_cache must be [num_blocks, page_block_size, 1, d] "
            f"with indices, got {tuple(cache.shape)}."
        )
    if indices is None or indices.dim() != 3 or indices.shape[:2] != (B, n):
        got = None if indices is None else tuple(indices.shape)
        raise DropInError(
            f"flash_mla_with_kvcache: {which}indices{'_in_kvcache' if which else ''} must be "
            f"[b, s_q, topk] with b={B} and s_q={n}, got {got}."
        )
    K = indices.shape[2]
    if topk_length is None:
        lens = kept(_full, q, B * n, K)
    elif topk_length.shape != (B,):
        raise DropInError(
            f"flash_mla_with_kvcache: {which}topk_length must be [b] with b={B}, "
            f"got {tuple(topk_length.shape)}."
        )
    else:
        lens = topk_length if n == 1 else topk_length.repeat_interleave(n, output_size=B * n)
    format = _format_of(cache.dtype, cache.shape[3], D, kv_format)
    pages = cache.select(2, 0)
    if format in PACKED.values() and cache.dtype != torch.uint8:
        pages = pages.view(torch.uint8)
    rows = indices.reshape(B * n, K)
    return Segment(pages, _scale_of(descale_k, q), format, "slots", None, rows, lens)


def _listed(
    q: Tensor,
    parts: list[Segment],
    sink: Tensor | None,
    C: int,
    scale: float,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    B, n, H, D = q.shape
    T = B * n
    out, lse = mqa_sparse(
        q.reshape(T, H, D), kept(starts, q, 1, T), kept(_zeros, q, T), parts[0],
        parts[1] if len(parts) > 1 else None, sink, C=C, scale=scale, run_length=run_length,
    )  # fmt: skip
    return out.view(B, n, H, C), _as_theirs(lse).view(B, n, H).transpose(1, 2)


@lru_cache(maxsize=256)
def _format_of(dtype: torch.dtype, width: int, D: int, kv_format: str | None) -> str:
    """The cache format of rows of so many elements, for queries of D values."""
    if dtype in PLAIN:
        return PLAIN[dtype]
    if kv_format not in (None, *PACKED):
        raise UnsupportedError(
            f"flash_mla_with_kvcache: kv_format must be {', '.join(PACKED)} or None, "
            f"got {kv_format!r}."
        )
    # rows of 512 values without rope are as long as V4.1's: these are taken by name only
    some = ("fp8_dsv4",) if D % GROUP == 0 else ("fp8_ds_mla", "fp8_dsv4")
    packed = some if kv_format is None else (PACKED[kv_format],)
    for format in packed:
        if _width(format, D) == width:
            return format
    if dtype == torch.float8_e4m3fn and width == D:
        return "fp8"
    known = " or ".join(str(found) for format in packed if (found := _width(format, D)))
    raise DropInError(
        f"flash_mla_with_kvcache: k_cache must have rows of {known or D} bytes for q of {D} "
        f"values, or of {D} float8_e4m3fn values, got {width} of {dtype}."
    )


def _width(format: str, D: int) -> int:
    """Bytes of a row; 0 where a format has none of so many values."""
    try:
        return FORMATS[format].width(D)
    except OpenMLAError:
        return 0


def _scale_of(descale: Tensor | None, like: Tensor) -> Tensor:
    return kept(_one, like) if descale is None else descale.reshape(())


def _as_theirs(lse: Tensor) -> Tensor:
    """+inf where there is no key, in one launch; NaN stays."""
    return lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)


def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def _zeros(device: torch.device, T: int) -> Tensor:
    """Positions of tokens, which slots do not ask for."""
    return torch.zeros(T, dtype=torch.int64, device=device)


def _full(device: torch.device, T: int, K: int) -> Tensor:
    return torch.full((T,), K, dtype=torch.int32, device=device)


def _max_logits(q: Tensor, rows: Tensor, listed: Tensor, lens: Tensor, scale: float) -> Tensor:
    """The largest logit of each token and head, plainly."""
    T, K = listed.shape
    S, D = rows.shape
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
