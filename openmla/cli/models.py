"""Models of the command line: a folder on disk, or the demo checkpoint in the package. Offline."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers loads: nothing is ever downloaded

import argparse
import codecs
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.utils.logging import disable_progress_bar

from openmla.cli.doctor import cpu_bf16_works
from openmla.errors import ConfigError, UnsupportedError

DEMO = Path(__file__).parent.parent / "demo"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ByteTokenizer:
    """One token per byte, for models that ship no tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        return bytes(token % 256 for token in tokens).decode(errors="replace")

    def stream(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(errors="replace")


def model_folder(name: str) -> Path:
    """The folder behind --model: "demo", or a path."""
    folder = DEMO if name == "demo" else Path(name)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model must be demo or a folder with config.json, got {name!r}.")
    return folder


def add_attention_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention",
        choices=("dense", "sparse"),
        help="of a V3.2 checkpoint, with or without its indexer; default: sparse, the demo dense",
    )


def wants_dense(name: str, attention: str | None) -> bool:
    return attention == "dense" or (attention is None and name == "demo")


def can_be_dense(folder: Path) -> bool:
    """Whether a checkpoint has a dense form: it is dense, or a V3.2 that can leave its indexer."""
    config = AutoConfig.from_pretrained(folder)
    return config.model_type == "deepseek_v32" or not hasattr(config, "index_topk")


def demo_text() -> str:
    """The text held out when the demo was trained."""
    return (DEMO / "heldout.txt").read_text(encoding="utf-8")


def demo_prompt() -> str:
    """3,600 bytes of a class it has not seen; the demo's context has room for 496 more."""
    text = demo_text()
    start = text.index("class Shelf") - 1000
    return text[start : text.rindex("\n", start, start + 3600) + 1]


def load_model(
    folder: Path, device: str, dtype_name: str | None = None, *, dense: bool = False
) -> Any:
    """A causal language model, for inference. `dense`: a V3.2 checkpoint without its indexer."""
    config = AutoConfig.from_pretrained(folder)
    wanted = DTYPES[dtype_name] if dtype_name else getattr(config, "dtype", None) or torch.float32
    if device == "cpu" and wanted == torch.bfloat16 and not cpu_bf16_works():
        note("bf16 matrix products die on this CPU: using float32 (openmla doctor tells more)")
        wanted = torch.float32
    sparse = hasattr(config, "index_topk")
    if dense and not can_be_dense(folder):
        raise UnsupportedError(f"{config.model_type} has no dense attention. Leave the option out.")
    dense = dense and sparse
    kind = f"{config.model_type}, dense" if dense else config.model_type
    note(f"loading {folder.name} ({kind}) as {str(wanted).removeprefix('torch.')} on {device}")
    disable_progress_bar()  # transformers', for a file read in a blink
    if dense:
        model = _without_indexer(folder, config, wanted)
    else:
        model = model_class(config.model_type).from_pretrained(folder, dtype=wanted)
    return model.to(device).eval().requires_grad_(False)


def _without_indexer(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The checkpoint as `deepseek_v3`: the same weights but for the indexers'."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedError(
            f"{folder.name} must hold .safetensors to be read without its indexer."
        )
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    kept = {name: tensor for name, tensor in weights.items() if ".indexer." not in name}
    known = set(DeepseekV3Config().to_dict()) - {"model_type", "architectures", "dtype"}
    fields = {name: value for name, value in config.to_dict().items() if name in known}
    cls = model_class("deepseek_v3")
    return cls.from_pretrained(
        None, config=DeepseekV3Config(**fields), state_dict=kept, dtype=dtype
    )


def model_class(model_type: str) -> Any:
    """The causal language model class of a model type; Mistral 4 is not in the automatic table."""
    import transformers

    names = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4": "Mistral4ForCausalLM"}
    cls = getattr(transformers, names.get(model_type, ""), None)
    if cls is None or not issubclass(cls, PreTrainedModel | GenerationMixin):
        raise ConfigError(f"{model_type!r} is not a language model transformers knows.")
    return cls


def load_tokenizer(folder: Path) -> Any:
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return AutoTokenizer.from_pretrained(folder)
    note("no tokenizer in the folder: one token per byte")
    return ByteTokenizer()


def note(text: str) -> None:
    """A line about what is being done, on the error stream."""
    print(f"openmla: {text}", file=sys.stderr, flush=True)
