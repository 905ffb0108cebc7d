"""PagedCache: one tensor of blocks and its format. LayerCache: everything that a layer caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openmla.cache.format import (
    FORMATS,
    GROUP,
    V4_GROUP,
    V4_ROPE,
    CacheFormat,
    PackedLatent,
    PackedV4,
    check_blocks_apart,
    check_pages,
    get_format,
)
from openmla.cache.geometry import Geometry, layer_parts
from openmla.cache.scales import LayerScales, check_scale
from openmla.config import MLAConfig, check_layer_number
from openmla.errors import ConfigError, ShapeError


def shown_bytes(num_bytes: float) -> str:
    """Format a size for people."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


@dataclass(frozen=True)
class PagedCache:
    """A tensor of cache blocks and its format. Make one over memory that your engine allocated.

    Attributes:
        data: [N, BS, W] blocks of rows. Blocks may be strided, as in a view of larger memory.
        format: a key of openmla.FORMATS.
        kv_scale: [] float32 on the device of data, so that kernels read it without a host round
            trip. 1 for formats that are not scaled.
        rope_ratio: [] float32, a power of two that k_pe is divided by before it is stored; a step
            multiplies q_pe by it. None for 1.
        clamped: [] int64 counter of values that the scales clipped. None for no counting.
        q_scale: [] float32, the scale of queries for query_dtype="fp8_static". None if it was not
            calibrated.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3"]
    memory = torch.zeros(8, 2, 16, config.latent_dim, dtype=torch.bfloat16)  # blocks of 2 layers
    latent = openmla.PagedCache(memory[:, 0], "bf16", torch.ones(()))
    cache = openmla.LayerCache(latent=latent)
    print(cache)
    ```
    """

    data: Tensor  # [N, BS, W]
    format: str
    kv_scale: Tensor  # [] f32
    rope_ratio: Tensor | None = None  # [] f32; None: 1
    clamped: Tensor | None = None  # [] i64; None: not counted
    q_scale: Tensor | None = None  # [] f32; None: not calibrated

    def __post_init__(self) -> None:
        for name in ("data", "kv_scale"):
            given = getattr(self, name)
            if not isinstance(given, Tensor):
                raise ShapeError(f"cache: {name} must be a tensor, got {type(given).__name__}.")
        if self.data.dim() != 3:
            raise ShapeError(f"cache: data must be [N, BS, W], got {tuple(self.data.shape)}.")
        check_pages("cache", self.data, self.format)
        check_blocks_apart("cache", "data", self.data)
        if self.data.shape[2] > 1 and self.data.stride(2) != 1:
            raise ShapeError(
                f"cache: data must be contiguous along a row, got strides {self.data.stride()}."
            )
        if self.kv_scale.shape != () or self.kv_scale.dtype != torch.float32:
            raise ShapeError(
                "cache: kv_scale must be a float32 scalar tensor, "
                f"got {tuple(self.kv_scale.shape)} {self.kv_scale.dtype}."
            )
        kinds = {"rope_ratio": torch.float32, "clamped": torch.int64, "q_scale": torch.float32}
        for name, dtype in kinds.items():
            given, device = getattr(self, name), self.data.device
            if given is None:
                continue
            if not isinstance(given, Tensor):
                raise ShapeError(f"cache: {name} must be a tensor, got {type(given).__name__}.")
            if given.shape != () or given.dtype != dtype or given.device != device:
                raise ShapeError(
                    f"cache: {name} must be a scalar tensor of {dtype} on {device}, "
                    f"got {tuple(given.shape)} {given.dtype} on {given.device}."
                )
        if self.rope_ratio is not None and not self.layout.scaled:
            raise ConfigError(
                f"cache: rope_ratio must be None for format {self.format}, which has no kv_scale."
            )
        if self.kv_scale.device != self.data.device:
            raise ShapeError(
                f"cache: kv_scale must be on {self.data.device}, got {self.kv_scale.device}."
            )

    def __repr__(self) -> str:
        return f"PagedCache({self._blocks()}, {shown_bytes(self.num_bytes)} on {self.data.device})"

    def _blocks(self) -> str:
        N, BS, W = self.data.shape
        return f"{self.format}, {N} blocks of {BS} rows, {W} wide"

    @property
    def layout(self) -> CacheFormat:
        """The CacheFormat of `format`."""
        return get_format(self.format)

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        return self.data.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, including padding between them."""
        return self.num_blocks * self.data.stride(0) * self.data.element_size()

    def check_width(self, where: str, name: str, D: int) -> None:
        """Raise unless rows have the width of D values."""
        W = self.layout.width(D)
        if self.data.shape[2] != W:
            raise ConfigError(
                f"{where}: {name} rows must be W={W} wide for {D} values in {self.format}, "
                f"got {self.data.shape[2]}. Allocate the cache with the config of the plan."
            )

    def check_q_scale(self, where: str) -> None:
        """Raise unless the cache has a scale for queries."""
        if self.q_scale is None:
            raise ConfigError(
                f"{where}: query_dtype 'fp8_static' needs a q_scale, and the cache has none. "
                "Call allocate_cache(kv_scale=calibrate(...)), or plan with query_dtype='fp8'."
            )

    def grown(self, num_blocks: int) -> PagedCache:
        """Return a copy with more blocks, at the same stride; the first ones hold the old rows."""
        _, BS, W = self.data.shape
        data = _pages(num_blocks, BS, W, self.data.stride(0), self.data.dtype, self.data.device)
        data.view(torch.uint8)[: self.num_blocks] = self.data.view(torch.uint8)
        return replace(self, data=data)

    def page_bytes(self, D: int) -> int:
        """Return the allocated bytes of a block of rows of D values, including padding."""
        return self.layout.page_width(D, self.block_size) * self.data.element_size()

    def over(self, pages: Tensor) -> PagedCache:
        """Return a cache of this format over other memory, [n, page_bytes] uint8."""
        _, BS, W = self.data.shape
        data = pages.view(self.data.dtype)[:, : BS * W].unflatten(1, (BS, W))
        return replace(self, data=data)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, as (source, target) pairs that BlockPool.take() returned."""
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

    def move_rows(self, sources: Tensor, targets: Tensor, D: int) -> None:
        """Copy the bytes of rows of D values from slots to slots, [n] int64 on any device."""
        device = self.data.device
        self.layout.move(self.data, sources.to(device), targets.to(device), D)


