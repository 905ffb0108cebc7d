"""attend_step: write this step's rows, then attend, each request in the form its plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.attention.absorbed import attend_absorbed, attend_chosen, writes_in_place
from openmla.attention.expanded import attend_expanded
from openmla.attention.masked import attend_masked
from openmla.attention.quantized import (
    attend_quantized,
    check_quantized,
    end_padding,
    end_plainly,
    target,
)
from openmla.attention.ratio import scale_rope
from openmla.attention.sink import apply_sink
from openmla.attention.types import (
    AbsorbedWeights,
    Projected,
    RawProjections,
    Selection,
    check_alike,
)
from openmla.attention.write import write_rows
from openmla.cache import LayerCache, PagedCache
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.ops._register import refuse_grad
from openmla.ops.project_heads import E4M3, check_weights
from openmla.outputs import QuantizedOutput
from openmla.plan import CompressedPlan, Plan, SparsePlan
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
    if isinstance(out, QuantizedOutput) and sink is None:
        projected, latent = begin_step(projected, absorbed, cache, plan, selection, raw, write)
        attend_quantized(out, projected, absorbed, latent, plan, selection)
        return out
    room = out if isinstance(out, Tensor) and sink is None else None
    parts = attend_parts(projected, absorbed, cache, plan, selection, raw, write, room)
    if sink is not None:
        parts = [(rows, apply_sink(some, lse, sink), lse) for rows, some, lse in parts]
    if isinstance(out, QuantizedOutput):
        for rows, some, _ in parts:
            end_plainly(out, some, plan, target(rows))
        if plan.padding:
            end_padding(out, projected.q_nope, plan)
        return out
    return put_together([(rows, some) for rows, some, _ in parts], plan, into=out)


def attend_parts(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
    selection: Selection | None,
    raw: RawProjections | None,
    write: bool,
    out: Tensor | None = None,  # [T, H, V]
) -> list[Part]:
    """Write, then the tokens of each form; absorbed ones straight into `out` where they can."""
    projected, latent = begin_step(projected, absorbed, cache, plan, selection, raw, write)
    parts: list[Part] = []
    if plan.decode is not None:
        room = room_for(out, plan.decode.rows)
        attended = attend_absorbed(projected, absorbed, latent, plan, plan.decode, room)
        parts.append((plan.decode.rows, *attended))
    if plan.prefill is not None:
        attended = attend_expanded(projected, absorbed, latent, plan, plan.prefill)
        parts.append((plan.prefill.rows, *attended))
    if plan.sparse is not None:
        assert selection is not None
        attended = _attend_sparse(projected, absorbed, latent, plan, plan.sparse, selection, out)
        parts.append((plan.sparse.rows, *attended))
    return parts


def room_for(out: Tensor | None, rows: Rows) -> Tensor | None:
    """The part of `out` that these tokens fill, if a view can be written to as it is."""
    if out is None or not isinstance(rows, slice) or not writes_in_place(out):
        return None
    return out[rows]


def begin_step(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
    selection: Selection | None,
    raw: RawProjections | None,
    write: bool,
) -> tuple[Projected, PagedCache]:
    """All checks, then this step's rows into the cache. Returns the latent one, and queries and new
    rows as they meet its rows."""
    latent = check_inputs(projected, absorbed, cache, plan)
    if plan.sparse is not None:
        check_selection(selection, plan.sparse)
    check_write(raw, plan, write)
    if write and plan.causal:
        write_rows(projected.kv_c, projected.k_pe, raw, latent, plan)
    return scale_rope(projected, latent, plan), latent


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


def put_both_together(parts: Sequence[Part], plan: Plan) -> tuple[Tensor, Tensor]:
    """Out [T, H, ...] and lse [T, H] of all tokens."""
    out = put_together([(rows, some) for rows, some, _ in parts], plan)
    lse = put_together([(rows, some) for rows, _, some in parts], plan, empty=-torch.inf)
    return out, lse


def check_given(projected: object, absorbed: object, cache: object, plan: object) -> None:
    """Of the classes that have the names looked at below."""
    for name, given, kind in (
        ("projected", projected, Projected),
        ("absorbed", absorbed, AbsorbedWeights),
        ("cache", cache, LayerCache),
        ("plan", plan, Plan),
    ):
        check_kind("step", name, given, kind)


def check_sink(sink: Tensor, q: Tensor, plan: Plan) -> None:
    check_kind("step", "sink", sink, Tensor)
    shape = (plan.config.num_heads,)
    if sink.shape != shape:
        raise ShapeError(f"step: sink must be [H] with {shape}, got {tuple(sink.shape)}.")
    if not sink.is_floating_point():
        raise ShapeError(f"step: sink must be of a floating dtype, got {sink.dtype}.")
    check_alike("step", "sink", sink, sink.dtype, q.device)


def check_write(raw: RawProjections | None, plan: Plan, write: bool) -> None:
    """Rows are finished on their way into the cache; where none goes there, they are already."""
    if not isinstance(write, bool):
        raise ConfigError(f"step: write must be True or False, got {write!r}.")
    if raw is not None and not (write and plan.causal):
        raise ConfigError(
            "step: raw must not be given where nothing is written, which is what normalises and "
            "rotates. Give rows and queries that are finished."
        )


def check_out(out: Tensor | None, q: Tensor, plan: Plan) -> None:
    """A caller's buffer can take the result as it is; looked at before anything is written."""
    if out is None:
        return
    H, V = plan.config.num_heads, plan.config.v_head_dim
    shape = (plan.num_tokens, H, V)
    if not isinstance(out, Tensor):
        raise ShapeError(f"step: out must be a tensor, got {type(out).__name__}.")
    if out.shape != shape:
        raise ShapeError(f"step: out must be [T, H, V] with {shape}, got {tuple(out.shape)}.")
    check_alike("step", "out", out, q.dtype, q.device)
    inside = (V == 1 or out.stride(2) == 1) and (H == 1 or out.stride(1) == V)
    if not inside or (shape[0] > 1 and out.stride(0) < H * V):
        raise ShapeError(
            f"step: out must be contiguous within a token and tokens apart, "
            f"got strides {out.stride()}."
        )
    refuse_grad("step", (out,))


