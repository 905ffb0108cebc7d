"""attend_step: write this step's rows, then attend, each request in the form its plan says."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.absorbed import attend_absorbed, attend_chosen
from openmla.attention.expanded import attend_expanded
from openmla.attention.masked import attend_masked
from openmla.attention.types import (
    AbsorbedWeights,
    Projected,
    RawProjections,
    Selection,
    check_alike,
)
from openmla.attention.write import write_rows
from openmla.cache import LayerCache, PagedCache
from openmla.errors import ConfigError, ShapeError
from openmla.ops._register import refuse_grad
from openmla.plan import Plan, SparsePlan


def attend_step(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
    *,
    selection: Selection | None = None,
    sink: Tensor | None = None,  # [H] f32
    raw: RawProjections | None = None,
) -> Tensor:  # [T, H, V]
    """One layer's attention over the step's T tokens, in the caller's order.

    All new rows are written first, so that absorbed queries find their own row in the cache. With
    `raw`, of which `projected` is a view, they are normalised and rotated on their way.
    `selection` is select_step's, this layer's or an earlier one's, where the plan has sparse rows.
    A `sink` is a logit per head that joins the softmax and has no value. Tokens of no request, a
    batch's padding and what fills up a captured step, get 0.
    """
    latent = check_inputs(projected, absorbed, cache, plan, sink)
    if plan.sparse is not None:
        _check_selection(selection, plan.sparse)
    config, T = plan.config, plan.num_tokens
    write_rows(projected.kv_c, projected.k_pe, raw, latent, plan)
    parts = []
    if plan.decode is not None:
        attended = attend_absorbed(projected, absorbed, latent, plan, plan.decode)
        parts.append((plan.decode.rows, *attended))
    if plan.prefill is not None:
        attended = attend_expanded(projected, absorbed, latent, plan, plan.prefill)
        parts.append((plan.prefill.rows, *attended))
    if plan.sparse is not None:
        assert selection is not None
        attended = _attend_sparse(projected, absorbed, latent, plan, plan.sparse, selection)
        parts.append((plan.sparse.rows, *attended))
    if sink is not None:
        parts = [(rows, _with_sink(out, lse, sink), lse) for rows, out, lse in parts]
    if len(parts) == 1 and isinstance(parts[0][0], slice) and not plan.padding:
        return parts[0][1]  # every token, in order
    combined = projected.q_nope.new_empty((T, config.num_heads, config.v_head_dim))
    combined[T - plan.padding :] = 0
    for rows, out, _ in parts:
        combined[rows] = out
    return combined


def check_inputs(
    projected: Projected,
    absorbed: AbsorbedWeights,
    cache: LayerCache,
    plan: Plan,
    sink: Tensor | None = None,
) -> PagedCache:
    """What an op would refuse only after rows are written; returns the latent cache."""
    latent = cache.latent
    if latent is None:
        raise ConfigError("step: cache must have latent rows, got none.")
    plan.check_cache(cache)
    config, T, q = plan.config, plan.num_tokens, projected.q_nope
    H, P, R = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    C, both = config.kv_lora_rank, P + config.v_head_dim
    for name, tensor, letters, shape in (
        ("q_nope", q, "[T, H, P]", (T, H, P)),
        ("q_pe", projected.q_pe, "[T, H, R]", (T, H, R)),
        ("kv_c", projected.kv_c, "[T, C]", (T, C)),
        ("k_pe", projected.k_pe, "[T, R]", (T, R)),
        ("kv_b", absorbed.kv_b, "[H * (P + V), C]", (H * both, C)),
    ):
        if tensor.shape != shape:
            raise ShapeError(
                f"step: {name} must be {letters} with {shape} as planned, "
                f"got {tuple(tensor.shape)}."
            )
        check_alike("step", name, tensor, q.dtype, latent.data.device)
    if sink is not None and sink.shape != (H,):
        raise ShapeError(f"step: sink must be [H] with {(H,)}, got {tuple(sink.shape)}.")
    space = plan.workspace
    if space is not None and space.rows.dtype != q.dtype:
        raise ShapeError(
            f"step: q_nope must be {space.rows.dtype} like the plan's workspace, got {q.dtype}."
        )
    refuse_grad("step", (*projected, absorbed.kv_b))
    return latent


def _check_selection(selection: Selection | None, sparse: SparsePlan) -> None:
    if selection is None:
        raise ConfigError(
            "step: selection must be given, the plan has tokens that choose their keys. "
            "It is what select_step returned for this layer, or for the one it shares with."
        )
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
) -> tuple[Tensor, Tensor]:
    """Absorbed rows first, then masked ones, as the plan packed them."""
    q_nope, q_pe = projected.q_nope[sparse.rows], projected.q_pe[sparse.rows]
    n = sparse.num_absorbed
    parts = []
    if n:
        parts.append(attend_chosen(q_nope[:n], q_pe[:n], absorbed, latent, plan, sparse, selection))
    if sparse.masked:
        q = torch.cat([q_nope[n:], q_pe[n:]], dim=-1)
        parts.append(attend_masked(q, projected, absorbed, latent, plan, sparse, selection))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """What the sink leaves; a token that sees nothing stays 0, whatever its sink."""
    kept = (lse - sink.to(lse.dtype)).sigmoid().masked_fill(lse == -torch.inf, 0)
    return (out * kept[..., None]).to(out.dtype)
