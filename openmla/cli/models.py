"""Models for the command line: a local folder, or the demo checkpoint in the package."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from openmla.cache.scales import read_name
from openmla.cli.checkpoint import (
    DEMO,
    Checkpoint,
    check_tokens,
    checked_device,
    open_checkpoint,
    read_text,
)
from openmla.cli.doctor import cpu_bf16_works
from openmla.cli.hub import called
from openmla.cli.terminal import note, progress, shows_progress, warn
from openmla.config import MLAConfig
from openmla.config.schema import is_finite, require_size
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers import supported_text_config
from openmla.plan.explanation import counted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
USUAL_CONTEXT = 4096
# safetensors' names of the dtypes of unquantized weights, and of index tensors.
WIDE, INDICES = ("F64", "F32", "F16", "BF16"), ("I64", "I32")
# Fields of a GenerationConfig that its validate() does not check.
NUMBERS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "num_beams"),
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff"),
    *("eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "guidance_scale", "num_return_sequences"),
)
LONG = 2**29  # bytes of weights from which transformers' progress bar is shown


class ByteTokenizer:
    """One token per byte, for models without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        return bytes(token % 256 for token in tokens).decode(errors="replace")


def read_config(folder: Path) -> Any:
    """The transformers config of a model that attach() supports."""
    try:
        with _only_errors():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            quantized = getattr(config, "quantization_config", None)
            known = quantized is None or AutoHfQuantizer.supports_quant_method(quantized)
    except Exception as error:  # any type, for any invalid field
        raise ConfigError(
            f"{called(folder)}: transformers cannot read config.json: {type(error).__name__}: "
            f"{error}"
        ) from error
    vocab_size = getattr(supported_text_config(config, called(folder)), "vocab_size", None)
    if vocab_size is not None:
        require_size("vocab_size", vocab_size, most=2**31)
    if not known:
        raise UnsupportedError(
            f"{called(folder)}: quantization_config must be one transformers knows, "
            f"got {quantized!r}."
        )
    return config


def attentions(config: Any) -> tuple[str, ...]:
    """The supported forms of attention: a V3.2 checkpoint also runs without its indexer."""
    if not hasattr(config.get_text_config(), "index_topk"):
        return ("dense",)
    return ("dense", "sparse") if config.model_type == "deepseek_v32" else ("sparse",)


def check_attention(asked: str | None, config: Any) -> None:
    if asked is not None and asked not in attentions(config):
        raise UnsupportedError(
            f"{config.model_type} has no {asked} attention. Leave --attention out."
        )


def demo_text() -> str:
    """The text held out from the demo's training."""
    return (DEMO / "heldout.txt").read_text(encoding="utf-8")


def demo_prompt() -> str:
    """3,600 bytes of a class it has not seen; the demo's context has room for 496 more."""
    text = demo_text()
    start = text.index("class Shelf") - 1000
    return text[start : text.rindex("\n", start, start + 3600) + 1]


def compute_dtype(config: Any, device: str, asked: str | None) -> torch.dtype:
    """The compute dtype, requested or from the checkpoint, if this machine supports it."""
    wanted = DTYPES[asked] if asked else getattr(config, "dtype", None) or torch.float32
    if wanted not in DTYPES.values():
        raise ConfigError(
            f"config: dtype must be float32, bfloat16 or float16, got {wanted}. Give --dtype."
        )
    if device == "cpu" and wanted == torch.bfloat16 and not cpu_bf16_works():
        note("bf16 matrix products crash on this CPU: using float32 (see openmla doctor)")
        return torch.float32
    return wanted


