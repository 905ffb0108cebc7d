"""Launching latent attention over segments of rows, and what launches ask of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backends.segments import Segment
from openmla.backends.triton import _latent as kernels
from openmla.backends.triton import _primitives as primitives
from openmla.backends.triton._build import capability_of, cdiv
from openmla.backends.triton._prepare import Launch
from openmla.backends.triton._runs import Runs, make_targets, merge_runs, runs_of
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.backends.triton._tiles import (
    E4M3,
    EIGHT_BITS_ON,
    KINDS,
    PACKED,
    PLAIN,
    STORED_AS,
    V4,
    Config,
    Shape,
    config_of,
    shape_of,
    tile_constants,
)
from openmla.hardware import multiprocessors

LOG2E = primitives.LOG2E.value
TOKENS = 65535  # of one launch: the limit of a grid's second dimension


def run_latent(
    q: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    width: int,
    run_length: int,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch over all tokens. Rows are split every run_length, else into as many runs as fill the
    machine; `width` is the most rows of a token."""
    T, H, D = q.shape
    segments = [flattened(part) for part in segments]
    first, second = segments[0], segments[-1]
    work = work_of(
        q.dtype, T, H, D, C, tuple((part.kind, part.format) for part in segments),
        tuple(part.cache.shape[1] for part in segments), width, run_length, sink is not None,
        capability_of(q.device), multiprocessors(q.device), aligned=all(map(is_aligned, segments)),
        wide=any(map(is_wide, segments)), scales=scales_of(q_scale),
    )  # fmt: skip
    runs, dtype = work.runs, out_dtype(q)
    targets = make_targets(q, C, runs, dtype)
    if T == 0:
        return targets.out.to(dtype), targets.lse
    B = query_start_loc.shape[0] - 1
    unused = query_start_loc = query_start_loc.contiguous()
    for first_token in range(0, T, TOKENS):
        work.launch(
            (work.tiles, min(T - first_token, TOKENS), runs.X),
            *query_pieces(q, q_scale),
            query_start_loc,
            positions.contiguous(),
            targets.lse if sink is None else sink,
            *_tensors(first, unused),
            *_tensors(second, unused),
            targets.part,
            targets.part_lse,
            B,
            first_token,
            scale,
            q.stride(0),
            q.stride(1),
            runs.X,
            runs.length,
            *_sizes(first),
            *_sizes(second),
        )
    merge_runs(runs, targets, sink)
    return targets.out.to(dtype), targets.lse


def out_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == E4M3 else q.dtype


def scales_of(q_scale: Tensor | None) -> int:
    """Q_SCALES of kernels: none, one for all queries, one per token and head."""
    return 0 if q_scale is None else 1 if q_scale.dim() == 0 else 2


