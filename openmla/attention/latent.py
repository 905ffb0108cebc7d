"""attend_latent: queries in latent space over the cache, into outputs in latent space."""

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
    """Attend with queries in latent space to rows that are in the cache; nothing is written.

    The caller multiplies by w_uk before and by w_uv afterwards. The rows of this step must be in
    the cache already.

    Args:
        q_latent: [T, H, C + R]: q_nope @ w_uk, then the rotated q_pe. For DeepSeek V4, queries
            [T, H, D]; they attend to window and entries, without the sink.
        cache: the layer's cache.
        plan: a plan with absorbed requests only: make_plan(form="absorbed"), form="chosen" with a
            `selection`, or into=.
        selection: the selected keys, where the plan selects.

    Returns:
        out_latent [T, H, C] and lse [T, H]. lse is a natural logarithm that includes the softmax
        scale. A token that sees no key has out 0 and lse -inf.

    Raises:
        ShapeError: q_latent has a wrong shape, dtype or device.
        ConfigError: the plan has expanded requests, or cache, plan or selection do not match.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3"]
    cache = openmla.allocate_cache(config, num_blocks=2, block_size=16, format="fp32")
    cache.latent.data.normal_()  # as if 20 rows had been written
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    batch = openmla.Batch([1], [20], table, torch.tensor([19]))
    plan = openmla.make_plan(batch, config, cache, form="absorbed")
    q_latent = torch.randn(1, config.num_heads, config.latent_dim)
    out_latent, lse = openmla.attend_latent(q_latent, cache, plan)
    print(out_latent.shape, lse.shape)  # [T, H, C] and [T, H]
    ```
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
            "latent: plan has expanded requests, and attend_latent() needs absorbed ones. "
            "Call make_plan(form='absorbed')."
        )
    latent = cache.latent
    if latent is None:
        raise ConfigError(
            "latent: cache has no latent rows. Pass the LayerCache that the plan was made for."
        )
    plan.check_cache("latent", cache)
    shape = (plan.num_tokens, plan.config.num_heads, plan.config.latent_dim)
    if q_latent.shape != shape:
        raise ShapeError(
            f"latent: q_latent must be [T, H, C + R] = {shape} for this plan, "
            f"got {tuple(q_latent.shape)}."
        )
    check_alike("latent", "q_latent", q_latent, q_latent.dtype, latent.data.device)
    refuse_grad("latent", (q_latent,))
    return latent
