"""attach(): run the MLA layers of a loaded Hugging Face model on this package.

Only public doors of transformers are used. Every MLA attention module projects, normalises, rotates
and computes its output as before; in between it asks its cache to store the new latents and a named
attention function to attend. attach() registers that function ("openmla", with a mask function that
never builds a square mask), puts paged layers into the cache objects as they come by, and names the
function in the model's config. No class is patched and no parameter copied.

Sparse models (with an indexer) score every key in one matrix and expand every cached latent in
every step (transformers 5.17 caches them expanded). There, each module's expand_kv is shadowed on
the instance, so that latents stay latents, and its indexer is watched: see indexer.py. DeepSeek
V4's compressors are shadowed: see compressed.py.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache

from openmla.backends import all_backends
from openmla.backends.requirements import warn_of_reference
from openmla.cache.format import get_format
from openmla.config import MLAConfig
from openmla.config.families import FAMILIES, REFUSED, SUPPORTED
from openmla.config.huggingface import read_config
from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.integrations.transformers.attachment import Attachment
from openmla.integrations.transformers.attention import (
    openmla_attention,
    openmla_mask,
    openmla_sparse_mask,
)
from openmla.integrations.transformers.captured import CapturedDecode, inner_hooks
from openmla.integrations.transformers.compressed import CompressorStandIn, with_positions
from openmla.integrations.transformers.indexer import IndexerWatch, keep_latents
from openmla.integrations.transformers.offload import is_away
from openmla.integrations.transformers.paged_layer import PagedLayer, install_layer

__all__ = ["REFUSED", "SUPPORTED", "Attachment", "PagedLayer", "attach", "attachment_of", "detach"]

Model = TypeVar("Model", bound=nn.Module)

NAME = "openmla"
SPARSE_NAME = "openmla_sparse"
FIRST_BLOCKS = 64  # of a pool that may grow


@torch.compiler.disable
def _before_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    attachment = module.openmla
    assert isinstance(attachment, Attachment)
    current = attachment.current
    current.storing = current.compressible = None
    current.positions = kwargs.get("position_ids")
    implementation = module.config._attn_implementation
    if implementation != attachment.name:
        raise ConfigError(
            f"attach: the model's attention was set to {implementation!r} while attached. "
            "Call detach(model) first."
        )
    past = kwargs.get("past_key_values")
    if past is not None or module is attachment.modules[0]:
        current.own_cache = None  # of an earlier call of a module by itself
    if past is None and attachment.config.indexer is not None:
        # an indexer can only be watched with a cache: one for this pass, gone after it
        if current.own_cache is None:
            current.own_cache = Cache(layers=[])
        past = current.own_cache
        kwargs = {**kwargs, "past_key_values": past}
    if past is not None:
        install_layer(attachment, int(module.layer_idx), past)
    return args, kwargs


class _ByName:
    """Turns arguments given by position into named ones, which is how other hooks look for them."""

    def __init__(self, model: nn.Module) -> None:
        parameters = signature(model.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        named = dict(zip(self.names, args, strict=False))
        if len(named) < len(args) or named.keys() & kwargs.keys():
            return None  # too many, or twice: forward itself says so
        return (), {**named, **kwargs}


class _AfterPass:
    """Ends a pass: lets go of a cache that was its own and, if it failed, of what it had taken."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, model: nn.Module, args: Any, result: Any) -> None:
        current = self.attachment.current
        session, current.session, current.own_cache = current.session, None, None
        if session is None or not session.unfinished:
            return
        if result is None:  # an exception is on its way
            session.fail()
        else:  # the model left its last layers out
            session.finish()


def _refuse_right_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """generate() continues from the last column, so padding there would be continued."""
    mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep")
    generating = isinstance(keep, int) and keep == 1  # what generate() asks for
    if not generating or not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] == 0:
        return
    ids = kwargs.get("input_ids")
    if mask.device.type != "cpu" and (ids is None or ids.shape[1] == 1):
        return  # a prompt is longer
    if mask.shape[0] == 1:
        return  # a token that only looks like padding: transformers makes an assistant's mask so
    if bool(((mask[:, -1] == 0) & mask.any(dim=1)).any()):
        raise ShapeError(
            "attach: prompts must be padded on the left to generate, got padding on the right. "
            'Set tokenizer.padding_side = "left".'
        )


