"""attend_step: writes this step's rows, then attends with each group of tokens as planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.attention.absorbed import attend_absorbed, writes_in_place
from openmla.attention.across import attend_across, merge_across
from openmla.attention.checks import (
    check_given,
    check_inputs,
    check_out,
    check_selection,
    check_sink,
    check_write,
)
from openmla.attention.expanded import attend_expanded
from openmla.attention.quantized import (
    attend_into,
    check_quantized,
    quantize_into,
    quantize_padding,
    target,
)
from openmla.attention.ratio import scale_rope
from openmla.attention.sink import apply_sink
from openmla.attention.types import (
    AbsorbedWeights,
    Projected,
    RawProjections,
    Selection,
    Step,
)
from openmla.attention.write import write_rows
from openmla.cache import LayerCache
from openmla.outputs import QuantizedOutput
from openmla.plan import Absorbed, Plan
from openmla.plan.types import Rows

# Rows of the step, their out [n, H, V] and lse [n, H]. A plain tuple: torch.compile turns a slice's
# ends into constants if it is a field of a class.
Part = tuple[Rows, Tensor, Tensor]


def attend_step(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
    *,
    selection: Selection | None = None,
    sink: Tensor | None = None,  # [H] f32
    raw: RawProjections | None = None,
    write: bool = True,
    out: Tensor | QuantizedOutput | None = None,  # [T, H, V], or make_output()'s for T rows
) -> Any:  # [T, H, V] in the queries' dtype, or the buffers
    """Write a step's rows and run one layer's attention over its T tokens.

    All new rows are written first, so that absorbed queries find their own row in the cache. The
    result is in the caller's order. Padding tokens, which belong to no request, get 0.

    Args:
        projected: queries and latent rows of the step's tokens.
        absorbed: the weights of kv_b_proj, made by absorb().
        cache: the layer's cache.
        plan: the plan of the step, made with a cache of the same geometry.
        selection: the selected keys of select_step() or make_selection(), of this layer or of the
            layer whose selection it shares. Needed where the plan selects keys.
        sink: [H] float32, a logit per head that joins the softmax and has no value.
        raw: projections before norm and RoPE, of which `projected` is a view. The write normalizes
            and rotates them in place.
        write: False if the caller has already written this step's rows to the plan's slots.
            Absorbed and masked requests then read all keys from the cache. Expanded requests read
            their context from the cache and their new rows from `projected`, with or without
            `write`. The result is the same, also with a lossy cache.
        out: a tensor [T, H, V] to fill, whose tokens may be strided and whose heads are
            contiguous; or make_output() buffers of T rows in the plan's output format.

    Returns:
        The output [T, H, V] in the dtype of the queries, or `out`.

    Raises:
        ShapeError: a tensor has a wrong shape, dtype or device. Nothing is written.
        ConfigError: cache, plan or selection do not match. Nothing is written.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3"]
    cache = openmla.allocate_cache(config, num_blocks=4, block_size=16, format="fp32")
    pool = openmla.BlockPool(num_blocks=4, block_size=16)
    pool.take({"a": 20})
    table, slots = pool.block_table(["a"]), pool.slot_mapping([("a", 0, 20)])
    plan = openmla.make_plan(openmla.Batch([20], [20], table, slots), config, cache)

    H, P, R = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    C, V = config.kv_lora_rank, config.v_head_dim
    weights = openmla.absorb(torch.randn(H * (P + V), C), config)
    projected = openmla.Projected(
        torch.randn(20, H, P), torch.randn(20, H, R), torch.randn(20, C), torch.randn(20, R)
    )
    with torch.inference_mode():
        out = openmla.attend_step(projected, weights, cache, plan)
    assert out.shape == (20, H, V)
    ```
    """
    check_given(projected, absorbed, cache, plan)
    if isinstance(out, QuantizedOutput):
        check_quantized(out, projected.q_nope, plan)
    else:
        check_out(out, projected.q_nope, plan)
    if sink is not None:
        check_sink(sink, projected.q_nope, plan)
    step = begin_step(projected, absorbed, cache, plan, selection, raw, write)
    parts = attend_groups(step, sink, out)
    if isinstance(out, QuantizedOutput):
        if plan.padding:
            quantize_padding(out, projected.q_nope, plan)
        return out
    return scatter_parts([(rows, some) for rows, some, _ in parts], plan, into=out)


def begin_step(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
    selection: Selection | None,
    raw: RawProjections | None,
    write: bool,
) -> Step:
    """Run all checks, then write this step's rows. The returned step has queries and new rows
    scaled to match the cached ones."""
    latent = check_inputs(projected, absorbed, cache, plan)
    if plan.select is not None:
        check_selection(selection, plan.select)
    check_write(raw, plan, write)
    if write and plan.causal:
        write_rows(projected.kv_c, projected.k_pe, raw, latent, plan)
    scaled = scale_rope(projected, latent, plan)
    return Step(cache, plan, scaled, absorbed, selection=selection)


def attend_groups(
    step: Step,
    sink: Tensor | None = None,  # [H] f32
    out: Tensor | QuantizedOutput | None = None,
) -> list[Part]:
    """Run every group of the plan. Absorbed groups write directly to `out` if possible. Groups
    whose last op quantizes write to the buffers and are not in the result. Without weights
    mqa_sparse applies the sink, unless results of other ranks must still be merged."""
    parts: list[Part] = []
    for group in step.plan.groups:
        quantized = out if isinstance(out, QuantizedOutput) else None
        if quantized is not None and group.end != "quantize_out" and sink is None:
            attend_into(quantized, step, group)
            continue
        alone = group.across is None
        inside = sink if step.weights is None and alone else None
        if group.across is not None and (group.part is None or step.only == "entries"):
            some, lse = attend_across(step, group.across)
        elif isinstance(group.part, Absorbed):
            room = None
            if isinstance(out, Tensor) and sink is None and alone:
                room = room_for(out, group.rows)
            some, lse = attend_absorbed(step, group, room, inside)
        else:
            some, lse = attend_expanded(step, group)
        if group.part is not None and group.across is not None and step.only == "all":
            merge_across(step, group.across, some, lse)
        if sink is not None and inside is None:
            some = apply_sink(some, lse, sink)
        if quantized is not None:
            quantize_into(quantized, some, step.plan, target(group.rows))
        else:
            parts.append((group.rows, some, lse))
    return parts


def room_for(out: Tensor, rows: Rows) -> Tensor | None:
    """Return the view of `out` that these tokens fill, if it can be written directly."""
    if not isinstance(rows, slice) or not writes_in_place(out):
        return None
    return out[rows]


def scatter_parts(
    parts: Sequence[tuple[Rows, Tensor]],
    plan: Plan,
    *,
    empty: float = 0.0,
    into: Tensor | None = None,
) -> Tensor:  # [T, ...]
    """Scatter parts into one tensor of all tokens. Padding, at the end, is filled with `empty`.

    Only the plan's padding tells how far the parts reach: under torch.compile their own ends are
    symbols, and comparing symbols would specialize them.
    """
    rows, first = parts[0]
    if into is None:
        if len(parts) == 1 and isinstance(rows, slice) and not plan.padding:
            return first  # all tokens, in order
        into = first.new_empty((plan.num_tokens, *first.shape[1:]))
    if plan.padding:
        into[plan.num_tokens - plan.padding :] = empty
    for rows, part in parts:
        room = room_for(into, rows)
        if room is None or room.data_ptr() != part.data_ptr():  # else `part` is that view
            into[rows] = part
    return into


def scatter_out_lse(parts: Sequence[Part], plan: Plan) -> tuple[Tensor, Tensor]:
    """Return out [T, H, ...] and lse [T, H] of all tokens."""
    out = scatter_parts([(rows, some) for rows, some, _ in parts], plan)
    lse = scatter_parts([(rows, some) for rows, _, some in parts], plan, empty=-torch.inf)
    return out, lse
