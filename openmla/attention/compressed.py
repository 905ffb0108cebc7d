"""V4's step: raw rows into the window, tokens into entries, then attention over both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla.attention.select import choose_positions
from openmla.attention.step import check_out, check_selection, check_write
from openmla.attention.types import (
    CompressedInputs,
    IndexInputs,
    PoolInputs,
    RawProjections,
    Selection,
    check_alike,
    seen_nothing,
)
from openmla.attention.write import write_rows
from openmla.cache import LayerCache, PagedCache
from openmla.cache.format import state_width
from openmla.config import INDEXED_RATIO
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.ops import Segment, compress_kv, mqa_sparse
from openmla.ops._register import refuse_grad
from openmla.ops.index_logits import scores_dtype
from openmla.plan import CompressedPlan, Plan

KEYS = ("all", "window", "entries")
_TOKENS, _WEIGHTS = ("kv", "score"), ("bias", "norm_weight")  # of PoolInputs


def attend_compressed(
    q: Tensor,  # [T, H, D], rotated
    rows: Tensor,  # [T, D], this step's rows, rotated
    cache: LayerCache,
    plan: Plan,
    *,
    sink: Tensor,  # [H] f32
    raw: RawProjections | None = None,  # what q and rows are before they are normalised and rotated
    table: Tensor | None = None,  # [Q, R] f32, the layer's rope, where it has entries
    pool_inputs: PoolInputs | None = None,  # where the layer has entries
    index: IndexInputs | None = None,  # where the plan has tokens choose among them
    index_pool_inputs: PoolInputs | None = None,
    hadamard: bool = False,
    out: Tensor | None = None,  # [T, H, D]
) -> Tensor:  # [T, H, D], still rotated: rope with inverse=True undoes that
    """One layer's attention over the step's T tokens, in the caller's order.

    Rows and entries of this step are written first: a token attends to its own row and to the
    entry it finishes. `hadamard` says that q_idx was rotated so, and rotates the keys. `out` is
    filled and returned, as attend_step's.
    """
    check_kind("step", "cache", cache, LayerCache)
    check_kind("step", "plan", plan, Plan)
    check_out(out, q, plan)
    inputs = CompressedInputs(q, rows, raw, table, pool_inputs, index, index_pool_inputs, hadamard)
    if not isinstance(sink, Tensor):
        raise ShapeError(f"step: sink must be a tensor, got {type(sink).__name__}.")
    attended, _ = attend_segments(inputs, cache, plan, sink=sink)
    return attended if out is None else out.copy_(attended)


def attend_segments(
    inputs: CompressedInputs,
    cache: LayerCache,
    plan: Plan,
    *,
    selection: Selection | None = None,
    keys: str = "all",
    write: bool = True,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # out [T, H, D], still rotated, and lse [T, H], never with the sink
    """The same over all keys, the "window" alone or the "entries" alone; `selection` is of entries,
    instead of inputs.index. Without `write` all of this step is in the caches already: of `inputs`
    only q, and index, is looked at."""
    if keys not in KEYS:
        raise ConfigError(f"step: keys must be all, window or entries, got {keys!r}.")
    check_write(inputs.raw, plan, write)
    if not write:
        inputs = CompressedInputs(q=inputs.q, index=inputs.index)
    step, window = _check_step(inputs, cache, plan, write=write)
    chooses = len(step.chunks) > 0 and keys != "window"
    _check_inputs(inputs, plan, step, sink, write=write)
    _check_choice(inputs.index, selection, step, chooses=chooses)
    _check_dtypes(inputs, sink, window.data.device)
    _check_cache(cache, plan, inputs.pool_inputs, inputs.index_pool_inputs)
    if write:
        _write(inputs, cache, plan, step)
    segments = [] if keys == "entries" else [_window(window, plan, step)]
    if cache.compressed is not None and keys != "window":
        if chooses:
            chosen = _chosen_entries(inputs.index, selection, cache, plan, step)
            segments.append(chosen)
        else:
            segments.append(_all_entries(cache.compressed, step))
    return _attend(inputs.q, segments, plan, step, sink)


def write_compressed(inputs: CompressedInputs, cache: LayerCache, plan: Plan) -> None:
    """This step's rows and entries into the caches, where something else attends to them."""
    step, window = _check_step(inputs, cache, plan, write=True)
    _check_inputs(inputs, plan, step, None, write=True)
    _check_dtypes(inputs, None, window.data.device)
    _check_cache(cache, plan, inputs.pool_inputs, inputs.index_pool_inputs)
    _write(inputs, cache, plan, step)