def query_pieces(q: Tensor, q_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries, e4m3 as bytes, and scales, or what is in their place."""
    if q_scale is None:
        return q, q
    return q.view(torch.uint8), q_scale.contiguous()


class Work(NamedTuple):
    """What is fixed between calls of the same sizes; `tiles` of heads."""

    launch: Launch
    tiles: int
    runs: Runs


@lru_cache(maxsize=4096)
def work_of(
    dtype: torch.dtype, T: int, H: int, D: int, C: int, kinds: tuple[tuple[str, str], ...],
    blocks: tuple[int, ...], width: int, run_length: int, sink: bool, capability: int, units: int,
    *, aligned: bool, wide: bool, scales: int = 0,
) -> Work:  # fmt: skip
    """Of segments of these kinds and formats, with so many rows in a block."""
    shape = shape_of(dtype, [format for _, format in kinds], H, D, C)
    config = config_of(shape, capability, kinds)
    runs = runs_of(T, H, C, config.block_h, config.block_n, width, run_length, sink, units)
    launch = SPEC.launch(
        shape, config, tuple((*kind, BS) for kind, BS in zip(kinds, blocks, strict=True)),
        aligned=aligned, wide=wide, sink=sink and not runs.split, split=runs.split, scales=scales,
    )  # fmt: skip
    return Work(launch, cdiv(H, config.block_h), runs)


def flattened(part: Segment) -> Segment:
    """Slots of a cache without padding between pages, as blocks of one row: no division by BS."""
    N, BS, W = part.cache.shape
    if part.kind != "slots" or STORED_AS[part.format] == V4 or not is_dense(part.cache):
        return part
    return part._replace(
        cache=part.cache.as_strided((N * BS, 1, W), (part.cache.stride(1),) * 2 + (1,))
    )


def is_dense(cache: Tensor) -> bool:
    """Whether pages follow one another without padding, so that a slot is a row index."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def is_aligned(part: Segment) -> bool:
    """Whether scales and bf16 columns inside bytes lie on multiples of 4."""
    if STORED_AS[part.format] < PACKED:
        return True
    cache = part.cache
    return cache.data_ptr() % 4 == 0 and cache.stride(0) % 4 == 0 and cache.stride(1) % 4 == 0


def is_wide(part: Segment) -> bool:
    """Whether offsets into a cache need 64 bits; 32 halve the registers of a gather."""
    return part.cache.shape[0] * part.cache.stride(0) >= 2**31


def inner_contiguous(table: Tensor) -> Tensor:
    """Kernels assume stride 1 in the last dimension; these tables are small enough to copy."""
    return table if table.stride(-1) == 1 or table.shape[-1] < 2 else table.contiguous()


def _tensors(part: Segment, unused: Tensor) -> tuple[Tensor, ...]:
    cache = part.cache.view(torch.uint8) if part.format == "fp8" else part.cache
    tables = (part.rows, part.row_lens, part.block_table)
    return (
        cache,
        part.kv_scale,
        *(unused if each is None else inner_contiguous(each) for each in tables),
    )


def _sizes(part: Segment) -> tuple[int, ...]:
    N, _, W = part.cache.shape
    table, rows = (
        None if each is None else inner_contiguous(each) for each in (part.block_table, part.rows)
    )
    return (
        part.cache.stride(0),
        part.cache.stride(1),
        W,
        N,
        0 if table is None else table.shape[1],
        0 if rows is None else rows.shape[1],
        part.span,
        0 if rows is None else rows.stride(0),
        0 if table is None else table.stride(0),
    )


def fix(
    shape: Shape, config: Config, segments: tuple[tuple[str, str, int], ...], *, aligned: bool,
    wide: bool, sink: bool, split: bool, scales: int = 0,
) -> Fixed:  # fmt: skip
    """Segments are of a kind, a format and so many rows in a block; the second may be the first."""
    constants: dict[str, Any] = {}
    for number, (kind, format, BS) in ((1, segments[0]), (2, segments[-1])):
        constants |= {
            f"KIND_{number}": KINDS[kind],
            f"FORMAT_{number}": STORED_AS[format],
            f"BS_{number}": BS,
            f"ONE_BLOCK_{number}": kind == "prefix" and BS % config.block_n == 0,
        }
    constants |= {
        "SECOND": len(segments) == 2,
        "SINK": sink,
        "SPLIT": split,
        **tile_constants(shape, config, aligned=aligned, wide=wide),
        "Q_SCALES": scales,
    }
    return Fixed(constants, config.num_warps, config.num_stages)


def cases(capability: int) -> Iterator[Case]:
    """Kinds of segments, with the formats that models store them in; few heads and many. dots3's
    sliding layers have one number of heads."""
    latent, v4 = ("bf16", "fp8", "fp8_ds_mla"), ("bf16", "fp8_dsv4")
    for kinds, formats, heads, D, C in (
        (("slots",), latent, (16, 128), 576, 512),
        (("positions",), latent, (16, 128), 576, 512),
        (("window",), latent, (64,), 1088, 1024),
        (("window", "positions"), v4, (16, 128), 512, 512),
        (("window", "prefix"), v4, (16, 128), 512, 512),
    ):
        BS = 1 if kinds == ("slots",) else 64  # as flattened() makes it
        quantizes = capability in EIGHT_BITS_ON and kinds in (("slots",), ("window",))
        for format, H in product(formats, heads):
            stored = "*bf16" if STORED_AS[format] == PLAIN else "*u8"
            dtypes = [torch.bfloat16]
            if quantizes and format != "bf16":
                dtypes.append(E4M3)
            for dtype in dtypes:
                eight = dtype == E4M3
                shape = shape_of(dtype, [format], H, D, C)
                config = config_of(shape, capability, [(kind, format) for kind in kinds])
                yield case(
                    f"latent-{'-'.join(kinds)}-{format}{'-e4m3' * eight}-H{H}-D{D}", shape, config,
                    tuple((kind, format, BS) for kind in kinds), aligned=True, wide=False,
                    sink=False, split=True, scales=2 * eight,
                    types={"q": "*u8" if eight else "*bf16", "cache_1": stored, "cache_2": stored},
                )  # fmt: skip


SPEC = KernelSpec(
    kernels._latent_kernel,
    fix,
    types={
        "*i64": "positions",
        "*fp32": "out sink lse q_scale kv_scale_1 kv_scale_2",
        "*i32": "query_start_loc rows_1 row_lens_1 table_1 rows_2 row_lens_2 table_2",
        "fp32": "qk_scale",
    },
    cases=cases,
    fp_fusion=True,
)
