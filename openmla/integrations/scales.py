"""Scales: the fp8 scales of a model, in safetensors under the names that checkpoints use."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openmla.cache.scales import SCALE_PATTERNS, LayerScales, check_scale, place_of, read_name
from openmla.errors import ConfigError, UnsupportedError, check_kind

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Scales:
    """The fp8 scales of a model's layers, as calibrate() returns them.

    Pass them to attach(cache_format="fp8", kv_scale=...), or save() them to a file and pass its
    path.

    Attributes:
        layers: LayerScales by the name of the attention module, such as "layers.3.self_attn".

    ```python
    import openmla

    first = openmla.LayerScales(k=0.05, v=0.05)
    scales = openmla.Scales({"layers.0.self_attn": first})
    print(scales.layers["layers.0.self_attn"].k)
    ```
    """

    layers: Mapping[str, LayerScales]

    def __post_init__(self) -> None:
        check_kind("scales", "layers", self.layers, Mapping)
        if not self.layers:
            raise ConfigError("scales: layers is empty. Pass the LayerScales of at least 1 layer.")
        for place, scales in self.layers.items():
            if not isinstance(place, str) or place_of(place) != place:
                raise ConfigError(
                    f"scales: names of layers must look like 'layers.0.self_attn', got {place!r}."
                )
            check_kind("scales", place, scales, LayerScales)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file of float32 scalars, such as model.layers.0.self_attn.k_scale.

        k_pe_scale, q_nope_scale and q_pe_scale are names that only openmla uses.

        Args:
            path: the file to write.
        """
        from safetensors.torch import save_file

        tensors = {
            f"model.{place}.{kind}_scale": torch.tensor(value, dtype=torch.float32)
            for place, scales in self.layers.items()
            for kind, value in scales.by_kind().items()
        }
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except Exception as error:  # safetensors' own exception types
            raise ConfigError(f"scales: {os.fspath(path)!r} cannot be written: {error}.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scales:
        """Read scales from a file that save() wrote, or from the folder of a checkpoint.

        Args:
            path: the file or folder.
        """
        found = read_scales(_files(Path(path)))
        if found is None:
            raise ConfigError(
                f"scales: {os.fspath(path)!r} has no k_scale or v_scale of any layer."
            )
        return found


KvScale = float | LayerScales | Scales | str | os.PathLike[str]  # types of attach(kv_scale=)


def scales_of(named: Iterable[tuple[str, Any]], where: str) -> Scales | None:
    """Scales from named tensors, under any of the names a scale may have; others are ignored."""
    found: dict[str, dict[str, float]] = {}
    for name, value in named:
        known = read_name(name)
        if known is None:
            continue
        mine = found.setdefault(known.place, {})
        scale = check_scale(where, name, value)
        if mine.setdefault(known.kind, scale) != scale:
            raise ConfigError(
                f"{where}: {known.place} has two values of {known.kind}_scale, "
                f"{mine[known.kind]} and {scale}."
            )
    layers = {place: LayerScales.of(kinds) for place, kinds in found.items()}
    known_layers = {place: scales for place, scales in layers.items() if scales is not None}
    return Scales(known_layers) if known_layers else None


def read_scales(files: Iterable[Path]) -> Scales | None:
    """Read only the scales from safetensors files."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UnsupportedError(
            f'scales: safetensors cannot be imported: {error}. Run pip install "openmla[hf]".'
        ) from error
    tensors: list[tuple[str, Tensor]] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if read_name(name)]  # noqa: SIM118
                tensors += [(name, opened.get_tensor(name)) for name in names]
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"scales: {file.name!r} is not a valid safetensors file: {error}."
            ) from error
    return scales_of(tensors, "scales")


def checkpoint_scales(folder: Path) -> Scales | None:
    """Scales among a checkpoint's own weights, or None if it has none or is not in safetensors."""
    has_any = any((folder / name).is_file() for name in (SINGLE, INDEX))
    return read_scales(_files(folder)) if has_any else None


def expect_scales(model_class: Any) -> None:
    """Make a transformers class expect fp8 scales in its checkpoints.

    from_pretrained(), also of an AutoModel class, then no longer lists them as unexpected keys.
    attach() reads them with or without this call.

    Args:
        model_class: the class of the model, such as DeepseekV3ForCausalLM.

    Raises:
        ConfigError: model_class is not a class with from_pretrained().

    ```python
    import openmla
    from transformers import DeepseekV3ForCausalLM

    class Model(DeepseekV3ForCausalLM):
        pass

    openmla.expect_scales(Model)  # before Model.from_pretrained()
    print(Model._keys_to_ignore_on_load_unexpected)
    ```
    """
    known = getattr(model_class, "_keys_to_ignore_on_load_unexpected", ())
    if not isinstance(model_class, type) or not hasattr(model_class, "from_pretrained"):
        raise ConfigError(
            "expect_scales: model_class must be a class with from_pretrained(), such as "
            f"DeepseekV3ForCausalLM, got {model_class!r}."
        )
    told: Any = model_class
    patterns = [*(known or ()), *SCALE_PATTERNS]
    told._keys_to_ignore_on_load_unexpected = list(dict.fromkeys(patterns))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not (path / INDEX).is_file():
        raise ConfigError(
            f"scales: {str(path)!r} is neither a safetensors file nor a folder with {SINGLE} or "
            f"{INDEX}."
        )
    try:
        weights = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        named = {file for name, file in weights.items() if read_name(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"scales: {INDEX} must contain a weight_map of tensors to files: {error!r}."
        ) from error
    return [path / file for file in sorted(named)]
