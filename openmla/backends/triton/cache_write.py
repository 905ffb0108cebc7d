"""cache_write, Triton: quantise rows to the cache's format and store them in their slots.

Computes  cache[slot // BS, slot % BS] = encode(concat(kv_c[i], k_pe[i])) for the i with a slot,
          byte for byte as cache/format.py encodes them (specification: ops/cache_write.py)
Grid      (T',): one program owns one row.
Reads     kv_c [T, C], k_pe [T, R], slot_mapping [T'], kv_scale []
Writes    cache [N, BS, W]; clamped [], if COUNTED and a value was cut off
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._cache_rows import (
    Layout,
    Target,
    Writing,
    is_aligned,
    layout_of,
    row_constants,
    row_warps,
    stored_type,
    why_not_rows,
    write_row,
)
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.cache.format import get_format

LAUNCHES = 1


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT)
def _cache_write_kernel(
    cache, kv_c, k_pe, slot_mapping, kv_scale, rope_ratio, clamped,
    page, row_stride, kv_c_stride, k_pe_stride, slot_stride, N,
    BS: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, APART: tl.constexpr, COUNTED: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    LAYOUT: tl.constexpr = Layout(FORMAT, MAIN, ROPE, GROUP, SCALES, EXACT)
    WRITING: tl.constexpr = Writing(BS, ALIGNED, ASM, APART, COUNTED, BLOCK_G, BLOCK_C, BLOCK_R)
    target = Target(cache, page, row_stride, kv_scale, rope_ratio, clamped)
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + i * slot_stride)
    if (slot >= 0) & (slot // BS < N):
        write_row(target, kv_c + i * kv_c_stride, k_pe + i * k_pe_stride, slot, C, LAYOUT, WRITING)


def why_not(problem: Problem) -> str | None:
    return why_not_rows(problem)


def run(
    cache: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor,
    rope_ratio: Tensor | None,
    clamped: Tensor | None,
    *,
    format: str,
) -> None:
    N, BS, _ = cache.shape
    C, R = kv_c.shape[1], k_pe.shape[1]
    if slot_mapping.shape[0] == 0 or C + R == 0:
        return
    layout = layout_of(format, C + R, cut=C)
    launch = SPEC.launch(
        layout, C, BS, aligned=is_aligned(cache, layout), apart=rope_ratio is not None,
        counted=clamped is not None,
    )  # fmt: skip
    launch(
        (slot_mapping.shape[0],),
        cache.view(torch.uint8) if format == "fp8" else cache,
        kv_c,
        k_pe,
        slot_mapping,
        kv_scale,
        kv_scale if rope_ratio is None else rope_ratio,
        kv_scale if clamped is None else clamped,
        cache.stride(0),
        cache.stride(1),
        kv_c.stride(0),
        k_pe.stride(0),
        slot_mapping.stride(0),
        N,
    )


def fix(layout: Layout, C: int, BS: int, *, aligned: bool, apart: bool, counted: bool) -> Fixed:
    constants = row_constants(layout, C, BS, aligned=aligned)
    return Fixed({**constants, "APART": apart, "COUNTED": counted}, row_warps(constants))


def cases(_: int) -> Iterator[Case]:
    """Every format, with bf16 rows of the models' widths."""
    for format, C, R in (
        ("bf16", 512, 64), ("fp8", 512, 64), ("fp8_ds_mla", 512, 64), ("fp8_ds_mla_exact", 512, 64),
        ("fp8_dsv4", 512, 0), ("index_fp8", 128, 0), ("index_fp8_exact", 128, 0),
    ):  # fmt: skip
        scaled = get_format(format).scaled
        yield case(
            f"write-{format}-C{C}-R{R}", layout_of(format, C + R, cut=C), C, 64, aligned=True,
            apart=scaled, counted=scaled, types={"cache": stored_type(format)},
        )  # fmt: skip


SPEC = KernelSpec(
    _cache_write_kernel,
    fix,
    types={"*bf16": "kv_c k_pe", "*i64": "slot_mapping clamped", "*fp32": "kv_scale rope_ratio"},
    cases=cases,
    fp_fusion=False,  # a row's bytes must not depend on how the compiler contracts
)
SPECS = (SPEC,)
