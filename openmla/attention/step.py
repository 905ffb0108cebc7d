"""attend_step: write this step's rows, then attend, each group of tokens as its plan says."""

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

# Rows of the step, their out [n, H, V] and lse [n, H]. A plain tuple: the compiler makes constants
# of a slice's ends where it becomes a field of a class.
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
) -> Any:  # the same: [T, H, V] in the queries' dtype, or the buffers
    """One layer's attention over the step's T tokens, in the caller's order.

    All new rows are written first, so that absorbed queries find their own row in the cache. With
    `raw`, of which `projected` is a view, they are normalised and rotated on their way.
    `selection` is select_step's, this layer's or an earlier one's, where the plan has sparse rows.
    A `sink` is a logit per head that joins the softmax and has no value. Tokens of no request, a
    batch's padding and what fills up a captured step, get 0.

    `write=False`: the caller has written this step's rows to the plan's slots. Absorbed requests,
    and masked ones (sparse prefill), read all keys from the cache; expanded ones read their context
    from it and take their new rows from `projected`, as ever. With a lossy cache the answer so is
    the one that writing here gives.

    `out` is filled and returned. Its tokens may be apart, as in a wider buffer; a token's heads are
    contiguous. Where it is a QuantizedOutput, of the format that the plan was made for, outputs are
    quantised by the ops that the plan names, and after a sink.
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
    return put_together([(rows, some) for rows, some, _ in parts], plan, into=out)


def begin_step(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
    selection: Selection | None,
    raw: RawProjections | None,
    write: bool,
) -> Step:
    """All checks, then this step's rows into the cache. The step has queries and new rows as they
    meet the cached ones."""
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
    """Every group of the plan; absorbed ones straight into `out` where they can, and into buffers
    those whose last op quantizes, which are not in the result. Without weights mqa_sparse applies
    the sink, unless ranks are still to be merged."""
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
    """The part of `out` that these tokens fill, if a view can be written to as it is."""
    if not isinstance(rows, slice) or not writes_in_place(out):
        return None
    return out[rows]


def put_together(
    parts: Sequence[tuple[Rows, Tensor]],
    plan: Plan,
    *,
    empty: float = 0.0,
    into: Tensor | None = None,
) -> Tensor:  # [T, ...]
    """Parts of the plan's tokens as one tensor of all. Padding, the last of them, gets `empty`.

    Only the plan's padding is asked how far the parts reach: their own ends are symbols where a
    step is compiled, and comparing symbols would fix them.
    """
    rows, first = parts[0]
    if into is None:
        if len(parts) == 1 and isinstance(rows, slice) and not plan.padding:
            return first  # every token, in order
        into = first.new_empty((plan.num_tokens, *first.shape[1:]))
    if plan.padding:
        into[plan.num_tokens - plan.padding :] = empty
    for rows, part in parts:
        room = room_for(into, rows)
        if room is None or room.data_ptr() != part.data_ptr():  # else it was written there
            into[rows] = part
    return into


def scatter_out_lse(parts: Sequence[Part], plan: Plan) -> tuple[Tensor, Tensor]:
    """Out [T, H, ...] and lse [T, H] of all tokens."""
    out = put_together([(rows, some) for rows, some, _ in parts], plan)
    lse = put_together([(rows, some) for rows, _, some in parts], plan, empty=-torch.inf)
    return out, lse
