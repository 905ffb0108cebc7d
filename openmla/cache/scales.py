"""LayerScales: the scales of one layer's rows and queries in fp8."""

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
# engine's attention (attn, mla_attn, attn_mqa), or the linear whose output was measured.
_PLACE = r"layers\.\d+\.(?:self_attn|attn|attention)(?:\.\d+)?"
_KIND = "q|k|v|kv|k_pe|q_nope|q_pe"
_NAME = re.compile(rf"(?:.*?\.)?({_PLACE})(?:\.(?!indexer\b)\w+)*\.({_KIND})_scale")
_OUTPUT = re.compile(rf"(?:.*?\.)?({_PLACE})\.([qkv])_proj\.output_scale")
_OF_A_LAYER = re.compile(rf"(?:(?!indexer\b)\w+\.)*({_KIND})_scale")

# Patterns that read_name() accepts, for code that searches names.
SCALE_PATTERNS = tuple(rf"^(?!mtp\.){name.pattern}$" for name in (_NAME, _OUTPUT))


class ScaleName(NamedTuple):
    """The parsed name of a scale in a checkpoint: the layer that it belongs to, and its kind."""

    place: str  # such as "layers.3.self_attn": prefixes differ between engines
    kind: str  # one of _KIND


def read_name(name: str) -> ScaleName | None:
    """Parse a name; None if it is not a scale of attention, or belongs to a draft layer."""
    if name.startswith("mtp."):
        return None
    found = _NAME.fullmatch(name) or _OUTPUT.fullmatch(name)
    return ScaleName(found[1], found[2]) if found else None


def kind_in_layer(name: str) -> str | None:
    """Return the kind of a scale in a layer's own state dict, such as "attn.k_scale"."""
    found = _OF_A_LAYER.fullmatch(name)
    return found[1] if found else None


def place_of(module_name: str) -> str | None:
    """Return the place of an attention module, as in ScaleName."""
    found = re.search(rf"{_PLACE}$", module_name)
    return found[0] if found else None


def check_scale(where: str, name: str, value: object) -> float:
    """Return a scale rounded to float32, or raise unless it is positive and finite."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(
                f"{where}: {name} must be one number for the whole tensor, got shape "
                f"{tuple(value.shape)}. Scales per channel or block are not supported."
            )
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {name} must be a number, got {type(value).__name__}.")
    held = float(torch.tensor(float(value), dtype=torch.float64).float())
    if not (math.isfinite(held) and held > 0):
        raise ConfigError(f"{where}: {name} must be positive and finite, got {value!r}.")
    if held * FP8_MAX > torch.finfo(torch.float32).max:
        raise ConfigError(
            f"{where}: {name} must be at most {torch.finfo(torch.float32).max / FP8_MAX:g}, so "
            f"that {FP8_MAX:g} times the scale fits float32, got {value!r}."
        )
    return held


def next_power_of_two(value: float) -> float:
    """Return the smallest power of two that is at least `value`, a positive number."""
    fraction, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if fraction == 0.5 else exponent)


@dataclass(frozen=True)
class LayerScales:
    """The fp8 scales of one layer: a value is stored as value / scale, in e4m3.

    Scales of queries are None if they were not measured.

    Attributes:
        k: scale of a whole row, latent and k_pe.
        v: scale of the latent, which holds the values.
        q: scale of the absorbed query, q_nope @ w_uk with q_pe.
        k_pe: scale of the rotated columns alone. If None, k is the scale of the whole row.
        q_nope: scale of q_nope @ w_uk alone.
        q_pe: scale of q_pe alone.
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
        """The kv_scale of a cache: v if k_pe has a scale of its own, else k."""
        return self.k if self.k_pe is None else self.v

    @property
    def rope_ratio(self) -> float:
        """The power of two that k_pe is divided by in the cache, and that q_pe is multiplied by.

        It is the least that leaves k_pe, in units of `row`, no larger than its own scale would.
        """
        if self.k_pe is None:
            return 1.0
        return next_power_of_two(self.k_pe / self.row)

    @property
    def query(self) -> float | None:
        """The q_scale of a cache, which covers q_nope @ w_uk and q_pe * rope_ratio, or None."""
        if self.q is None:
            return None
        if self.q_nope is None or self.q_pe is None:
            return self.q * max(1.0, self.rope_ratio)
        return max(self.q_nope, self.q_pe * self.rope_ratio)

    @classmethod
    def of(cls, found: Mapping[str, object]) -> LayerScales | None:
        """Make LayerScales from scales by kind. If only one of k and v is given, it is used for
        both; if neither is, the result is None."""
        k = found.get("k", found.get("kv", found.get("v")))
        v = found.get("v", found.get("kv", found.get("k")))
        if k is None or v is None:
            return None
        others = {kind: found.get(kind) for kind in ("q", "k_pe", "q_nope", "q_pe")}
        return cls(k, v, **others)  # type: ignore[arg-type]

    def by_kind(self) -> dict[str, float]:
        """Return the scales that are known, by kind: the inverse of of()."""
        return {kind: value for kind, value in vars(self).items() if value is not None}
