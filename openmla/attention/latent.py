"""attend_latent: queries that are in latent space already, over the cache, into latent outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.absorbed import in_e4m3, read_all, read_chosen
from openmla.attention.compressed import attend_segments
from openmla.attention.ratio import scale_rope_of_latent
from openmla.attention.step import Part, check_selection, put_both_together
from openmla.attention.types import CompressedInputs, Selection, check_alike
from openmla.cache import LayerCache, PagedCache
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.ops._register import refuse_grad
from openmla.plan import Plan, SparsePlan


def attend_latent(
    q_latent: Tensor,  # [T, H, C + R]
    cache: LayerCache,
    plan: Plan,
    *,
    selection: Selection | None = None,
) -> tuple[Tensor, Tensor]:  # out_latent [T, H, C], lse [T, H] f32
    """The step's tokens over rows that are in the cache, their own included: nothing is written.

    q_latent is [q_nope @ w_uk, q_pe], the caller's product, as is out_latent @ w_uv. Every request
    of the plan must be absorbed: make_plan(form="absorbed"), or "chosen" where each token attends
    to what `selection` names, or into=. lse is natural-log with scale included; a token that sees
    no key has out 0 and lse -inf. V4's queries [T, H, D] attend to window and entries, no sink.
    """
    for name, given, kind in (
        ("q_latent", q_latent, Tensor),
        ("cache", cache, LayerCache),
        ("plan", plan, Plan),
    ):
        check_kind("latent", name, given, kind)
    if plan.compressed is not None:
        return attend_segments(
            CompressedInputs(q_latent), cache, plan, selection=selection, write=False
        )
    latent = _check(q_latent, cache, plan)
    q_latent = scale_rope_of_latent(q_latent, latent, plan.config.kv_lora_rank)
    parts: list[Part] = []
    if plan.decode is not None:
        rows = plan.decode.rows
        q, q_scale = _queries(q_latent[rows], latent, plan)
        out, lse = read_all(q, latent, plan, plan.decode, q_scale)
        parts.append((rows, out.to(q_latent.dtype), lse))
    if plan.sparse is not None:
        check_selection(selection, plan.sparse)
        assert selection is not None
        rows = plan.sparse.rows
        attended = _attend_chosen(q_latent[rows], latent, plan, plan.sparse, selection)
        parts.append((rows, *attended))
    return put_both_together(parts, plan)


def _check(q_latent: Tensor, cache: LayerCache, plan: Plan) -> PagedCache:
    if plan.prefill is not None or (plan.sparse is not None and plan.sparse.masked):
        raise ConfigError(
            "latent: plan must have every request absorbed, got some expanded. "
            "make_plan(form='absorbed') plans so."
        )
    latent = cache.latent
    if latent is None:
        raise ConfigError("latent: cache must have latent rows, got none.")
    plan.check_cache(cache)
    shape = (plan.num_tokens, plan.config.num_heads, plan.config.latent_dim)
    if q_latent.shape != shape:
        raise ShapeError(
            f"latent: q_latent must be [T, H, C + R] with {shape} as planned, "
            f"got {tuple(q_latent.shape)}."
        )
    check_alike("latent", "q_latent", q_latent, q_latent.dtype, latent.data.device)
    refuse_grad("latent", (q_latent,))
    return latent


def _queries(q_latent: Tensor, cache: PagedCache, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """As they are, or in e4m3 with their scale where the plan says so."""
    if plan.query_dtype is None:
        return q_latent, None
    C = plan.config.kv_lora_rank
    return in_e4m3(q_latent[:, :, :C], q_latent[:, :, C:], cache, plan)


def _attend_chosen(
    q_latent: Tensor, latent: PagedCache, plan: Plan, sparse: SparsePlan, selection: Selection
) -> tuple[Tensor, Tensor]:
    """A chunk of queries at a time, as planned."""
    parts = []
    for number, chunk in enumerate(sparse.query_chunks):
        q, q_scale = _queries(q_latent[chunk], latent, plan)
        out, lse = read_chosen(q, latent, plan, sparse, selection, number, q_scale)
        parts.append((out.to(q_latent.dtype), lse))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
