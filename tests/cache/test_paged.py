"""PagedCache and allocate_cache: shapes, strided pages, block copies, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import (
    FORMATS,
    PRESETS,
    ConfigError,
    LayerCache,
    PagedCache,
    ShapeError,
    allocate_cache,
)
from openmla.testing import LATENT_FORMATS

ONE = torch.tensor(1.0)
PLAIN = ("fp32", "bf16", "fp16", "fp8")


@pytest.mark.parametrize("format", LATENT_FORMATS)
def test_allocate(format: str) -> None:
    cache = allocate_cache(PRESETS["deepseek-v3"], num_blocks=3, block_size=64, format=format)
    assert isinstance(cache, LayerCache) and cache.latent is not None
    assert (cache.index, cache.window, cache.compressed, cache.state) == (None,) * 4
    width = {"fp8_ds_mla": 656, "fp8_ds_mla_exact": 656, "fp8_dsv4": 512 + 128 + 8}
    assert cache.latent.data.shape == (3, 64, width.get(format, 576))
    assert cache.latent.data.dtype == FORMATS[format].dtype == cache.latent.layout.dtype
    assert (cache.latent.num_blocks, cache.latent.block_size) == (3, 64)
    assert not cache.latent.data.float().any()
    assert cache.latent.kv_scale.item() == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be a positive integer, got 0"),
        ({"block_size": 1.5}, "block_size must be a positive integer, got 1.5"),
        ({"format": "fp4"}, "format 'fp4' is not known"),
        ({"kv_scale": 0.0}, "kv_scale must be positive and finite, got 0.0"),
        ({"kv_scale": float("nan")}, "kv_scale must be positive and finite, got nan"),
        ({"kv_scale": 2.0}, "kv_scale must be 1 for format bf16, got 2.0"),
        ({"format": "index_bf16"}, "format 'index_bf16' is not known for latent rows"),
        ({"index_format": "bf16"}, "format 'bf16' is not known for index rows"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        allocate_cache(PRESETS["tiny-v3"], **{"num_blocks": 2, "block_size": 4, **changes})
    assert f"cache: {message}" in str(error.value)


def test_sparse_models_keep_indexer_keys() -> None:
    config = PRESETS["deepseek-v3.2"]
    cache = allocate_cache(config, num_blocks=3, block_size=64, format="fp8_ds_mla")
    assert cache.latent is not None and cache.latent.data.shape == (3, 64, 656)
    assert cache.index is not None and cache.index.data.shape == (3, 64, 132)
    exact = allocate_cache(config, num_blocks=3, block_size=64, index_format="index_fp32")
    assert exact.index is not None and exact.index.data.shape == (3, 64, 128)
    assert exact.index.data.dtype == torch.float32


def test_layers_that_share_a_selection_keep_no_keys() -> None:
    config = PRESETS["glm-5"]
    assert config.indexer is not None
    indexer = replace(config.indexer, shared=(False, True) * (config.num_layers // 2))
    config = replace(config, indexer=indexer)
    caches = [allocate_cache(config, num_blocks=2, block_size=4, layer=n) for n in range(3)]
    assert [cache.index is None for cache in caches] == [False, True, False]


@pytest.mark.parametrize("name", ["tiny-v3", "tiny-v3.2", "tiny-glm-5.2"])
def test_layers_are_counted_from_zero(name: str) -> None:
    for layer in (-1, 1.0, True, None):
        with pytest.raises(ConfigError, match="layer must be an integer of at least 0, got"):
            allocate_cache(PRESETS[name], num_blocks=2, block_size=4, layer=layer)  # type: ignore[arg-type]


def test_blocks_may_lie_among_others() -> None:
    """Layers side by side in a page, and rows of all blocks one after another."""
    for data in (torch.zeros(2, 5, 3, 4)[:, 1], torch.zeros(3, 2, 4).transpose(0, 1)):
        assert PagedCache(data, "fp32", ONE).num_blocks == 2
    one_row = torch.zeros(1).as_strided((1, 1, 1), (0, 0, 1))
    assert PagedCache(one_row, "fp32", ONE).num_blocks == 1


def test_packed_latents_need_whole_groups() -> None:
    """Or rope columns would be quantised with the latent."""
    config = replace(PRESETS["deepseek-v3"], kv_lora_rank=448)
    with pytest.raises(ConfigError, match="fp8_ds_mla needs kv_lora_rank to be a multiple of 128"):
        allocate_cache(config, num_blocks=2, block_size=4, format="fp8_ds_mla")


@pytest.mark.parametrize(
    ("data", "format", "scale", "message"),
    [
        (torch.zeros(2, 3), "fp32", ONE, r"data must be \[N, BS, W\], got \(2, 3\)"),
        (torch.zeros(2, 0, 4), "fp32", ONE, "blocks must have at least 1 row, got BS=0"),
        ([[[0.0]]], "fp32", ONE, "data must be a tensor, got list"),
        (torch.zeros(2, 3, 4), "fp32", 1.0, "kv_scale must be a tensor, got float"),
        (torch.zeros(2, 3, 4), "bf16", ONE, "cache must be torch.bfloat16 for format bf16"),
        (torch.zeros(2, 3, 8)[:, :, ::2], "fp32", ONE, "data must be contiguous along a row"),
        (torch.zeros(1, 3, 4).expand(2, 3, 4), "fp32", ONE, "blocks of data must not overlap"),
        (torch.zeros(2, 1, 4).expand(2, 3, 4), "fp32", ONE, "blocks of data must not overlap"),
        (torch.zeros(36).as_strided((2, 3, 4), (8, 4, 1)), "fp32", ONE, "blocks of data must not"),
        (torch.zeros(36).as_strided((2, 3, 4), (4, 4, 1)), "fp32", ONE, "blocks of data must not"),
        (torch.zeros(2, 3, 4), "fp32", ONE[None], "kv_scale must be a float32 scalar tensor"),
        (torch.zeros(2, 3, 4), "fp32", ONE.double(), "kv_scale must be a float32 scalar tensor"),
        (torch.zeros(2, 3, 4), "fp32", ONE.to("meta"), "kv_scale must be on cpu, got meta"),
    ],
)
def test_bad_parts(data: Any, format: str, scale: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=f"cache: {message}"):
        PagedCache(data, format, scale)


def test_reprs_say_format_blocks_and_bytes() -> None:
    cache = allocate_cache(PRESETS["deepseek-v3.2"], num_blocks=3, block_size=64, device="meta")
    assert repr(cache.latent) == (
        "PagedCache(bf16, 3 blocks of 64 rows, 576 wide, 216.0 KiB on meta)"
    )
    assert repr(cache) == (
        "LayerCache(latent: bf16, 3 blocks of 64 rows, 576 wide; index: index_fp8, 3 blocks of 64 "
        "rows, 132 wide; 240.8 KiB on meta)"
    )
    assert repr(LayerCache()) == "LayerCache(nothing; 0 B)"


@pytest.mark.parametrize("format", PLAIN)
def test_grown_keeps_the_rows(format: str) -> None:
    data = torch.randn(3, 2, 5).to(FORMATS[format].dtype)
    grown = PagedCache(data, format, ONE).grown(7)
    assert grown.data.shape == (7, 2, 5) and torch.equal(grown.data[:3].float(), data.float())
    assert not grown.data[3:].float().any() and grown.kv_scale is ONE


@pytest.mark.parametrize("format", PLAIN)
def test_copy_blocks_of_strided_pages(format: str) -> None:
    """Layers interleaved in one page-major allocation: copying one layer leaves the other."""
    both = torch.randn(6, 2, 4, 5).to(FORMATS[format].dtype)
    before = both.clone()
    layer = PagedCache(both[:, 1], format, ONE)
    layer.copy_blocks([(0, 5), (3, 1)])
    layer.copy_blocks([])
    assert torch.equal(both[:, 0].float(), before[:, 0].float())
    assert torch.equal(both[5, 1].float(), before[0, 1].float())
    assert torch.equal(both[1, 1].float(), before[3, 1].float())
    assert torch.equal(both[0, 1].float(), before[0, 1].float())
    with pytest.raises(ShapeError, match="cache: block copies must stay within 6 blocks"):
        layer.copy_blocks([(0, 2), (6, 0)])
    assert torch.equal(both[2, 1].float(), before[2, 1].float())
