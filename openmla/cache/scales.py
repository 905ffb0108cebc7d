"""LayerScales: what one layer's rows and queries are divided by before they are rounded to fp8."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.cache.format import FP8_MAX
from openmla.errors import ConfigError

# A layer's attention, then whatever an exporter puts between it and the scale: nothing, the
# engine's attention (attn, mla_attn, attn_mqa), or the linear the scale was measured behind.
_PLACE = r"layers\.\d+\.(?:self_attn|attn|attention)(?:\.\d+)?"
_KIND = "q|k|v|kv|k_pe|q_nope|q_pe"
_NAME = re.compile(rf"(?:.*?\.)?({_PLACE})(?:\.(?!indexer\b)\w+)*\.({_KIND})_scale")
_OUTPUT = re.compile(rf"(?:.*?\.)?({_PLACE})\.([qkv])_proj\.output_scale")
_OF_A_LAYER = re.compile(rf"(?:(?!indexer\b)\w+\.)*({_KIND})_scale")

# What read_name() takes, for others to search names with.
SCALE_PATTERNS = tuple(rf"^(?!mtp\.){name.pattern}$" for name in (_NAME, _OUTPUT))


class ScaleName(NamedTuple):
    """What the name of a tensor in a checkpoint says: the layer it belongs to, and its scale."""

    place: str  # as "layers.3.self_attn": names before "layers" differ between engines
    kind: str  # one of _KIND


def read_name(name: str) -> ScaleName | None:
    """None of a tensor that is no scale of attention; draft layers are not the model's."""
    if name.startswith("mtp."):
        return None
    found = _NAME.fullmatch(name) or _OUTPUT.fullmatch(name)
    return ScaleName(found[1], found[2]) if found else None


def kind_in_layer(name: str) -> str | None:
    """The same of a name in a layer's own state dict, as "k_scale" or "attn.k_scale"."""
    found = _OF_A_LAYER.fullmatch(name)
    return found[1] if found else None


def place_of(module_name: str) -> str | None:
    """Where an attention module stands, as ScaleName has it."""
    found = re.search(rf"{_PLACE}$", module_name)
    return found[0] if found else None


def check_scale(where: str, name: str, value: object) -> float:
    """A positive number that float32 holds, as it holds it; or a sentence."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(
                f"{where}: {name} must be one number for the whole tensor, "
                f"got shape {tuple(value.shape)}."
            )
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {name} must be a number, got {type(value).__name__}.")
    held = float(torch.tensor(float(value), dtype=torch.float64).float())
    if not (math.isfinite(held) and held > 0):
        raise ConfigError(f"{where}: {name} must be positive and finite, got {value!r}.")
    if held * FP8_MAX > torch.finfo(torch.float32).max:
        raise ConfigError(
            f"{where}: {name} must be at most what float32 holds {FP8_MAX:g} times of, "
            f"got {value!r}."
        )
    return held


def next_power_of_two(value: float) -> float:
    """The least that is no smaller than a positive number."""
    fraction, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if fraction == 0.5 else exponent)


@dataclass(frozen=True)
class LayerScales:
    """Per-tensor scales of one layer: a value is stored as value / scale, in e4m3.

    q is of the absorbed query, q_nope @ w_uk beside q_pe; k of a whole row, latent and k_pe; v of
    the latent, which is what values are. k_pe is that of the rotated columns alone, None where it
    is not known: then the row has the one scale k. q_nope and q_pe are those of the query's two
    parts alone; the scales of queries are None where nobody measured them.
    """

    k: float
    v: float
    q: float | None = None
    k_pe: float | None = None
    q_nope: float | None = None
    q_pe: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None or name in ("k", "v"):
                object.__setattr__(self, name, check_scale("scales", f"{name}_scale", value))

    @property
    def row(self) -> float:
        """kv_scale of a cache that holds one: the latent's, where k_pe has its own."""
        return self.k if self.k_pe is None else self.v

    @property
    def rope_ratio(self) -> float:
        """The power of two that k_pe is divided by on its way into the cache, and q_pe multiplied
        by: the least that leaves k_pe no larger, in units of `row`, than its own scale would."""
        if self.k_pe is None:
            return 1.0
        return next_power_of_two(self.k_pe / self.row)

    @property
    def query(self) -> float | None:
        """q_scale of a cache: holds q_nope @ w_uk beside q_pe * rope_ratio. None: not measured."""
        if self.q is None:
            return None
        if self.q_nope is None or self.q_pe is None:
            return self.q * max(1.0, self.rope_ratio)
        return max(self.q_nope, self.q_pe * self.rope_ratio)

    @classmethod
    def of(cls, found: Mapping[str, object]) -> LayerScales | None:
        """From scales by their kind: one of k and v stands for the other, neither is None."""
        k = found.get("k", found.get("kv", found.get("v")))
        v = found.get("v", found.get("kv", found.get("k")))
        if k is None or v is None:
            return None
        others = {kind: found.get(kind) for kind in ("q", "k_pe", "q_nope", "q_pe")}
        return cls(k, v, **others)  # type: ignore[arg-type]

    def by_kind(self) -> dict[str, float]:
        """The inverse of of()."""
        return {kind: value for kind, value in vars(self).items() if value is not None}
