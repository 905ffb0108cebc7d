"""RankPlan: a step over ranks, as one of them runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from openmla.cache import shown_bytes
from openmla.config import MLAConfig
from openmla.parallel.gathered import GatheredContext
from openmla.parallel.gathered_entries import GatheredEntries
from openmla.parallel.layout import Shard
from openmla.parallel.merge import choose_schedule, sent_bytes
from openmla.parallel.ranks import Ranks
from openmla.plan import CompressedPlan, Explanation, Plan, SparsePlan
from openmla.plan.explanation import Line
from openmla.plan.rows import num_rows
from openmla.plan.types import Rows


class RankPart(NamedTuple):
    """Some of the step's tokens, and the plan of them alone."""

    rows: Rows
    plan: Plan
    inside: Rows = slice(0, 0)  # of context: where its rows are among the new ones

    @property
    def scored(self) -> SparsePlan | CompressedPlan:
        """Of tokens that choose: which keys they see here."""
        found = self.plan.sparse or self.plan.compressed
        assert found is not None
        return found


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
    context: RankPart | None = None  # the same tokens, those with earlier keys, in place
    gathered: GatheredContext | None = None  # in its place: the same, from all ranks
    entries: GatheredEntries | None = None  # V4's, in the place of absorbed and chosen
    candidates: int = 0  # keys that each rank offers for a token of `chosen`

    @property
    def chooses(self) -> bool:
        """Whether some of its tokens attend to keys that are chosen for them."""
        return self.chosen is not None or (self.entries is not None and self.entries.plan.chooses)

    @property
    def shard(self) -> Shard:
        """This rank's of all keys: positions; of V4 entries, which go in whole blocks."""
        part = self.chosen or self.absorbed
        if self.config.compressor is None or part is None:
            return self.ranks.shard
        return replace(self.ranks.shard, interleave=part.plan.block_size)

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
        if self.gathered is not None:
            total += self.gathered.sent_bytes(self.config, self.ranks, dtype)
        if self.entries is not None:
            total += (size - 1) * self.entries.num_bytes // size
        return total

    def selection_bytes(self, scores: torch.dtype = torch.float32) -> int:
        """What this rank sends where a layer chooses keys: candidates, with their scores."""
        if self.chosen is None:
            return 0
        each = self.candidates * (scores.itemsize + 4)
        return (self.ranks.shard.size - 1) * num_rows(self.chosen.rows) * each

    def explain(self, *, finished: bool = False) -> Explanation:
        """What runs on this rank and what is exchanged, part by part."""
        shard, dtype = self.ranks.shard, self.step.problem("cache_write").dtype
        owned = (
            "all heads on every rank"
            if self.ranks.heads == "all"
            else "heads gathered, own returned"
        )
        v4 = self.config.compressor is not None
        dealt = "entries in whole blocks" if v4 else f"positions in runs of {shard.interleave}"
        sent = shown_bytes(self.sent_bytes(dtype))
        told = f"{shard.rank} of {shard.size}, {dealt}, {owned}, {sent} sent a layer"
        lines = [Line("rank", told)]
        if v4:  # geometries differ from ratio to ratio
            mine = self.step if self.entries is None else self.entries.plan
            what = "on every rank, merged last"
            if self.entries is not None:
                what = (
                    f"entries gathered from all ranks, {len(self.entries.blocks)} blocks from "
                    f"each, {shown_bytes(self.entries.num_bytes)} together: cheaper than attending "
                    "to them in place and merging"
                )
            below = replace(mine, geometry=None).explain(finished=finished).lines
            lines.append(Line("", what, below=below))
        for name, part in self.parts.items():
            merged = "nothing is merged over ranks"
            if name != "new":
                merged = f"merged over ranks by {self.schedule_of(part, dtype)}"
            below, why = part.plan.explain(finished=finished).lines, ""
            if name == "chosen":
                sent = shown_bytes(self.selection_bytes())
                of = f"of {self.candidates} candidates a rank and token, {sent} sent where a layer"
                below = (Line("", f"{of} chooses"), *below)
            if name == "context":
                why = "attended to in place, which is cheaper than gathering it"
            lines.append(
                Line("", f"{name} of {num_rows(part.rows)} tokens, {merged}", why, below=below)
            )
        if self.gathered is not None:
            chunks, rows = len(self.gathered.chunks), self.gathered.sent_rows
            what = f"gathered from all ranks in {chunks} chunks, {rows} rows from each, in a "
            what += f"workspace of {shown_bytes(self.ranks.workspace.num_bytes)}"
            why = "cheaper than attending to it in place and merging"
            lines.append(Line("context", what, why))
        return Explanation(lines)
