"""attend_over_ranks: one layer's attention over a cache that is sharded by position.

    absorbed, chosen   local keys of this rank, then one merge over ranks
    new                expanded: this step's rows among themselves, the same on every rank
    context            earlier keys of this rank in place, merged over ranks, then with `new`; or
                       gathered from all ranks, where that is cheaper (gathered.py)

With heads="own" queries are gathered in latent space, each rank attends with everyone's heads, and
gets its own back, in latent space too.
"""

from __future__ import annotations

from torch import Tensor

from openmla.attention import (
    AbsorbedWeights,
    CompressedInputs,
    Projected,
    RawProjections,
    Selection,
    apply_sink,
    attend_latent,
    attend_partial,
    check_inputs,
)
from openmla.attention.absorbed import into_latent, out_of_latent
from openmla.attention.expanded import whole_queries
from openmla.attention.ratio import scale_rope
from openmla.attention.step import Part, check_selection, check_write, put_both_together
from openmla.attention.write import write_rows
from openmla.cache import LayerCache
from openmla.errors import ConfigError, check_kind
from openmla.ops import merge_states
from openmla.parallel.entries import attend_compressed_over_ranks, gather_heads, merged
from openmla.parallel.gathered import attend_gathered
from openmla.parallel.types import RankPart, RankPlan


def attend_over_ranks(
    projected: Projected | CompressedInputs,
    absorbed: AbsorbedWeights | None,
    cache: LayerCache,
    plan: RankPlan,
    *,
    selection: Selection | None = None,
    sink: Tensor | None = None,  # [H] f32
    raw: RawProjections | None = None,
    write: bool = True,
) -> Tensor:  # [T, H, V]
    """attend_step over ranks; every rank of the plan's group calls it with the same tokens.

    Rows are written by the ranks that hold their positions, then everyone attends. `selection` is
    select_over_ranks', where the plan has tokens that choose their keys. H is this rank's: with
    heads="all" that is all of them, and every rank gets the same result.

    V4 takes a CompressedInputs and no weights, as attend_partial; entries are chosen in here, and
    what comes out is still rotated.
    """
    check_kind("parallel", "plan", plan, RankPlan)
    check_kind("parallel", "cache", cache, LayerCache)
    if plan.config.compressor is not None:
        check_kind("parallel", "projected", projected, CompressedInputs)
        assert isinstance(projected, CompressedInputs)
        for name, other in (("absorbed", absorbed), ("selection", selection), ("raw", raw)):
            if other is not None:
                raise ConfigError(f"parallel: {name} must not be given beside CompressedInputs.")
        return attend_compressed_over_ranks(projected, cache, plan, sink=sink, write=write)
    check_kind("parallel", "projected", projected, Projected)
    check_kind("parallel", "absorbed", absorbed, AbsorbedWeights)
    assert isinstance(projected, Projected) and absorbed is not None
    latent = check_inputs(projected, absorbed, cache, plan.step)
    if plan.chosen is not None:
        assert plan.chosen.plan.sparse is not None
        check_selection(selection, plan.chosen.plan.sparse)
    check_write(raw, plan.step, write)
    if write:
        write_rows(projected.kv_c, projected.k_pe, raw, latent, plan.step)
    parts: list[Part] = []
    for part, choice in ((plan.absorbed, None), (plan.chosen, selection)):
        if part is not None:
            parts.append((part.rows, *_attend_here(projected, absorbed, cache, plan, part, choice)))
    if plan.new is not None:
        parts.append((plan.new.rows, *_attend_expanded(projected, absorbed, cache, plan)))
    if sink is not None:
        parts = [(rows, apply_sink(some, lse, sink), lse) for rows, some, lse in parts]
    out, _ = put_both_together(parts, plan.step)
    return out


def _attend_here(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: RankPlan,
    part: RankPart,
    selection: Selection | None = None,
) -> tuple[Tensor, Tensor]:  # out [n, H, V], lse [n, H], over all ranks' keys
    """This rank's keys, then everyone's. Such plans write nothing."""
    mine = Projected(*(tensor[part.rows] for tensor in projected))
    if plan.ranks.heads == "all":
        out, lse = attend_partial(mine, absorbed, cache, part.plan, selection=selection)
        return merged(out, lse, plan, part)
    backend = plan.step.called_with("project_heads")
    q_latent = gather_heads(into_latent(mine.q_nope, mine.q_pe, absorbed, backend), plan)
    out_latent, lse = attend_latent(q_latent, cache, part.plan, selection=selection)
    out_latent, lse = merged(out_latent, lse, plan, part)
    return out_of_latent(out_latent, absorbed, backend), lse


def _attend_expanded(
    projected: Projected, absorbed: AbsorbedWeights, cache: LayerCache, plan: RankPlan
) -> tuple[Tensor, Tensor]:
    """New rows, and where there is context, what this rank has of it, everyone's merged."""
    new, context = plan.new, plan.context
    assert new is not None
    mine = Projected(*(tensor[new.rows] for tensor in projected))
    out, lse = attend_partial(mine, absorbed, cache, new.plan, write=False)
    if plan.gathered is not None:
        assert cache.latent is not None
        q = whole_queries(scale_rope(mine, cache.latent, new.plan))
        attend_gathered(q, out, lse, absorbed, cache.latent, new.plan, plan.gathered, plan.ranks)
    if context is None:
        return out, lse
    earlier = _attend_here(projected, absorbed, cache, plan, context)
    part, part_lse = out[context.inside], lse[context.inside]
    merge_states(part, part_lse, *earlier, backend=new.plan.requested["merge_states"])
    out[context.inside], lse[context.inside] = part, part_lse
    return out, lse