def _refuse_attentions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and getattr(model.config, "output_attentions", False)):
        raise UnsupportedError(
            "attach: output_attentions=True is not supported: attention weights are never all in "
            "memory. Call detach(model) to see them."
        )


def attach(
    model: Model,
    *,
    cache_format: str | None = None,
    index_format: str = "index_fp32",
    block_size: int | None = None,
    num_blocks: int | None = None,
    backend: str = "auto",
    workspace: int | None = None,
    capture: bool | None = None,
) -> Model:
    """Run a model's MLA layers here from now on; returns the model.

    `cache_format` is a key of FORMATS, by default the model's own precision; `index_format` is that
    of a sparse model's indexer keys, which transformers does not round. `block_size` is by default
    64 tokens, 256 for V4. `num_blocks` fixes the size of the block pool that all caches of this
    model share; without it the pool grows as needed. `workspace` is the context rows that prefill
    expands at once. Then generate(), pipeline() and bare forward passes work as before.

    With `capture` a decode step (one new token per row) is recorded as a CUDA graph when it first
    comes and replayed from then on; it is recorded anew for another number of rows and whenever
    the longest context has doubled. By default that is done on a GPU, unless modules inside have
    hooks, which a replayed step would not run. On a CPU, where it must be asked for, the step runs
    over the same fixed tensors instead.

    V4's windows of raw rows grow to the longest pass there is, once: long prompts are best given in
    passes of a few thousand tokens.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(
            f"attach: the model must be one of transformers, got {type(model).__name__}."
        )
    config = supported_text_config(config, "attach")
    model_type = str(config.model_type)
    mark = FAMILIES[model_type].mark
    modules = [module for module in model.modules() if hasattr(module, mark)]
    if not modules:
        raise UnsupportedError(
            f"attach: the model must have {model_type} attention modules of transformers, got none."
        )
    if any(hasattr(module, "openmla") for module in modules):
        raise ConfigError("attach: the model is attached already. Call detach(model) first.")
    ours = _as_the_modules_are(read_config(config, rotated=True), modules)
    for module in modules:
        if not math.isclose(float(module.scaling), ours.scale, rel_tol=1e-6):  # type: ignore[arg-type]
            raise ConfigError(
                f"attach: softmax scale must be {ours.scale} by the config, "
                f"got {module.scaling} in the model."
            )
    if block_size is None:
        block_size = 64 if ours.compressor is None else 256
    attachment = Attachment(
        config=ours,
        modules=modules,
        num_blocks=FIRST_BLOCKS if num_blocks is None else num_blocks,
        block_size=block_size,
        format=cache_format,
        index_format=index_format,
        backend=backend,
        workspace_tokens=workspace,
        may_grow=num_blocks is None,
    )
    if cache_format is not None:
        get_format(cache_format, "latent").width(ours.latent_dim)  # or its error
    index_layout = get_format(index_format, "index")
    if ours.indexer is not None:
        index_layout.width(ours.indexer.head_dim)
    if backend != "auto" and backend not in all_backends():
        raise ConfigError(
            f"attach: backend {backend!r} is not known. Known: auto, {', '.join(all_backends())}."
        )
    if workspace is not None and ours.compressor is not None:
        raise ConfigError(
            f"attach: workspace must not be given for {model_type}: it expands nothing."
        )
    if workspace is not None and workspace < block_size:
        raise ConfigError(
            f"attach: workspace must be at least one block of {block_size} rows, got {workspace}."
        )
    if capture and not hasattr(model, "lm_head"):
        raise ConfigError("attach: capture needs a model with a language head.")
    if capture and any(map(is_away, model.modules())):
        raise ConfigError(
            "attach: capture needs all weights on the device, some are offloaded by accelerate."
        )
    if backend == "auto":
        warn_of_reference("attach", next(modules[0].parameters()).device.type)
    others = inner_hooks(model)
    AttentionInterface.register(NAME, openmla_attention)
    AttentionMaskInterface.register(NAME, openmla_mask)
    AttentionInterface.register(SPARSE_NAME, openmla_attention)
    AttentionMaskInterface.register(SPARSE_NAME, openmla_sparse_mask)
    outers = list(dict.fromkeys((model, getattr(model, "base_model", model))))
    for outer in outers:  # each may be called by itself
        handle = outer.register_forward_pre_hook(_ByName(outer), with_kwargs=True)
        attachment.handles.append(handle)
    if ours.compressor is not None:
        _stand_in(attachment)
        for outer in outers:
            handle = outer.register_forward_pre_hook(with_positions, with_kwargs=True)
            attachment.handles.append(handle)
    elif ours.indexer is not None:
        _watch_indexers(attachment)
    for module in modules:
        module.openmla = attachment  # type: ignore[assignment]
        handle = module.register_forward_pre_hook(_before_forward, with_kwargs=True)
        attachment.handles.append(handle)
    attachment.handles.append(
        model.register_forward_pre_hook(_refuse_right_padding, with_kwargs=True)
    )
    for outer in outers:
        attachment.handles.append(
            outer.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
        )
    attachment.handles.append(
        outers[-1].register_forward_hook(_AfterPass(attachment), always_call=True)
    )
    if capture or (capture is None and _on_gpu(modules[0]) and hasattr(model, "lm_head")):
        hooks = inner_hooks(model) - others
        decode = CapturedDecode(model, attachment, asked=bool(capture), hooks=hooks)
        attachment.handles.append(decode)
    text_config = _own_config(model, modules[0].config)
    attachment.previous = (text_config, text_config._attn_implementation)
    text_config._attn_implementation = attachment.name
    return model


def _own_config(model: nn.Module, text_config: Any) -> Any:
    """Give a model its own copy of its config objects, which other models may share; returns the
    copy of the one that its attention modules have."""
    copies: dict[int, Any] = {}
    deepcopy(model.config, copies)
    deepcopy(text_config, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])
    return copies[id(text_config)]


def supported_text_config(config: Any, who: str) -> Any:
    """The config of a model's text model, which may be all of it, if attach() takes that."""
    try:
        text_config = config.get_text_config(decoder=True)
    except ValueError as error:  # it has several
        raise UnsupportedError(f"{who}: the model must have one text model: {error}") from error
    model_type, around = str(text_config.model_type), ""
    if text_config is not config:
        around = f", the text model of {config.model_type},"
    if model_type in REFUSED:
        reason = REFUSED[model_type]
        raise UnsupportedError(f"{who}: {model_type}{around} is not supported: {reason}.")
    if model_type not in SUPPORTED:
        raise UnsupportedError(
            f"{who}: {model_type!r}{around} is not an MLA model known here. "
            f"Known: {', '.join(SUPPORTED)}."
        )
    return text_config


