"""V4's step over ranks: own entries, everyone's merged, then the window, which every rank has."""

from __future__ import annotations

from torch import Tensor

from openmla.attention import CompressedInputs, Selection, apply_sink
from openmla.attention.compressed import attend_segments, write_compressed
from openmla.attention.step import check_sink, check_write
from openmla.cache import LayerCache
from openmla.errors import ConfigError
from openmla.ops import merge_states
from openmla.parallel.collectives import all_gather
from openmla.parallel.gathered_entries import attend_gathered_entries
from openmla.parallel.merge import merge_over_ranks
from openmla.parallel.select import choose_over_ranks, held_here
from openmla.parallel.types import RankPart, RankPlan


def attend_compressed_over_ranks(
    inputs: CompressedInputs,
    cache: LayerCache,
    plan: RankPlan,
    *,
    sink: Tensor | None,
    write: bool,
) -> Tensor:  # [T, H, D], still rotated
    """Every rank pools all tokens and keeps the entries of its own blocks; nothing is sent for it.

    The window is merged after ranks are, so that it counts once; the sink comes last.
    """
    part = plan.chosen or plan.absorbed
    if sink is not None:
        check_sink(sink, inputs.q, plan.step)
    if plan.chooses and inputs.index is None:
        raise ConfigError("step: index must be given for ratio 4, its tokens choose.")
    if plan.entries is not None:
        check_write(inputs.raw, plan.step, write)
        if write:
            write_compressed(inputs, cache, plan.step)
        return attend_gathered_entries(inputs, cache, plan.entries, plan.ranks, sink)
    if part is None:
        return attend_segments(inputs, cache, plan.step, write=write, sink=sink)[0]
    out, lse = attend_segments(inputs, cache, plan.step, keys="window", write=write)
    q = inputs.q if plan.ranks.heads == "all" else gather_heads(inputs.q, plan)
    choice: Selection | None = None
    if plan.chosen is not None:
        assert inputs.index is not None and cache.index is not None
        positions = choose_over_ranks(inputs.index, cache.index, plan, part)
        choice = held_here(positions, cache, plan, part)
    queries = CompressedInputs(q=q)
    here = attend_segments(queries, cache, part.plan, selection=choice, keys="entries", write=False)
    merge_states(out, lse, *merged(*here, plan, part), backend=plan.step.requested["merge_states"])
    return out if sink is None else apply_sink(out, lse, sink)


def gather_heads(q_latent: Tensor, plan: RankPlan) -> Tensor:  # [n, W * H, D]
    """Everyone's heads, by rank."""
    return all_gather(q_latent, plan.ranks.group).transpose(0, 1).flatten(1, 2)


def merged(out: Tensor, lse: Tensor, plan: RankPlan, part: RankPart) -> tuple[Tensor, Tensor]:
    """A part over all ranks' keys, by the plan's schedule."""
    schedule = plan.schedule_of(part, out.dtype)
    return merge_over_ranks(out, lse, plan.ranks.group, heads=plan.ranks.heads, schedule=schedule)
