"""The checks of attach(), which all run before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from openmla.backends.choice import check_backend_choice
from openmla.backends.requirements import warn_of_reference
from openmla.cache.format import get_format
from openmla.config import MLAConfig
from openmla.config.families import FAMILIES, REFUSED, SUPPORTED
from openmla.config.huggingface import read_config
from openmla.errors import ConfigError, UnsupportedError, check_kind
from openmla.integrations.options import AttachOptions
from openmla.integrations.transformers.attachment import Attachment, check_scaling
from openmla.integrations.transformers.offload import is_away
from openmla.integrations.transformers.scales import FIRST, chosen_scales
from openmla.layers.eight_bits import check_absorbed_format
from openmla.parallel import Ranks
from openmla.plan.checks import (
    check_eight_bit_products,
    check_query_dtype,
    check_wide_queries,
)
from openmla.plan.options import Combination, PlanOptions, check_combination

FIRST_BLOCKS = 64  # initial blocks of a pool that may grow


def check_model(model: nn.Module, options: AttachOptions) -> Attachment:
    """Run all checks and return what attach() will set up. The model itself is not changed."""
    text_config = getattr(model, "config", None)
    if not isinstance(text_config, PreTrainedConfig):
        raise UnsupportedError(
            f"attach: expected a loaded Hugging Face model, got {type(model).__name__}. Load it "
            "first with AutoModelForCausalLM.from_pretrained(...)."
        )
    text_config = supported_text_config(text_config, "attach")
    modules = _attention_modules(model, str(text_config.model_type))
    config = _as_the_modules_are(read_config(text_config, rotated=True), modules)
    if config.log_scale and not hasattr(text_config, "kv_sharing_modes"):
        raise UnsupportedError(
            f"attach: {config.model_type} is supported with transformers 5.23 or newer."
        )
    if config.output_gate != FAMILIES[config.model_type].output_gate:
        raise UnsupportedError(
            f"attach: output gate {config.output_gate!r} is not supported: the {config.model_type} "
            "class of transformers does not apply it. Build the model with MLAAttention."
        )
    for module in modules:
        check_scaling(module.scaling, config.layer(module.layer_idx))  # type: ignore[arg-type]
        if not getattr(module, "is_causal", True):
            raise UnsupportedError(
                "attach: is_causal must be True in every attention module, got False: "
                "bidirectional attention is not supported."
            )
    check_backend_choice("attach", options.backend)
    block_size, num_blocks = options.block_size, options.num_blocks
    if block_size is None:
        block_size = 64 if config.compressor is None else 256
    attachment = Attachment(
        config=config,
        modules=modules,
        num_blocks=FIRST_BLOCKS if num_blocks is None else num_blocks,
        block_size=block_size,
        format=options.cache_format,
        index_format=options.index_format,
        backend=options.backend if isinstance(options.backend, str) else dict(options.backend),
        workspace_tokens=options.workspace,
        may_grow=num_blocks is None,
        absorbed_format=options.absorbed_format,
        batch_invariant=options.batch_invariant,
        query_dtype=options.query_dtype,
        prefill_dtype=options.prefill_dtype,
        ranks=_ranks_of(options, config, block_size),
    )
    _check_options(options, config, block_size)
    weight = next(modules[0].parameters())
    check_query_dtype("attach", config, options.query_dtype, options.cache_format, weight.device)
    check_wide_queries("attach", options.query_dtype, weight.dtype)
    if options.prefill_dtype is not None:
        check_eight_bit_products("attach", weight.device, weight.dtype)
    _check_capture(model, options)
    attachment.scales = chosen_scales(options.kv_scale, options.cache_format, model, modules)
    attachment.first_scales = _first_scales(options, config)
    _check_static_queries(attachment)
    if options.backend == "auto":
        warn_of_reference("attach", next(modules[0].parameters()).device.type)
    return attachment


def _first_scales(options: AttachOptions, config: MLAConfig) -> bool:
    """Whether the first pass measures the scales."""
    if not isinstance(options.kv_scale, str) or options.kv_scale != FIRST:
        return False
    if config.compressor is not None or options.group is not None:
        reason = "with a group"
        if config.compressor is not None:
            reason = f"for {config.model_type}, whose entries are pooled as they are written"
        raise UnsupportedError(
            f"attach: kv_scale 'first' is not supported {reason}. Pass "
            "kv_scale=calibrate(model, batches)."
        )
    return True


def _check_static_queries(attachment: Attachment) -> None:
    """Check that fp8_static queries have their one scale per layer."""
    if attachment.query_dtype != "fp8_static":
        return
    if attachment.format != "fp8":
        raise ConfigError(
            "attach: query_dtype 'fp8_static' needs cache_format 'fp8', got "
            f"{attachment.format!r}. Use query_dtype='fp8'."
        )
    if attachment.first_scales:
        return
    for module in attachment.modules:
        scales = attachment.scales.get(module.layer_idx)  # type: ignore[call-overload]
        if scales is None or scales.q is None:
            raise ConfigError(
                f"attach: query_dtype 'fp8_static' needs a q_scale for every layer, and layer "
                f"{module.layer_idx} has none. Pass kv_scale=calibrate(model, batches), or use "
                "query_dtype='fp8'."
            )


def _attention_modules(model: nn.Module, model_type: str) -> list[nn.Module]:
    mark = FAMILIES[model_type].mark
    modules = [module for module in model.modules() if hasattr(module, mark)]
    if not modules:
        raise UnsupportedError(
            f"attach: the model has no {model_type} attention modules of transformers. Load it "
            "without remote code (trust_remote_code=False)."
        )
    if any(hasattr(module, "openmla") for module in modules):
        raise ConfigError("attach: the model is already attached. Call detach(model) first.")
    return modules


def _check_options(options: AttachOptions, config: MLAConfig, block_size: int) -> None:
    index_layout = get_format(options.index_format, "index")
    for kind in config.every_kind:
        if options.cache_format is not None:
            get_format(options.cache_format, "latent").width(kind.latent_dim)  # may raise
        if kind.indexer is not None:
            index_layout.width(kind.indexer.head_dim)
    check_absorbed_format("attach", options.absorbed_format)
    check_kind("attach", "batch_invariant", options.batch_invariant, bool)
    asked = PlanOptions(query_dtype=options.query_dtype, prefill_dtype=options.prefill_dtype)
    for kind in config.every_kind:
        over_ranks = options.group is not None
        check_combination("attach", Combination(asked, kind, over_ranks=over_ranks))
    if options.absorbed_format is not None and config.compressor is not None:
        raise ConfigError(
            f"attach: absorbed_format must be None for {config.model_type}, which has no "
            f"kv_b_proj, got {options.absorbed_format!r}."
        )
    workspace = options.workspace
    if workspace is not None and config.compressor is not None:
        raise ConfigError(
            f"attach: workspace must be None for {config.model_type}, which expands nothing, got "
            f"{workspace}."
        )
    if workspace is not None and workspace < block_size:
        raise ConfigError(
            f"attach: workspace must be at least 1 block of {block_size} rows, got {workspace}."
        )


def _ranks_of(options: AttachOptions, config: MLAConfig, block_size: int) -> Ranks | None:
    """How the cache is sharded over the given group, which may be a plain group or Ranks."""
    group = options.group
    if group is None:
        return None
    ranks = group if isinstance(group, Ranks) else Ranks(group)
    if ranks.heads != "all":
        raise ConfigError(
            f"attach: group must be Ranks(heads='all'), as every rank runs the whole model, got "
            f"heads={ranks.heads!r}."
        )
    ranks.shard.check_block_size(block_size)
    if config.compressor is not None and ranks.interleave not in (1, block_size):
        raise ConfigError(
            f"attach: interleave must be 1 or the block size of {block_size} for "
            f"{config.model_type}, which keeps the tokens of an entry on one rank, got "
            f"{ranks.interleave}."
        )
    return ranks


def _check_capture(model: nn.Module, options: AttachOptions) -> None:
    if options.capture and not hasattr(model, "lm_head"):
        raise ConfigError(
            f"attach: capture needs a model with a language head (lm_head), got "
            f"{type(model).__name__}. Remove capture=True."
        )
    if options.capture and any(map(is_away, model.modules())):
        raise ConfigError(
            "attach: capture needs all weights on the device, and accelerate has offloaded some. "
            "Remove capture=True, or load the model without offloading."
        )


def supported_text_config(config: Any, who: str) -> Any:
    """Return the config of a model's text model, or raise if attach() does not support it."""
    try:
        text_config = config.get_text_config(decoder=True)
    except ValueError as error:  # the model has several
        raise UnsupportedError(f"{who}: the model has several text models: {error}") from error
    model_type, around = str(text_config.model_type), ""
    if text_config is not config:
        around = f", the text model of {config.model_type},"
    family = FAMILIES.get(model_type)
    reason = REFUSED.get(model_type, "") if family is None else family.unattached
    if reason:
        raise UnsupportedError(f"{who}: {model_type}{around} is not supported: {reason}.")
    if model_type not in SUPPORTED:
        raise UnsupportedError(
            f"{who}: model type {model_type!r}{around} is not supported. Supported: "
            f"{', '.join(SUPPORTED)}."
        )
    return text_config


def _as_the_modules_are(config: MLAConfig, modules: list[nn.Module]) -> MLAConfig:
    """Override config fields that transformers' classes fix: which columns an indexer pairs and, in
    some, that all layers have an indexer. Such config fields are for other engines."""
    layers = [config.layer(number) for number in range(config.num_layers)]
    if config.compressor is not None or all(layer.indexer is None for layer in layers):
        return config
    have_one = {
        module.layer_idx for module in modules if getattr(module, "indexer", None) is not None
    }
    shared = tuple(
        layer.indexer is not None and number not in have_one for number, layer in enumerate(layers)
    )
    pairing = FAMILIES[config.model_type].indexer_pairing
    assert pairing is not None
    for number, layer in enumerate(layers):
        if layer.indexer is not None:
            fixed = replace(layer.indexer, pairing=pairing, shared=shared if any(shared) else ())
            layers[number] = replace(layer, indexer=fixed)
    return MLAConfig.from_layers(layers)
