"""The hooks attach() puts on a model and its attention modules."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers.attachment import Attachment
from openmla.integrations.transformers.paged_layer import install_layer


@torch.compiler.disable
def before_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook of an attention module: put its layer into the cache object it is given."""
    attachment = module.openmla
    assert isinstance(attachment, Attachment)
    current = attachment.current
    current.storing = current.awaited = current.compressible = None
    current.positions = kwargs.get("position_ids")
    implementation = module.config._attn_implementation
    if implementation != attachment.name:
        raise ConfigError(
            f"attach: the model's attention implementation was set to {implementation!r} after "
            "attach(). Call detach(model) first."
        )
    past = kwargs.get("past_key_values")
    if past is not None or module is attachment.modules[0]:
        current.own_cache = None  # left by an earlier call of a module by itself
    if past is None and attachment.partial_keys:
        # indexers are only watched and windows only kept with a cache: make one for this pass
        if current.own_cache is None:
            current.own_cache = Cache(layers=[])
        past = current.own_cache
        install_layer(attachment, int(module.layer_idx), past)
        return args, {**kwargs, "past_key_values": past}
    if past is not None:
        install_layer(attachment, int(module.layer_idx), past)
    return None


def expand_uncached(
    module: nn.Module, kv_nope: Tensor, k_rot: Tensor
) -> tuple[Tensor, Tensor]:  # [B, H, T, E] and [B, H, T, V], or the latents as they are
    """Replaces a module's expand_kv: the step expands what a paged layer holds."""
    attachment = module.openmla
    assert isinstance(attachment, Attachment)
    if attachment.current.storing is not None:
        return kv_nope, k_rot
    expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, kv_nope, k_rot)
    return expanded


class ByName:
    """Turns positional arguments into named ones, which other hooks look for."""

    def __init__(self, model: nn.Module) -> None:
        parameters = signature(model.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        named = dict(zip(self.names, args, strict=False))
        if len(named) < len(args) or named.keys() & kwargs.keys():
            return None  # too many, or given twice: forward itself raises
        return (), {**named, **kwargs}


class AfterPass:
    """Ends a pass: drops a cache of its own and, if the pass failed, frees what it had taken."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, model: nn.Module, args: Any, result: Any) -> None:
        if result is not None:
            self.attachment.after_pass()
        current = self.attachment.current
        session, current.session, current.own_cache = current.session, None, None
        if session is None or not session.unfinished:
            return
        if result is None:  # an exception is propagating
            session.fail()
        else:  # the model skipped its last layers
            session.finish()


class WhileGenerating:
    """Makes right-padded prompts raise during generate(), which continues from the last column and
    would continue the padding. The check is where the mask is read, to wait for the device only
    once. end(), a forward hook, turns it off."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep")
        # generate() keeps one logit unless its caller overrides that, and always sets return_dict
        generating = keep is not None and (
            kwargs.get("return_dict") is True or (isinstance(keep, int) and keep == 1)
        )
        ids = kwargs.get("input_ids")
        if not generating or not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] == 0:
            generating = False
        elif mask.device.type != "cpu" and (ids is None or ids.shape[1] == 1):
            generating = False  # prefill has more tokens
        self.attachment.current.generating = generating

    def end(self, model: nn.Module, args: Any, result: Any) -> None:
        self.attachment.current.generating = False


def refuse_attentions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a call or the config asks for attention weights, which cannot be returned."""
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and getattr(model.config, "output_attentions", False)):
        raise UnsupportedError(
            "attach: output_attentions=True is not supported: attention weights are not stored. "
            "Call detach(model) to get them."
        )
