"""Caches that are views of an engine's memory: a layer runs over them as over its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import PRESETS, LayerCache, MLAAttention, MLAConfig, PagedCache
from openmla.cache.format import ScalesBehind
from openmla.testing import poison
from tests.layers import serving, v4

NAMES = ("latent", "index", "window", "compressed", "state")
LENGTH = 80
STEPS = ([("a", 50), ("b", 9)], [("b", 30), ("a", 1)], [("a", 3), ("b", 1)])


def interleaved(part: PagedCache, device: str) -> tuple[Tensor, Tensor]:
    """The second of three layers in each block: [N, 3, BS, W]."""
    N, BS, W = part.data.shape
    whole = poison((N, 3, part.data.stride(0)), part.data.dtype, device)
    return whole, whole[:, 1, : BS * W].unflatten(1, (BS, W))


def padded(part: PagedCache, device: str) -> tuple[Tensor, Tensor]:
    """Blocks with something behind each."""
    N, BS, W = part.data.shape
    whole = poison((N, part.data.stride(0) + 64), part.data.dtype, device)
    return whole, whole[:, : BS * W].unflatten(1, (BS, W))


def by_rows(part: PagedCache, device: str) -> tuple[Tensor, Tensor]:
    """The second of three layers in each row, [N, BS, 3, W], where a format has whole rows."""
    if isinstance(part.layout, ScalesBehind):
        return interleaved(part, device)
    N, BS, W = part.data.shape
    whole = poison((N, BS, 3, W), part.data.dtype, device)
    return whole, whole[:, :, 1]


Way = Callable[[PagedCache, str], tuple[Tensor, Tensor]]
WAYS: list[Way] = [interleaved, padded, by_rows]


class Viewed:
    """A server whose cache is a view of other memory."""

    def __init__(self, server: Any, way: Way) -> None:
        self.server, self.wholes, changes = server, {}, {}
        for name in NAMES:
            part = getattr(server.cache, name)
            if part is not None:
                whole, data = way(part, server.device)
                data.view(torch.uint8).copy_(part.data.view(torch.uint8))
                self.wholes[name] = (whole, data, whole.view(torch.uint8).clone())
                changes[name] = PagedCache(data, part.format, part.kv_scale)
        server.cache = replace(server.cache, **changes)

    def others_untouched(self) -> bool:
        """Every byte that is not this layer's is as it was."""
        for whole, data, before in self.wholes.values():
            after = whole.view(torch.uint8).clone()
            offset = data.storage_offset() * data.element_size()
            strides = [stride * data.element_size() for stride in data.stride()[:2]]
            shape = (*data.shape[:2], data.shape[2] * data.element_size())
            for tensor in (after, before):
                tensor.as_strided(shape, (*strides, 1), offset).zero_()
            if not torch.equal(after, before):
                return False
        return True


def same(own: Any, view: Viewed, names: str, exact: bool) -> None:
    """The same outputs and the same rows; on a GPU kernels may differ by how rows are aligned."""
    for name in names:
        one, other = own.outputs[name], view.server.outputs[name]
        one, other = (torch.cat(o) if isinstance(o, list) else o for o in (one, other))
        assert one.isfinite().all()
        if exact:
            assert torch.equal(one, other)
        else:
            assert serving.relative_error(other, one) < 2e-3
    for name in NAMES:
        one, other = (getattr(server.cache, name) for server in (own, view.server))
        if one is not None and exact:
            assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
    assert view.others_untouched()


def sparse_config(config: MLAConfig) -> MLAConfig:
    assert config.indexer is not None
    return replace(config, indexer=replace(config.indexer, head_dim=128, topk=16))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("model", ["tiny-v3", "tiny-v3.2"])
def test_dense_and_sparse(model: str, format: str, form: str, way: Way, device: str) -> None:
    config = replace(PRESETS[model], kv_lora_rank=128)
    config = sparse_config(config) if config.indexer is not None else config
    torch.manual_seed(0)
    layer = MLAAttention(config)
    hidden = {name: serving.sequence(LENGTH, seed) for seed, name in enumerate("ab")}
    options: dict[str, Any] = {"format": format, "index_format": "index_fp8", "block_size": 8}
    own, other = (
        serving.Server(layer, hidden, **options, form=form, workspace_tokens=16, device=device)
        for _ in range(2)
    )
    raw = [part.data.view(torch.uint8) for part in own.cache.parts]
    for mine, part in zip(raw, other.cache.parts, strict=True):
        part.data.view(torch.uint8).copy_(mine)
    view = Viewed(other, way)
    for wanted in STEPS:
        own.step(wanted)
        other.step(wanted)
    same(own, view, "ab", exact=device == "cpu")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("format", ["fp32", "fp8_dsv4"])
def test_v4(format: str, ratio: int, way: Way, device: str) -> None:
    config = v4.tiny_config() if format == "fp32" else v4.real_config()
    layer = v4.make_layer(config, ratio)
    hidden = {name: v4.sequence(250, seed) for seed, name in enumerate("ab")}
    index = "index_fp32" if format == "fp32" else "index_fp8"
    own, other = (
        v4.Server(layer, hidden, format=format, index_format=index, device=device) for _ in range(2)
    )
    view = Viewed(other, way)
    for wanted in ([("a", 150), ("b", 9)], [("b", 30), ("a", 1)], [("a", 3), ("b", 1)]):
        own.step(wanted)
        other.step(wanted)
    same(own, view, "ab", exact=device == "cpu")


def test_copies_and_moves_stay_in_their_layer() -> None:
    whole = torch.randn(6, 3, 4, 8)
    before = whole.clone()
    part = PagedCache(whole[:, 1], "fp32", torch.tensor(1.0))
    cache = LayerCache(latent=part)
    cache.copy_blocks([(0, 5)])
    part.move_rows(torch.tensor([1]), torch.tensor([21]), 8)
    grown = cache.grown(9)
    assert torch.equal(whole[:, ::2], before[:, ::2])
    assert torch.equal(whole[5, 1, 0], before[0, 1, 0]) and torch.equal(
        whole[5, 1, 1], before[0, 1, 1]
    )
    assert grown.latent is not None and grown.latent.data.shape == (9, 4, 8)
    assert torch.equal(grown.latent.data[:6], whole[:, 1]) and not grown.latent.data[6:].any()