def check_inputs(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
) -> PagedCache:
    """What an op would refuse only after rows are written; returns the latent cache."""
    latent = cache.latent
    if latent is None:
        raise ConfigError("step: cache must have latent rows, got none.")
    plan.check_cache(cache)
    config, T, q = plan.config, plan.num_tokens, projected.q_nope
    dtype, device = q.dtype, latent.data.device
    H, P, R = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    C, V = config.kv_lora_rank, config.v_head_dim
    scaled = absorbed.uk_scale is not None or absorbed.uv_scale is not None
    for name, tensor, letters, shape in (
        ("q_nope", q, "[T, H, P]", (T, H, P)),
        ("q_pe", projected.q_pe, "[T, H, R]", (T, H, R)),
        ("kv_c", projected.kv_c, "[T, C]", (T, C)),
        ("k_pe", projected.k_pe, "[T, R]", (T, R)),
        ("kv_b", absorbed.kv_b, "[H * (P + V), C]", (H * (P + V), C)),
        ("w_uk", absorbed.w_uk, "[H, P, C]", (H, P, C)),
        ("w_uv", absorbed.w_uv, "[H, C, V]", (H, C, V)),
    ):
        if tensor.shape != shape:
            raise ShapeError(
                f"step: {name} must be {letters} with {shape} as planned, "
                f"got {tuple(tensor.shape)}."
            )
        if tensor.dtype != dtype or tensor.device != device:
            eight_bits = scaled and tensor.dtype == E4M3 and name in ("kv_b", "w_uk", "w_uv")
            check_alike("step", name, tensor, E4M3 if eight_bits else dtype, device)  # says which
    if scaled:
        check_weights("step", "w_uk", absorbed.w_uk, absorbed.uk_scale, q)
        check_weights("step", "w_uv", absorbed.w_uv, absorbed.uv_scale, q)
    space = plan.workspace
    if space is not None and space.rows.dtype != q.dtype:
        raise ShapeError(
            f"step: q_nope must be {space.rows.dtype} like the plan's workspace, got {q.dtype}."
        )
    refuse_grad("step", (*projected, absorbed.kv_b))
    return latent


def check_selection(selection: Selection | None, sparse: SparsePlan | CompressedPlan) -> None:
    if selection is None:
        raise ConfigError(
            "step: selection must be given, the plan has tokens that choose their keys. "
            "It is what select_step or make_selection returned for this layer, or for the one it "
            "shares with."
        )
    check_kind("step", "selection", selection, Selection)
    if selection.row_lens is not sparse.row_lens:
        raise ConfigError(
            f"step: selection must be of this step's {sparse.num_rows} sparse tokens, "
            f"got another plan's {selection.positions.shape[0]}."
        )


def _attend_sparse(
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    sparse: SparsePlan,
    selection: Selection,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Absorbed rows first, then masked ones, as the plan packed them."""
    q_nope, q_pe = projected.q_nope[sparse.rows], projected.q_pe[sparse.rows]
    n = sparse.num_absorbed
    parts = []
    if n:
        room = None if sparse.masked else room_for(out, sparse.rows)
        step = absorbed, latent, plan, sparse, selection, room
        parts.append(attend_chosen(q_nope[:n], q_pe[:n], *step))
    if sparse.masked:
        q = torch.cat([q_nope[n:], q_pe[n:]], dim=-1)
        parts.append(attend_masked(q, projected, absorbed, latent, plan, sparse, selection))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
