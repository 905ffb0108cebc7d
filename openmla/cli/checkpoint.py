"""Checks of a command's inputs before weights load: texts, device, backend, checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from openmla.backends import all_backends, why_not
from openmla.backends.choice import BackendChoice, check_backend_choice
from openmla.cli.hub import called, fetched, is_hub_id
from openmla.config import MLAConfig
from openmla.config.huggingface import read_config
from openmla.errors import ConfigError, UnsupportedError
from openmla.ops.cache_write import problem

DEMO = Path(__file__).parent.parent / "demo"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Stored(NamedTuple):
    """A tensor as a file's header describes it."""

    dtype: str  # in safetensors' notation
    shape: tuple[int, ...]


class Checkpoint(NamedTuple):
    """A folder with a supported config and readable weights."""

    folder: Path
    config: MLAConfig
    files: tuple[Path, ...]  # safetensors files; none if only (allowed) pickles exist
    tensors: dict[str, Stored]  # their tensors, by name
    num_bytes: int


def open_checkpoint(
    name: str, *, allow_pickle: bool = False, revision: str | None = None
) -> Checkpoint:
    """The checkpoint behind --model: "demo", a folder, or a Hub model ID. No tensor is read."""
    folder = DEMO if name == "demo" else Path(name)
    if is_hub_id(name):
        folder = fetched(name, revision=revision, allow_pickle=allow_pickle)
    elif revision is not None:
        raise ConfigError(
            f"--revision {revision!r} applies to models of the Hugging Face Hub, and {name!r} is "
            "local. Leave it out."
        )
    if not os.path.isfile(folder / "config.json"):  # False also for invalid file names
        raise ConfigError(
            f"model {name!r} is neither demo nor a folder with config.json. Check the path, or "
            "give a Hugging Face model ID (owner/name)."
        )
    config = read_config(folder, rotated=True)  # read as if rotated by the model, for any RoPE type
    files = _weight_files(folder, allow_pickle)
    tensors: dict[str, Stored] = {}
    for file in files:
        tensors.update(_tensors(file))
    if files and config.num_layers > len(tensors):  # modules are created for every layer
        raise ConfigError(
            f"{called(folder)}: config.json must have no more layers than the weights have "
            f"tensors, got {config.num_layers} and {len(tensors)}."
        )
    return Checkpoint(folder, config, files, tensors, sum(file.stat().st_size for file in files))


def _weight_files(folder: Path, allow_pickle: bool) -> tuple[Path, ...]:
    """Find weight files like transformers: one file, or an index of several."""
    if (folder / SINGLE).exists():
        return (folder / SINGLE,)
    if (folder / INDEX).exists():
        files = tuple(folder / name for name in _shards(folder / INDEX))
        for file in files:
            if not file.is_file():
                raise ConfigError(
                    f"{called(folder)}: {INDEX} names {file.name!r}, which is missing. Copy that "
                    "file into the folder."
                )
        return files
    if not any((folder / name).exists() for name in PICKLES):
        raise ConfigError(
            f"{called(folder)}: the folder has no weights. Add {SINGLE}, or {INDEX} and its files."
        )
    if not allow_pickle:
        raise UnsupportedError(
            f"{called(folder)}: the weights are pickles, and a pickle can run any code. "
            "Give --allow-pickle if you trust them."
        )
    return ()


def _shards(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not names or not all(name == Path(name).name for name in names):
            raise ValueError("no files in its own folder")
    except OSError as error:
        raise ConfigError(f"{index.name} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{called(index.parent)}: {index.name} must hold a weight_map of tensors to files: "
            f"{error!r}."
        ) from error
    return names


def _tensors(file: Path) -> dict[str, Stored]:
    """Read the header, which must account for every byte of the file."""
    try:
        if not file.is_file() or file.stat().st_size == 0:
            raise ValueError("it is empty or no file")
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: Stored(each.get_dtype(), tuple(each.get_shape()))
                for name, each in slices.items()
            }
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{called(file.parent)}: {file.name} must be a whole safetensors file: {error}. "
            "Copy it again."
        ) from error


def read_text(option: str, name: str) -> str:
    """Read a text file given by the user."""
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option}: {name!r} cannot be read: {error.strerror}. Give a text file."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{option}: {name!r} is not text in UTF-8: {error}.") from error
    if not text:
        raise ConfigError(f"{option}: {name!r} is empty. Give a file with text.")
    return text


def checked_device(name: str | None) -> str:
    """A device that can hold tensors; by default cuda if available."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--device {name!r} is not a device of PyTorch. Give one such as cpu or cuda:0."
        ) from error
    if device.type == "meta":
        raise ConfigError("--device meta has no memory. Give one such as cpu or cuda:0.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"--device {name} needs a GPU, and PyTorch finds none. Run openmla doctor."
        )
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # every device type raises its own errors
        reason = str(error).strip().splitlines() or [type(error).__name__]
        first = reason[0].split(". ")[0].rstrip(".")
        raise UnsupportedError(
            f"--device {name} cannot be used: {first}. Give one such as cpu or cuda:0."
        ) from error
    return name


def check_backend(name: BackendChoice, device: str, format: str | None) -> None:
    """Check that a named backend exists and can write a model's rows; plans check the rest."""
    if not isinstance(name, str):
        check_backend_choice("--backend", name)
        return
    if name == "auto":
        return
    if name not in all_backends():
        raise ConfigError(
            f"--backend must be auto or one of {', '.join(all_backends())}, got {name!r}."
        )
    rows = problem(torch.device(device), torch.float32, format or "bf16")
    reason = why_not(rows, name)
    if reason is not None:
        raise UnsupportedError(f"--backend {name} cannot run this model: {reason}.")


def check_tokens(tokens: list[int], vocab_size: Any) -> None:
    """Check that the model has embeddings for a tokenizer's output."""
    if not tokens:
        raise ConfigError("the text has no tokens. Give a longer one.")
    if isinstance(vocab_size, int) and max(tokens) >= vocab_size:
        raise ConfigError(
            f"token {max(tokens)} of the text is outside the model's vocab_size of {vocab_size}. "
            "Put the model's own tokenizer into the folder."
        )
