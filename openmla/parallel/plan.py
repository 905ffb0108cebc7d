"""plan_over_ranks: a step over a cache that is sharded by position, as one rank will run it.

The batch is everyone's: the same lengths, tables and slots as of one process whose blocks hold W
times as many tokens (layout.py). Every rank's keys keep the order of positions, so a token at
position p sees the first local_len(p + 1) keys here: causality is a length per token, and tokens
that stay in latent space are planned as requests of their own. New tokens that are expanded
attend to one another on every rank, and to the context by its local part.

What decides which collectives run, and how often, is computed from what all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from openmla.backends.asked import Asked
from openmla.cache import LayerCache, PagedCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError, UnsupportedError, check_kind
from openmla.ops.index_write import problem as index_write_problem
from openmla.parallel.agree import check_agreement
from openmla.parallel.batches import context_batch, new_batch, token_batch
from openmla.parallel.captured import plan_captured
from openmla.parallel.compressed import plan_compressed_over_ranks
from openmla.parallel.gathered import (
    CONTEXTS,
    GatheredContext,
    gathering_is_cheaper,
    plan_gathered,
)
from openmla.parallel.layout import Shard
from openmla.parallel.ranks import Ranks, with_all_heads
from openmla.parallel.types import RankPart, RankPlan
from openmla.plan import Batch, Plan, Workspace, make_plan
from openmla.plan.captured import check_buffers
from openmla.plan.checks import check_batch, check_dtype
from openmla.plan.forms import choose_absorbed
from openmla.plan.problems import chosen
from openmla.plan.rows import pick, pick_rows, rope_offsets, some
from openmla.plan.upload import upload
from openmla.plan.workspace import default_workspace_tokens

FORMS = ("auto", "absorbed", "expanded")


def plan_over_ranks(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    *,
    dtype: torch.dtype | None = None,
    backend: Asked = "auto",
    form: str = "auto",
    workspace: Workspace | None = None,
    workspace_tokens: int | None = None,
    into: dict[str, Tensor] | None = None,
    context: str = "auto",
) -> RankPlan:
    """Plan one step, on every rank, for every layer that shares this cache geometry.

    `batch` is the same on every rank: global lengths, and tables and slots of blocks that hold
    block_size * W tokens, of which `cache`, this rank's, holds block_size each. The others are
    make_plan()'s; the form of each request is chosen by its global length. `into` takes buffers of
    rank_buffers() and fills them: the step stays in latent space then, its addresses and sizes
    stay, and a CUDA graph of it may be replayed, collectives included.

    `context` says what becomes of expanded tokens' earlier keys, and of V4's entries: attended to
    in "place", "gather"ed from all ranks, or by "auto" whichever is cheaper.
    """
    check_kind("parallel", "ranks", ranks, Ranks)
    asked = {
        "dtype": dtype,
        "backend": backend,
        "workspace_tokens": workspace_tokens,
    }
    fields: dict[str, Any] = {"refused": True}
    try:
        rows = _check_kinds(batch, config, cache)
        fields |= _fields(batch, config, cache, ranks)
        sizes = {"workspace": _num_rows(workspace), "into": _shapes(into)}
        fields["options"] = {"form": form, "context": context} | sizes | asked
        check_dtype("parallel", dtype)
        _check_step(batch, form, context)
        if config.compressor is not None:
            options = asked | {"form": form, "workspace": workspace, "into": into}
            plan = plan_compressed_over_ranks(batch, config, cache, ranks, context, options)
            fields["refused"] = False
            return plan
        ranks.shard.check_block_size(rows.block_size)
        check_batch(batch, rows, ranks.shard.size)
        if into is None:
            plan = _plan(batch, config, cache, ranks, form, context, workspace, asked)
        else:
            plan = plan_captured(batch, config, cache, ranks, form, into, asked)
        fields["refused"] = False
    finally:
        if ranks.check:
            kept = getattr(cache, "latent", None) or getattr(cache, "window", None)
            device = getattr(kept, "data", torch.empty(0)).device
            _tell(fields, ranks.group, device)
    return plan


def _tell(fields: dict[str, Any], group: Any, device: torch.device) -> None:
    """Compare with the others; where this rank failed, its own error is the one to be seen."""
    try:
        check_agreement(fields, group, device)
    except ConfigError:
        if not fields["refused"]:
            raise


def _check_kinds(batch: Batch, config: MLAConfig, cache: LayerCache) -> PagedCache:
    check_kind("parallel", "batch", batch, Batch)
    check_kind("parallel", "config", config, MLAConfig)
    check_kind("parallel", "cache", cache, LayerCache)
    name = "latent" if config.compressor is None else "window"
    rows: PagedCache | None = getattr(cache, name)
    if rows is None:
        raise ConfigError(f"parallel: cache must have {name} rows, got none.")
    return rows


def _fields(batch: Batch, config: MLAConfig, cache: LayerCache, ranks: Ranks) -> dict[str, Any]:
    """What must be the same on every rank."""
    return {
        "config": config,
        "cache": [
            cache.ratio,
            *((part.format, part.num_blocks, part.block_size) for part in cache.parts),
        ],
        "ranks": (ranks.shard.size, ranks.interleave, ranks.heads, ranks.schedule),
        "query_lens": batch.query_lens,
        "seq_lens": batch.seq_lens,
        "padding": batch.padding,
        "block_table": batch.block_table,
        "slot_mapping": batch.slot_mapping,
        "window_table": batch.window_table,
        "state_slots": batch.state_slots,
    }


def _num_rows(workspace: Workspace | None) -> int | None:
    """Context rows gathered at once: they decide how many collectives there are."""
    if workspace is None:
        return None
    check_kind("parallel", "workspace", workspace, Workspace)
    return workspace.num_rows


def _shapes(into: dict[str, Tensor] | None) -> dict[str, tuple[int, ...]] | None:
    """The buffers' sizes are those of a captured step's collectives."""
    if into is None:
        return None
    check_buffers("parallel", "into", into)
    return {name: tuple(buffer.shape) for name, buffer in sorted(into.items())}


def _check_step(batch: Batch, form: str, context: str) -> None:
    for name, given, known in (("form", form, FORMS), ("context", context, CONTEXTS)):
        if given not in known:
            raise ConfigError(f"parallel: {name} must be one of {', '.join(known)}, got {given!r}.")
    if batch.device_seq_lens is not None:
        raise UnsupportedError(
            "parallel: lengths must be known on the host, got device_seq_lens. Which rank holds a "
            "token follows from its position."
        )
    if not batch.causal:
        raise ConfigError(
            "parallel: batch must be of the whole step, got causal=False. Parts are made here."
        )


def _plan(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    form: str,
    context: str,
    workspace: Workspace | None,
    asked: dict[str, Any],
) -> RankPlan:
    shard, latent, slots = ranks.shard, cache.latent, batch.slot_mapping
    assert latent is not None and slots is not None
    dense = replace(config, indexer=None)
    wide = with_all_heads(dense, ranks)
    starts = _starts(batch.query_lens)
    routes = _routes(batch, config, latent, asked["dtype"], form)
    kept = LayerCache(latent=latent)
    reserved = asked | {"workspace": workspace}
    parts: dict[str, Any] = {}
    if routes["absorbed"] or not any(routes.values()):
        own = token_batch(batch, routes["absorbed"], shard)
        plan = make_plan(own, wide, kept, form="absorbed", **asked)
        parts["absorbed"] = _part(routes["absorbed"], starts, plan)
    if routes["chosen"]:
        own = token_batch(batch, routes["chosen"], shard)
        chooses = replace(wide, indexer=config.indexer)
        parts["chosen"] = _part(
            routes["chosen"], starts, make_plan(own, chooses, cache, form="chosen", **asked)
        )
    if routes["expanded"]:
        new = new_batch(batch, routes["expanded"], latent.block_size)
        plan = make_plan(new, dense, kept, form="expanded", **reserved)
        parts["new"] = _part(routes["expanded"], starts, plan)
    later = [b for b in routes["expanded"] if batch.seq_lens[b] > batch.query_lens[b]]
    gathered = None
    if later and _gathers(batch, later, dense, latent, ranks, context, parts["new"].plan):
        gathered = _gathered(batch, routes["expanded"], latent, ranks, parts["new"].plan, reserved)
    elif later:
        keys = context_batch(batch, later, shard)
        if ranks.heads == "all":
            plan = make_plan(keys, dense, kept, form=form, **reserved)
        else:
            plan = make_plan(keys, wide, kept, form="absorbed", **asked)
        own_starts = _starts(some(batch.query_lens, routes["expanded"]))
        places = [routes["expanded"].index(b) for b in later]
        parts["context"] = RankPart(pick_rows(later, starts), plan, pick_rows(places, own_starts))
    first = next(iter(parts.values())).plan
    local, offsets, rows = upload(
        (
            shard.local_slots(slots, latent.block_size),
            rope_offsets(batch, config),
            tuple((part.rows, part.inside) for part in parts.values()),
        ),
        latent.data.device,
    )
    parts = {
        name: RankPart(row, part.plan, inside)
        for (name, part), (row, inside) in zip(parts.items(), rows, strict=True)
    }
    step = replace(
        first,
        config=config,
        num_tokens=batch.num_tokens,
        padding=batch.padding,
        slot_mapping=local,
        rope_offsets=offsets,
        causal=True,
        **_key_writer(first, cache, asked["backend"]),
    )
    offered = _candidates(batch, routes["chosen"], config, shard)
    return RankPlan(
        config, ranks, batch.num_tokens, step, **parts, gathered=gathered, candidates=offered
    )


def _key_writer(plan: Plan, cache: LayerCache, backend: Asked) -> dict[str, Any]:
    """Who writes indexer keys, of all tokens: parts that attend to all their keys have none."""
    if cache.index is None:
        return {}
    device, dtype = cache.index.data.device, plan.problem("cache_write").dtype
    problem = index_write_problem(device, dtype, cache.index.format)
    others = tuple(other for other in plan.problems if other.op != problem.op)
    backends = {**plan.backends, **chosen([problem], backend)}
    return {"backends": backends, "problems": (*others, problem)}


def _candidates(batch: Batch, choosing: list[int], config: MLAConfig, shard: Shard) -> int:
    """As many as a token chooses, or as any rank has keys of the longest request."""
    if not choosing or config.indexer is None:
        return 0
    return min(config.indexer.topk, shard.most_local(max(some(batch.seq_lens, choosing))))


def _gathers(
    batch: Batch,
    requests: list[int],
    config: MLAConfig,
    latent: PagedCache,
    ranks: Ranks,
    context: str,
    new: Plan,
) -> bool:
    wide = latent.block_size * ranks.shard.size
    fits = new.workspace is None or new.workspace.num_rows >= wide
    if context == "gather" and not fits:
        raise ConfigError(
            f"parallel: a workspace must have at least {wide} rows, a block on every rank, to "
            f"gather context, got {_num_rows(new.workspace)}. Give warmup() a larger "
            "workspace_tokens."
        )
    if context != "auto" or not fits:
        return context == "gather"
    query_lens, contexts = some(batch.query_lens, requests), _contexts(batch, requests)
    dtype = new.problem("cache_write").dtype
    return gathering_is_cheaper(query_lens, contexts, config, latent, ranks, dtype)


def _gathered(
    batch: Batch,
    requests: list[int],
    latent: PagedCache,
    ranks: Ranks,
    new: Plan,
    reserved: dict[str, Any],
) -> GatheredContext:
    workspace: Workspace | None = reserved["workspace"]
    most = reserved["workspace_tokens"] if workspace is None else workspace.num_rows
    if most is None:
        size = {"max_requests": len(requests), "block_size": latent.block_size}
        most = default_workspace_tokens(new.config, **size)
    own = replace(new_batch(batch, requests, 1), block_table=pick(batch.block_table, requests))
    return plan_gathered(own, _contexts(batch, requests), latent, ranks, most, new)


def _contexts(batch: Batch, requests: list[int]) -> list[int]:
    return [batch.seq_lens[b] - batch.query_lens[b] for b in requests]


def _starts(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def _part(requests: list[int], starts: list[int], plan: Plan) -> RankPart:
    return RankPart(pick_rows(requests, starts), plan)


def _routes(
    batch: Batch, config: MLAConfig, latent: PagedCache, dtype: torch.dtype | None, form: str
) -> dict[str, list[int]]:
    """Which request takes which form; one without tokens takes none. All by global lengths."""
    layout = latent.layout
    if dtype is None:
        dtype = torch.bfloat16 if layout.scaled or layout.packed else layout.dtype
    if form == "auto":
        cheaper = choose_absorbed(
            config,
            batch.query_lens,
            batch.seq_lens,
            format=latent.format,
            itemsize=dtype.itemsize,
            device=latent.data.device.type,
        )
    else:
        cheaper = [form == "absorbed"] * len(batch.query_lens)
    routes: dict[str, list[int]] = {"absorbed": [], "chosen": [], "expanded": []}
    for b, (n, S) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        if n and config.indexer is not None and config.indexer.topk < S:
            routes["chosen"].append(b)
        elif n:
            routes["absorbed" if cheaper[b] else "expanded"].append(b)
    return routes
