"""index_select, Triton: keys chosen while they are scored, or after.

Where a prompt's rows are long and its tokens fill the machine, one kernel does both (_choose.py).
Where they do not, or all scores take little room, columns are shared out instead: index_logits' and
index_topk's own kernels, some rows after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import cache_write, index_logits, index_topk
from openmla.backends.triton._build import TARGETS, Build, capability_of, cdiv
from openmla.backends.triton._choose import _index_select_kernel
from openmla.backends.triton._index import FP8, Config, Shape, stored_type
from openmla.backends.triton.index_topk import SPAN
from openmla.cache.format import get_format
from openmla.hardware import multiprocessors

SCORES = 64 << 20  # bytes held at once where scores are written down
ROOM = 4096  # keys kept of a token, twice K or more; half as many are scored between two looks
TOKENS = 4  # of a program, at most: what is kept of them passes through registers together
LONG = 48  # times K keys. H200: at 32 the other way is 1 to 5 % faster, at 64 this one 2 %
FP_FUSION = True
BUSY = 0.8  # share of the machine that tiles of tokens must keep busy


def why_not(problem: Problem) -> str | None:
    return index_logits.why_not(problem)


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
    shape = index_logits.paged_shape(q_idx.dtype, format, HI, DI, capability)
    layout = cache_write.layout_of(format, DI, cut=DI)
    aligned = cache_write.is_aligned(cache, layout)
    config, constants = constants_of(
        shape, format, cache.shape[1], cdiv(T, max(block_table.shape[0], 1)), capability,
        aligned=aligned,
    )  # fmt: skip
    slots = slots_of(config) * max(multiprocessors(q_idx.device), 1)
    tiles = cdiv(T, constants["BLOCK_Q"])
    tensors = (q_idx, w_idx, cache, block_table, query_start_loc, row_lens)
    if not suits(T, num_keys, K, tiles, slots):
        in_turns(*tensors, positions, lens, format=format, num_keys=num_keys)
        return positions, lens
    programs = min(tiles, slots)
    rows = (programs, constants["BLOCK_Q"])
    scores = w_idx.new_empty((*rows, constants["STRETCH"]), dtype=torch.float32)
    kept = row_lens.new_empty((*rows, 2, constants["ROOM"] + SPAN.value))
    inputs, strides = index_logits.arguments_of(*tensors, shape)
    _index_select_kernel[(programs,)](
        positions,
        lens,
        scores,
        kept,
        *inputs,
        T,
        block_table.shape[0],
        cache.shape[0],
        K,
        *strides,
        **constants,
        num_warps=config.num_warps,
        num_stages=constants["STAGES"],
        enable_fp_fusion=FP_FUSION,
    )
    return positions, lens


def suits(T: int, num_keys: int, K: int, tiles: int, slots: int) -> bool:
    """Whether to choose while scoring: there is much to write otherwise, rows are so long that the
    first keys, of which most are kept and soon dropped, are few, and nobody waits long for the last
    tiles."""
    if 4 * T * num_keys <= SCORES or num_keys < LONG * K or ROOM < 2 * K:
        return False
    return tiles >= BUSY * slots * cdiv(tiles, slots)


def slots_of(config: Config) -> int:
    """Programs a multiprocessor holds, or is given one after another."""
    return 2 if config.columns == 256 else 4


def constants_of(
    shape: Shape,
    format: str,
    BS: int,
    tokens: int,
    capability: int,
    *,
    aligned: bool,
) -> tuple[Config, dict[str, Any]]:
    config, constants = index_logits.constants_of(
        shape, format, BS, min(tokens, TOKENS), capability, aligned=aligned
    )
    del constants["FILL"]
    constants["ROOM"] = ROOM
    constants["STRETCH"] = ROOM // 2  # fits beside K
    return config, constants


def in_turns(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    positions: Tensor,
    lens: Tensor,
    *,
    format: str,
    num_keys: int,
) -> None:
    """Scores of some rows, then their best, then more rows: turns of about equal size."""
    T = q_idx.shape[0]
    starts = torch.zeros_like(row_lens)
    turns = cdiv(T, max(SCORES // (4 * max(num_keys, 1)), 1))
    step = max(cdiv(T, max(turns, 1)), 1)
    for i in range(0, T, step):
        turn = slice(i, min(i + step, T))
        bounds = query_start_loc
        if step < T:
            bounds = query_start_loc.clamp(turn.start, turn.stop) - turn.start
        logits = index_logits.run(
            q_idx[turn],
            w_idx[turn],
            cache,
            block_table,
            bounds,
            row_lens[turn],
            format=format,
            num_keys=num_keys,
        )
        index_topk.choose_rows(logits, starts[turn], row_lens[turn], positions[turn], lens[turn])
        del logits  # before the next turn's


def builds() -> Iterator[Build]:
    """The models' heads; nothing is compiled for K."""
    for capability in TARGETS:
        for HI in (64, 32):
            yield select_build(capability, FP8, "index_fp8", HI, 128, 64)
        yield select_build(capability, torch.bfloat16, "index_bf16", 64, 128, 64)


def select_build(
    capability: int, dtype: torch.dtype, format: str, HI: int, DI: int, BS: int
) -> Build:
    shape = index_logits.paged_shape(dtype, format, HI, DI, capability)
    config, constants = constants_of(shape, format, BS, 4096, capability, aligned=True)
    types = {
        "scores": "*fp32",
        "kept": "*i32",
        "q": "*" + stored_type(dtype, shape),
        "w": "*fp32",
        "cache": "*" + stored_type(get_format(format).dtype, shape),
        **dict.fromkeys(
            ("topk_positions", "topk_lens", "table", "query_start_loc", "row_lens"), "*i32"
        ),
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in _index_select_kernel.arg_names
    }
    return Build(
        f"select-{format}-{str(dtype)[6:]}-HI{HI}-DI{DI}-BS{BS}", _index_select_kernel,
        signature, constants, config.num_warps, constants["STAGES"], capability, FP_FUSION,
    )  # fmt: skip
