"""A decode step, its ranks and its caches, and how much context fits.

A step is one new token for each of `batch` requests that have `context` keys; roofline.py computes
its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from openmla.cache import Geometry, cache_bytes, check_formats
from openmla.cache.format import get_format
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError

WINDOW_BLOCK, ROLLBACK = 64, 8  # allocate_cache's defaults for V4's caches
HEADS, SCHEDULES = ("own", "all"), ("auto", "gather", "exchange")


@dataclass(frozen=True)
class Split:
    """`size` ranks that share every request's keys by position, round robin.

    With `heads` "own" each rank has its part of the heads and of the weights (tensor parallelism):
    queries are gathered, outputs merged and scattered back. With "all" each rank runs the whole
    model on the same tokens. `schedule` is how partial outputs are merged.
    """

    size: int = 1
    heads: str = "own"
    schedule: str = "auto"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("heads", self.heads, HEADS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise ConfigError(
                    f"ranks: {name} must be one of {', '.join(known)}, got {value!r}."
                )
        if not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(f"ranks: size must be a positive integer, got {self.size!r}.")

    def out_width(self, config: MLAConfig) -> int:
        """Values per head in merged outputs: latent, or after w_uv if all ranks have it."""
        return config.kv_lora_rank if self.heads == "own" else config.v_head_dim

    def own_heads(self, config: MLAConfig) -> int:
        """Heads that a rank projects; it attends for all heads."""
        return config.num_heads // self.size if self.heads == "own" else config.num_heads


@dataclass(frozen=True)
class Step:
    """A decode step of a model's attention, on one of several ranks."""

    config: MLAConfig
    format: str = "bf16"
    index_format: str = "index_fp8"
    batch: int = 1
    context: int = 1  # keys per request, including its new token
    ranks: Split = Split()

    def __post_init__(self) -> None:
        check_formats(self.config, self.format, self.index_format)
        for name, value in (("batch", self.batch), ("context", self.context)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"step: {name} must be a positive integer, got {value!r}.")
        W, H = self.ranks.size, self.config.num_heads
        if self.ranks.heads == "own" and H % W:
            raise ConfigError(
                f"ranks: size must divide the model's {H} heads with heads='own', got {W}."
            )

    @property
    def local_context(self) -> int:
        """Keys of a request on the rank with the most of them."""
        return -(-self.context // self.ranks.size)

    @property
    def scored(self) -> int:
        """Keys of a request that an indexer selects from; for V4 these are entries."""
        return self.context if self.config.compressor is None else self.context // INDEXED_RATIO

    @property
    def local_scored(self) -> int:
        """Such keys on the rank with the most of them."""
        return -(-self.scored // self.ranks.size)

    @property
    def chooses(self) -> bool:
        """Whether an indexer selects keys: a request with at most K keys attends to all."""
        indexer = self.config.indexer
        return indexer is not None and self.scored > indexer.topk


class Kind(NamedTuple):
    """A group of equal layers."""

    num_layers: int
    indexed: bool  # has an indexer of its own
    ratio: int = 0  # tokens per entry, V4

    def is_sharded(self, config: MLAConfig) -> bool:
        """Whether ranks share its keys; for V4 only selected entries are shared."""
        return config.compressor is None or self.ratio == INDEXED_RATIO


def kinds(config: MLAConfig) -> tuple[Kind, ...]:
    """Group a model's layers by what they do."""
    if config.compressor is not None:
        ratios = config.compressor.ratios
        return tuple(Kind(ratios.count(r), r == INDEXED_RATIO, r) for r in sorted(set(ratios)))
    indexer, layers = config.indexer, config.num_layers
    if indexer is None:
        return (Kind(layers, False),)
    shared = sum(map(indexer.is_shared, range(layers)))
    both = (Kind(layers - shared, True), Kind(shared, False))
    return tuple(kind for kind in both if kind.num_layers)


class TokenBytes(NamedTuple):
    """Bytes of cache per token of context over all layers, without padding."""

    latent: float  # rows, or for V4 entries
    keys: float  # indexer keys

    @property
    def total(self) -> float:
        return self.latent + self.keys


def token_bytes(step: Step) -> TokenBytes:
    """V4's windows and compressor states do not count, as they do not grow with the context."""
    config = step.config
    row = get_format(step.format).row_bytes(config.latent_dim)
    DI = config.indexer.head_dim if config.indexer is not None else 0
    key = get_format(step.index_format).row_bytes(DI) if DI else 0
    latent = keys = 0.0
    for kind in kinds(config):
        per = max(kind.ratio, 1)
        kept = config.compressor is None or kind.ratio > 0
        latent += kind.num_layers * row / per if kept else 0
        keys += kind.num_layers * key / per if kind.indexed else 0
    return TokenBytes(latent, keys)


class Room(NamedTuple):
    """Size of a cache for some requests on one rank, as allocate_cache makes it."""

    block: int  # bytes of one block of tokens per rank over all layers, with padding
    fixed: int  # bytes for any context: V4's windows and compressor states


def room(step: Step, block_size: int) -> Room:
    """For `batch` requests and steps of one token each."""
    config = step.config
    if config.compressor is None:
        D, block = config.latent_dim, 0
        for kind in kinds(config):
            block += kind.num_layers * _page_bytes(step.format, D, block_size)
            if kind.indexed and config.indexer is not None:
                DI = config.indexer.head_dim
                block += kind.num_layers * _page_bytes(step.index_format, DI, block_size)
        return Room(block, 0)
    growing = fixed = 0
    for tokens, sharded in ((block_size, True), (block_size * step.ranks.size, False)):
        geometry = Geometry.for_model(
            config,
            num_blocks=1,
            block_size=tokens,
            max_requests=step.batch,
            max_tokens=step.batch,
            window_block_size=WINDOW_BLOCK,
            rollback=ROLLBACK,
            format=step.format,
            index_format=step.index_format,
        )
        for part in cache_bytes(config, geometry):
            if (part.ratio == INDEXED_RATIO) == sharded:
                growing += part.entries + part.padding
                fixed += part.window + part.state
    return Room(growing, fixed)


def _page_bytes(format: str, D: int, block_size: int) -> int:
    layout = get_format(format)
    return layout.page_width(D, block_size) * layout.dtype.itemsize


def tokens_that_fit(step: Step, free_bytes: float, block_size: int) -> int:
    """Tokens of context, over all requests, that fit into `free_bytes` on each rank: whole blocks,
    one of which is block_size positions per rank."""
    needed = room(step, block_size)
    blocks = max(int((free_bytes - needed.fixed) // needed.block), 0)
    return blocks * block_size * step.ranks.size
