"""Dump: what an engine computed, in the safetensors layout of docs/bisect.md, and its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openmla.cache.format import get_format
from openmla.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAME = re.compile(r"layers\.(\d{1,6})\.([a-z0-9_]+)")
OF_ALL = ("tokens", "fresh_from")  # tensors that are not per layer
_CHOICES = {
    "dtype": ("", *DTYPES),
    "lse_base": ("e", "2"),
    "rope_order": ("kept", "split"),
    "index_rope_order": ("kept", "split"),
    "index_hadamard": ("false", "true"),
}


@dataclass(frozen=True)
class Settings:
    """A dump's metadata; all values are strings, and all may be left out."""

    model_type: str = ""
    dtype: str = ""  # compute dtype; empty: that of the tensors
    cache_format: str = ""  # a key of FORMATS if `cache` holds bytes; empty: it holds values
    index_format: str = ""
    lse_base: str = "e"
    rope_order: str = "kept"  # split: the first members of all pairs, then the second ones
    index_rope_order: str = "kept"
    index_hadamard: str = "false"
    block_size: str = ""  # tokens per block of the cache, to name a wrong block

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                listed = ", ".join(filter(None, known))
                raise ConfigError(
                    f"bisect: {name} of the dump must be one of {listed}, "
                    f"got {getattr(self, name)!r}."
                )
        for name, holds in (("cache_format", "latent"), ("index_format", "index")):
            if getattr(self, name):
                get_format(getattr(self, name), holds)
        if self.block_size and not re.fullmatch(r"[1-9]\d{0,8}", self.block_size):
            raise ConfigError(
                "bisect: block_size of the dump must be a positive integer, got "
                f"{self.block_size!r}."
            )

    @property
    def block_rows(self) -> int:
        """The block size in rows, 0 if unknown."""
        return int(self.block_size or 0)


@dataclass(frozen=True)
class Dump:
    """Tensors by name, `layers.{i}.{component}` and those of no single layer, and settings."""

    tensors: Mapping[str, Tensor]
    settings: Settings = field(default_factory=Settings)

    @property
    def layers(self) -> list[int]:
        """The layers that have tensors."""
        found = {int(match[1]) for name in self.tensors if (match := NAME.fullmatch(name))}
        return sorted(found)

    def layer(self, number: int) -> dict[str, Tensor]:
        """One layer's tensors by component."""
        prefix = f"layers.{number}."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }

    def save(self, path: str) -> None:
        """Write the file that read_dump() reads."""
        said = {each.name: getattr(self.settings, each.name) for each in fields(self.settings)}
        # copies: a file's tensors must not share memory, but unrounded index keys and their cache
        # do
        tensors = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in self.tensors.items()
        }
        save_file(tensors, path, metadata={name: value for name, value in said.items() if value})


def read_dump(path: str) -> Dump:
    """Read a file that an engine wrote."""
    try:
        if not Path(path).is_file():
            raise ConfigError(f"bisect: --against must be a file, got {path!r}.")
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"bisect: --against must be a valid safetensors file, got {path!r}: {error}."
        ) from error
    known = {each.name for each in fields(Settings)}
    settings = Settings(**{name: value for name, value in metadata.items() if name in known})
    return Dump(tensors, settings)
