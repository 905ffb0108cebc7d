"""mqa_paged, Gluon: rows of V3 in 16 bits or fp8, tokens times heads in tiles of 64 or 16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.backends import Problem
from openmla.backends.gluon import _many_heads, _paged, _paged_e4m3, _paged_few
from openmla.backends.gluon._launch import NUM_WARPS
from openmla.backends.gluon._shapes import needs_nvidia, needs_sm90
from openmla.backends.triton import _merge_parts as merge
from openmla.backends.triton._build import cdiv, next_power_of_2
from openmla.backends.triton._launch import LOG2E, inner_contiguous, out_dtype, scales_of
from openmla.backends.triton._prepare import Address, Launch, Piece
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.hardware import multiprocessors

LAUNCHES = 2  # the second merges what was split
STEP = 128  # keys of a program's step
TILES = 4  # of an item at most: programs that read the same keys at the same time, from L2 mostly
BOXES = (8, 16, 32)  # rows of a bulk copy, where pages are no multiple of 64
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Tile(NamedTuple):
    """A kernel, query rows of a program, and registers a thread of its odd and of its loading warp
    group has: with others they spill. Of e4m3 queries, those of the second group of values, of
    scores and of the producer."""

    name: str
    spec: KernelSpec
    rows: int
    registers: tuple[int, ...]
    decoded: bool  # by the producer, which reads words; else bulk copies of boxes are


def fix(
    tile: Tile, H: int, BS: int, row_stride: int, tokens: int, *, causal: bool, fixed: bool,
    scales: int = 0,
) -> Fixed:  # fmt: skip
    constants = {
        "BS": BS,
        "BOX": min(BS, 64),
        "H": H,
        "TOKENS": tokens,
        "CAUSAL": causal,
        "FOLDED": causal and tokens > 1,
        "FIXED": fixed,
        "BLOCK_T": next_power_of_2(tokens),
    }
    names: tuple[str, ...]
    if scales:
        names = ("VALUE_REGISTERS", "SCORE_REGISTERS", "LOAD_REGISTERS")
        constants |= {"ROWS": tile.rows, "Q_SCALES": scales}
    else:
        names = ("ODD_REGISTERS", "LOAD_REGISTERS")
        if tile is not FEW_FP8:
            constants["ROW_WORDS"] = row_stride if tile.decoded else 0
    return Fixed({**constants, **dict(zip(names, tile.registers, strict=True))}, NUM_WARPS)


def cases(*tiles: tuple[Tile, int, int, int, bool, str]) -> Iterator[Case]:
    """Calls to compile: a tile, heads, rows of a page, tokens of an item, fixed runs, a dtype."""
    for tile, H, BS, tokens, fixed, dtype in tiles:
        stored = dtype if tile is MANY else "fp8"
        types = {"q": f"*{dtype}", "out": f"*{dtype}", "rows": "*i32", "rope": "*i32"}
        if not tile.decoded:
            columns, layout = box_of(torch.int32 if stored == "fp8" else torch.bfloat16)
            kind = "i32" if stored == "fp8" else dtype
            types["rope"] = f"tensordesc<{kind}[{min(BS, 64)}, {columns}],{layout!r}>"
            if tile is MANY:
                columns = wide_columns(BS)
            types["rows"] = f"tensordesc<{kind}[{min(BS, 64)}, {columns}],{layout!r}>"
        name = f"{tile.name}-{stored}-H{H}x{tokens}-BS{BS}{'-fixed' * fixed}"
        yield case(name, tile, H, BS, 144, tokens, causal=True, fixed=fixed, types=types)


def e4m3_cases(_: int) -> Iterator[Case]:
    for tile, H, BS, tokens, fixed, scales in (
        (E4M3[0], 16, 64, 1, False, 2), (E4M3[0], 8, 16, 2, False, 1),
        (E4M3[1], 32, 64, 1, True, 2), (E4M3[2], 128, 64, 1, False, 2),
        (E4M3[2], 16, 32, 4, False, 1),
    ):  # fmt: skip
        types = {"q": "*i32", "q_scale": "*fp32", "out": "*bf16"}
        for name in ("rows", "rope"):
            width = _paged_e4m3.SPAN_WORDS if name == "rows" else _paged_e4m3.ROPE_WORDS
            columns, layout = box_of(torch.int32, width.value)
            types[name] = f"tensordesc<i32[{min(BS, 64)}, {columns}],{layout!r}>"
        yield case(
            f"{tile.name}-H{H}x{tokens}-BS{BS}{'-fixed' * fixed}", tile, H, BS, 144, tokens,
            causal=True, fixed=fixed, scales=scales, types=types,
        )  # fmt: skip


spec = partial(
    KernelSpec,
    fix=fix,
    types={
        "*i32": "query_start_loc seq_lens table spans",
        "*fp32": "lse part part_lse kv_scale",
        "fp32": "qk_scale",
    },
    targets=(90,),
    fp_fusion=True,
)
SPEC_MANY = spec(
    _paged._paged_kernel,
    cases=lambda _: cases(
        (MANY, 128, 64, 1, False, "bf16"), (MANY, 16, 64, 1, False, "bf16"),
        (MANY, 64, 64, 2, False, "bf16"), (MANY, 16, 16, 4, False, "fp16"),
        (MANY, 128, 64, 1, True, "bf16"), (MANY_FP8, 128, 64, 1, False, "bf16"),
        (MANY_FP8, 64, 16, 2, False, "fp16"), (MANY_FP8, 128, 64, 1, True, "bf16"),
    ),
)  # fmt: skip
SPEC_FEW = spec(
    _paged_few._paged_few_kernel,
    cases=lambda _: cases((FEW_FP8, 16, 64, 1, False, "bf16"), (FEW_FP8, 8, 16, 4, False, "fp16")),
)
SPEC_E4M3 = spec(_paged_e4m3._paged_e4m3_kernel, cases=e4m3_cases)
MANY: Tile = Tile("many-rows", SPEC_MANY, 64, (224, 56), False)
MANY_FP8: Tile = Tile("many-rows", SPEC_MANY, 64, (192, 112), True)
FEW_FP8: Tile = Tile("few-rows", SPEC_FEW, 16, (168, 152), False)
E4M3 = tuple(
    Tile("e4m3", SPEC_E4M3, rows, registers, False)
    for rows, registers in ((16, (152, 120, 88)), (32, (168, 104, 72)), (64, (192, 80, 48)))
)


SPECS = (SPEC_MANY, SPEC_FEW, SPEC_E4M3)


def why_not(problem: Problem) -> str | None:
    if needs_nvidia():
        return needs_nvidia()
    if problem.format == "fp8":
        if problem.dtype == torch.float8_e4m3fn:
            if problem.BS == 8:
                return "takes e4m3 queries over pages of 16 rows or more, this is 8"
        elif problem.dtype not in FORMATS.values():
            return f"takes queries of 16 bits, this is {problem.dtype}"
    elif FORMATS.get(problem.format) != problem.dtype:
        return f"takes queries of the cache's 16 bits, this is {problem.dtype} and {problem.format}"
    if (problem.D, problem.C) != (576, 512):
        return f"needs rows of 512 + 64, this is {problem.C} + {problem.D - problem.C}"
    if problem.BS % 64 and problem.BS not in BOXES:
        return f"needs pages of 8, 16, 32 or a multiple of 64 rows, this is {problem.BS}"
    if "rows" not in problem.aligned:
        return "needs rows at multiples of 16 bytes, no padding between pages, fewer than 2**33"
    return needs_sm90(problem)


def tile_of(
    format: str, H: int, BS: int, max_query_len: int, run_length: int, *, e4m3: bool = False
) -> Tile:
    """With fixed runs heads alone decide: bits may not depend on other requests' tokens. Pages of 8
    are too many boxes for the registers of few rows' producer."""
    if format != "fp8":
        return MANY
    rows = H if run_length else H * max_query_len
    if e4m3:
        return next((tile for tile in E4M3 if rows <= tile.rows), E4M3[-1])
    return FEW_FP8 if rows <= FEW_FP8.rows and BS > 8 else MANY_FP8


