"""What a flash_mla_with_kvcache call's shapes and dtypes imply, checked once for similar calls."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from openmla.cache.format import FORMATS, GROUP
from openmla.errors import OpenMLAError, UnsupportedError
from openmla.integrations.drop_in import DropInError
from openmla.plan.types import fixed_run

PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PACKED = {"V32": "fp8_ds_mla", "V32_NO_ROPE": "fp8_ds_mla", "V4": "fp8_dsv4"}
BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
Shape = tuple[int, ...]


class Plan(NamedTuple):
    """Everything that follows from a call's shapes and dtypes."""

    shape: tuple[Any, ...]  # as compared by schedules
    scale: float
    run_length: int
    dims: tuple[int, int, int, int, int]  # requests, tokens of each, heads, value dim, KV heads
    pages: tuple[tuple[str, bool], ...]  # for each cache: format, whether viewed as bytes
    widths: tuple[int, int]


class Call(NamedTuple):
    """Shapes and dtypes of the arguments, None for those not given."""

    q: Shape
    q_dtype: torch.dtype
    k_cache: Shape
    dtype: torch.dtype
    causal: bool
    is_fp8_kvcache: bool | None
    kv_format: str | None
    enable_batch_invariant: bool
    block_table: Shape | None
    cache_seqlens: Shape | None
    indices: Shape | None
    topk_length: Shape | None
    extra_k_cache: tuple[Shape, torch.dtype] | None
    extra_indices_in_kvcache: Shape | None
    extra_topk_length: Shape | None
    attn_sink: bool
    descale_q: bool
    descale_k: bool


@lru_cache(maxsize=1024)
def plan_of(*call: Any) -> Plan:
    """Everything that can be derived without reading values. Takes the fields of a Call."""
    (
        q, q_dtype, k_cache, dtype, causal, is_fp8, kv_format, batch_invariant, table, seqlens,
        indices, topk_length, extra, extra_indices, extra_topk_length, sink, descale_q,
        descale_k,
    ) = Call(*call)  # fmt: skip
    if len(q) != 4 or len(k_cache) != 4:
        raise DropInError(
            "flash_mla_with_kvcache: q and k_cache must have 4 dimensions, got "
            f"{tuple(q)} and {tuple(k_cache)}."
        )
    (B, n, H, D), (_, page, G, _) = q, k_cache
    caches: list[tuple[Shape, torch.dtype]] = [(k_cache, dtype)]
    eight_bits = dtype in BYTES
    if is_fp8 is not None and is_fp8 != eight_bits:
        raise DropInError(
            f"flash_mla_with_kvcache: is_fp8_kvcache must be {eight_bits} for a k_cache of "
            f"{dtype}, got {is_fp8}."
        )
    if indices is None:
        _check_none(
            "without indices",
            attn_sink=sink, extra_k_cache=extra, extra_indices_in_kvcache=extra_indices,
            topk_length=topk_length, extra_topk_length=extra_topk_length,
        )  # fmt: skip
        _check_dense(q, q_dtype, G, table, seqlens, descale_q)
    else:
        _check_none("with indices", causal=causal, descale_q=descale_q)
        _check_list("", q, k_cache, indices, topk_length)
        if extra is None:
            _check_none(
                "without extra_k_cache",
                extra_indices_in_kvcache=extra_indices, extra_topk_length=extra_topk_length,
            )  # fmt: skip
        else:
            _check_list("extra_", q, extra[0], extra_indices, extra_topk_length)
            caches.append(extra)
    pages = []
    for shape, kind in caches:
        format = _format_of(kind, shape[3], D, kv_format)
        if descale_k and not FORMATS[format].scaled:
            raise DropInError(
                f"flash_mla_with_kvcache: descale_k must be None for rows of {format}, which no "
                "other scale applies to, got a tensor. Pass it for fp8 rows only."
            )
        packed = format in PACKED.values() and kind != torch.uint8
        pages.append((format, packed))
    widths = [None if each is None else each[-1] for each in (indices, extra_indices)]
    known = (
        B, n, H, page, G, causal, eight_bits, widths[0], None if extra is None else extra[0][1],
        widths[1], batch_invariant,
    )  # fmt: skip
    return Plan(
        known, D**-0.5, fixed_run(H) if batch_invariant else 0, (B, n, H, D, G), tuple(pages),
        (widths[0] or 0, widths[1] or 0),
    )  # fmt: skip


def _check_none(where: str, **given: object) -> None:
    for name, each in given.items():
        if each is not None and each is not False:
            raise DropInError(
                f"flash_mla_with_kvcache: {name} is not supported {where}, got "
                f"{True if name == 'causal' else 'a tensor'}."
            )


def _check_dense(
    q: Shape,
    dtype: torch.dtype,
    G: int,
    table: Shape | None,
    seqlens: Shape | None,
    descale_q: bool,
) -> None:
    B, _, H, _ = q
    if table is None or seqlens is None:
        raise DropInError(
            "flash_mla_with_kvcache: without indices, pass block_table and cache_seqlens."
        )
    if table[:1] != (B,) or seqlens != (B,):
        raise DropInError(
            f"flash_mla_with_kvcache: block_table and cache_seqlens must be of the {B} requests of "
            f"q, got {tuple(table)} and {tuple(seqlens)}."
        )
    if G == 0 or H % G:
        raise DropInError(
            f"flash_mla_with_kvcache: heads of q must be a multiple of those of k_cache, got {H} "
            f"and {G}."
        )
    if descale_q and dtype != torch.float8_e4m3fn:
        raise DropInError(
            f"flash_mla_with_kvcache: descale_q must be None for q of {dtype}, which is not fp8."
        )


def _check_list(
    which: str, q: Shape, cache: Shape, indices: Shape | None, topk_length: Shape | None
) -> None:
    B, n, _, _ = q
    if len(cache) != 4 or cache[2] != 1:
        raise DropInError(
            f"flash_mla_with_kvcache: {which}k_cache must be [num_blocks, page_block_size, 1, d] "
            f"with indices, got {tuple(cache)}."
        )
    if indices is None or len(indices) != 3 or indices[:2] != (B, n):
        got = None if indices is None else tuple(indices)
        raise DropInError(
            f"flash_mla_with_kvcache: {which}indices{'_in_kvcache' if which else ''} must be "
            f"[b, s_q, topk] with b={B} and s_q={n}, got {got}."
        )
    if topk_length is not None and topk_length != (B,):
        raise DropInError(
            f"flash_mla_with_kvcache: {which}topk_length must be [b] with b={B}, "
            f"got {tuple(topk_length)}."
        )


def _format_of(dtype: torch.dtype, width: int, D: int, kv_format: str | None) -> str:
    """The cache format for rows with that many elements and queries of D values."""
    if dtype in PLAIN:
        return PLAIN[dtype]
    if kv_format not in (None, *PACKED):
        raise UnsupportedError(
            f"flash_mla_with_kvcache: kv_format must be {', '.join(PACKED)} or None, "
            f"got {kv_format!r}."
        )
    # rows of 512 values without rope are as long as V4.1's, so those must be requested by name
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
    """Bytes of a row; 0 if the format does not support D values."""
    try:
        return FORMATS[format].width(D)
    except OpenMLAError:
        return 0