@dataclass(frozen=True)
class LayerCache:
    """Everything that one layer caches. Parts that a layer does not have are None.

    Attributes:
        latent: latent rows, of all models but DeepSeek V4.
        index: indexer keys, of sparse layers with an indexer of their own.
        window: DeepSeek V4: the buffer of recent rows.
        compressed: DeepSeek V4: entries, one per `ratio` tokens, if `ratio` is not 0.
        state: DeepSeek V4: compressor states, one block per request. With an `index`, the columns
            of the indexer's compressor follow.
        ratio: DeepSeek V4: the layer's compress ratio, 0, 4 or 128.
        geometry: DeepSeek V4: the sizes that all layers of the model have in common.
    """

    latent: PagedCache | None = None
    index: PagedCache | None = None
    window: PagedCache | None = None
    compressed: PagedCache | None = None
    state: PagedCache | None = None
    ratio: int = 0
    geometry: Geometry | None = None

    def __repr__(self) -> str:
        names = ("latent", "index", "window", "compressed", "state")
        held = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        parts = [f"{name}: {part._blocks()}" for name, part in held.items()] or ["nothing"]
        if self.window is not None:
            parts.insert(0, f"ratio {self.ratio}")
        where = f" on {self.parts[0].data.device}" if held else ""
        return f"LayerCache({'; '.join(parts)}; {shown_bytes(self.num_bytes)}{where})"

    @property
    def parts(self) -> tuple[PagedCache, ...]:
        """The parts that are not None."""
        all_parts = (self.latent, self.index, self.window, self.compressed, self.state)
        return tuple(part for part in all_parts if part is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def copy_blocks(
        self,
        pairs: Sequence[tuple[int, int]],
        window: Sequence[tuple[int, int]] = (),
        states: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Copy blocks, as BlockPool.take() returned them, or CompressedPool.take() unpacked."""
        for part, wanted in (
            (self.latent, pairs),
            (self.index, pairs),
            (self.compressed, pairs),
            (self.window, window),
            (self.state, states),
        ):
            if part is not None:
                part.copy_blocks(wanted)

    def reading(self, source: LayerCache) -> LayerCache:
        """Return this cache with the latent rows of another layer, for a layer without its own."""
        return replace(self, latent=source.latent)

    def grown(self, num_blocks: int, window_blocks: int = 0, num_states: int = 0) -> LayerCache:
        """Return a copy whose parts have at least these numbers of blocks, with the same rows."""
        wanted = {
            "latent": num_blocks,
            "index": num_blocks,
            "compressed": num_blocks,
            "window": window_blocks,
            "state": num_states,
        }
        larger: dict[str, Any] = {}
        for name, count in wanted.items():
            part = getattr(self, name)
            if part is not None and part.num_blocks < count:
                larger[name] = part.grown(count)
        if not larger:
            return self
        if self.geometry is not None:
            larger["geometry"] = self.geometry.grown(num_blocks, window_blocks, num_states)
        return replace(self, **larger)


def latent_formats(config: MLAConfig) -> tuple[str, ...]:
    """Return the names of the formats that suit a model's rows."""

    def fits(layout: CacheFormat, kind: MLAConfig) -> bool:
        C, D, R = kind.kv_lora_rank, kind.latent_dim, kind.qk_rope_head_dim
        v4 = kind.compressor is not None
        if isinstance(layout, PackedV4):
            return v4 and D > V4_ROPE >= R and D % V4_GROUP == 0
        if isinstance(layout, PackedLatent):
            return not v4 and C % GROUP == 0 and R < GROUP
        return layout.holds == "latent"

    kinds = config.every_kind
    return tuple(n for n, layout in FORMATS.items() if all(fits(layout, kind) for kind in kinds))


def check_formats(config: MLAConfig, format: str, index_format: str) -> None:
    """Raise unless the formats can hold a model's rows and, if it is sparse, its indexer keys."""
    layout = get_format(format, "latent")
    index_layout = get_format(index_format, "index")
    if isinstance(layout, PackedLatent):
        if config.compressor is not None:
            raise ConfigError(
                f"cache: format {format} would quantize the rotated columns of "
                f"{config.model_type}. Use format='fp8_dsv4'."
            )
        if config.kv_lora_rank % GROUP:
            raise ConfigError(
                f"cache: format {format} needs kv_lora_rank to be a multiple of {GROUP}, "
                f"got {config.kv_lora_rank}."
            )
    layout.width(config.latent_dim)  # raises if the width does not fit
    if config.indexer is not None:
        index_layout.width(config.indexer.head_dim)


def allocate_cache(
    config: MLAConfig,
    *,
    num_blocks: int,
    block_size: int,
    format: str = "bf16",
    kv_scale: float | LayerScales = 1.0,
    index_format: str = "index_fp8",
    layer: int = 0,
    max_requests: int | None = None,
    max_tokens: int | None = None,
    window_block_size: int = 64,
    rollback: int = 8,
    device: torch.device | str = "cpu",
) -> LayerCache:
    """Allocate the cache of one layer: num_blocks * block_size rows, zeroed.

    Args:
        config: the model's dimensions.
        num_blocks: blocks of the cache. For DeepSeek V4, blocks of entries and indexer keys.
        block_size: tokens per block. For DeepSeek V4 a multiple of 128.
        format: format of latent rows, a key of openmla.FORMATS. It must hold "latent" rows.
        kv_scale: scale(s) of format "fp8", which values are divided by. A float, or the LayerScales
            of calibrate(), which scale k_pe apart from the latent.
        index_format: format of the indexer keys of a sparse model.
        layer: number of the layer. It decides the width of rows if layers are of several kinds.
            Sparse layers that share the selection of an earlier layer keep no indexer keys.
            Layers that read the rows of an earlier layer keep none: see LayerCache.reading().
            DeepSeek V4's layers keep the caches of their compress ratio.
        max_requests: DeepSeek V4 only: requests at a time. Sizes the buffer of recent rows, whose
            blocks are recycled, and the compressor states, one per request.
        max_tokens: DeepSeek V4 only: tokens in a step.
        window_block_size: DeepSeek V4 only: rows per block of the buffer of recent rows.
        rollback: DeepSeek V4 only: how many of its last tokens a request can take back.
        device: where to allocate.

    Returns:
        A LayerCache. Parts that the layer does not need are None.

    Raises:
        ConfigError: a size is not positive, or the format does not suit the model.

    ```python
    import openmla

    config = openmla.PRESETS["tiny-v3.2"]
    cache = openmla.allocate_cache(config, num_blocks=8, block_size=64, format="fp8", kv_scale=0.5)
    assert cache.latent.data.shape == (8, 64, config.latent_dim)
    print(cache)  # formats, shapes and bytes of its parts
    ```
    """
    layout = get_format(format, "latent")
    check_layer_number(layer)
    config = config.layer(layer)
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"cache: {name} must be a positive integer, got {value!r}.")
    scales = _checked_scales(kv_scale, layout)
    check_formats(config, format, index_format)
    if config.compressor is not None:
        geometry = Geometry.for_model(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            max_requests=max_requests,
            max_tokens=max_tokens,
            window_block_size=window_block_size,
            rollback=rollback,
            format=format,
            index_format=index_format,
        )
        ratio = config.compressor.ratio(layer)
        return _allocate_compressed(config, geometry, ratio, scales, torch.device(device))

    def pages(name: str, D: int, scales: LayerScales) -> PagedCache:
        return _new_cache(name, num_blocks, block_size, D, scales, torch.device(device))

    indexer, latent, index = config.indexer, None, None
    if config.kv_source(layer) == layer:
        latent = pages(format, config.latent_dim, scales)
    if indexer is not None and not indexer.is_shared(layer):
        index = pages(index_format, indexer.head_dim, UNSCALED)
    return LayerCache(latent=latent, index=index)


UNSCALED = LayerScales(1.0, 1.0)


def _checked_scales(kv_scale: float | LayerScales, layout: CacheFormat) -> LayerScales:
    if isinstance(kv_scale, str) and kv_scale == "first":
        raise ConfigError(
            "cache: kv_scale 'first' is supported by attach() only. Call calibrate(layer, batches) "
            "to measure the scales of a layer."
        )
    if not isinstance(kv_scale, LayerScales):
        scale = check_scale("cache", "kv_scale", kv_scale)
        kv_scale = LayerScales(scale, scale)
    if not layout.scaled and (kv_scale.k, kv_scale.v, kv_scale.rope_ratio) != (1.0, 1.0, 1.0):
        raise ConfigError(
            f"cache: kv_scale must be 1 for format {layout.name}, got {kv_scale.row!r}. Only "
            "format 'fp8' has a kv_scale."
        )
    return kv_scale


def _allocate_compressed(
    config: MLAConfig, geometry: Geometry, ratio: int, scales: LayerScales, device: torch.device
) -> LayerCache:
    made = {}
    for part in layer_parts(config, geometry, ratio):
        # Rows are keys and values at once, so rotated columns share the scale of the row.
        mine = (
            LayerScales(scales.k, scales.k) if part.name in ("window", "compressed") else UNSCALED
        )
        made[part.name] = _new_cache(part.format, part.blocks, part.rows, part.width, mine, device)
    return LayerCache(**made, ratio=ratio, geometry=geometry)


def _new_cache(
    format: str, num_blocks: int, block_size: int, D: int, scales: LayerScales, device: torch.device
) -> PagedCache:
    layout = get_format(format)
    width, page = layout.width(D), layout.page_width(D, block_size)
    data = _pages(num_blocks, block_size, width, page, layout.dtype, device)
    ratio, clamped, query = None, None, None
    if layout.scaled:
        clamped = torch.zeros((), dtype=torch.int64, device=device)
        if scales.rope_ratio != 1:
            ratio = torch.tensor(scales.rope_ratio, dtype=torch.float32, device=device)
    if scales.query is not None:
        query = torch.tensor(scales.query, dtype=torch.float32, device=device)
    scale = torch.tensor(scales.row, dtype=torch.float32, device=device)
    return PagedCache(data, format, scale, ratio, clamped, query)


def _pages(N: int, BS: int, W: int, page: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate [N, BS, W] zeros with a stride of `page` elements between blocks."""
    flat = torch.empty((N, page), dtype=dtype, device=device)
    flat.view(torch.uint8).zero_()
    return flat[:, : BS * W].unflatten(1, (BS, W))