def load_model(
    checkpoint: Checkpoint | Path,
    device: str,
    dtype_name: str | None = None,
    *,
    dense: bool = False,
    device_map: str | None = None,
) -> Any:
    """Load a causal language model for inference. `dense`: a V3.2 checkpoint without its indexer.
    `device_map`: where transformers puts its parts, instead of all on `device`."""
    if isinstance(checkpoint, Path):
        checkpoint = open_checkpoint(str(checkpoint))
    folder = checkpoint.folder
    config = read_config(folder)
    check_attention("dense" if dense else None, config)
    wanted = compute_dtype(config, device, dtype_name)
    stripped = dense and hasattr(config, "index_topk")
    if stripped and getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{called(folder)}: quantized weights cannot run without their indexer. "
            "Use --attention sparse."
        )
    kind = f"{config.model_type}, dense" if stripped else config.model_type
    size = f", {checkpoint.num_bytes / 2**30:.1f} GiB" if checkpoint.num_bytes >= LONG else ""
    name = str(wanted).removeprefix("torch.")
    place = f"by device map {device_map}" if device_map else f"on {device}"
    note(f"loading {called(folder)} ({kind}{size}) as {name} {place}")
    cls = model_class("deepseek_v3" if stripped else config.model_type)
    try:
        with _only_errors(bars=checkpoint.num_bytes >= LONG and shows_progress()):
            if stripped:
                config = _without_indexer(config)
                _check_tensors(cls, config, checkpoint)
                model, info = cls.from_pretrained(
                    None,
                    config=config,
                    state_dict=_weights_without_indexer(checkpoint),
                    dtype=wanted,
                    device_map=device_map,
                    output_loading_info=True,
                )
                model.name_or_path = str(folder)  # where attach() looks for scales
            else:
                _check_tensors(cls, config, checkpoint)
                model, info = cls.from_pretrained(
                    folder,
                    config=config,
                    dtype=wanted,
                    device_map=device_map,
                    use_safetensors=bool(checkpoint.files),
                    output_loading_info=True,
                )
    except (ConfigError, UnsupportedError):
        raise
    except Exception as error:  # from torch, safetensors and packages that decode weights
        raise UnsupportedError(
            f"{called(folder)}: transformers cannot load it: {type(error).__name__}: {error}"
        ) from error
    _check_loaded(folder, info)
    return (model if device_map else model.to(device)).eval().requires_grad_(False)


def _check_tensors(cls: Any, config: Any, checkpoint: Checkpoint) -> None:
    """Compare shapes given by the config with those in the files, before memory is allocated for
    either, and check dtypes: transformers casts any dtype."""
    if getattr(config, "quantization_config", None) is not None:
        return  # stored in other shapes
    folder = called(checkpoint.folder)
    with torch.device("meta"):
        expected = cls(config).state_dict()
    for name, (dtype, found) in checkpoint.tensors.items():
        value = expected.get(name)
        if value is not None and found != value.shape:
            raise ConfigError(
                f"{folder}: {name} must be {list(value.shape)} by config.json, "
                f"got {list(found)} in the weights."
            )
        # integers under names that only the checkpoint has are taken for indices
        floats = WIDE if value is not None and value.is_floating_point() else (*WIDE, *INDICES)
        if dtype not in floats and (value is None or value.is_floating_point()):
            raise ConfigError(
                f"{folder}: {name} must be stored in 16 bits or wider where config.json has no "
                f"quantization_config, got {dtype}. Add the one that the weights were quantized "
                "with."
            )


def check_generation(folder: Path, config: Any) -> None:
    """Check what generate() reads of a checkpoint: transformers uses defaults for an unreadable
    file, and checks values only when it needs them."""
    file = folder / "generation_config.json"
    where = file.name if file.exists() else "config.json"
    try:
        with _only_errors():
            if file.exists():
                found = GenerationConfig.from_pretrained(folder)
            else:
                found = GenerationConfig.from_model_config(config)
            found.validate()
    except Exception as error:  # any type, for any invalid field
        raise ConfigError(
            f"{called(folder)}: transformers cannot use {where}: {type(error).__name__}: {error}"
        ) from error
    for name in NUMBERS:
        number = getattr(found, name, None)
        if number is not None and not is_finite(number):
            raise ConfigError(
                f"{called(folder)}: {name} in {where} must be a finite number, got {number!r}."
            )
    most = getattr(config.get_text_config(), "vocab_size", None) or 2**31
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = getattr(found, name, None)
        for token in given if isinstance(given, list) else [given]:
            if token is not None and not (type(token) is int and 0 <= token < most):
                raise ConfigError(
                    f"{called(folder)}: {name} in {where} must be a token from 0 to {most - 1}, "
                    f"got {token!r}."
                )


def run_once(model: Any, folder: Path) -> None:
    """Run a short pass of plain transformers: the first pass of a process is always slow, and
    config values that contradict each other raise."""
    ids = torch.zeros((1, 8), dtype=torch.int64, device=input_device(model))
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # from torch, of many types
        raise UnsupportedError(
            f"{called(folder)}: transformers cannot run it: {type(error).__name__}: {error}. "
            "Compare config.json with the model's own."
        ) from error


def input_device(model: Any) -> torch.device:
    """The device for a model's input tokens; for an offloaded embedding, the device it runs on."""
    device: torch.device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    places = [place for place in model.hf_device_map.values() if place not in ("cpu", "disk")]
    return torch.device(places[0] if places else "cpu")


