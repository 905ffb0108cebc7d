"""Launching the selection of top-k positions; index_topk, and index_select after scoring."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.backends.triton._build import GFX942, assembly, capability_of, nearest_target
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.backends.triton._topk import SPAN, _index_topk_kernel
from openmla.backends.triton._versions import JOINS_BRANCHES, RELEASE
from openmla.hardware import multiprocessors

SAMPLE = 4096  # scores of a row that the first pivots are taken from


class Config(NamedTuple):
    block: int  # the most candidates; none are kept if that is less than 2 K
    num_warps: int
    programs: int  # per multiprocessor
    maxnreg: int | None


# Few rows take the most warps. Many take four programs per multiprocessor, so that some read while
# others search. H200: 8 warps for few rows, 2 or 3 programs for many were slower.
FEW = Config(4096, 16, 1, None)
MANY = Config(4096, 8, 4, 64)
if JOINS_BRANCHES:  # with 64 registers it would spill
    MANY = Config(4096, 8, 3, 80)
MANY_ELSEWHERE = MANY  # than on SM90
if JOINS_BRANCHES:
    MANY_ELSEWHERE = Config(4096, 8, 2, 128)
elif RELEASE == (3, 7):  # 52 and 60 bytes of spill on SM100 and SM120 with 64 registers
    MANY_ELSEWHERE = Config(4096, 8, 3, 80)
LARGE_K = Config(8192, 16, 1, None)
AMD = Config(4096, 8, 2, None)
AMD_LARGE_K = Config(8192, 8, 1, None)  # 16 warps of 64 lanes leave 128 registers, and spill


def config_of(T: int, K: int, multiprocessors: int, capability: int) -> Config:
    large = FEW.block < 2 * K
    if capability == GFX942:
        return AMD_LARGE_K if large else AMD
    if large:
        return LARGE_K
    if multiprocessors >= T:
        return FEW
    return MANY if nearest_target(capability) == 90 else MANY_ELSEWHERE


def chunks_of(config: Config) -> int:
    """What a row is cut into: a chunk per warp, or two where candidates are too many for that:
    each chunk's part of them takes at most SPAN (see even_out())."""
    return max(config.num_warps, config.block // SPAN.value)


def launch_topk(
    logits: Tensor, row_starts: Tensor, row_lens: Tensor, positions: Tensor, lens: Tensor
) -> None:
    """Write positions [T, K] and lens [T], both contiguous."""
    (T, S), K = logits.shape, positions.shape[1]
    if T == 0:
        return
    sms = multiprocessors(logits.device)
    config = config_of(T, K, sms, capability_of(logits.device))
    fits = config.block >= 2 * K
    size = config.block if fits else 0
    programs = min(T, config.programs * sms)
    width = config.block + SPAN.value if size < S else 0
    candidates = logits.new_empty((programs, chunks_of(config), width), dtype=torch.int64)
    aligned = logits.data_ptr() % 16 == 0
    SPEC.launch(config, aligned=aligned, fits=fits, asm=assembly())(
        (programs,),
        logits,
        row_starts.contiguous(),
        row_lens.contiguous(),
        positions,
        lens,
        candidates,
        logits.stride(0),
        T,
        K,
        isqrt(K * config.block) if fits else K,
    )


def fix(config: Config, *, aligned: bool, fits: bool, asm: bool) -> Fixed:
    """Loads of an aligned tensor start on multiples of four scores, wherever a row starts."""
    constants = {
        "ASM": asm,
        "ALIGN": 4 if aligned else 1,
        "BLOCK": config.block,
        "SAMPLE": SAMPLE,
        "CHUNKS": chunks_of(config),
        "FITS": fits,
    }
    options = {"maxnreg": config.maxnreg} if asm else {}
    return Fixed(constants, config.num_warps, options=options)


def cases(capability: int) -> Iterator[Case]:
    """Few rows, many rows and a large K; no kernel specializes on K or S."""
    shapes = ((1, 2048), (1000, 2048), (1000, 4096))
    for config in dict.fromkeys(config_of(T, K, 100, capability) for T, K in shapes):
        name = f"topk-fp32-{config.block}-{config.num_warps}"
        yield case(name, config, aligned=True, fits=True, asm=assembly())


SPEC = KernelSpec(
    _index_topk_kernel,
    fix,
    types={
        "*fp32": "logits",
        "*i64": "candidates",
        "*i32": "row_starts row_lens topk_positions topk_lens",
    },
    cases=cases,
    fp_fusion=True,
)
