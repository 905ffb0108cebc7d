"""Context gathered from all ranks instead of attended to in place, and which of the two is cheaper.

Ranks exchange the latents of a chunk of context, in whole rounds so that each brings as many rows,
put them in order and expand them for their own heads, as one process does with its cache. In place,
queries and partial outputs are exchanged instead: much less where contexts are long and new tokens
few, more where it is the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.attention import AbsorbedWeights
from openmla.attention.eight_bits import queries_of
from openmla.attention.expanded import attend_rows
from openmla.cache import PagedCache
from openmla.config import MLAConfig
from openmla.ops import cache_gather, merge_states
from openmla.ops.mha_ragged import cost as mha_cost
from openmla.ops.mqa_paged import cost as mqa_cost
from openmla.parallel.collectives import all_gather
from openmla.parallel.layout import Shard
from openmla.parallel.merge import sent_bytes
from openmla.parallel.ranks import Ranks
from openmla.parallel.workspace import Shape, power_of_two
from openmla.plan import Batch, ContextChunk, Plan
from openmla.plan.dense import plan_prefill
from openmla.plan.rows import cumulative, integers
from openmla.plan.upload import upload

# Flops a device does in the time a byte takes to another: an H200's 760 TFLOP/s over NVLink's 450
# GB/s; on CPUs, a core's share over a socket. Only the order matters.
LINK_BALANCE = {"cuda": 1700, "cpu": 200}
CONTEXTS = ("auto", "place", "gather")


class GatheredChunk(NamedTuple):
    """A chunk of context: what it is to attention, and what of it each rank brings."""

    chunk: ContextChunk  # all its keys, in order
    starts: Tensor  # [requests] i32, in this rank's keys
    key_start_loc: Tensor  # [requests + 1] i32, of the rows that each rank brings
    num_rows: int
    order: Tensor  # [num_keys] i64: where the ranks' rows, one rank behind another, have each key


class GatheredContext(NamedTuple):
    """The contexts of some of the expanded tokens, gathered in the workspace of the ranks."""

    chunks: tuple[GatheredChunk, ...]
    sent_rows: int  # by each rank, in all chunks

    def sent_bytes(self, config: MLAConfig, ranks: Ranks, dtype: torch.dtype) -> int:
        return (ranks.shard.size - 1) * self.sent_rows * config.latent_dim * dtype.itemsize


def plan_gathered(
    batch: Batch,
    contexts: Sequence[int],
    latent: PagedCache,
    ranks: Ranks,
    rows_at_once: int,
    new: Plan,  # of the new rows
) -> GatheredContext:
    """`batch` has the expanded requests alone; chunks end where rounds over all ranks do. Memory is
    reserved for chunks of rows_at_once keys, however few keys this step has."""
    shard, device = ranks.shard, latent.data.device
    wide = latent.block_size * shard.size
    rows_at_once = max(rows_at_once, wide)
    whole = Batch(batch.query_lens, contexts, batch.block_table, causal=False)
    starts = list(accumulate(batch.query_lens, initial=0))
    everyone = range(len(contexts))
    planned = plan_prefill(whole, everyone, starts, wide, rows_at_once)
    chunks = tuple(_gathered(chunk, shard) for chunk in planned.chunks)
    sent = sum(chunk.num_rows for chunk in chunks)
    # each request's last round may be short; requests are counted in powers of two
    brought = rows_at_once // shard.size + shard.interleave * power_of_two(len(contexts))
    dtype = new.problem("cache_write").dtype
    shapes = gather_shapes(brought, rows_at_once, new, shard.size)
    ranks.workspace.reserve(device, dtype, *shapes)
    moved = upload(chunks, device)  # as plain tuples, where there is something to move
    return GatheredContext(tuple(GatheredChunk(*chunk) for chunk in moved), sent)


def _gathered(chunk: ContextChunk, shard: Shard) -> GatheredChunk:
    lens = chunk.key_start_loc.diff().tolist()
    brought = [shard.most_local(length) for length in lens]
    total, places, first = sum(brought), [], 0
    for length, rows in zip(lens, brought, strict=True):
        keys = torch.arange(length)  # whole rounds come before the chunk's first
        places.append(shard.owners(keys) * total + first + shard.local_indices(keys))
        first += rows
    starts = [start // shard.size for start in chunk.starts.tolist()]
    return GatheredChunk(chunk, integers(starts), cumulative(brought), total, torch.cat(places))


def gather_shapes(num_rows: int, num_keys: int, new: Plan, size: int) -> tuple[Shape, ...]:
    """A chunk's rows as this rank brings them, as all ranks' come, and in order: these are in the
    plan's own workspace if it has one."""
    in_order = num_keys if new.workspace is None else 0
    return tuple((n, new.config.latent_dim) for n in (num_rows, size * num_rows, in_order))


def attend_gathered(
    q: Tensor,  # [n, H, P + R], the expanded tokens
    out: Tensor,  # [n, H, V], merged into
    lse: Tensor,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,  # of the new rows
    gathered: GatheredContext,
    ranks: Ranks,
) -> None:
    """Context chunk by chunk, everyone's rows, this rank's heads."""
    queries, size = queries_of(q, plan), ranks.shard.size
    for each in gathered.chunks:
        num_keys = each.chunk.num_keys
        shapes = gather_shapes(each.num_rows, num_keys, plan, size)
        rows, every, keys = ranks.workspace.split(q.device, q.dtype, *shapes)
        if plan.workspace is not None:
            keys = plan.workspace.rows[:num_keys]
        cache_gather(
            rows,
            latent.data,
            latent.kv_scale,
            each.chunk.block_table,
            each.starts,
            each.key_start_loc,
            format=latent.format,
            backend=plan.requested["cache_gather"],
        )
        all_gather(rows, ranks.group, out=every)
        torch.index_select(every, 0, each.order, out=keys)
        mine = each.chunk.rows
        part = attend_rows(queries.of(mine), keys, absorbed, plan, each.chunk, causal=False)
        merge_states(out[mine], lse[mine], *part, backend=plan.requested["merge_states"])


def gathering_is_cheaper(
    query_lens: Sequence[int],
    contexts: Sequence[int],
    config: MLAConfig,
    latent: PagedCache,
    ranks: Ranks,
    dtype: torch.dtype,
) -> bool:
    """By flops and bytes sent, of what all ranks know."""
    size, H = ranks.shard.size, config.num_heads
    balance = LINK_BALANCE.get(latent.data.device.type, LINK_BALANCE["cpu"])
    C, D, V, E = config.kv_lora_rank, config.latent_dim, config.v_head_dim, config.qk_head_dim
    tokens, keys, e = sum(query_lens), sum(contexts), dtype.itemsize
    local = [ranks.shard.most_local(length) for length in contexts]
    expansion = 2 * C * H * (config.qk_nope_head_dim + V)

    def expanded(lens: Sequence[int]) -> float:
        attention = mha_cost(query_lens, lens, H=H, E=E, V=V, itemsize=e, causal=False)
        return float(attention.flops + expansion * sum(lens))

    gathered = expanded(contexts) + balance * (size - 1) / size * keys * D * e
    if ranks.heads == "all":
        sent = sent_bytes("exchange", "all", (tokens, H, V), dtype, size)
        return gathered < expanded(local) + balance * sent
    heads = H * size
    attention = mqa_cost(
        query_lens, local, H=heads, D=D, C=C, itemsize=e, format=latent.format, causal=False
    )
    sent = sent_bytes("exchange", "own", (tokens, heads, C), dtype, size)
    sent += (size - 1) * tokens * H * D * e
    return gathered < attention.flops + balance * sent