def _check_loaded(folder: Path, info: dict[str, Any]) -> None:
    """Check that every tensor came from the checkpoint; transformers would initialize the rest.

    It has already removed tied tensors, and what a class allows to be unused, from these lists.
    """
    missing = sorted(info["missing_keys"])
    # attach() reads scales of a quantized cache
    unused = sorted(name for name in info["unexpected_keys"] if read_name(name) is None)
    if missing:
        raise ConfigError(
            f"{called(folder)}: the checkpoint lacks {counted(len(missing), 'tensor')} of the "
            f"model, such as {missing[0]}. Copy all of its files."
        )
    if unused:
        warn(
            f"the model does not use {counted(len(unused), 'tensor')} of the checkpoint, such as "
            f"{unused[0]}"
        )


def _weights_without_indexer(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    if not checkpoint.files:
        raise UnsupportedError(
            f"{called(checkpoint.folder)}: weights that are pickles cannot run without their "
            "indexer. Use --attention sparse."
        )
    weights: dict[str, torch.Tensor] = {}
    with progress(len(checkpoint.files)) as tell:
        for number, file in enumerate(checkpoint.files):
            tell(f"reading {file.name}", number)
            weights |= load_file(file)
    return {name: tensor for name, tensor in weights.items() if ".indexer." not in name}


def _without_indexer(config: Any) -> Any:
    """The config as `deepseek_v3`: the same weights except for the indexers'."""
    known = set(DeepseekV3Config().to_dict()) - {"model_type", "architectures", "dtype"}
    fields = {name: value for name, value in config.to_dict().items() if name in known}
    return DeepseekV3Config(**fields)


def model_class(model_type: str) -> Any:
    """The class that generates text for a model type; Mistral 4 is not in the automatic table."""
    import transformers

    names = {
        **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "mistral4": "Mistral4ForCausalLM",
    }
    cls = getattr(transformers, names.get(model_type, ""), None)
    if cls is None or not issubclass(cls, PreTrainedModel | GenerationMixin):
        raise ConfigError(f"{model_type!r} is not a language model transformers knows.")
    return cls


def load_tokenizer(folder: Path) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        note("no tokenizer in the folder: one token per byte")
        return ByteTokenizer()
    try:
        with _only_errors():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # any type, depending on the tokenizer
        raise ConfigError(
            f"{called(folder)}: transformers cannot load the tokenizer: {type(error).__name__}: "
            f"{error}"
        ) from error


def open_windows(
    command: str, options: argparse.Namespace
) -> tuple[Checkpoint, str, Any, Any, torch.Tensor]:
    """Check what eval and calibrate are given: checkpoint, device, config, tokenizer, and chunks of
    the text."""
    checkpoint = open_checkpoint(
        options.model, allow_pickle=options.allow_pickle, revision=options.revision
    )
    device = checked_device(options.device)
    if options.text is None and options.model != "demo":
        raise ConfigError(f"{command}: no text is given. Pass --text FILE; only the demo has one.")
    text = read_text(f"{command}: --text", options.text) if options.text else demo_text()
    config = read_config(checkpoint.folder)
    check_attention(options.attention, config)
    tokenizer = load_tokenizer(checkpoint.folder)
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    windows = _cut_windows(command, tokenizer, text, options, checkpoint.config, vocab_size)
    return checkpoint, device, config, tokenizer, windows


def _cut_windows(
    command: str,
    tokenizer: Any,
    text: str,
    options: argparse.Namespace,
    mla: MLAConfig,
    vocab_size: int | None,
) -> torch.Tensor:  # [windows, context]
    """Evenly spaced chunks of the text."""
    tokens = tokenizer.encode(text)
    check_tokens(tokens, vocab_size)
    ids, limit = torch.tensor(tokens), mla.max_positions
    context = options.context or min(limit, USUAL_CONTEXT, len(ids))
    if not 2 <= context <= len(ids):
        raise ConfigError(
            f"{command}: --context must be from 2 to the text's {len(ids)} tokens, got {context}."
        )
    if context > limit:
        warn(f"chunks of {context} tokens exceed the model's context of {limit}")
    starts = torch.linspace(0, len(ids) - context, options.windows).long()
    return torch.stack([ids[start : start + context] for start in starts.tolist()])


@contextmanager
def _only_errors(bars: bool = False) -> Iterator[None]:
    """Silence transformers' warnings, and its bars except for long work; commands have theirs."""
    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
