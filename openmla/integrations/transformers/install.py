"""What attach() does to a model after the checks: hooks, shadows and a config of its own."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from openmla.integrations.transformers.attachment import Attachment
from openmla.integrations.transformers.attention import (
    openmla_attention,
    openmla_mask,
    openmla_sparse_mask,
)
from openmla.integrations.transformers.captured import CapturedDecode, inner_hooks
from openmla.integrations.transformers.compressed import CompressorStandIn, with_positions
from openmla.integrations.transformers.hooks import (
    AfterPass,
    ByName,
    WhileGenerating,
    before_forward,
    expand_uncached,
    refuse_attentions,
)
from openmla.integrations.transformers.indexer import IndexerWatch, keep_latents

NAME = "openmla"
SPARSE_NAME = "openmla_sparse"


def install_attachment(model: nn.Module, attachment: Attachment, capture: bool | None) -> None:
    """Make the model's attention modules use openmla's attention."""
    others = inner_hooks(model)
    AttentionInterface.register(NAME, openmla_attention)
    AttentionMaskInterface.register(NAME, openmla_mask)
    AttentionInterface.register(SPARSE_NAME, openmla_attention)
    AttentionMaskInterface.register(SPARSE_NAME, openmla_sparse_mask)
    _add_hooks(model, attachment)
    module = attachment.modules[0]
    if capture or (capture is None and _on_gpu(module) and hasattr(model, "lm_head")):
        hooks = inner_hooks(model) - others
        decode = CapturedDecode(model, attachment, asked=bool(capture), hooks=hooks)
        attachment.handles.append(decode)
        attachment.captured = decode
    text_config = _own_config(model, module.config)
    attachment.previous = (text_config, text_config._attn_implementation)
    text_config._attn_implementation = attachment.name


def remove_attachment(attachment: Attachment) -> None:
    """Restore the model's own attention."""
    for handle in attachment.handles:
        handle.remove()
    text_config, implementation = attachment.previous
    text_config._attn_implementation = implementation
    for module in attachment.modules:
        del module.openmla
        if attachment.config.compressor is None:
            del module.expand_kv
    attachment.detached = True
    attachment.known.clear()  # views would keep a weight's memory alive
    attachment.eight_bits.clear()


def _add_hooks(model: nn.Module, attachment: Attachment) -> None:
    handles, config = attachment.handles, attachment.config
    # each of them may be called directly
    outers = list(dict.fromkeys((model, getattr(model, "base_model", model))))
    for outer in outers:
        handles.append(outer.register_forward_pre_hook(ByName(outer), with_kwargs=True))
    if config.compressor is not None:
        _stand_in(attachment)
        for outer in outers:
            handles.append(outer.register_forward_pre_hook(with_positions, with_kwargs=True))
    elif attachment.partial_keys:
        _watch_indexers(attachment)
    else:
        for module in attachment.modules:
            module.expand_kv = partial(expand_uncached, module)  # type: ignore[assignment]
    for module in attachment.modules:
        module.openmla = attachment  # type: ignore[assignment]
        handles.append(module.register_forward_pre_hook(before_forward, with_kwargs=True))
    generating = WhileGenerating(attachment)
    handles.append(model.register_forward_pre_hook(generating, with_kwargs=True))
    handles.append(model.register_forward_hook(generating.end, always_call=True))
    for outer in outers:
        handles.append(outer.register_forward_pre_hook(refuse_attentions, with_kwargs=True))
    handles.append(outers[-1].register_forward_hook(AfterPass(attachment), always_call=True))


def _stand_in(attachment: Attachment) -> None:
    """Replace V4's compressors."""
    attachment.name = SPARSE_NAME
    for module in attachment.modules:
        compressor = module.compressor
        if isinstance(compressor, nn.Module):
            attachment.handles.append(CompressorStandIn(attachment, compressor))


def _watch_indexers(attachment: Attachment) -> None:
    attachment.name = SPARSE_NAME
    for module in attachment.modules:
        module.expand_kv = keep_latents  # type: ignore[assignment]
        indexer = module.indexer
        if isinstance(indexer, nn.Module):
            layer = int(module.layer_idx)  # type: ignore[arg-type]
            watch = attachment.watches[layer] = IndexerWatch(attachment, layer)
            watch.hook(indexer)
            attachment.handles.append(watch)


def _on_gpu(module: nn.Module) -> bool:
    return next(module.parameters()).device.type == "cuda"


def _own_config(model: nn.Module, text_config: Any) -> Any:
    """Give a model its own copy of its config objects, which other models may share. Returns the
    copy of the config that its attention modules use."""
    copies: dict[int, Any] = {}
    deepcopy(model.config, copies)
    deepcopy(text_config, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])
    return copies[id(text_config)]
