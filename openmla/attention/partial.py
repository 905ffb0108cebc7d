"""attend_partial: a step over part of the keys, with the lse by which parts are merged."""

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
    """attend_step without the sink, and with its lse: natural-log, float32 (float64 for float64
    queries), scale included. A token that sees no key has out 0 and lse -inf.

    merge_states joins results over parts of the keys, in any order; apply_sink comes last. A part
    is a cache, or a block table, of its own. This step's rows are in one part, planned as ever. The
    others are context that every token sees whole: Batch(causal=False). Where keys are chosen, a
    part's Selection names those of its own (form="chosen" plans for that however few they are).

    V4 takes a CompressedInputs and no weights; its parts are the "window" and the "entries", by
    `keys`. The first call of a step writes, the others say write=False. What comes out is still
    rotated, as of attend_compressed.
    """
    check_kind("step", "plan", plan, Plan)
    if isinstance(projected, CompressedInputs):
        check_kind("step", "cache", cache, LayerCache)
        if absorbed is not None or raw is not None:
            name = "raw" if absorbed is None else "absorbed"
            raise ConfigError(f"step: {name} must not be given beside CompressedInputs.")
        return attend_segments(projected, cache, plan, selection=selection, keys=keys, write=write)
    if plan.config.compressor is not None:
        raise ConfigError(
            f"step: projected must be CompressedInputs for {plan.config.model_type}, "
            f"got {type(projected).__name__}."
        )
    if keys != "all":
        raise ConfigError(
            f"step: keys must be 'all' for {plan.config.model_type}, got {keys!r}. A part of its "
            "keys has a batch of its own."
        )
    if absorbed is None:
        raise ConfigError(f"step: absorbed must be given for {plan.config.model_type}, got none.")
    check_given(projected, absorbed, cache, plan)
    step = begin_step(projected, absorbed, cache, plan, selection, raw, write)
    return scatter_out_lse(attend_groups(step), plan)
