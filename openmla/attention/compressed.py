"""DeepSeek V4 step: writes rows to the window, compresses tokens to entries, attends to both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.attention.across import gathered_cache
from openmla.attention.checks import check_out, check_selection, check_sink, check_write
from openmla.attention.quantized import check_quantized, quantize_into
from openmla.attention.select import choose
from openmla.attention.step import attend_groups
from openmla.attention.types import (
    CompressedInputs,
    IndexInputs,
    PoolInputs,
    RawProjections,
    Selection,
    Step,
    check_alike,
)
from openmla.attention.write import write_rows
from openmla.cache import LayerCache, PagedCache
from openmla.cache.format import state_width
from openmla.config import INDEXED_RATIO
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.ops import compress_kv, rope
from openmla.ops._register import refuse_grad
from openmla.ops.index_logits import scores_dtype
from openmla.outputs import QuantizedOutput
from openmla.plan import Plan

KEYS = ("all", "window", "entries")
_TOKENS, _WEIGHTS = ("kv", "score"), ("bias", "norm_weight")  # fields of PoolInputs


def attend_compressed(
    q: Tensor,  # [T, H, D], rotated
    rows: Tensor,  # [T, D], this step's rows, rotated
    cache: LayerCache,
    plan: Plan,
    *,
    sink: Tensor,  # [H] f32
    raw: RawProjections | None = None,  # q and rows before norm and RoPE
    table: Tensor | None = None,  # [Q, R] f32, the layer's RoPE table, if it has entries
    pool_inputs: PoolInputs | None = None,  # if the layer has entries
    index: IndexInputs | None = None,  # if the plan selects entries
    index_pool_inputs: PoolInputs | None = None,
    hadamard: bool = False,
    out: Tensor | QuantizedOutput | None = None,  # [T, H, D], or make_output()'s for T rows
) -> Any:  # [T, H, D], still rotated: rope with inverse=True undoes that; or the buffers
    """Run the attention of one DeepSeek V4 layer over the T tokens of a step.

    Rows and entries of this step are written first: a token attends to its own row and to the
    entry that it completes. Tokens keep the caller's order.

    Args:
        q: [T, H, D] queries, rotated.
        rows: [T, D] rows of this step, rotated; they are keys and values at once.
        cache: the layer's cache, of the plan's compress ratio.
        plan: the plan of the step for layers of this ratio.
        sink: [H] float32, a logit per head that joins the softmax and has no value.
        raw: q and rows before they are normalized and rotated. The write then does that in place.
        table: the layer's RoPE table. Needed by layers with entries, and with a quantized `out`.
        pool_inputs: inputs of the compressor, for layers with entries.
        index: inputs of the indexer, where the plan selects entries.
        index_pool_inputs: inputs of the compressor of indexer keys, for layers of ratio 4.
        hadamard: whether q_idx is rotated by a Hadamard matrix; indexer keys then are too.
        out: a tensor [T, H, D] or make_output() buffers to fill and return. Quantized outputs are
            rotated back by `table` before they are quantized.

    Returns:
        The output [T, H, D], or `out`. An output that is not quantized is still rotated: rotate it
        back with ops.rope(inverse=True).

    Raises:
        ShapeError: a tensor has a wrong shape, dtype or device. Nothing is written.
        ConfigError: plan and cache do not match, or an input of this ratio is missing. Nothing is
            written.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v4"]
    cache = openmla.allocate_cache(
        config, num_blocks=4, block_size=256, format="fp32", max_requests=1, max_tokens=20
    )
    pool = openmla.CompressedPool(cache.geometry)
    pool.take({"a": 20})
    batch = openmla.Batch([20], [20], **pool.tables(["a"])._asdict())
    plan = openmla.make_plan(batch, config, cache)
    H, D = config.num_heads, config.latent_dim
    q, rows, sink = torch.randn(20, H, D), torch.randn(20, D), torch.zeros(H)
    out = openmla.attend_compressed(q, rows, cache, plan, sink=sink)
    print(out.shape)  # [T, H, D]
    ```
    """
    check_kind("step", "cache", cache, LayerCache)
    check_kind("step", "plan", plan, Plan)
    if isinstance(out, QuantizedOutput):
        check_quantized(out, q, plan)
        if table is None:
            raise ConfigError(
                "step: table is missing: outputs are rotated back before they are quantized. Pass "
                "the layer's RoPE table."
            )
    else:
        check_out(out, q, plan)
    inputs = CompressedInputs(q, rows, raw, table, pool_inputs, index, index_pool_inputs, hadamard)
    if not isinstance(sink, Tensor):
        raise ShapeError(f"step: sink must be a tensor, got {type(sink).__name__}.")
    attended, _ = attend_segments(inputs, cache, plan, sink=sink)
    if not isinstance(out, QuantizedOutput):
        return attended if out is None else out.copy_(attended)
    assert table is not None and plan.shared is not None
    rope(
        attended[:, :, attended.shape[2] - table.shape[1] :],
        plan.shared.positions.clamp_min(0),  # padding has no position; its rows are 0
        table,
        pairing="pairs",
        inverse=True,
        backend=plan.backend("rope"),
    )
    quantize_into(out, attended, plan, {})
    return out


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
    """Attend to "all" keys, only the "window" or only the "entries". `selection` selects entries in
    place of inputs.index. Without `write` the caches must already hold this step, and only q and
    index of `inputs` are read."""
    if keys not in KEYS:
        raise ConfigError(f"step: keys must be 'all', 'window' or 'entries', got {keys!r}.")
    check_write(inputs.raw, plan, write)
    if not write:
        inputs = CompressedInputs(q=inputs.q, index=inputs.index)
    chooses = plan.chooses and keys != "window"
    _check(inputs, cache, plan, sink, write=write)
    _check_choice(inputs.index, selection, plan, chooses=chooses)
    if write:
        _write(inputs, cache, plan)
    if plan.bring is not None:
        cache = gathered_cache(cache, plan)
    if chooses and selection is None:
        assert inputs.index is not None
        selection = choose(inputs.index, cache, plan)
    step = Step(cache, plan, q=inputs.q, selection=selection, only=keys)
    ((_, out, lse),) = attend_groups(step, sink)
    return out, lse


def write_compressed(inputs: CompressedInputs, cache: LayerCache, plan: Plan) -> None:
    """Write this step's rows and entries to the caches, for a separate attention call."""
    _check(inputs, cache, plan, None, write=True)
    _write(inputs, cache, plan)


def _check(
    inputs: CompressedInputs, cache: LayerCache, plan: Plan, sink: Tensor | None, *, write: bool
) -> None:
    """Run all checks before anything is written."""
    window = _check_step(inputs, cache, plan, write=write)
    _check_inputs(inputs, plan, sink, write=write)
    _check_dtypes(inputs, sink, window.data.device)
    plan.check_cache("step", cache)
    _check_state(cache, inputs)


def _check_step(
    inputs: CompressedInputs, cache: LayerCache, plan: Plan, *, write: bool
) -> PagedCache:
    """Raise unless plan and cache match the same kind of layer, and q and rows match the plan."""
    window, v4 = cache.window, plan.config.compressor is not None
    if not v4 or window is None:
        if v4:
            raise ConfigError(
                "step: cache has no window rows. Pass the LayerCache that the plan was made for."
            )
        raise ConfigError(
            f"step: the plan's config ({plan.config.model_type}) has no compressor. Call "
            "attend_step() or attend_partial()."
        )
    if cache.ratio != plan.ratio:
        raise ConfigError(
            f"step: cache must have the plan's compress ratio {plan.ratio}, got {cache.ratio}. "
            "Make one plan for each ratio."
        )
    D, H = plan.config.latent_dim, plan.config.num_heads
    due: list[tuple[str, Tensor | None, tuple[int, ...]]]
    due = [("q", inputs.q, (plan.num_tokens, H, D))]
    due += [("rows", inputs.rows, (plan.num_tokens, D))] if write else []
    for name, tensor, shape in due:
        got = None if tensor is None else tuple(tensor.shape)
        if got != shape:
            raise ShapeError(f"step: {name} must be {shape} for this plan, got {got}.")
    return window


def _check_choice(
    index: IndexInputs | None, selection: Selection | None, plan: Plan, *, chooses: bool
) -> None:
    """Raise unless exactly one of index and selection is given if the plan selects entries."""
    if chooses and index is None and selection is None:
        raise ConfigError(
            f"step: index is missing: tokens of this plan select entries (ratio {plan.ratio}). "
            "Pass index, or a selection to attend_partial()."
        )
    if selection is None:
        return
    if index is not None or not chooses:
        why = "when index is given" if chooses else "where no token selects entries"
        raise ConfigError(f"step: selection must be None {why}.")
    assert plan.select is not None
    check_selection(selection, plan.select)


def _write(inputs: CompressedInputs, cache: LayerCache, plan: Plan) -> None:
    """Write rows to the window, and compress tokens to entries and indexer keys."""
    rows, pool_inputs, table = inputs.rows, inputs.pool_inputs, inputs.table
    assert rows is not None and cache.window is not None
    write_rows(rows, rows[:, :0], inputs.raw, cache.window, plan)
    if pool_inputs is None or table is None:
        return
    assert cache.compressed is not None and cache.state is not None
    width = state_width(plan.config.latent_dim, overlap=cache.index is not None)
    _compress(pool_inputs, cache.compressed, cache.state.data[..., :width], plan, table)
    if cache.index is not None:
        assert inputs.index_pool_inputs is not None
        state = cache.state.data[..., width:]
        keys = inputs.index_pool_inputs
        _compress(keys, cache.index, state, plan, table, hadamard=inputs.hadamard)


def _check_inputs(
    inputs: CompressedInputs,
    plan: Plan,
    sink: Tensor | None,
    *,
    write: bool,
) -> None:
    """Raise unless exactly the inputs of this ratio are given, in the planned shapes."""
    index, table = inputs.index, inputs.table
    config, T, r = plan.config, plan.num_tokens, plan.ratio
    assert config.indexer is not None
    HI, DI, chooses = config.indexer.num_heads, config.indexer.head_dim, r == INDEXED_RATIO
    if sink is not None:
        check_sink(sink, inputs.q, plan)
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = []
    for name, given, due, D in (
        ("pool_inputs", inputs.pool_inputs, write and r > 0, config.latent_dim),
        ("index_pool_inputs", inputs.index_pool_inputs, write and chooses, DI),
    ):
        if (given is not None) != due:
            what = "is missing" if due else "must be None"
            raise ConfigError(f"step: {name} {what} for ratio {r}.")
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
            f"step: table must have a row for each of {config.max_positions} positions, got "
            f"{None if table is None else table.shape[0]}. Pass the layer's RoPE table."
        )
    for name, tensor, shape in wanted:
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(
                f"step: {name} must be {shape} for this plan, got {tuple(tensor.shape)}."
            )


def _check_dtypes(inputs: CompressedInputs, sink: Tensor | None, device: torch.device) -> None:
    """Check all dtypes and devices before the first write; each op checks only its own."""
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


def _check_state(cache: LayerCache, inputs: CompressedInputs) -> None:
    """Check what compress_kv would check only after half of the step is written."""
    for parts in (inputs.pool_inputs, inputs.index_pool_inputs):
        if parts is not None and cache.state is not None:
            wide = torch.promote_types(parts.kv.dtype, torch.float32)
            if wide != cache.state.data.dtype:
                raise ConfigError(
                    f"step: cache.state must be {wide} for {parts.kv.dtype} tokens, got "
                    f"{cache.state.data.dtype}."
                )


def _compress(
    pool_inputs: PoolInputs,
    entries: PagedCache,
    state: Tensor,
    plan: Plan,
    table: Tensor,
    *,
    hadamard: bool = False,
) -> None:
    pool = plan.pool
    assert pool is not None
    compress_kv(
        entries.data,
        entries.kv_scale,
        state,
        pool_inputs.kv,
        pool_inputs.score,
        pool_inputs.bias,
        pool_inputs.norm_weight,
        table,
        pool.positions,
        pool.query_start_loc,
        pool.block_table,
        pool.state_slots,
        entries.clamped,
        format=entries.format,
        ratio=pool.ratio,
        overlap=pool_inputs.kv.shape[1] == 2 * pool_inputs.norm_weight.shape[0],
        eps=plan.config.latent_eps,
        hadamard=hadamard,
        batch_invariant=plan.batch_invariant,
        backend=plan.backend("compress_kv"),
    )
