"""Layer: the dumped tensors of one layer, and reference values for whatever was not dumped.

A component is judged on the inputs that were dumped for it, so that a fault is not attributed to
later components. Inputs that were not dumped are computed from earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from openmla.bisect.dump import DTYPES, Settings
from openmla.bisect.precision import EXACT, Precision
from openmla.cache.format import get_format
from openmla.cache.scales import check_scale
from openmla.config import MLAConfig
from openmla.errors import ConfigError, ShapeError

Compute = Callable[["Layer", Precision], Tensor]
STORED = {"cache": "cache_format", "index_cache": "index_format"}  # bytes; where their format is
ALWAYS_WIDE = ("lse", "index_scores", "kv_scale", "rope_ratio", "entries", "index_entries")
TOKENS, ENTRIES, ROW, ANY = -1, -2, -3, -4  # sizes in shapes: T, entries, a stored row, any


class MissingError(Exception):
    """An input is not in the dump and cannot be computed from what is."""


@dataclass(frozen=True)
class Component:
    """One step of a layer: its key in a dump, its title, and how to compute it.

    `peers` are implementations that round differently, the first is compute itself; the largest of
    their errors is the budget. `alternatives` are known mistakes, to explain what happened.
    """

    name: str
    title: str
    compute: Compute
    shape: tuple[int, ...]  # dumped shape, heads may be flattened; may use the sizes above
    kind: str = "values"  # values, lse, scores or choice (top-k selection)
    peers: tuple[Compute, ...] = ()
    alternatives: Mapping[str, Compute] = field(default_factory=dict)
    first_row: str = ""  # what it means if only row 0 is off
    # compute() with one block of cached rows replaced: (destination, source, size)
    reread: Callable[[Layer, Precision, tuple[int, int, int]], Tensor] | None = None


@dataclass(eq=False)
class Layer:
    """One layer of a dump, its weights and its components."""

    number: int
    config: MLAConfig
    weights: Mapping[str, Tensor]
    eps: Mapping[str, float]  # norm epsilons, by module
    tensors: Mapping[str, Tensor]
    settings: Settings
    components: Mapping[str, Component]
    num_tokens: int
    fresh_from: Tensor | None = None  # [T]: the first key a token reads as projected, not stored
    shared: Tensor | None = None  # an earlier layer's selection, if this layer has no indexer
    computed: dict[tuple[str, Precision], Tensor] = field(default_factory=dict)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The subject's compute dtype: as declared, or as the values of its tensors imply."""
        if self.settings.dtype:
            return DTYPES[self.settings.dtype]
        found = [
            tensor
            for name, tensor in self.tensors.items()
            if tensor.dtype in DTYPES.values() and name not in STORED and name not in ALWAYS_WIDE
        ]
        for dtype in (torch.bfloat16, torch.float16):  # values may be stored in a wider dtype
            if found and all(torch.equal(part.to(dtype).to(part.dtype), part) for part in found):
                return dtype
        return min((part.dtype for part in found), key=lambda d: d.itemsize, default=torch.float32)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str, precision: Precision) -> Tensor:
        """A component's output: the dumped one, else the reference's."""
        if name in self.tensors:
            return self.dumped(name).to(precision.dtype)
        key = (name, precision)
        if key not in self.computed:
            component = self.components.get(name)
            if component is None:
                raise MissingError(name)
            self.computed[key] = component.compute(self, precision)
        return self.computed[key]

    def dumped(self, name: str) -> Tensor:
        """A dumped tensor as values: cache bytes are decoded, unusable scores are 0."""
        if name == "index_scores":
            return self.tensors[name].where(self.usable_scores, 0)
        if name not in STORED:
            return self.tensors[name]
        D = self.row_width(name)
        return self.decoded(name, self.tensors[name], D)

    def row_width(self, name: str) -> int:
        indexer = self.config.indexer
        if name == "cache" or indexer is None:
            return self.config.latent_dim
        return indexer.head_dim

    def format_of(self, name: str) -> str:
        return str(getattr(self.settings, STORED[name]))

    def decoded(self, name: str, stored: Tensor, D: int) -> Tensor:
        """Cache rows as attention reads them, in float64 where it represents more."""
        format = self.format_of(name)
        values = stored
        if format:
            values = get_format(format).decode(stored, self.kv_scale, EXACT.dtype, D)
        if name == "cache" and "rope_ratio" in self.tensors:
            values = values.to(EXACT.dtype, copy=True)
            values[:, self.config.kv_lora_rank :] *= self.tensors["rope_ratio"].to(EXACT.dtype)
        return values

    def round_trip(self, name: str, rows: Tensor) -> Tensor:
        """Quantize rows to a cache format and back."""
        format = self.format_of(name)
        if not format:
            return rows
        given = rows
        if name == "cache" and "rope_ratio" in self.tensors:
            given = rows.clone()
            given[:, self.config.kv_lora_rank :] /= self.tensors["rope_ratio"].to(rows.dtype)
        stored = get_format(format).encode(given, self.kv_scale)
        return self.decoded(name, stored, rows.shape[-1]).to(rows.dtype)

    @property
    def kv_scale(self) -> Tensor:
        return self.tensors.get("kv_scale", torch.ones(())).float().reshape(())

    @property
    def chooses(self) -> bool:
        """Whether tokens attend to selected keys; V4's entries are handled separately."""
        return self.config.indexer is not None and self.config.compressor is None

    def get_chosen(self) -> Tensor:
        """[T, K] i64."""
        if "chosen" in self.tensors:
            return self.tensors["chosen"].long()
        if self.shared is not None:
            return self.shared
        indexer, limits = self.config.indexer, self.num_choices()
        if indexer is None or int(limits.max()) > indexer.topk:
            raise MissingError("chosen")  # only the dump decides between equal scores
        places = torch.arange(int(limits.max())).expand(self.num_tokens, -1)
        return places.masked_fill(places >= limits[:, None], -1)

    def num_choices(self) -> Tensor:
        """[T] i64: how many keys (for V4: entries) each token may select from."""
        tokens = torch.arange(1, self.num_tokens + 1)
        compressor = self.config.compressor
        return tokens if compressor is None else tokens // compressor.ratio(self.number)

    @cached_property
    def usable_scores(self) -> Tensor:
        """[T, S] bool: scores of keys that a token may select. None in a dumped row without scores,
        which means that the token sees so few keys that they were not scored."""
        limits = self.num_choices()[:, None]
        width = self.num_entries if self.config.compressor is not None else self.num_tokens
        usable = torch.arange(width) < limits
        if "index_scores" in self.tensors:
            found = self.tensors["index_scores"] != -torch.inf
            usable &= (found & usable).any(1, keepdim=True)
        return usable

    def weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"]

    def linear(self, module: str, x: Tensor, precision: Precision) -> Tensor:
        return precision.linear(x, self.weight(module), self.weights.get(f"{module}.bias"))

    def norm(self, module: str, x: Tensor, precision: Precision) -> Tensor:
        return precision.rms_norm(x, self.weight(module), self.eps[module])

    def checked(self) -> Layer:
        """Return the layer with every tensor in its component's shape, or raise for one that does
        not fit this model."""
        tensors = dict(self.tensors)
        for name, tensor in self.tensors.items():
            if name in ("kv_scale", "rope_ratio"):
                if tensor.numel() != 1:
                    raise ShapeError(
                        f"bisect: layers.{self.number}.{name} must be one number, "
                        f"got {list(tensor.shape)}."
                    )
                check_scale("bisect", f"layers.{self.number}.{name}", tensor)
                continue
            shape = self._shape(name)
            if shape is None:
                continue
            if not _fits(tuple(tensor.shape), shape):
                asked = ["any" if size == ANY else size for size in shape]
                raise ShapeError(
                    f"bisect: layers.{self.number}.{name} must be {asked} for this model and "
                    f"{self.num_tokens} tokens, got {list(tensor.shape)}."
                )
            if name == "chosen" and tensor.is_floating_point():
                raise ShapeError(
                    f"bisect: layers.{self.number}.chosen must be integers, got {tensor.dtype}."
                )
            tensors[name] = tensor.reshape([tensor.shape[-1] if n == ANY else n for n in shape])
        return replace(self, tensors=tensors, computed={})

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if name == "hidden_in":
            return (self.num_tokens, self.config.hidden_size)
        component = self.components.get(name)
        if component is None:
            return None
        sizes = {TOKENS: self.num_tokens, ENTRIES: self.num_entries, ROW: self._stored_width(name)}
        return tuple(sizes.get(size, size) for size in component.shape)

    def _stored_width(self, name: str) -> int:
        if name not in STORED:
            return -1
        D, format = self.row_width(name), self.format_of(name)
        stored = self.tensors.get(name)
        if not format:
            return D
        layout = get_format(format)
        if stored is not None and stored.dtype != layout.dtype:
            raise ConfigError(
                f"bisect: layers.{self.number}.{name} must be {layout.dtype} for format {format}, "
                f"got {stored.dtype}."
            )
        return layout.width(D)

    @property
    def num_entries(self) -> int:
        """Number of V4 entries: one for every full window."""
        compressor = self.config.compressor
        ratio = 0 if compressor is None else compressor.ratio(self.number)
        return self.num_tokens // ratio if ratio else 0


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether shapes agree, allowing one of them to have all but the first dimension flattened."""
    if ANY in wanted:
        return len(shape) == len(wanted) and shape[0] == wanted[0]
    flat = 2 in (len(shape), len(wanted)) and shape[:1] == wanted[:1]
    return shape == wanted or (flat and math.prod(shape[1:]) == math.prod(wanted[1:]))