def _check_step(
    inputs: CompressedInputs, cache: LayerCache, plan: Plan, *, write: bool
) -> tuple[CompressedPlan, PagedCache]:
    """Plan and cache are of the same kind of layer, queries and rows of the plan."""
    step, window = plan.compressed, cache.window
    if step is None or window is None:
        what = "plan must be of a compressed layer" if window else "cache must have window rows"
        raise ConfigError(f"step: {what}, got none.")
    if cache.ratio != step.ratio:
        raise ConfigError(f"step: cache must be of ratio {step.ratio}, got {cache.ratio}.")
    D, H = plan.config.latent_dim, plan.config.num_heads
    due: list[tuple[str, Tensor | None, tuple[int, ...]]]
    due = [("q", inputs.q, (plan.num_tokens, H, D))]
    due += [("rows", inputs.rows, (plan.num_tokens, D))] if write else []
    for name, tensor, shape in due:
        got = None if tensor is None else tuple(tensor.shape)
        if got != shape:
            raise ShapeError(f"step: {name} must be {shape} as planned, got {got}.")
    return step, window


def _check_choice(
    index: IndexInputs | None, selection: Selection | None, step: CompressedPlan, *, chooses: bool
) -> None:
    """Entries are chosen by one of the two, where they are."""
    if chooses and index is None and selection is None:
        raise ConfigError(
            f"step: index must be given for ratio {step.ratio}, its tokens choose, or a selection."
        )
    if selection is None:
        return
    if index is not None or not chooses:
        why = "beside index" if chooses else "where no token chooses"
        raise ConfigError(f"step: selection must not be given {why}.")
    check_selection(selection, step)


def _write(inputs: CompressedInputs, cache: LayerCache, plan: Plan, step: CompressedPlan) -> None:
    """Raw rows into the window; tokens into entries, and into the indexer's keys."""
    rows, pool_inputs, table = inputs.rows, inputs.pool_inputs, inputs.table
    assert rows is not None and cache.window is not None
    write_rows(rows, rows[:, :0], inputs.raw, cache.window, plan)
    if pool_inputs is None or table is None:
        return
    assert cache.compressed is not None and cache.state is not None
    width = state_width(plan.config.latent_dim, overlap=cache.index is not None)
    _compress(pool_inputs, cache.compressed, cache.state.data[..., :width], plan, step, table)
    if cache.index is not None:
        assert inputs.index_pool_inputs is not None
        state = cache.state.data[..., width:]
        _compress(
            inputs.index_pool_inputs, cache.index, state, plan, step, table,
            hadamard=inputs.hadamard,
        )  # fmt: skip


