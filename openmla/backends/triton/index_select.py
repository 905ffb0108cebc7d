"""index_select, Triton: keys selected while they are scored, or after.

If a prompt's rows are long and its tokens fill the machine, one fused kernel does both
(_choose.py). If not, or if all scores fit in little memory, keys are spread over programs instead:
index_logits and index_topk, for one chunk of queries after another.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import index_logits
from openmla.backends.triton._build import capability_of, cdiv, nearest_target
from openmla.backends.triton._choose import _index_select_kernel
from openmla.backends.triton._index_tiles import (
    FP8,
    PagedInputs,
    Shape,
    keys_aligned,
    paged_arguments,
    paged_constants,
    paged_shape,
    programs_per_multiprocessor,
    stored_types,
    why_not_index,
)
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.backends.triton._topk import SPAN
from openmla.backends.triton._topk_launch import launch_topk
from openmla.backends.triton._versions import JOINS_BRANCHES
from openmla.hardware import multiprocessors

SCORE_BYTES = 64 << 20  # of a chunk of queries, where scores are written to memory
CAPACITY = 4096  # keys kept of a token, at least twice K; half as many are scored in between
COLUMNS_SM100 = 128  # tokens times heads
TOKENS = 4  # of a program, at most: what is kept of them goes through registers together
# Keys, in multiples of K, from which to fuse. H200: 1 to 5 % slower at 32, 2 % faster at 64.
MIN_KEYS_OVER_K = 48
MIN_UTILISATION = 0.8  # of the resident programs, averaged over waves


def why_not(problem: Problem) -> str | None:
    return why_not_index(problem)


def run(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    *,
    format: str,
    num_keys: int,
    K: int,
    sorted: bool,
) -> tuple[Tensor, Tensor]:
    T, HI, DI = q_idx.shape
    positions = row_lens.new_empty((T, K))
    lens = torch.empty_like(row_lens)
    if T == 0:
        return positions, lens
    capability = capability_of(q_idx.device)
    shape = paged_shape(q_idx.dtype, format, HI, DI, capability)
    tokens = cdiv(T, max(block_table.shape[0], 1))
    sizes = shape, format, cache.shape[1], tokens, capability, CAPACITY
    aligned = keys_aligned(cache, format, DI)
    constants, *_, tile = SPEC.fix(*sizes, aligned=aligned)
    resident = programs_per_multiprocessor(tile) * max(multiprocessors(q_idx.device), 1)
    tiles = cdiv(T, constants["BLOCK_Q"])
    inputs = PagedInputs(q_idx, w_idx, cache, block_table, query_start_loc, row_lens)
    if not is_fused(T, num_keys, K, tiles, resident):
        select_in_chunks(inputs, positions, lens, format=format, num_keys=num_keys)
        return positions, lens
    programs = min(tiles, resident)
    rows = (programs, constants["BLOCK_Q"])
    scores = w_idx.new_empty((*rows, constants["CHUNK"]), dtype=torch.float32)
    kept = row_lens.new_empty((*rows, 2, constants["CAPACITY"] + SPAN.value))
    tensors, strides = paged_arguments(inputs, shape)
    SPEC.launch(*sizes, aligned=aligned)(
        (programs,),
        positions,
        lens,
        scores,
        kept,
        *tensors,
        T,
        block_table.shape[0],
        cache.shape[0],
        K,
        *strides,
    )
    return positions, lens


def is_fused(T: int, num_keys: int, K: int, tiles: int, resident: int) -> bool:
    """Whether to select while scoring: scores would take much memory, rows are so long that the
    first keys, most of which are kept and soon dropped, matter little, and the last wave is nearly
    full."""
    if 4 * T * num_keys <= SCORE_BYTES or num_keys < MIN_KEYS_OVER_K * K or CAPACITY < 2 * K:
        return False
    return tiles >= MIN_UTILISATION * resident * cdiv(tiles, resident)


def fix(
    shape: Shape, format: str, BS: int, tokens: int, capability: int, capacity: int, *,
    aligned: bool,
) -> Fixed:  # fmt: skip
    most, target = TOKENS, nearest_target(capability)
    if target == 100:  # 256 columns spill there beside what is kept of four tokens
        most = max(min(most, COLUMNS_SM100 // shape.HI), 1)
    config, constants = paged_constants(
        shape, format, BS, min(tokens, most), capability, aligned=aligned
    )
    if JOINS_BRANCHES and target in (80, 86, 89):  # else up to 92 bytes are spilled
        if constants["BLOCK_Q"] == TOKENS:
            config = config._replace(num_warps=8)
        else:
            constants["STAGES"] = 1
    del constants["FILL"]
    constants["CAPACITY"] = capacity
    constants["CHUNK"] = capacity // 2  # fits beside K
    return Fixed(constants, config.num_warps, constants["STAGES"], tile=config)


def select_in_chunks(
    inputs: PagedInputs, positions: Tensor, lens: Tensor, *, format: str, num_keys: int
) -> None:
    """Scores of a chunk of queries, then their best keys; chunks of about equal size."""
    q_idx, w_idx, cache, block_table, query_start_loc, row_lens = inputs
    T = q_idx.shape[0]
    starts = torch.zeros_like(row_lens)
    chunks = cdiv(T, max(SCORE_BYTES // (4 * max(num_keys, 1)), 1))
    step = max(cdiv(T, max(chunks, 1)), 1)
    for i in range(0, T, step):
        chunk = slice(i, min(i + step, T))
        bounds = query_start_loc
        if step < T:
            bounds = query_start_loc.clamp(chunk.start, chunk.stop) - chunk.start
        logits = index_logits.run(
            q_idx[chunk],
            w_idx[chunk],
            cache,
            block_table,
            bounds,
            row_lens[chunk],
            format=format,
            num_keys=num_keys,
        )
        launch_topk(logits, starts[chunk], row_lens[chunk], positions[chunk], lens[chunk])
        del logits  # before the next ones are allocated


def cases(capability: int) -> Iterator[Case]:
    """The models' heads; no kernel specializes on K."""
    for dtype, format, HI in (
        (FP8, "index_fp8", 64), (FP8, "index_fp8", 32), (torch.bfloat16, "index_bf16", 64),
    ):  # fmt: skip
        shape = paged_shape(dtype, format, HI, 128, capability)
        yield case(
            f"select-{format}-{str(dtype)[6:]}-HI{HI}-DI128-BS64", shape, format, 64, 4096,
            capability, CAPACITY, aligned=True, types=stored_types(dtype, format, shape),
        )  # fmt: skip


SPEC = KernelSpec(
    _index_select_kernel,
    fix,
    types={
        "*fp32": "scores w",
        "*i32": "kept topk_positions topk_lens table query_start_loc row_lens",
    },
    cases=cases,
    fp_fusion=True,
)
SPECS = (SPEC,)
