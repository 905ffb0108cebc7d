"""Bridges to what people already run; what they bridge to is loaded when they are called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from openmla.cache import LayerScales
from openmla.errors import UnsupportedError
from openmla.integrations.scales import Scales, expect_scales
from openmla.layers import MLAAttention
from openmla.layers.measure import HEADROOM, calibrate_layer, check_headroom

__all__ = ["Scales", "attach", "calibrate", "detach", "expect_scales"]

Model = TypeVar("Model")


def attach(model: Model, **options: Any) -> Model:
    """Run a Hugging Face model's MLA layers here from now on; returns the model.

    Options: cache_format, kv_scale, index_format, block_size, num_blocks, backend, workspace,
    capture, absorbed_format, group. What they mean is told by
    help(openmla.integrations.transformers.attach).
    """
    _need_transformers("attach")
    from openmla.integrations import transformers

    return transformers.attach(model, **options)  # type: ignore[type-var]


def detach(model: Model) -> Model:
    """Undo attach(): the model attends by itself again; returns it. Its caches are lost."""
    _need_transformers("detach")
    from openmla.integrations import transformers

    return transformers.detach(model)  # type: ignore[type-var]


def calibrate(
    model_or_layer: Any, batches: Iterable[Any], *, headroom: float = HEADROOM
) -> Scales | LayerScales:
    """Scales of an fp8 cache, from what a model or a layer makes of some batches.

    Of a Hugging Face model, which must not be attached, batches are tokens [B, S] or arguments by
    name, as tokenizers make them; the Scales are what attach(cache_format="fp8", kv_scale=...)
    takes. Of an MLAAttention they are arguments of its forward(), and the LayerScales are what
    allocate_cache(kv_scale=...) takes. A scale is the next power of two from the largest magnitude
    seen, times `headroom` for what was not, over 448.
    """
    room = check_headroom(headroom)
    if isinstance(model_or_layer, MLAAttention):
        return calibrate_layer(model_or_layer, batches, room)
    _need_transformers("calibrate")
    from openmla.integrations.transformers.scales import calibrate_model

    return calibrate_model(model_or_layer, batches, room)


def _need_transformers(what: str) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f'{what}: transformers must be installed, got: {error}. Run: pip install "openmla[hf]".'
        ) from error
