"""PagedCache: one tensor of blocks and its format; LayerCache: everything one layer keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openmla.cache.format import GROUP, CacheFormat, PackedLatent, check_pages, get_format
from openmla.config import MLAConfig
from openmla.errors import ConfigError, ShapeError, UnsupportedError


@dataclass(frozen=True)
class PagedCache:
    """Blocks of rows, data [N, BS, W]. Pages may be strided: a view into a larger allocation.

    `kv_scale` is a device scalar, so that kernels read it without a host round trip.
    """

    data: Tensor  # [N, BS, W]
    format: str
    kv_scale: Tensor  # [] f32

    def __post_init__(self) -> None:
        if self.data.dim() != 3:
            raise ShapeError(f"cache: data must be [N, BS, W], got {tuple(self.data.shape)}.")
        check_pages("cache", self.data, self.format)
        if self.data.shape[2] > 1 and self.data.stride(2) != 1:
            raise ShapeError(
                f"cache: data must be contiguous along a row, got strides {self.data.stride()}."
            )
        if self.kv_scale.shape != () or self.kv_scale.dtype != torch.float32:
            raise ShapeError(
                "cache: kv_scale must be a float32 scalar tensor, "
                f"got {tuple(self.kv_scale.shape)} {self.kv_scale.dtype}."
            )
        if self.kv_scale.device != self.data.device:
            raise ShapeError(
                f"cache: kv_scale must be on {self.data.device}, got {self.kv_scale.device}."
            )

    @property
    def layout(self) -> CacheFormat:
        return get_format(self.format)

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        return self.data.shape[1]

    def grown(self, num_blocks: int) -> PagedCache:
        """A cache of more blocks with the same rows in the first ones."""
        data = self.data.new_empty((num_blocks, *self.data.shape[1:]))
        raw = data.view(torch.uint8)
        raw[: self.num_blocks] = self.data.view(torch.uint8)
        raw[self.num_blocks :] = 0
        return PagedCache(data, self.format, self.kv_scale)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Carry out the (source, target) copies that BlockPool.take asks for."""
        for source, target in pairs:
            if not (0 <= source < self.num_blocks and 0 <= target < self.num_blocks):
                raise ShapeError(
                    f"cache: block copies must stay within {self.num_blocks} blocks, "
                    f"got {(source, target)}."
                )
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            # bytes, because torch cannot index fp8 on every device
            data = self.data.view(torch.uint8)
            data[list(targets)] = data[list(sources)]


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps between steps; absent parts are None."""

    latent: PagedCache | None = None
    index: PagedCache | None = None
    window: PagedCache | None = None
    compressed: PagedCache | None = None
    state: PagedCache | None = None


def allocate_cache(
    config: MLAConfig,
    *,
    num_blocks: int,
    block_size: int,
    format: str = "bf16",
    kv_scale: float = 1.0,
    index_format: str = "index_fp8",
    layer: int = 0,
    device: torch.device | str = "cpu",
) -> LayerCache:
    """The cache of one layer: num_blocks * block_size rows, zeroed.

    A sparse model's layers also keep indexer keys, in `index_format`; a `layer` that shares the
    selection of an earlier one keeps none.
    """
    layout = get_format(format, "latent")
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"cache: {name} must be a positive integer, got {value!r}.")
    if not (math.isfinite(kv_scale) and kv_scale > 0):
        raise ConfigError(f"cache: kv_scale must be positive and finite, got {kv_scale!r}.")
    if kv_scale != 1 and not layout.scaled:
        raise ConfigError(f"cache: kv_scale must be 1 for format {format}, got {kv_scale!r}.")
    if config.compressor is not None:
        raise UnsupportedError(
            f"cache: {config.model_type} needs compressed caches, which this version does not have."
        )

    if isinstance(layout, PackedLatent) and config.kv_lora_rank % GROUP:
        raise ConfigError(
            f"cache: format {format} needs kv_lora_rank to be a multiple of {GROUP}, "
            f"got {config.kv_lora_rank}."
        )

    def pages(name: str, width: int, scale: float) -> PagedCache:
        kind = get_format(name)
        shape = (num_blocks, block_size, kind.width(width))
        data = torch.empty(shape, dtype=kind.dtype, device=device)
        data.view(torch.uint8).zero_()
        return PagedCache(data, name, torch.tensor(scale, dtype=torch.float32, device=device))

    indexer = config.indexer
    get_format(index_format, "index")
    latent = pages(format, config.latent_dim, kv_scale)
    if indexer is None or indexer.is_shared(layer):
        return LayerCache(latent=latent)
    return LayerCache(latent=latent, index=pages(index_format, indexer.head_dim, 1.0))
