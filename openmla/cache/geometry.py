"""Geometry: sizes of DeepSeek V4's caches, and their bytes by kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from openmla.cache.format import get_format, state_rows, state_width
from openmla.cache.group import ring_blocks
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError

LARGEST_RATIO = 128


@dataclass(frozen=True)
class Geometry:
    """Sizes of a V4 model's caches, which are the same for all layers.

    The caches have three lifetimes. Entries and indexer keys live as long as their request, in
    `num_blocks` blocks of `block_size` tokens. Raw rows are recycled when they leave the `window`.
    Each request has a compressor state, and can go back `rollback` tokens.
    """

    num_blocks: int
    block_size: int
    window: int
    window_blocks: int
    window_block_size: int
    num_states: int
    rollback: int
    format: str
    index_format: str

    @classmethod
    def for_model(
        cls,
        config: MLAConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_requests: int | None,
        max_tokens: int | None,
        window_block_size: int,
        rollback: int,
        format: str,
        index_format: str,
    ) -> Geometry:
        """Return the sizes for max_requests requests and steps of max_tokens tokens."""
        assert config.compressor is not None
        if block_size % LARGEST_RATIO:
            raise ConfigError(
                f"cache: block_size must be a multiple of {LARGEST_RATIO} for "
                f"{config.model_type}, got {block_size}."
            )
        sizes = {"max_requests": max_requests, "max_tokens": max_tokens}
        for name, value in {**sizes, "window_block_size": window_block_size}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"cache: {name} must be a positive integer for {config.model_type}, "
                    f"got {value!r}."
                )
        if not isinstance(rollback, int) or isinstance(rollback, bool) or rollback < 0:
            raise ConfigError(
                f"cache: rollback must be an integer of at least 0, got {rollback!r}."
            )
        assert max_requests is not None and max_tokens is not None
        window = config.compressor.window
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            window=window,
            window_blocks=ring_blocks(
                window, rollback, max_requests, max_tokens, window_block_size
            ),
            window_block_size=window_block_size,
            num_states=max_requests,
            rollback=rollback,
            format=format,
            index_format=index_format,
        )

    def serves(self, planned: Geometry) -> bool:
        """Whether a plan made for caches of another geometry is valid for these, which must be at
        least as large and otherwise equal."""
        return self == planned.grown(self.num_blocks, self.window_blocks, self.num_states)

    def alike(self, other: Geometry) -> bool:
        """Whether the two differ in num_blocks and num_states at most."""
        return self == replace(other, num_blocks=self.num_blocks, num_states=self.num_states)

    def grown(self, num_blocks: int, window_blocks: int, num_states: int) -> Geometry:
        return replace(
            self,
            num_blocks=max(self.num_blocks, num_blocks),
            window_blocks=max(self.window_blocks, window_blocks),
            num_states=max(self.num_states, num_states),
        )


class Part(NamedTuple):
    """One tensor of a layer's cache: `blocks` blocks of `rows` rows of `width` values."""

    name: str
    format: str
    blocks: int
    rows: int
    width: int

    @property
    def num_bytes(self) -> int:
        layout = get_format(self.format)
        return self.blocks * layout.page_width(self.width, self.rows) * layout.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return get_format(self.format).row_bytes(self.width)


def layer_parts(config: MLAConfig, geometry: Geometry, ratio: int) -> tuple[Part, ...]:
    """Return the cache tensors of a V4 layer of this compress ratio."""
    D, DI = config.latent_dim, config.indexer.head_dim if config.indexer is not None else 0
    window = Part("window", geometry.format, geometry.window_blocks, geometry.window_block_size, D)
    if ratio == 0:
        return (window,)
    overlap = ratio == INDEXED_RATIO
    width = state_width(D, overlap=overlap)
    if overlap:
        width += state_width(DI, overlap=overlap)
    rows = state_rows(ratio, overlap=overlap) + geometry.rollback
    entries, N = geometry.block_size // ratio, geometry.num_blocks
    parts = [
        window,
        Part("compressed", geometry.format, N, entries, D),
        Part("state", "fp32", geometry.num_states, rows, width),
    ]
    if overlap:
        parts.append(Part("index", geometry.index_format, N, entries, DI))
    return tuple(parts)


class KindBytes(NamedTuple):
    """Total cache sizes of all layers of one compress ratio."""

    ratio: int
    num_layers: int
    token_bytes: float  # per token of context and layer, without padding
    entries: int  # bytes of entries and indexer keys, without padding
    padding: int  # bytes between their blocks
    window: int
    state: int

    @property
    def total(self) -> int:
        return self.entries + self.padding + self.window + self.state


def cache_bytes(config: MLAConfig, geometry: Geometry) -> tuple[KindBytes, ...]:
    """Return the bytes of all caches of a V4 model by kind of layer, as in allocate_cache()."""
    assert config.compressor is not None
    kinds = []
    for ratio in sorted(set(config.compressor.ratios)):
        layers = config.compressor.ratios.count(ratio)
        parts = {part.name: part for part in layer_parts(config, geometry, ratio)}
        growing = [parts[name] for name in ("compressed", "index") if name in parts]
        entries = sum(part.blocks * part.rows * part.row_bytes for part in growing)
        state = parts.get("state")
        kinds.append(
            KindBytes(
                ratio,
                layers,
                sum(part.row_bytes for part in growing) / max(ratio, 1),
                layers * entries,
                layers * (sum(part.num_bytes for part in growing) - entries),
                layers * parts["window"].num_bytes,
                layers * state.num_bytes if state is not None else 0,
            )
        )
    return tuple(kinds)
