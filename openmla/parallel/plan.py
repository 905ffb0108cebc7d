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
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from openmla.backends.asked import Asked
from openmla.cache import LayerCache, PagedCache, shown_bytes
from openmla.config import MLAConfig
from openmla.errors import ConfigError, UnsupportedError, check_kind
from openmla.parallel.agree import check_agreement
from openmla.parallel.layout import Shard
from openmla.parallel.merge import choose_schedule, sent_bytes
from openmla.parallel.ranks import Ranks
from openmla.plan import Batch, Plan, Workspace, make_plan
from openmla.plan.checks import check_batch
from openmla.plan.forms import choose_absorbed
from openmla.plan.rows import num_rows, pick, pick_rows, repeated, rope_offsets, some
from openmla.plan.types import Rows
from openmla.plan.upload import upload

FORMS = ("auto", "absorbed", "expanded")


class RankPart(NamedTuple):
    """Some of the step's tokens, and the plan of them alone."""

    rows: Rows
    plan: Plan
    inside: Rows = slice(0, 0)  # of context: where its rows are among the new ones


@dataclass(frozen=True, repr=False)
class RankPlan:
    """One step on one rank; parts that are None have no token on any rank."""

    config: MLAConfig  # with the heads that this rank projects
    ranks: Ranks
    num_tokens: int
    step: Plan  # all tokens and this rank's slots: what is checked and written
    absorbed: RankPart | None = None  # a request per token, over all its keys here
    chosen: RankPart | None = None  # a request per token, over the keys chosen for it
    new: RankPart | None = None  # expanded: this step's rows among themselves
    context: RankPart | None = None  # the same tokens, those with keys from earlier steps
    candidates: int = 0  # keys that each rank offers for a token of `chosen`

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{num_rows(part.rows)} tokens {name}" for name, part in self.parts.items()
        )
        shard = self.ranks.shard
        return f"RankPlan(rank {shard.rank} of {shard.size}: {parts or 'no tokens'})"

    @property
    def parts(self) -> dict[str, RankPart]:
        """Those that have tokens, by name."""
        named = ("absorbed", "chosen", "new", "context")
        return {name: getattr(self, name) for name in named if getattr(self, name) is not None}

    def merged_shape(self, part: RankPart) -> tuple[int, int, int]:
        """Of the partial outputs of a part: all heads, in latent space where they are gathered."""
        config, n = self.config, num_rows(part.rows)
        if self.ranks.heads == "own":
            return n, config.num_heads * self.ranks.shard.size, config.kv_lora_rank
        return n, config.num_heads, config.v_head_dim

    def schedule_of(self, part: RankPart, dtype: torch.dtype) -> str:
        """By which schedule a part is merged."""
        if self.ranks.schedule != "auto":
            return self.ranks.schedule
        return choose_schedule(
            self.merged_shape(part), dtype, self.ranks.shard.size, self.ranks.heads
        )

    def sent_bytes(self, dtype: torch.dtype) -> int:
        """What this rank sends in one layer's attention, of outputs and queries in `dtype`."""
        size, total = self.ranks.shard.size, 0
        for name, part in self.parts.items():
            if name == "new":
                continue
            shape = self.merged_shape(part)
            total += sent_bytes(self.schedule_of(part, dtype), self.ranks.heads, shape, dtype, size)
            if self.ranks.heads == "own":  # this rank's queries to the others
                width = self.config.num_heads * self.config.latent_dim
                total += (size - 1) * shape[0] * width * dtype.itemsize
        return total

    def selection_bytes(self, scores: torch.dtype = torch.float32) -> int:
        """What this rank sends where a layer chooses keys: candidates, with their scores."""
        if self.chosen is None:
            return 0
        each = self.candidates * (scores.itemsize + 4)
        return (self.ranks.shard.size - 1) * num_rows(self.chosen.rows) * each

    def explain(self, *, finished: bool = False) -> str:
        """What runs on this rank and what is exchanged, part by part."""
        shard, dtype = self.ranks.shard, self.step.problem("cache_write").dtype
        owned = (
            "all heads on every rank"
            if self.ranks.heads == "all"
            else "heads gathered, own returned"
        )
        lines = [
            f"rank      {shard.rank} of {shard.size}, positions in runs of {shard.interleave}, "
            f"{owned}, {shown_bytes(self.sent_bytes(dtype))} sent a layer"
        ]
        for name, part in self.parts.items():
            merged = "nothing is merged over ranks"
            if name != "new":
                merged = f"merged over ranks by {self.schedule_of(part, dtype)}"
            lines.append(f"{name} of {num_rows(part.rows)} tokens, {merged}")
            if name == "chosen":
                lines.append(
                    f"  of {self.candidates} candidates a rank and token, "
                    f"{shown_bytes(self.selection_bytes())} sent where a layer chooses"
                )
            if name == "context":
                lines.append("  why     context stays where it is: its keys here are attended to")
            lines += [f"  {line}" for line in part.plan.explain(finished=finished).splitlines()]
        return "\n".join(lines)


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
    batch_invariant: bool = False,
) -> RankPlan:
    """Plan one step, on every rank, for every layer that shares this cache geometry.

    `batch` is the same on every rank: global lengths, and tables and slots of blocks that hold
    block_size * W tokens, of which `cache`, this rank's, holds block_size each. The others are
    make_plan()'s; the form of each request is chosen by its global length.
    """
    check_kind("parallel", "ranks", ranks, Ranks)
    asked = {
        "dtype": dtype,
        "backend": backend,
        "workspace_tokens": workspace_tokens,
        "batch_invariant": batch_invariant,
    }
    fields: dict[str, Any] = {"refused": True}
    try:
        latent = _check_kinds(batch, config, cache)
        fields |= _fields(batch, config, cache, ranks)
        fields["options"] = {"form": form} | asked
        _check_step(batch, latent, ranks.shard, form)
        plan = _plan(batch, config, cache, ranks, form, workspace, asked)
        fields["refused"] = False
    finally:
        if ranks.check:
            device = getattr(getattr(cache, "latent", None), "data", torch.empty(0)).device
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
    if config.compressor is not None:
        raise UnsupportedError(
            f"parallel: {config.model_type} is not sharded over ranks yet, its windows, entries "
            "and compressor states are not. Dense models and those of V3.2's kind are."
        )
    if cache.latent is None:
        raise ConfigError("parallel: cache must have latent rows, got none.")
    return cache.latent


