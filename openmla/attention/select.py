"""Lightning indexer: this step's keys into the cache, then K positions for every sparse row."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.types import IndexInputs, Selection, check_alike
from openmla.cache import LayerCache, PagedCache
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.ops import cache_write, index_logits, index_topk, map_slots
from openmla.ops._register import refuse_grad
from openmla.ops.index_logits import scores_dtype
from openmla.plan import CompressedPlan, Plan, ScoreChunk, SparsePlan


def select_step(index: IndexInputs, cache: LayerCache, plan: Plan) -> Selection | None:
    """Write the keys, score, choose. None where no request has more keys than K: all attend to all.

    Keys are written whatever the plan: later steps will need them.
    """
    for name, given, kind in (
        ("index", index, IndexInputs),
        ("cache", cache, LayerCache),
        ("plan", plan, Plan),
    ):
        check_kind("select", name, given, kind)
    keys = check_index(index, cache, plan)
    write_keys(index, keys, plan)
    if plan.sparse is None:
        return None
    return _choose(index, keys, cache, plan, plan.sparse)


def check_index(index: IndexInputs, cache: LayerCache, plan: Plan) -> PagedCache:
    """What an op would refuse only after keys are written; returns the cache of indexer keys."""
    config, keys = plan.config, cache.index
    if config.indexer is None or keys is None:
        what = "config must have an indexer" if keys else "cache must have index rows"
        raise ConfigError(f"select: {what}, got none.")
    plan.check_cache(cache)
    if plan.sparse is not None and not plan.sparse.chunks and plan.sparse.num_rows:
        raise ConfigError(
            "select: plan must be made of a cache with index rows to score, got one whose caller "
            "chooses. make_selection takes its positions."
        )
    HI, DI = config.indexer.num_heads, config.indexer.head_dim
    for name, tensor, shape in (
        ("q_idx", index.q_idx, (plan.num_tokens, HI, DI)),
        ("w_idx", index.w_idx, (plan.num_tokens, HI)),
        ("k_idx", index.k_idx, (plan.num_tokens, DI)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(
                f"select: {name} must be {shape} as planned, got {tuple(tensor.shape)}."
            )
    device = keys.data.device
    check_alike("select", "q_idx", index.q_idx, index.q_idx.dtype, device)
    check_alike("select", "w_idx", index.w_idx, scores_dtype(index.q_idx.dtype), device)
    refuse_grad("select", tuple(tensor for tensor in index if tensor is not None))
    return keys


def write_keys(index: IndexInputs, keys: PagedCache, plan: Plan) -> None:
    """This step's indexer keys to the plan's slots, unless they are there already."""
    if index.k_idx is None:
        return
    cache_write(
        keys.data,
        index.k_idx,
        index.k_idx[:, :0],
        plan.slot_mapping,
        keys.kv_scale,
        format=keys.format,
        backend=plan.backends["cache_write"],
    )


def _choose(
    index: IndexInputs, keys: PagedCache, cache: LayerCache, plan: Plan, sparse: SparsePlan
) -> Selection:
    assert plan.config.indexer is not None and cache.latent is not None
    positions = choose_positions(
        index.q_idx[sparse.rows], index.w_idx[sparse.rows], keys, plan, sparse
    )
    rows = absorbed_rows(positions, cache.latent, plan, sparse)
    return Selection(positions, sparse.topk_lens, rows, sparse.row_lens)


def absorbed_rows(
    positions: Tensor,  # [n, K] i32
    latent: PagedCache,
    plan: Plan,
    sparse: SparsePlan,
) -> Tensor:  # [num_absorbed, K] i32
    """What the absorbed rows chose, as slots where whoever attends takes nothing else."""
    if not plan.mapped:
        return positions[: sparse.num_absorbed]
    parts = [
        map_slots(
            positions[chunk],
            sparse.block_table,
            start_loc,
            BS=latent.block_size,
            num_blocks=latent.num_blocks,
            backend=plan.backends["map_slots"],
        )[0]
        for chunk, start_loc in zip(sparse.query_chunks, sparse.query_chunk_start_locs, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def choose_positions(
    q_idx: Tensor,  # [n, HI, DI]
    w_idx: Tensor,  # [n, HI]
    keys: PagedCache,
    plan: Plan,
    scored: SparsePlan | CompressedPlan,
) -> Tensor:  # [n, K] i32
    """The best of the keys each row may see, scored as many rows at a time as the plan says."""
    assert plan.config.indexer is not None
    K = plan.config.indexer.topk
    if plan.workspace is not None and plan.workspace.selection.shape[0]:
        positions = plan.workspace.selection[: scored.num_rows]
    else:
        shape = (scored.num_rows, K)
        positions = torch.empty(shape, dtype=torch.int32, device=q_idx.device)
    for chunk, start_loc in zip(scored.chunks, scored.score_start_locs, strict=True):
        choice = positions[chunk.rows]
        if chunk.num_keys <= K:  # nothing to choose
            choice.copy_(scored.first_keys.expand(choice.shape))
            choice.masked_fill_(choice >= scored.row_lens[chunk.rows, None], -1)
        else:
            choice.copy_(_score_and_choose(q_idx, w_idx, keys, plan, scored, chunk, start_loc))
    return positions


def _score_and_choose(
    q_idx: Tensor,
    w_idx: Tensor,
    keys: PagedCache,
    plan: Plan,
    scored: SparsePlan | CompressedPlan,
    chunk: ScoreChunk,
    start_loc: Tensor,  # [B+1] i32
) -> Tensor:  # [rows, K] i32
    assert plan.config.indexer is not None
    seen = scored.row_lens[chunk.rows]
    positions, _ = index_topk(
        score_chunk(q_idx, w_idx, keys, plan, scored, chunk, start_loc),
        scored.row_starts[: len(seen)],
        seen,
        K=plan.config.indexer.topk,
        backend=plan.backends["index_topk"],
    )
    return positions


def score_chunk(
    q_idx: Tensor,  # [n, HI, DI]
    w_idx: Tensor,  # [n, HI]
    keys: PagedCache,
    plan: Plan,
    scored: SparsePlan | CompressedPlan,
    chunk: ScoreChunk,
    start_loc: Tensor,  # [B+1] i32
) -> Tensor:  # [rows, num_keys] f32
    """Scores of the keys that a chunk's rows may see."""
    rows = chunk.rows
    q, scales = keys.layout.encode_query(q_idx[rows])
    w = w_idx[rows] if scales is None else w_idx[rows] * scales
    return index_logits(
        q,
        w,
        keys.data,
        scored.block_table,
        start_loc,
        scored.row_lens[rows],
        format=keys.format,
        num_keys=chunk.num_keys,
        batch_invariant=plan.batch_invariant,
        backend=plan.backends["index_logits"],
    )
