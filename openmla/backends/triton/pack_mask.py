"""pack_mask, Triton: pack each query's selection into one bit per key.

Computes  bit j of mask[t] set if some topk_positions[t, k] == key_starts[t] + j, 0 <= j <
          key_lens[t] (specification: ops/pack_mask.py)
Grid      (T,): one program owns one row of the mask; it clears the words, then sets their bits.
Reads     topk_positions [T, K], key_starts [T], key_lens [T]
Writes    mask [T, num_words]
Limits    see why_not()

Bits are set by atomics, whose order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT, next_power_of_2
from openmla.backends.triton._spec import Fixed, KernelSpec, case

POSITIONS = 2048  # positions per tile, at most: 8 per thread of 8 warps
WORDS = 1024  # words cleared at a time

LAUNCHES = 1


@triton.jit(
    do_not_specialize=["K", "num_words"],
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _pack_mask_kernel(
    topk_positions, key_starts, key_lens, mask, row_stride, K, num_words,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    words = mask + t * num_words
    for first in range(0, num_words, BLOCK_W):
        w = first + tl.arange(0, BLOCK_W)
        tl.store(words + w, tl.zeros([BLOCK_W], tl.int32), mask=w < num_words)
    tl.debug_barrier()  # clear every word before setting bits in it
    start = tl.load(key_starts + t)
    n = tl.load(key_lens + t)
    row = topk_positions + t * row_stride
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        p = tl.load(row + k, mask=k < K, other=-1)
        j = p - start  # negative for a key before the range, even if it wraps around
        inside = (p >= 0) & (j >= 0) & (j < n) & ((j >> 5) < num_words)
        bit = (tl.full([BLOCK_K], 1, tl.uint32) << (j & 31).to(tl.uint32)).to(
            tl.int32, bitcast=True
        )
        tl.atomic_or(words + (j >> 5), bit, mask=inside, sem="relaxed")


def why_not(problem: Problem) -> str | None:
    return None


def run(topk_positions: Tensor, key_starts: Tensor, key_lens: Tensor, *, num_words: int) -> Tensor:
    T, K = topk_positions.shape
    mask = topk_positions.new_empty((T, num_words))
    if T * num_words > 0:
        SPEC.launch(K)(
            (T,),
            topk_positions,
            key_starts.contiguous(),
            key_lens.contiguous(),
            mask,
            topk_positions.stride(0),
            K,
            num_words,
        )
    return mask


def fix(K: int) -> Fixed:
    """Return constants that do not depend on the words per row: a longer context must not recompile
    the kernel."""
    block = min(next_power_of_2(max(K, 32)), POSITIONS)
    # 8 positions per thread, 256 per warp
    return Fixed({"BLOCK_K": block, "BLOCK_W": WORDS}, num_warps=min(max(block // 256, 1), 8))


SPEC = KernelSpec(
    _pack_mask_kernel,
    fix,
    types={"*i32": "topk_positions key_starts key_lens mask"},
    cases=lambda _: [case(f"pack-K{K}", K) for K in (2048, 512)],  # V3.2 and V4
    fp_fusion=True,
)
SPECS = (SPEC,)