def _on_gpu(module: nn.Module) -> bool:
    return next(module.parameters()).device.type == "cuda"


def _as_the_modules_are(config: MLAConfig, modules: list[nn.Module]) -> MLAConfig:
    """transformers' classes fix which columns an indexer pairs and, some, that all layers have one;
    config fields that say otherwise are for other engines."""
    if config.indexer is None or config.compressor is not None:
        return config
    shared = tuple(getattr(module, "indexer", None) is None for module in modules)
    pairing = FAMILIES[config.model_type].indexer_pairing
    assert pairing is not None
    fixed = replace(config.indexer, pairing=pairing, shared=shared if any(shared) else ())
    return replace(config, indexer=fixed)


def _stand_in(attachment: Attachment) -> None:
    """Take the place of V4's compressors."""
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
            watch = IndexerWatch(attachment)
            attachment.watches[int(module.layer_idx)] = watch  # type: ignore[arg-type]
            watch.hook(indexer)
            attachment.handles.append(watch)


def detach(model: Model) -> Model:
    """Undo attach(): the model attends by itself again; returns it. Caches made in between are
    lost."""
    attachment = attachment_of(model)
    for handle in attachment.handles:
        handle.remove()
    text_config, implementation = attachment.previous
    text_config._attn_implementation = implementation
    for module in attachment.modules:
        del module.openmla
        if attachment.config.indexer is not None and attachment.config.compressor is None:
            del module.expand_kv
    attachment.detached = True
    return model


def attachment_of(model: nn.Module) -> Attachment:
    """What attach() set up on a model: its pool, caches and options."""
    for module in model.modules():
        attachment = getattr(module, "openmla", None)
        if isinstance(attachment, Attachment):
            return attachment
    raise ConfigError("attach: the model is not attached.")
