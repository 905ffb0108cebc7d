"""The scales of an attached model's caches: passed, from its checkpoint, or measured in passes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from openmla.attention import AbsorbedWeights, Projected
from openmla.backends.requirements import say_once
from openmla.cache.format import get_format
from openmla.cache.scales import LayerScales, check_scale, place_of
from openmla.errors import ConfigError
from openmla.integrations.scales import KvScale, Scales, checkpoint_scales, scales_of
from openmla.layers.measure import HEADROOM, Measured

if TYPE_CHECKING:
    from openmla.integrations.transformers.session import Session

FIRST = "first"  # kv_scale that measures in the first pass, like calibrate()


def places(model: nn.Module, modules: list[nn.Module]) -> dict[int, str]:
    """The module path of each attention module, by layer number."""
    found = {}
    for name, module in model.named_modules():
        place = place_of(f"layers.0.{name}" if name in ("self_attn", "attn") else name)
        if place is not None and any(module is each for each in modules):
            found[int(module.layer_idx)] = place
    return found


def chosen_scales(
    kv_scale: KvScale | None, format: str | None, model: nn.Module, modules: list[nn.Module]
) -> dict[int, LayerScales]:
    """Scales by layer number; empty for a format that does not use them."""
    if format is None or not get_format(format, "latent").scaled:
        if kv_scale is None or (isinstance(kv_scale, int | float) and kv_scale == 1):
            return {}
        raise ConfigError(
            f"attach: kv_scale must be None with cache_format={format!r}: only 'fp8' has one. Pass "
            "cache_format='fp8'."
        )
    layers = [int(module.layer_idx) for module in modules]  # type: ignore[arg-type]
    if kv_scale is None:
        found = scales_in(model)
        if found is None:
            say_once(
                "attach: the fp8 cache has kv_scale 1, for the checkpoint has no scales. Values "
                "beyond 448 are cut off; openmla.calibrate() finds scales."
            )
            return {}
        return _by_layer(found, places(model, modules), layers, more=True)
    if kv_scale == FIRST:
        return {}
    if isinstance(kv_scale, str | os.PathLike):
        more = Path(kv_scale).is_dir()  # the checkpoint may hold draft layers besides the model's
        return _by_layer(Scales.load(kv_scale), places(model, modules), layers, more=more)
    if isinstance(kv_scale, Scales):
        return _by_layer(kv_scale, places(model, modules), layers)
    if isinstance(kv_scale, LayerScales):
        return dict.fromkeys(layers, kv_scale)
    scale = check_scale("attach", "kv_scale", kv_scale)
    return dict.fromkeys(layers, LayerScales(scale, scale))


def scales_in(model: nn.Module) -> Scales | None:
    """A model's own scales: among its tensors, if it is quantized, or in its checkpoint."""
    loaded = scales_of((*model.named_parameters(), *model.named_buffers()), "attach")
    name = getattr(model, "name_or_path", None)
    if loaded is not None or not name or not Path(name).is_dir():
        return loaded
    return checkpoint_scales(Path(name))


def _by_layer(
    scales: Scales, places: dict[int, str], layers: list[int], *, more: bool = False
) -> dict[int, LayerScales]:
    wanted = {layer: places.get(layer, f"layers.{layer}.self_attn") for layer in layers}
    missing = [place for place in wanted.values() if place not in scales.layers]
    if missing or (not more and len(scales.layers) != len(wanted)):
        first = f", none for {missing[0]}" if missing else ""
        raise ConfigError(
            f"attach: kv_scale must have scales for the {len(wanted)} MLA layers of the model, got "
            f"{len(scales.layers)}{first}. Call calibrate(model, batches)."
        )
    return {layer: scales.layers[place] for layer, place in wanted.items()}


def measure_step(
    session: Session, layer: int, projected: Projected, absorbed: AbsorbedWeights
) -> None:
    """Measure a layer's tokens in a pass, before they are written: for calibrate(), or for the
    layer's own scales if the first pass measures them. The latter waits for the device."""
    attachment = session.attachment
    measured = attachment.measured.get(layer)
    if measured is None:
        if not attachment.awaits_scales or layer in attachment.scales:
            return
        measured = Measured()
    assert session.batch is not None and session.batch.slot_mapping is not None
    stored = session.batch.slot_mapping >= 0  # the others are padding, which is not written
    if not bool(stored.all()):
        tokens = stored.nonzero().flatten().to(projected.kv_c.device)
        projected = Projected(*(part[tokens] for part in projected))
    measured.see_step(projected, absorbed)
    if attachment.first_scales and measured.largest:
        attachment.scales[layer] = measured.scales(f"attach: layer {layer}", HEADROOM)
        attachment.caches.pop(layer, None)  # made by passes without tokens


@torch.no_grad()
def calibrate_model(model: Any, batches: Iterable[Any], headroom: float) -> Scales:
    """Run whole sequences through the model, attached with a cache in the model's own precision."""
    from openmla.integrations import attach, attachment_of, detach

    attach(model, capture=False)
    attachment = attachment_of(model)
    try:
        where = places(model, attachment.modules)
        measured = attachment.measured = {layer: Measured() for layer in where}
        device, inner = next(model.parameters()).device, getattr(model, "base_model", model)
        seen = False
        for batch in batches:
            given = _arguments(batch, device)
            past = DynamicCache(config=model.config)
            inner(**given, past_key_values=past, use_cache=True)
            for layer, cache in attachment.caches.items():
                for part in (cache.window, cache.compressed):  # V4's rows and entries
                    if part is not None:
                        measured[layer].see("latent", part.data)
            seen = True
        if not seen:
            raise ConfigError("calibrate: batches is empty. Pass at least 1 batch of tokens.")
        found = {
            place: measured[layer].scales(f"calibrate: {place}", headroom)
            for layer, place in where.items()
        }
    finally:
        detach(model)
    return Scales(found)


def _arguments(batch: Any, device: torch.device) -> dict[str, Any]:
    """A batch as arguments of the model's forward: tokens [B, S] or [S], or named arguments."""
    given = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    if not isinstance(given, Mapping) or not isinstance(given.get("input_ids"), Tensor):
        raise ConfigError(
            "calibrate: a batch must be a tensor of tokens, or a dict of forward() arguments with "
            f"input_ids, got {type(batch).__name__}."
        )
    ids = given["input_ids"]
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
        raise ConfigError(
            f"calibrate: input_ids must be integers [B, S], not empty, got {tuple(ids.shape)} "
            f"{ids.dtype}."
        )
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    return {**moved, "input_ids": ids.to(device)}
