"""attend_latent: queries that are in latent space already, over the cache, into latent outputs."""

from __future__ import annotations

from torch import Tensor

from openmla.attention.checks import check_selection
from openmla.attention.compressed import attend_segments
from openmla.attention.ratio import scale_rope_of_latent
from openmla.attention.step import attend_groups, scatter_out_lse
from openmla.attention.types import CompressedInputs, Selection, Step, check_alike
from openmla.cache import LayerCache, PagedCache
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.ops._register import refuse_grad
from openmla.plan import Expanded, Plan


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
    if plan.config.compressor is not None:
        return attend_segments(
            CompressedInputs(q_latent), cache, plan, selection=selection, write=False
        )
    latent = _check(q_latent, cache, plan)
    if plan.select is not None:
        check_selection(selection, plan.select)
    q = scale_rope_of_latent(q_latent, latent, plan.config.kv_lora_rank)
    return scatter_out_lse(attend_groups(Step(cache, plan, q=q, selection=selection)), plan)


def _check(q_latent: Tensor, cache: LayerCache, plan: Plan) -> PagedCache:
    if any(isinstance(group.part, Expanded) for group in plan.groups):
        raise ConfigError(
            "latent: plan must have every request absorbed, got some expanded. "
            "make_plan(form='absorbed') plans so."
        )
    latent = cache.latent
    if latent is None:
        raise ConfigError("latent: cache must have latent rows, got none.")
    plan.check_cache("latent", cache)
    shape = (plan.num_tokens, plan.config.num_heads, plan.config.latent_dim)
    if q_latent.shape != shape:
        raise ShapeError(
            f"latent: q_latent must be [T, H, C + R] with {shape} as planned, "
            f"got {tuple(q_latent.shape)}."
        )
    check_alike("latent", "q_latent", q_latent, q_latent.dtype, latent.data.device)
    refuse_grad("latent", (q_latent,))
    return latent
