"""Groups over a cache that is sharded by position over ranks.

All ranks plan the same batch: its lengths, tables and slots are those of one process whose blocks
hold W times as many tokens (ranks/layout.py). Each rank's keys keep the order of positions, so a
token at position p sees the first local_len(p + 1) keys of a rank. Causality becomes a length per
token, and absorbed tokens become requests of their own. Expanded tokens attend to one another on
every rank. Their context is attended to in place, each rank over its own part, or it is gathered
from all ranks. Gathering sends more bytes for long contexts and few new tokens, and fewer bytes in
the opposite case. Tokens that select keys read them in place, or all keys are gathered and masked.

What decides which collectives run, and how often, is computed from what all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from openmla.cache import PagedCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.ops.mha_ragged import cost as mha_cost
from openmla.ops.mqa_paged import cost as mqa_cost
from openmla.plan.batch import Batch
from openmla.plan.expanded import expanded_group, masked_group
from openmla.plan.forms import gathered_bytes, link_balance, merged_bytes
from openmla.plan.groups import absorbed_group, absorbed_roles
from openmla.plan.rows import (
    cumulative,
    integers,
    num_rows,
    owners,
    pick,
    pick_rows,
    repeated,
    some,
)
from openmla.plan.types import Across, Brought, Expanded, Group, KeyChunk, Plan, remade
from openmla.plan.upload import upload
from openmla.plan.workspace import Workspace
from openmla.ranks import Ranks, Shard
from openmla.ranks.merge import choose_schedule, sent_bytes
from openmla.ranks.workspace import Shape, power_of_two


def token_batch(batch: Batch, requests: Sequence[int], shard: Shard) -> Batch:
    """Make each token of some requests a request of its own, over the keys it sees on this rank."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    seen = [
        length
        for n, S in zip(query_lens, seq_lens, strict=True)
        for length in range(S - n + 1, S + 1)
    ]
    table = pick(batch.block_table, requests)
    if set(query_lens) != {1}:
        (mine,) = upload((owners(query_lens),), table.device)
        table = table[mine]
    given: dict[str, Any] = {}
    if batch.device_seq_lens is not None:  # below the host's bound by as much as the true length is
        true = pick(batch.device_seq_lens, requests)
        hidden = repeated(seq_lens, query_lens) - integers(seen)
        mine, hidden = upload((owners(query_lens), hidden), true.device)
        given["device_seq_lens"] = shard.local_counts((true[mine] - hidden).clamp_min(0))
    return Batch([1] * len(seen), shard.local_lens(seen), table, causal=False, **given)


def absorbed_across(
    batch: Batch, requests: Sequence[int], starts: Sequence[int], shard: Shard
) -> Group:
    """A group of absorbed tokens that attend to all their keys, each rank to its own part."""
    own, rows = token_batch(batch, requests, shard), pick_rows(requests, starts)
    tokens = range(own.num_tokens)
    group = absorbed_group(
        absorbed_roles(own, tokens), slice(0, len(tokens)), 1, tokens, causal=False
    )
    return Group("absorbed", rows, None, requests=requests, across=Across(rows, (group,)))


