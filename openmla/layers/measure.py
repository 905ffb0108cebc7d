"""Measures the largest absorbed queries, latents and k_pe of a layer, to compute its scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.attention import AbsorbedWeights, Projected
from openmla.attention.write import finish
from openmla.cache import LayerCache, LayerScales
from openmla.cache.format import FP8_MAX
from openmla.cache.scales import next_power_of_two
from openmla.errors import ConfigError, check_kind
from openmla.layers.mla import MLAAttention, check_tokens
from openmla.ops import project_heads
from openmla.plan import Plan

# Scales are powers of two, so dividing by one rounds nothing: every value is rounded as at scale 1,
# except those that scale 1 would saturate or flush to zero. Which mantissas large values fall on is
# chance: with other scales the demo's bits per byte vary by up to 0.6 %. The headroom is for unseen
# text. It is cheap because e4m3 is floating point: doubling the scale costs one bit for values
# below 1/14336 of the largest, while too small a scale saturates the largest.
HEADROOM = 2.0
TOKENS = 256  # tokens whose queries are absorbed at a time


class Measured:
    """The largest magnitudes of one layer so far, kept on its device to avoid syncs."""

    def __init__(self) -> None:
        self.largest: dict[str, Tensor] = {}

    def see(self, name: str, values: Tensor) -> None:
        if values.numel():
            found = values.detach().abs().amax().float()
            before = self.largest.get(name)
            self.largest[name] = found if before is None else torch.maximum(before, found)

    def see_step(self, projected: Projected, absorbed: AbsorbedWeights) -> None:
        """Measure a step's tokens, normalized and rotated."""
        self.see("latent", projected.kv_c)
        self.see("k_pe", projected.k_pe)
        self.see("q_pe", projected.q_pe)
        for q_nope in projected.q_nope.split(TOKENS):
            if absorbed.uk_scale is None:
                self.see("q_nope", torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk))
            else:
                in_latent = q_nope.new_empty((*q_nope.shape[:2], absorbed.w_uk.shape[2]))
                project_heads(in_latent, q_nope, absorbed.w_uk, absorbed.uk_scale)
                self.see("q_nope", in_latent)

    def scales(self, where: str, headroom: float) -> LayerScales:
        """Return scales: the next power of two of the largest magnitude times headroom over the
        largest e4m3, or 1 for tensors that were always 0."""
        largest = {name: float(value) for name, value in self.largest.items()}
        for name, value in largest.items():
            if not math.isfinite(value):
                raise ConfigError(f"{where}: {name} must be finite, got {value}.")

        def scale(*names: str) -> float:
            held = max(largest.get(name, 0.0) for name in names) * headroom / FP8_MAX
            return next_power_of_two(held) if held else 1.0

        apart = {name: scale(name) for name in ("k_pe", "q_nope", "q_pe") if largest.get(name)}
        q = scale("q", "q_nope", "q_pe")
        return LayerScales(scale("latent", "k_pe"), scale("latent"), q, **apart)


def check_headroom(headroom: object) -> float:
    if isinstance(headroom, bool) or not isinstance(headroom, int | float):
        raise ConfigError(f"calibrate: headroom must be a number, got {headroom!r}.")
    if not 1 <= headroom < math.inf:
        raise ConfigError(f"calibrate: headroom must be at least 1, got {headroom!r}.")
    return float(headroom)


@torch.no_grad()
def calibrate_layer(
    layer: MLAAttention, batches: Iterable[Sequence[Any]], headroom: float
) -> LayerScales:
    """Measure batches of forward() arguments, without writing to the cache or attending."""
    measured, seen = Measured(), False
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != 4:
            raise ConfigError(
                "calibrate: a layer's batch must be the arguments of its forward(), "
                f"(hidden, positions, cache, plan), got {type(batch).__name__}."
            )
        hidden, positions, cache, plan = batch
        check_kind("calibrate", "cache", cache, LayerCache)
        check_kind("calibrate", "plan", plan, Plan)
        check_tokens("calibrate", hidden, positions, cache, plan, layer.config, layer.like)
        projected, raw, _ = layer.project(hidden, positions, plan, cache)
        if raw is not None:
            finish(raw, plan)
        tokens = plan.num_tokens - plan.padding
        measured.see_step(Projected(*(part[:tokens] for part in projected)), layer.absorbed)
        seen = seen or tokens > 0
    if not seen:
        raise ConfigError("calibrate: batches must contain at least 1 token, got 0.")
    return measured.scales("calibrate", headroom)
