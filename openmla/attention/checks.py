"""Checks of attend_step() and related functions, all run before the first row is written."""

from __future__ import annotations

from torch import Tensor

from openmla.attention.types import (
    AbsorbedWeights,
    Projected,
    RawProjections,
    Selection,
    check_alike,
)
from openmla.cache import LayerCache, PagedCache
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.ops._register import refuse_grad
from openmla.ops.project_heads import E4M3, check_weights
from openmla.plan import Plan, Select


def check_given(projected: object, absorbed: object, cache: object, plan: object) -> None:
    """Raise unless the arguments have the classes whose attributes are read below."""
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
        raise ShapeError(f"step: sink must be [H] = {shape}, got {tuple(sink.shape)}.")
    if not sink.is_floating_point():
        raise ShapeError(f"step: sink must be of a floating dtype, got {sink.dtype}.")
    check_alike("step", "sink", sink, sink.dtype, q.device)


def check_write(raw: RawProjections | None, plan: Plan, write: bool) -> None:
    """Raise if raw rows are passed without a write: the write normalizes and rotates them."""
    if not isinstance(write, bool):
        raise ConfigError(f"step: write must be True or False, got {write!r}.")
    if raw is not None and not (write and plan.causal):
        raise ConfigError(
            "step: raw must be None where no row is written (write=False or causal=False): the "
            "write normalizes and rotates. Pass queries and rows that are normalized and rotated."
        )


def check_out(out: Tensor | None, q: Tensor, plan: Plan) -> None:
    """Raise unless a caller's buffer can hold the result."""
    if out is None:
        return
    H, V = plan.config.num_heads, plan.config.v_head_dim
    shape = (plan.num_tokens, H, V)
    if not isinstance(out, Tensor):
        raise ShapeError(f"step: out must be a tensor, got {type(out).__name__}.")
    if out.shape != shape:
        raise ShapeError(f"step: out must be [T, H, V] = {shape}, got {tuple(out.shape)}.")
    check_alike("step", "out", out, q.dtype, q.device)
    inside = (V == 1 or out.stride(2) == 1) and (H == 1 or out.stride(1) == V)
    if not inside or (shape[0] > 1 and out.stride(0) < H * V):
        raise ShapeError(
            f"step: out must be contiguous within a token, and tokens must not overlap, "
            f"got strides {out.stride()}."
        )
    refuse_grad("step", (out,))


def check_inputs(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
) -> PagedCache:
    """Check what the ops would check only after rows are written. Returns the latent cache."""
    latent = cache.latent
    if latent is None:
        raise ConfigError(
            "step: cache has no latent rows. Pass the LayerCache that the plan was made for."
        )
    plan.check_cache("step", cache)
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
                f"step: {name} must be {letters} = {shape} for this plan, "
                f"got {tuple(tensor.shape)}."
            )
        if tensor.dtype != dtype or tensor.device != device:
            eight_bits = scaled and tensor.dtype == E4M3 and name in ("kv_b", "w_uk", "w_uv")
            check_alike("step", name, tensor, E4M3 if eight_bits else dtype, device)  # raises
    if scaled:
        check_weights("step", "w_uk", absorbed.w_uk, absorbed.uk_scale, q)
        check_weights("step", "w_uv", absorbed.w_uv, absorbed.uv_scale, q)
    space = plan.workspace
    if space is not None and space.rows.dtype != q.dtype:
        raise ShapeError(
            f"step: q_nope must be {space.rows.dtype} like the plan's workspace, got {q.dtype}. "
            "Call warmup() with the dtype of the queries."
        )
    refuse_grad("step", (*projected, absorbed.kv_b))
    return latent


def check_selection(selection: Selection | None, select: Select) -> None:
    if selection is None:
        raise ConfigError(
            f"step: selection is missing: {select.num_rows} tokens of the plan attend to selected "
            "keys. Pass the result of select_step() or make_selection() for this layer, or for the "
            "layer whose selection it shares."
        )
    check_kind("step", "selection", selection, Selection)
    if selection.row_lens is not select.row_lens:
        raise ConfigError(
            f"step: selection must be made with this plan ({select.num_rows} selecting tokens), "
            f"got one of another plan ({selection.positions.shape[0]}). Call select_step() or "
            "make_selection() with this plan."
        )