def new_group(batch: Batch, requests: Sequence[int], starts: Sequence[int], BS: int) -> Group:
    """New rows attend to one another. No key is read from the cache, so the table is empty."""
    query_lens = some(batch.query_lens, requests)
    table = torch.zeros((len(requests), -(-max(query_lens) // BS)), dtype=torch.int32)
    slots = torch.full((sum(query_lens),), -1, dtype=torch.int64)
    alone = Batch(query_lens, query_lens, table, slots)
    group = expanded_group(alone, range(len(requests)), _starts(query_lens), BS, BS)
    return remade(group, {"rows": pick_rows(requests, starts), "requests": requests})


def context_batch(batch: Batch, requests: Sequence[int], shard: Shard) -> Batch:
    """The part of each request's earlier keys on this rank; every new token sees all of it."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    lens = [shard.local_len(S - n) for n, S in zip(query_lens, seq_lens, strict=True)]
    return Batch(query_lens, lens, pick(batch.block_table, requests), causal=False)


def with_context(
    group: Group,
    later: Sequence[int],  # those of the group's requests that have context
    starts: Sequence[int],
    query_lens: Sequence[int],  # of the group's requests
    groups: tuple[Group, ...],
) -> Group:
    """An expanded group whose context is attended to in place, by `groups` of context_batch()."""
    inside = pick_rows([list(group.requests).index(b) for b in later], _starts(query_lens))
    return remade(group, {"across": Across(pick_rows(later, starts), groups, inside)})


def with_gathered(
    group: Group,
    batch: Batch,
    latent: PagedCache,
    ranks: Ranks,
    rows_at_once: int,
    *,
    quantized: bool,
    fixed: bool,
) -> Group:
    """An expanded group whose context is gathered from all ranks. Chunks end at a whole round over
    the ranks."""
    shard, wide = ranks.shard, latent.block_size * ranks.shard.size
    query_lens, contexts = (
        some(batch.query_lens, group.requests),
        contexts_of(batch, group.requests),
    )
    table = pick(batch.block_table, group.requests)
    whole = Batch(query_lens, contexts, table, causal=False)
    planned = expanded_group(
        whole, range(len(contexts)), _starts(query_lens), wide, max(rows_at_once, wide),
        quantized=quantized, fixed=fixed,
    ).part  # fmt: skip
    assert isinstance(planned, Expanded) and isinstance(group.part, Expanded)
    chunks = _all_brought(planned, shard)
    changes = {"route": "chunked", "chunks": chunks, "alone": planned.alone}
    return remade(group, {"part": remade(group.part, changes)})


def masked_across(
    batch: Batch,
    requests: Sequence[int],
    starts: Sequence[int],
    BS: int,
    ranks: Ranks,
    rows_at_once: int,
    *,
    first: int,
    fixed: bool,
) -> Group:
    """masked_group() over keys that are gathered from all ranks."""
    wide = BS * ranks.shard.size
    most = max(rows_at_once, wide)
    group = masked_group(batch, requests, starts, wide, most, first=first, fixed=fixed)
    assert isinstance(group.part, Expanded)
    part = remade(group.part, {"chunks": _all_brought(group.part, ranks.shard)})
    return remade(group, {"part": part})


def _all_brought(part: Expanded, shard: Shard) -> tuple[KeyChunk, ...]:
    return tuple(remade(chunk, {"brought": _brought(chunk, shard)}) for chunk in part.chunks)


def _brought(chunk: KeyChunk, shard: Shard) -> Brought:
    lens = chunk.key_start_loc.diff().tolist()
    brought = [shard.most_local(length) for length in lens]
    total, places, first = sum(brought), [], 0
    for length, rows in zip(lens, brought, strict=True):
        keys = torch.arange(length)  # a chunk begins at a whole round
        places.append(shard.owners(keys) * total + first + shard.local_indices(keys))
        first += rows
    starts = [start // shard.size for start in chunk.starts.tolist()]
    return Brought(integers(starts), cumulative(brought), total, torch.cat(places))


def reserve_brought(
    config: MLAConfig,
    ranks: Ranks,
    num_requests: int,
    rows_at_once: int,
    workspace: Workspace | None,
    device: torch.device,
    dtype: torch.dtype,
    BS: int,
) -> None:
    """Reserve memory for chunks of rows_at_once keys, even if this step has fewer."""
    shard = ranks.shard
    rows_at_once = max(rows_at_once, BS * shard.size)
    # each request's last round may be short; requests are counted in powers of two
    brought = rows_at_once // shard.size + shard.interleave * power_of_two(num_requests)
    shapes = brought_shapes(brought, rows_at_once, config, workspace, shard.size)
    ranks.workspace.reserve(device, dtype, *shapes)


def brought_shapes(
    brought: int, num_keys: int, config: MLAConfig, workspace: Workspace | None, size: int
) -> tuple[Shape, ...]:
    """Shapes of a chunk's rows: from this rank, from all ranks, and sorted by position. The sorted
    rows go into the plan's workspace if it has one."""
    in_order = num_keys if workspace is None else 0
    return tuple((n, config.latent_dim) for n in (brought, size * brought, in_order))


def contexts_of(batch: Batch, requests: Sequence[int]) -> list[int]:
    return [batch.seq_lens[b] - batch.query_lens[b] for b in requests]


def _starts(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def has_room_to_gather(workspace: Workspace | None, context: str, wide: int) -> bool:
    """Whether a workspace has room for a block of every rank; context="gather" raises if not."""
    fits = workspace is None or workspace.num_rows >= wide
    if context == "gather" and not fits:
        assert workspace is not None
        raise ConfigError(
            f"parallel: workspace must have at least {wide} rows, 1 block of every rank, to gather "
            f"context, got {workspace.num_rows}. Call warmup() with a larger workspace_tokens."
        )
    return fits


def gathering_is_cheaper(
    query_lens: Sequence[int],
    contexts: Sequence[int],
    config: MLAConfig,
    latent: PagedCache,
    ranks: Ranks,
    dtype: torch.dtype,
) -> bool:
    """Whether gathering is cheaper, by FLOPs and bytes sent, from what all ranks know."""
    size, H, e = ranks.shard.size, config.num_heads, dtype.itemsize
    link = link_balance(latent.data.device.type)
    C, D, V, E = config.kv_lora_rank, config.latent_dim, config.v_head_dim, config.qk_head_dim
    local = [ranks.shard.most_local(length) for length in contexts]
    expansion = 2 * C * H * (config.qk_nope_head_dim + V)

    def expanded(lens: Sequence[int]) -> float:
        attention = mha_cost(query_lens, lens, H=H, E=E, V=V, itemsize=e, causal=False)
        return float(attention.flops + expansion * sum(lens))

    gathered = expanded(contexts) + link * gathered_bytes(config, ranks, sum(contexts), dtype)
    sent = link * merged_bytes(config, ranks, sum(query_lens), dtype)
    if ranks.heads == "all":
        return gathered < expanded(local) + sent
    attention = mqa_cost(
        query_lens, local, H=H * size, D=D, C=C, itemsize=e, format=latent.format, causal=False
    )
    return gathered < attention.flops + sent


def merged_shape(config: MLAConfig, ranks: Ranks, n: int) -> tuple[int, int, int]:
    """The width of partial outputs: all heads, in latent space if heads are gathered."""
    if ranks.heads == "own":
        return n, config.num_heads * ranks.shard.size, config.kv_lora_rank
    return n, config.num_heads, config.v_head_dim


def with_schedules(
    groups: tuple[Group, ...],
    config: MLAConfig,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    fixed: bool,
) -> tuple[Group, ...]:
    """Choose the schedule that merges each group's results over ranks. `fixed` merges in rank
    order, whatever the size."""
    found = []
    for group in groups:
        if group.across is not None:
            schedule, n = ranks.schedule, num_rows(group.across.rows)
            if fixed:
                schedule = "exchange"
            elif schedule == "auto":
                shape = merged_shape(config, ranks, n)
                schedule = choose_schedule(shape, dtype, ranks.shard.size, ranks.heads)
            group = remade(group, {"across": remade(group.across, {"schedule": schedule})})
        found.append(group)
    return tuple(found)


def bytes_sent(plan: Plan, dtype: torch.dtype) -> int:
    """Bytes that this rank sends in one layer's attention."""
    ranks, config, total = plan.ranks, plan.config, 0
    if ranks is None:
        return 0
    size = ranks.shard.size
    for group in plan.groups:
        if group.across is not None:
            n = num_rows(group.across.rows)
            shape = merged_shape(config, ranks, n)
            total += sent_bytes(group.across.schedule, ranks.heads, shape, dtype, size)
            if ranks.heads == "own":  # this rank's queries to the others
                width = config.num_heads * config.latent_dim
                each = width * dtype.itemsize
                if plan.query_dtype is not None:
                    each = width + 4 * config.num_heads
                total += (size - 1) * n * each
        chunks = group.part.chunks if isinstance(group.part, Expanded) else ()
        rows = sum(chunk.brought.num_rows for chunk in chunks if chunk.brought is not None)
        total += (size - 1) * rows * config.latent_dim * dtype.itemsize
    if plan.bring is not None:
        total += (size - 1) * plan.bring.num_bytes // size
    return total