def item_tokens(tile: Tile, H: int, max_query_len: int, *, even: bool) -> int:
    """Query tokens that share the keys of a tile, or of up to TILES of them: as many as fill whole
    tiles, with the fewest tiles for a request; one where it has no more. Few numbers of tokens
    occur, for each is a kernel of its own. `even`: requests have as many as the longest."""
    most = max(TILES if even else 2, cdiv(H, tile.rows))
    fits = {1, *(max(tiles * tile.rows // H, 1) for tiles in range(1, most + 1))}

    def preferred(tokens: int) -> tuple[int, int, int]:
        tiles = cdiv(max_query_len, tokens) * cdiv(tokens * H, tile.rows)
        return tiles, -min(tokens, max_query_len), tokens

    return min(fits, key=preferred)


class Schedule(NamedTuple):
    """What is fixed between calls of the same sizes."""

    tile: Tile
    launch: Launch
    grid: tuple[int, int]
    unit: int  # keys of the finest cut
    merge: merge.Merge


@lru_cache(maxsize=4096)
def schedule_of(
    format: str, T: int, H: int, C: int, BS: int, B: int, M: int, row_stride: int, causal: bool,
    max_query_len: int, run_length: int, units: int, scales: int = 0,
) -> Schedule:  # fmt: skip
    """For so many multiprocessors; `scales` of e4m3 queries: one, or one per token and head."""
    tile = tile_of(format, H, BS, max_query_len, run_length, e4m3=scales > 0)
    tokens = item_tokens(tile, H, max_query_len, even=B * max_query_len == T)
    tiles = cdiv(tokens * H, tile.rows)
    programs = max(units // tiles, 1)
    unit = cdiv(run_length, STEP) * STEP or STEP
    fixed = run_length > 0
    launch = tile.spec.launch(
        tile, H, BS, row_stride, tokens, causal=causal, fixed=fixed, scales=scales
    )
    merged = merge.prepare_merge(
        T, H, C, rows=tiles * tile.rows, items=B * cdiv(max_query_len, tokens), programs=programs,
        units=max(cdiv(M * BS, unit), 1), fixed=fixed, overlapped=True,
    )  # fmt: skip
    return Schedule(tile, launch, (tiles, programs), unit, merged)


def run(
    q_latent: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
    run_length: int,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q_latent.shape
    N, BS, W = cache.shape
    B, M = block_table.shape
    kind, values = (torch.int32, 4) if format == "fp8" else (cache.dtype, 1)  # of a word
    page, row, _ = cache.stride()
    page, row = page // values, row // values
    schedule = schedule_of(
        format, T, H, C, BS, B, M, row, causal, max_query_len, run_length,
        multiprocessors(q_latent.device), scales_of(q_scale),
    )  # fmt: skip
    outputs = merge.make_outputs(q_latent, C, schedule.merge, out_dtype(q_latent))
    if T == 0:
        return outputs.out, outputs.lse
    table = inner_contiguous(block_table)
    q_token, q_head, _ = q_latent.stride()
    if q_scale is not None:
        wide, rope = (
            boxes(cache.data_ptr(), N * BS, W // values, row, kind, min(BS, 64), columns)
            for columns in (_paged_e4m3.SPAN_WORDS.value, _paged_e4m3.ROPE_WORDS.value)
        )
        schedule.launch(
            schedule.grid,
            Piece(q_latent, 0, torch.int32),
            q_scale.contiguous(),
            wide,
            rope,
            kv_scale,
            query_start_loc.contiguous(),
            seq_lens.contiguous(),
            table,
            *outputs,
            B,
            T,
            schedule.unit,
            scale * LOG2E,
            q_token // values,
            q_head // values,
            table.stride(0),
            N * BS,
            schedule.merge.rows,
        )
        merge.merge_parts(schedule.merge, outputs)
        return outputs.out, outputs.lse
    if schedule.tile.decoded:
        words = [Piece(cache, 0, kind)] * 2
    else:
        words = [
            boxes(cache.data_ptr(), N * BS, W // values, row, kind, min(BS, 64), width)
            for width in ((0,) if schedule.tile is FEW_FP8 else (wide_columns(BS), 0))
        ]
    schedule.launch(
        schedule.grid,
        q_latent,
        *words,
        kv_scale,
        query_start_loc.contiguous(),
        seq_lens.contiguous(),
        table,
        *outputs,
        B,
        T,
        schedule.unit,
        scale * LOG2E,
        q_token,
        q_head,
        page,
        table.stride(0),
        N * BS,
        schedule.merge.rows,
    )
    merge.merge_parts(schedule.merge, outputs)
    return outputs.out, outputs.lse


@lru_cache(maxsize=1024)
def boxes(
    address: int, rows: int, columns: int, stride: int, dtype: torch.dtype, box: int, width: int = 0
) -> TensorDescriptor:
    """All rows of a cache, one behind the other, for bulk copies of `box` of them, of `width`
    columns for e4m3 queries."""
    width, layout = box_of(dtype, width)
    base = Address(address, dtype)
    return TensorDescriptor(base, [rows, columns], [stride, 1], [box, width], layout)


def wide_columns(BS: int) -> int:
    """Of a bulk copy of a half: parts of pages are rows of a tile that are not contiguous."""
    return _many_heads.HALF.value if BS % 64 == 0 else _paged.BOX_COLUMNS.value


def box_of(dtype: torch.dtype, width: int = 0) -> tuple[int, Any]:
    """Columns, and layout in shared memory: one swizzle span, of 128 bytes or of 64."""
    if dtype == torch.int32 and width == _paged_e4m3.SPAN_WORDS.value:
        return width, _paged_e4m3.WORDS.value
    if dtype != torch.int32:
        return width or _paged.BOX_COLUMNS.value, _many_heads.TILE.value
    if width:
        return width, _paged_e4m3.NARROW_WORDS.value
    return _paged_few.SPAN_WORDS.value, _paged_few.RAW.value