def _fields(batch: Batch, config: MLAConfig, cache: LayerCache, ranks: Ranks) -> dict[str, Any]:
    """What must be the same on every rank."""
    return {
        "config": config,
        "cache": [(part.format, part.num_blocks, part.block_size) for part in cache.parts],
        "ranks": (ranks.shard.size, ranks.interleave, ranks.heads, ranks.schedule),
        "query_lens": batch.query_lens,
        "seq_lens": batch.seq_lens,
        "padding": batch.padding,
        "block_table": batch.block_table,
        "slot_mapping": batch.slot_mapping,
    }


def _check_step(batch: Batch, latent: PagedCache, shard: Shard, form: str) -> None:
    shard.check_block_size(latent.block_size)
    if form not in FORMS:
        raise ConfigError(f"parallel: form must be one of {', '.join(FORMS)}, got {form!r}.")
    if batch.device_seq_lens is not None:
        raise UnsupportedError(
            "parallel: lengths must be known on the host, got device_seq_lens. Which rank holds a "
            "token follows from its position."
        )
    if not batch.causal:
        raise ConfigError(
            "parallel: batch must be of the whole step, got causal=False. Parts are made here."
        )
    check_batch(batch, latent, shard.size)


def _plan(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    form: str,
    workspace: Workspace | None,
    asked: dict[str, Any],
) -> RankPlan:
    shard, heads, latent, slots = ranks.shard, ranks.heads, cache.latent, batch.slot_mapping
    assert latent is not None and slots is not None
    dense = replace(config, indexer=None)
    wide = dense if heads == "all" else replace(dense, num_heads=config.num_heads * shard.size)
    starts = _starts(batch.query_lens)
    routes = _routes(batch, config, latent, asked["dtype"], form)
    kept = LayerCache(latent=latent)
    reserved = asked | {"workspace": workspace}
    parts: dict[str, RankPart] = {}
    if routes["absorbed"] or not any(routes.values()):
        own = _tokens(batch, routes["absorbed"], shard)
        plan = make_plan(own, wide, kept, form="absorbed", **asked)
        parts["absorbed"] = _part(routes["absorbed"], starts, plan)
    if routes["chosen"]:
        own = _tokens(batch, routes["chosen"], shard)
        chooses = replace(wide, indexer=config.indexer)
        parts["chosen"] = _part(
            routes["chosen"], starts, make_plan(own, chooses, cache, form="chosen", **asked)
        )
    if routes["expanded"]:
        new = _new(batch, routes["expanded"], latent.block_size)
        plan = make_plan(new, dense, kept, form="expanded", **reserved)
        parts["new"] = _part(routes["expanded"], starts, plan)
    later = [b for b in routes["expanded"] if batch.seq_lens[b] > batch.query_lens[b]]
    if later:
        context = _context(batch, later, shard)
        if heads == "all":
            plan = make_plan(context, dense, kept, **reserved)
        else:
            plan = make_plan(context, wide, kept, form="absorbed", **asked)
        own_starts = _starts(some(batch.query_lens, routes["expanded"]))
        places = [routes["expanded"].index(b) for b in later]
        parts["context"] = RankPart(pick_rows(later, starts), plan, pick_rows(places, own_starts))
    first = next(iter(parts.values())).plan
    local, rows = upload(
        (
            shard.local_slots(slots, latent.block_size),
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
        rope_offsets=rope_offsets(batch, config),
        causal=True,
    )
    offered = 0
    if routes["chosen"]:
        assert config.indexer is not None
        longest = max(some(batch.seq_lens, routes["chosen"]))
        offered = min(config.indexer.topk, shard.most_local(longest))
    return RankPlan(config, ranks, batch.num_tokens, step, **parts, candidates=offered)


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


def _tokens(batch: Batch, requests: list[int], shard: Shard) -> Batch:
    """Each token of some requests as a request of its own, over the keys it sees on this rank."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    seen = [
        length
        for n, S in zip(query_lens, seq_lens, strict=True)
        for length in range(S - n + 1, S + 1)
    ]
    table = pick(batch.block_table, requests)
    if len(seen) > len(requests):
        (mine,) = upload((repeated(range(len(requests)), query_lens, torch.int64),), table.device)
        table = table[mine]
    return Batch([1] * len(seen), shard.local_lens(seen), table, causal=False)


def _new(batch: Batch, requests: list[int], BS: int) -> Batch:
    """New rows among themselves: no key is read from the cache, and the table names none."""
    query_lens = some(batch.query_lens, requests)
    table = torch.zeros((len(requests), -(-max(query_lens) // BS)), dtype=torch.int32)
    slots = torch.full((sum(query_lens),), -1, dtype=torch.int64)
    return Batch(query_lens, query_lens, table, slots)


def _context(batch: Batch, requests: list[int], shard: Shard) -> Batch:
    """What requests had before this step, as far as it is here; every new token sees all of it."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    lens = [shard.local_len(S - n) for n, S in zip(query_lens, seq_lens, strict=True)]
    return Batch(query_lens, lens, pick(batch.block_table, requests), causal=False)