def _attend(
    q: Tensor,
    segments: Sequence[Segment],
    plan: Plan,
    step: CompressedPlan,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if not segments:  # entries of a layer that has none
        return seen_nothing(q, plan.config.latent_dim)
    return mqa_sparse(
        q,
        step.query_start_loc,
        step.positions,
        segments[0],
        segments[1] if len(segments) > 1 else None,
        sink,
        C=plan.config.latent_dim,
        scale=plan.config.scale,
        run_length=plan.run_length,
        backend=plan.called_with("mqa_sparse"),
    )


def _check_inputs(
    inputs: CompressedInputs,
    plan: Plan,
    step: CompressedPlan,
    sink: Tensor | None,
    *,
    write: bool,
) -> None:
    """What a layer of this ratio takes is given, in the shapes planned for, and nothing else."""
    index, table = inputs.index, inputs.table
    config, T, r = plan.config, step.num_rows, step.ratio
    assert config.indexer is not None
    HI, DI, chooses = config.indexer.num_heads, config.indexer.head_dim, r == INDEXED_RATIO
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [("sink", sink, (config.num_heads,))]
    for name, given, due, D in (
        ("pool_inputs", inputs.pool_inputs, write and r > 0, config.latent_dim),
        ("index_pool_inputs", inputs.index_pool_inputs, write and chooses, DI),
    ):
        if (given is not None) != due:
            verb = "be given" if due else "not be given"
            raise ConfigError(f"step: {name} must {verb} for ratio {r}.")
        if given is not None:
            width = 2 * D if chooses else D
            wanted += [
                (f"{name}.kv", given.kv, (T, width)),
                (f"{name}.score", given.score, (T, width)),
            ]
            wanted += [(f"{name}.bias", given.bias, (r, width))]
            wanted += [(f"{name}.norm_weight", given.norm_weight, (D,))]
    if index is not None:
        wanted += [("q_idx", index.q_idx, (T, HI, DI)), ("w_idx", index.w_idx, (T, HI))]
    if write and r and (table is None or table.shape[0] < config.max_positions):
        raise ConfigError(
            f"step: table must have a row for each of {config.max_positions} positions."
        )
    for name, tensor, shape in wanted:
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(f"step: {name} must be {shape} as planned, got {tuple(tensor.shape)}.")


def _check_dtypes(inputs: CompressedInputs, sink: Tensor | None, device: torch.device) -> None:
    """Dtypes and devices, all before the first write: ops check them one by one."""
    q, rows, index, table = inputs.q, inputs.rows, inputs.index, inputs.table
    given: list[tuple[str, Tensor, torch.dtype]]
    given = [("q", q, q.dtype if rows is None else rows.dtype)]
    given += [("rows", rows, rows.dtype)] if rows is not None else []
    given += [("sink", sink, torch.float32)] if sink is not None else []
    for name in ("pool_inputs", "index_pool_inputs"):
        parts = getattr(inputs, name)
        if parts is not None:
            given += [(f"{name}.{part}", getattr(parts, part), parts.kv.dtype) for part in _TOKENS]
            for part in _WEIGHTS:
                weight = getattr(parts, part)
                given.append((f"{name}.{part}", weight, weight.dtype))
    if index is not None:
        given += [("q_idx", index.q_idx, index.q_idx.dtype)]
        given += [("w_idx", index.w_idx, scores_dtype(index.q_idx.dtype))]
    if table is not None:
        given.append(("table", table, torch.promote_types(table.dtype, torch.float32)))
    for name, tensor, dtype in given:
        check_alike("step", name, tensor, dtype, device)
    refuse_grad("step", [tensor for _, tensor, _ in given])


def _check_cache(
    cache: LayerCache,
    plan: Plan,
    pool_inputs: PoolInputs | None,
    index_pool_inputs: PoolInputs | None,
) -> None:
    """What an op would refuse only after half of the step is written."""
    for name, part in (("window", cache.window), ("compressed", cache.compressed)):
        if part is not None:
            part.check_width("step", name, plan.config.latent_dim)
    if cache.index is not None and plan.config.indexer is not None:
        cache.index.check_width("step", "index", plan.config.indexer.head_dim)
    here, planned = cache.geometry, plan.geometry
    if here is not None and planned is not None and not here.serves(planned):
        raise ConfigError("step: cache must have the geometry the plan was made for, got another.")
    for parts in (pool_inputs, index_pool_inputs):
        if parts is not None and cache.state is not None:
            wide = torch.promote_types(parts.kv.dtype, torch.float32)
            if wide != cache.state.data.dtype:
                raise ConfigError(f"step: state must be {wide} with {parts.kv.dtype} tokens.")


def _window(window: PagedCache, plan: Plan, step: CompressedPlan) -> Segment:
    """Each token's last rows, its own included."""
    assert plan.config.compressor is not None
    return Segment(
        window.data,
        window.kv_scale,
        window.format,
        "window",
        block_table=step.window_table,
        span=plan.config.compressor.window,
    )


def _compress(
    pool_inputs: PoolInputs,
    entries: PagedCache,
    state: Tensor,
    plan: Plan,
    step: CompressedPlan,
    table: Tensor,
    *,
    hadamard: bool = False,
) -> None:
    compress_kv(
        entries.data,
        entries.kv_scale,
        state,
        pool_inputs.kv,
        pool_inputs.score,
        pool_inputs.bias,
        pool_inputs.norm_weight,
        table,
        step.positions,
        step.query_start_loc,
        step.block_table,
        step.state_slots,
        entries.clamped,
        format=entries.format,
        ratio=step.ratio,
        overlap=pool_inputs.kv.shape[1] == 2 * pool_inputs.norm_weight.shape[0],
        eps=plan.config.latent_eps,
        hadamard=hadamard,
        batch_invariant=plan.batch_invariant,
        backend=plan.backends["compress_kv"],
    )


def _all_entries(entries: PagedCache, step: CompressedPlan) -> Segment:
    """Every finished entry: known from the token's position, no list is made."""
    return Segment(
        entries.data,
        entries.kv_scale,
        entries.format,
        "prefix",
        block_table=step.block_table,
        span=step.ratio,
    )


def _chosen_entries(
    index: IndexInputs | None,
    selection: Selection | None,
    cache: LayerCache,
    plan: Plan,
    step: CompressedPlan,
) -> Segment:
    """The caller's choice, or that of the indexer."""
    entries, lens = cache.compressed, step.topk_lens
    assert entries is not None
    if selection is not None:
        positions, lens = selection.rows, selection.lens
    else:
        assert index is not None and cache.index is not None
        positions = choose_positions(index.q_idx, index.w_idx, cache.index, plan, step)
    return Segment(
        entries.data,
        entries.kv_scale,
        entries.format,
        "positions",
        block_table=step.block_table,
        rows=positions,
        row_lens=lens,
    )
