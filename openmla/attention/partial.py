"""attend_partial: a step over part of the keys, with the lse that merges the parts."""

from __future__ import annotations

from torch import Tensor

from openmla.attention.checks import check_given
from openmla.attention.compressed import attend_segments
from openmla.attention.step import attend_groups, begin_step, scatter_out_lse
from openmla.attention.types import (
    AbsorbedWeights,
    CompressedInputs,
    Projected,
    RawProjections,
    Selection,
)
from openmla.cache import LayerCache
from openmla.errors import ConfigError, check_kind
from openmla.plan import Plan


def attend_partial(
    projected: Projected | CompressedInputs,
    absorbed: AbsorbedWeights | None,
    cache: LayerCache,
    plan: Plan,
    *,
    selection: Selection | None = None,
    raw: RawProjections | None = None,
    write: bool = True,
    keys: str = "all",
) -> tuple[Tensor, Tensor]:  # out [T, H, V], lse [T, H]
    """Attend to part of the keys, like attend_step() but without a sink, and also return lse.

    A part is a cache, or a block table, of its own. Merge the parts with ops.merge_states(), in any
    order, and call apply_sink() last. Plan the part with this step's rows as usual. The other parts
    hold context that every token sees in full: plan them with Batch(causal=False). Where keys are
    selected, each part has its own Selection of its own keys: plan with form="chosen", which
    selects however few keys there are.

    Args:
        projected: the tokens of the step; for DeepSeek V4 CompressedInputs.
        absorbed: the weights of kv_b_proj; None for DeepSeek V4.
        cache: the cache of this part.
        plan: the plan of this part.
        selection: same as in attend_step().
        raw: same as in attend_step(); None for DeepSeek V4.
        write: whether this call writes the step's rows. Pass False for all but the first call.
        keys: for DeepSeek V4 "all", "window" or "entries".

    Returns:
        out [T, H, V] and lse [T, H]. lse is a natural logarithm that includes the softmax scale,
        float32 (float64 for float64 queries). A token that sees no key has out 0 and lse -inf. For
        DeepSeek V4, out is still rotated, as with attend_compressed().

    Raises:
        ShapeError: a tensor has a wrong shape, dtype or device. Nothing is written.
        ConfigError: the inputs do not suit the model, or cache, plan or selection do not match.
            Nothing is written.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3"]
    H, P, R, C, V = 4, 16, 8, 32, 24  # of tiny-v3
    cache = openmla.allocate_cache(config, num_blocks=3, block_size=16, format="fp32")
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    prefix = openmla.Batch([1], [32], table[:, :2], causal=False)
    rest = openmla.Batch([1], [1], table[:, 2:], torch.tensor([32]))  # writes its row to block 2
    weights = openmla.absorb(torch.randn(H * (P + V), C), config)
    shapes = (1, H, P), (1, H, R), (1, C), (1, R)
    step = openmla.Projected(*map(torch.randn, shapes)), weights, cache
    out, lse = openmla.attend_partial(*step, openmla.make_plan(prefix, config, cache))
    part = openmla.attend_partial(*step, openmla.make_plan(rest, config, cache))
    openmla.ops.merge_states(out, lse, *part)  # into out and lse
    print(out.shape, lse.shape)  # [T, H, V] and [T, H]
    ```
    """
    check_kind("step", "plan", plan, Plan)
    if isinstance(projected, CompressedInputs):
        check_kind("step", "cache", cache, LayerCache)
        if absorbed is not None or raw is not None:
            name, given = ("raw", raw) if absorbed is None else ("absorbed", absorbed)
            raise ConfigError(
                f"step: {name} must be None with CompressedInputs, got {type(given).__name__}."
            )
        return attend_segments(projected, cache, plan, selection=selection, keys=keys, write=write)
    if plan.config.compressor is not None:
        raise ConfigError(
            f"step: projected must be CompressedInputs for {plan.config.model_type}, "
            f"got {type(projected).__name__}."
        )
    if keys != "all":
        raise ConfigError(
            f"step: keys must be 'all' for {plan.config.model_type}, got {keys!r}. Plan each part "
            "of the keys with its own Batch."
        )
    if absorbed is None:
        raise ConfigError(
            f"step: absorbed is missing for {plan.config.model_type}. Pass "
            "absorb(kv_b_proj.weight, config)."
        )
    check_given(projected, absorbed, cache, plan)
    step = begin_step(projected, absorbed, cache, plan, selection, raw, write)
    return scatter_out_lse(attend_groups(step), plan)
