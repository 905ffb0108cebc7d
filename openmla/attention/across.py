"""Context parallelism: each rank attends to its own keys, then the results are merged.

With heads="all" every rank attends with all heads. With heads="own" latent queries are gathered,
each rank attends with the heads of all ranks, and the latent outputs of its own heads are returned
to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.absorbed import attend_absorbed, latent_queries, project_out
from openmla.attention.expanded import attend_expanded
from openmla.attention.types import Projected, Step, rows_of
from openmla.cache import LayerCache, PagedCache
from openmla.ops import merge_states
from openmla.plan import Absorbed, Group, Plan
from openmla.plan.across_v4 import block_shapes
from openmla.plan.types import Across
from openmla.ranks import Ranks
from openmla.ranks.collectives import all_gather
from openmla.ranks.merge import merge


def attend_across(step: Step, across: Across) -> tuple[Tensor, Tensor]:  # out [n, H, V], lse [n, H]
    """Attend with the rows of `across` to the keys of all ranks."""
    plan, ranks = step.plan, step.plan.ranks
    assert ranks is not None
    mine, dtype = _own_rows(step, across), _dtype(step)
    if ranks.heads == "own":
        mine = _with_all_heads(mine, ranks)
    parts = [(group.rows, *_attend(mine, group)) for group in across.groups]
    rows, out, lse = parts[0]
    if len(parts) > 1 or not isinstance(rows, slice):
        n = sum(part.shape[0] for _, part, _ in parts)
        out, lse = out.new_empty((n, *out.shape[1:])), lse.new_empty((n, lse.shape[1]))
        for rows, some, some_lse in parts:
            out[rows], lse[rows] = some, some_lse
    schedule = across.schedule
    out, lse = merge(out, lse, ranks.link, heads=ranks.heads, schedule=schedule)
    if ranks.heads == "own" and step.weights is not None:
        out = project_out(out.to(dtype), step.weights, plan)
    return out, lse


def merge_across(step: Step, across: Across, out: Tensor, lse: Tensor) -> None:
    """Merge the result across ranks into the partial result that every rank has computed."""
    earlier, backend = attend_across(step, across), step.plan.backend("merge_states")
    if across.inside is None:
        merge_states(out, lse, *earlier, backend=backend)
        return
    part, part_lse = out[across.inside], lse[across.inside]
    merge_states(part, part_lse, *earlier, backend=backend)
    out[across.inside], lse[across.inside] = part, part_lse


def _attend(step: Step, group: Group) -> tuple[Tensor, Tensor]:
    if isinstance(group.part, Absorbed):
        return attend_absorbed(step, group)
    return attend_expanded(step, group)


def _own_rows(step: Step, across: Across) -> Step:
    """Restrict the step to these rows."""
    if step.projected is None:
        assert step.q is not None
        return step._replace(q=rows_of(step.q, across.rows))
    mine = Projected(*(rows_of(tensor, across.rows) for tensor in step.projected))
    return step._replace(projected=mine)


def _dtype(step: Step) -> torch.dtype:
    q = step.q if step.projected is None else step.projected.q_nope
    assert q is not None
    return q.dtype


def _with_all_heads(step: Step, ranks: Ranks) -> Step:
    """Gather the latent queries of all ranks, and their scales if they are e4m3."""
    scale: Tensor | None = None
    if step.weights is None:
        assert step.q is not None
        q = step.q
    else:
        assert step.projected is not None and step.cache.latent is not None
        q_nope, q_pe = step.projected.q_nope, step.projected.q_pe
        q, scale = latent_queries(q_nope, q_pe, step.weights, step.cache.latent, step.plan)
    q_scale = None if scale is None else _every_head(scale, ranks)
    return step._replace(projected=None, weights=None, q=_every_head(q, ranks), q_scale=q_scale)


def _every_head(tensor: Tensor, ranks: Ranks) -> Tensor:  # [n, H, ...] to [n, W * H, ...]
    if tensor.dtype == torch.float8_e4m3fn:  # collectives transfer them as bytes
        return _every_head(tensor.view(torch.uint8), ranks).view(tensor.dtype)
    return all_gather(tensor, ranks.link).transpose(0, 1).flatten(1, 2)


def gathered_cache(cache: LayerCache, plan: Plan) -> LayerCache:
    """V4: gather the blocks of all ranks, numbered as in the plan's tables. The rows and entries of
    this step must have been written."""
    bring, ranks = plan.bring, plan.ranks
    assert bring is not None and ranks is not None
    assert cache.compressed is not None and cache.index is not None
    shapes = block_shapes(len(bring.blocks), plan.config, cache, ranks.shard.size)
    pages = ranks.workspace.split(bring.blocks.device, torch.uint8, *shapes)
    return LayerCache(
        window=cache.window,
        compressed=_together(cache.compressed, bring.blocks, next(pages), next(pages), ranks),
        index=_together(cache.index, bring.blocks, next(pages), next(pages), ranks),
        state=cache.state,
        ratio=cache.ratio,
    )


def _together(
    part: PagedCache, blocks: Tensor, mine: Tensor, every: Tensor, ranks: Ranks
) -> PagedCache:
    brought = part.over(mine).data.view(torch.uint8)
    torch.index_select(part.data.view(torch.uint8), 0, blocks, out=brought)
    return part.over(all_gather(mine, ranks.link, out=every))
