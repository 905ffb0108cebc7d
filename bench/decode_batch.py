"""Batches of dense decode for bench.latent, including batches as vLLM 0.32 passes them.

vLLM allocates the pages of all layers as one tensor. By default (layout LBNHC) the pages of a layer
are contiguous. With blocks outermost (BLNHC, selected by VLLM_KV_CACHE_LAYOUT; for MLA the same as
BLHNC, which vLLM's sparse indexer needs), the layers' pages alternate, and each cache is strided.
Block 0 is never given to a request. A block table has columns for max_model_len tokens; those
beyond a request's own blocks hold stale values of earlier steps.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

D, C = 576, 512  # columns of a cached row, and those that are values
NOPE = 128  # columns of a query head before its rope columns
MAX_MODEL_LEN = 33792
TABLE_TOKENS = 128  # vLLM rounds the width of a block table up to a multiple of this many tokens
LAYERS = (4, 61)  # the minimum, and DeepSeek-V3's number
COLD = 1 << 28  # bytes of all layers together that evict everything from an L2 cache
UNEVEN = "uneven"  # 64 requests of 1 to 32768 keys, the same in every run
LOG_UNIFORM = "log"  # as in "64xlog": 64 requests of 1024 to 32768 keys, the same in every run
ANY = "any"  # as in "64xany": 64 requests of 1 to 32768 keys, log-uniform, the same in every run
ONE_LONG = "100k+60"  # one request of 100,000 keys among 60 short ones


class DecodeBatch(NamedTuple):
    """One step: every request has `new` query tokens, which are the last of its keys."""

    q: Tensor  # [B * new, H, D]
    layers: tuple[Tensor, ...]  # caches [N, BS, W], equal in content
    table: Tensor  # [B, M] i32
    seq_lens: Tensor  # [B] i32
    start_loc: Tensor  # [B + 1] i32
    lens: list[int]  # keys of each request, including the new ones
    new: int
    halves: tuple[Tensor, Tensor]  # q[..., :C] and q[..., C:], as an engine passes them

    @property
    def max_model_len(self) -> int:
        """Keys that a row of the table can hold."""
        return self.table.shape[1] * self.layers[0].shape[1]


def decode_batch(
    halves: tuple[Tensor, Tensor],
    layers: tuple[Tensor, ...],
    table: Tensor,
    lens: list[int],
    new: int,
) -> DecodeBatch:
    int32: dict[str, Any] = {"device": table.device, "dtype": torch.int32}
    seq_lens = torch.tensor(lens, **int32)
    start_loc = torch.arange(len(lens) + 1, **int32) * new
    q = torch.cat(halves, -1)
    return DecodeBatch(q, layers, table, seq_lens, start_loc, lens, new, halves)


def lengths(keys: str) -> list[int]:
    """ "64x4096" is 64 requests of 4096 keys."""
    seeded = random.Random(1)
    if keys == UNEVEN:
        return [seeded.randint(1, 32768) for _ in range(64)]
    if keys == ONE_LONG:
        lens = [seeded.randint(50, 600) for _ in range(60)]
        return [*lens[:20], 100_000, *lens[20:]]
    B, S = keys.split("x")
    if S == ANY:
        return [round(2 ** seeded.uniform(0, 15)) for _ in range(int(B))]
    if S == LOG_UNIFORM:
        return [round(2 ** seeded.uniform(10, 15)) for _ in range(int(B))]
    return [int(S)] * int(B)


def table_width(BS: int, max_model_len: int = MAX_MODEL_LEN) -> int:
    """Columns of vLLM's block tables."""
    step = TABLE_TOKENS // math.gcd(TABLE_TOKENS, BS)
    return math.ceil(max_model_len / BS / step) * step


def vllm_layers(N: int, BS: int, num_layers: int, layout: str, device: str) -> tuple[Tensor, ...]:
    """Each layer's view of the one allocation, [N, BS, D]."""
    dim = {"LBNHC": 0, "BLNHC": 1}[layout]
    outer = [N]
    outer.insert(dim, num_layers)
    pool = torch.empty(*outer, BS, D, dtype=torch.bfloat16, device=device)
    first, *others = pool.unbind(dim)
    first.normal_(std=1 / 3)
    for layer in others:
        layer.copy_(first)
    return first, *others


def vllm_table(
    lens: list[int], N: int, BS: int, device: str, max_model_len: int = MAX_MODEL_LEN
) -> Tensor:
    """Blocks of each request, in any order, then stale ids."""
    columns = table_width(BS, max_model_len)
    table = torch.randint(1, N, (len(lens), columns), device=device, dtype=torch.int32)
    blocks = [-(-S // BS) for S in lens]
    free = 1 + torch.randperm(N - 1, device=device, dtype=torch.int32)
    for row, own in zip(table, free[: sum(blocks)].split(blocks), strict=True):
        row[: len(own)] = own
    return table


def vllm_batch(
    keys: str, H: int, new: int, BS: int, layout: str = "LBNHC", device: str = "cuda"
) -> DecodeBatch:
    """A step as vLLM passes it, with enough layers that their rows do not fit in an L2 cache."""
    lens = [max(S, new) for S in lengths(keys)]
    used = sum(-(-S // BS) for S in lens)
    N = 1 + used + used // 4  # the null block, and blocks of other requests
    fewest, most = LAYERS
    num_layers = min(max(-(-COLD // (used * BS * D * 2)), fewest), most)
    T = len(lens) * new
    latent, heads = (
        (torch.randn(T, H, width, device=device) / 3).bfloat16() for width in (C, NOPE + D - C)
    )
    halves = latent, heads[..., NOPE:]  # the rope columns stay where q_b_proj has written them
    layers = vllm_layers(N, BS, num_layers, layout, device)
    table = vllm_table(lens, N, BS, device, max(MAX_MODEL_LEN, *lens))
    return decode_batch(halves, layers, table, lens, new)
