"""Scales of a layer's fp8 cache: k_pe apart from the latent in every form, and where they are from.

The yardstick is exact: a layer whose latents are 4096 times as large, with kv_b_proj over 4096,
computes the same. With the latent's scale times 4096 its cache must hold the same bytes, and its
outputs the same bits, for k_pe's part of the row does not move.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    Batch,
    ConfigError,
    LayerScales,
    MLAAttention,
    Projected,
    ShapeError,
    allocate_cache,
    attend_latent,
    attend_partial,
    calibrate,
    make_plan,
)
from tests.layers.families import make_peer
from tests.layers.serving import Server, relative_error, sequence

LATENT, ROPE = 0.02, 0.05
STEPS: list[list[tuple[str, int]]] = [
    [("a", 30)],  # one prompt
    [("b", 50), ("a", 1)],
    [("b", 3), ("a", 20)],  # context in chunks, beside new rows
    [("b", 1), ("a", 1)],
]


def scaled_layer(layer: MLAAttention, factor: float) -> MLAAttention:
    """Latents times `factor`, and nothing else."""
    twin = deepcopy(layer)
    assert twin.kv_a_layernorm is not None
    twin.kv_a_layernorm.weight.mul_(factor)
    twin.kv_b_proj.weight.mul_(1 / factor)  # type: ignore[operator]
    return twin


def serve(layer: MLAAttention, scales: LayerScales, **options: Any) -> tuple[Tensor, Server]:
    hidden = {"a": sequence(60, seed=1), "b": sequence(60, seed=2)}
    server = Server(layer, hidden, format="fp8", kv_scale=scales, **options)
    for step in STEPS:
        server.step(step)
    outs = [torch.cat(server.outputs[name]) for name in ("a", "b")]
    return torch.cat(outs), server


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3", "kimi_linear", "deepseek_v32"])
@pytest.mark.parametrize("factor", [2.0**12, 2.0**-12])
@pytest.mark.parametrize("options", [{"form": "absorbed"}, {"form": "expanded"}, {}], ids=str)
def test_latents_of_any_size(
    family: str, factor: float, options: dict[str, Any], device: str
) -> None:
    """Prefill in one piece and in chunks, decode, dense, chosen and masked."""
    layer = make_peer(family).ours
    options = {**options, "device": device}
    if family != "deepseek_v32":
        options["workspace_tokens"] = 8
    expected, server = serve(layer, LayerScales(ROPE, LATENT, k_pe=ROPE), **options)
    scales = LayerScales(LATENT * factor, LATENT * factor, k_pe=ROPE)
    ours, other = serve(scaled_layer(layer, factor), scales, **options)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0 if device == "cpu" else 1e-5)
    assert server.cache.latent is not None and other.cache.latent is not None
    stored = [each.cache.latent.data.view(torch.uint8) for each in (server, other)]  # type: ignore[union-attr]
    assert torch.equal(*stored)
    seen = {name: server.pool.seq_len(name) for name in ("a", "b")}
    exact = [make_peer(family).full(server.sequences[name].cpu())[:n] for name, n in seen.items()]
    assert relative_error(ours.cpu(), torch.cat(exact)) < 0.06
    assert not int(other.cache.latent.clamped)  # type: ignore[arg-type]


def test_one_scale_for_such_a_row_is_worse(device: str) -> None:
    """What the ratio is for: under the latent's scale k_pe is cut off or vanishes."""
    layer = make_peer("deepseek_v3").ours
    exact, _ = serve(layer, LayerScales(ROPE, LATENT, k_pe=ROPE), device=device)
    for factor in (2.0**18, 2.0**-12):
        scales = LayerScales(LATENT * factor, LATENT)
        ours, server = serve(scaled_layer(layer, factor), scales, device=device)
        assert relative_error(ours, exact) > 0.1
        assert server.cache.latent is not None and server.cache.latent.clamped is not None
        assert (int(server.cache.latent.clamped) > 0) == (factor < 1)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_entry_points_of_engines(form: str) -> None:
    """attend_partial over rows written by others, attend_latent from queries of others."""
    layer = make_peer("deepseek_v3").ours
    scales = LayerScales(ROPE, LATENT, k_pe=ROPE)
    server = Server(layer, {"a": sequence(60)}, format="fp8", kv_scale=scales)
    server.step([("a", 20)])
    batch = server.batch([("a", 4)])
    plan = make_plan(batch, layer.config, server.cache, dtype=torch.float32, form=form)
    hidden, positions = sequence(60)[20:24], torch.arange(20, 24)
    projected, raw, _ = layer.project(hidden, positions, plan)
    given = Projected(*projected)
    out, lse = attend_partial(given, layer.absorbed, server.cache, plan, raw=raw)
    finished = Projected(*(part.clone() for part in given))
    again, lse_again = attend_partial(finished, layer.absorbed, server.cache, plan, write=False)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(lse_again, lse)
    for part, before in zip(given, finished, strict=True):
        assert torch.equal(part, before)  # a caller's rows and queries keep their units
    if form == "absorbed":
        w_uk, w_uv = layer.absorbed.w_uk, layer.absorbed.w_uv
        q_latent = torch.cat([torch.einsum("thp,hpc->thc", given.q_nope, w_uk), given.q_pe], -1)
        before = q_latent.clone()
        latent, lse_latent = attend_latent(q_latent, server.cache, plan)
        torch.testing.assert_close(torch.einsum("thc,hcv->thv", latent, w_uv), out)
        torch.testing.assert_close(lse_latent, lse)
        assert torch.equal(q_latent, before)


def test_compiled() -> None:
    layer = make_peer("deepseek_v3").ours
    scales = LayerScales(ROPE, LATENT, k_pe=ROPE)
    servers = [Server(layer, {"a": sequence(60)}, format="fp8", kv_scale=scales) for _ in range(2)]
    runs: tuple[Any, ...] = (layer, torch.compile(layer, backend="aot_eager"))
    outs = []
    for server, run in zip(servers, runs, strict=True):
        for start, stop in ((0, 20), (20, 21)):
            plan = make_plan(
                server.batch([("a", stop - start)]), layer.config, server.cache, dtype=torch.float32
            )
            positions = torch.arange(start, stop)
            outs.append(run(sequence(60)[start:stop], positions, server.cache, plan))
    torch._dynamo.reset()  # it would take this layer's sizes for those of others
    torch.testing.assert_close(outs[2:], outs[:2])


def test_grown_caches_keep_their_scales() -> None:
    config = make_peer("deepseek_v3").ours.config
    scales = LayerScales(ROPE, LATENT, k_pe=ROPE)
    cache = allocate_cache(config, num_blocks=2, block_size=4, format="fp8", kv_scale=scales)
    grown = cache.grown(5).latent
    assert cache.latent is not None and grown is not None
    for name in ("kv_scale", "rope_ratio", "clamped", "q_scale"):
        assert getattr(grown, name) is getattr(cache.latent, name)
    assert float(grown.kv_scale) == pytest.approx(LATENT) and float(grown.rope_ratio) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("k_pe", "ratio"), [(1.0, 1.0), (1.1, 2.0), (2.0, 2.0), (0.5, 0.5), (0.51, 1.0), (1e-9, 2**-29)]
)
def test_ratio_is_the_least_power_of_two_that_holds_k_pe(k_pe: float, ratio: float) -> None:
    assert LayerScales(k_pe, 1.0, k_pe=k_pe).rope_ratio == ratio


@pytest.mark.parametrize(
    ("scales", "query"),
    [
        ({}, None),
        ({"q": 2.0}, 2.0),
        ({"q": 2.0, "k_pe": 4.0}, 8.0),  # q_pe may be as large as the whole query
        ({"q": 2.0, "k_pe": 0.25}, 2.0),
        ({"q": 2.0, "k_pe": 4.0, "q_nope": 2.0, "q_pe": 0.5}, 2.0),
        ({"q": 2.0, "k_pe": 4.0, "q_nope": 2.0, "q_pe": 1.0}, 4.0),
        ({"q": 2.0, "k_pe": 0.25, "q_nope": 0.125, "q_pe": 2.0}, 0.5),
    ],
)
def test_scale_of_queries_holds_q_pe_times_the_ratio(
    scales: dict[str, float], query: float | None
) -> None:
    found = LayerScales(1.0, 1.0, **scales)
    assert found.query == query and LayerScales.of(found.by_kind()) == found
    config = make_peer("deepseek_v3").ours.config
    made = allocate_cache(config, num_blocks=2, block_size=4, format="fp8", kv_scale=found).latent
    assert made is not None
    assert (None if made.q_scale is None else float(made.q_scale)) == query


def test_one_of_k_and_v_stands_for_the_other() -> None:
    assert LayerScales.of({"k": 2.0}) == LayerScales(2.0, 2.0)
    assert LayerScales.of({"v": 2.0, "q": 3.0}) == LayerScales(2.0, 2.0, 3.0)
    assert LayerScales.of({"kv": 2.0, "k_pe": 4.0}) == LayerScales(2.0, 2.0, k_pe=4.0)
    assert LayerScales.of({"k": 2.0, "v": 1.0}) == LayerScales(2.0, 1.0)
    assert LayerScales.of({"q": 2.0}) is LayerScales.of({}) is None


@pytest.mark.parametrize("between", ["", "attn.", "mla_attn.", "attn.mla_attn.", "k_proj."])
def test_a_layer_takes_a_checkpoints_scales(between: str) -> None:
    layer = make_peer("deepseek_v3").ours
    state = {**layer.state_dict(), f"{between}k_scale": torch.tensor([0.5])}
    given = set(state)
    layer.load_state_dict(state)  # strictly
    assert layer.scales == LayerScales(0.5, 0.5) and set(state) == given
    outer = torch.nn.ModuleDict({"self_attn": layer})
    prefixed = {f"self_attn.{name}": value for name, value in layer.state_dict().items()}
    outer.load_state_dict({**prefixed, "self_attn.v_scale": torch.tensor(0.25)})
    assert layer.scales == LayerScales(0.25, 0.25)
    with pytest.raises(RuntimeError, match=r"indexer\.k_scale"):
        layer.load_state_dict({**layer.state_dict(), "indexer.k_scale": torch.ones(())})


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf, 1e-60, 1e60, True, "1"])
def test_bad_scales(value: Any) -> None:
    config = make_peer("deepseek_v3").ours.config
    message = r"_scale must be (positive and finite|a number), got"
    for name in ("k", "v", "q", "k_pe"):
        with pytest.raises(ConfigError, match=f"{name}{message}"):
            LayerScales(**{"k": 1.0, "v": 1.0, name: value})
    with pytest.raises(ConfigError, match=f"kv{message}"):
        allocate_cache(config, num_blocks=2, block_size=4, format="fp8", kv_scale=value)


def test_scales_of_another_shape() -> None:
    layer = make_peer("deepseek_v3").ours
    before = layer.kv_b_proj.weight.clone()  # type: ignore[operator]
    state = {name: value + 1 for name, value in layer.state_dict().items()}
    with pytest.raises(ConfigError, match=r"k_scale must be one number for the whole tensor, got"):
        layer.load_state_dict({**state, "k_scale": torch.ones(4)})
    assert torch.equal(layer.kv_b_proj.weight, before) and layer.scales is None  # type: ignore[arg-type]


def test_formats_with_scales_of_their_own() -> None:
    layer = make_peer("deepseek_v3").ours
    config = replace(layer.config, kv_lora_rank=128)
    for format in ("bf16", "fp8_ds_mla"):
        for given in (0.5, LayerScales(0.5, 0.5), LayerScales(1.0, 1.0, k_pe=4.0)):
            with pytest.raises(ConfigError, match=f"kv_scale must be 1 for format {format}"):
                allocate_cache(config, num_blocks=2, block_size=4, format=format, kv_scale=given)
        cache = allocate_cache(config, num_blocks=2, block_size=4, format=format).latent
        assert cache is not None and cache.clamped is None
        with pytest.raises(ConfigError, match=f"rope_ratio must be None for format {format}"):
            replace(cache, rope_ratio=torch.tensor(2.0))
    cache = allocate_cache(config, num_blocks=2, block_size=4, format="fp8").latent
    assert cache is not None
    with pytest.raises(ShapeError, match=r"rope_ratio must be a scalar tensor of torch\.float32"):
        replace(cache, rope_ratio=torch.ones(2))
    with pytest.raises(ShapeError, match=r"clamped must be a scalar tensor of torch\.int64"):
        replace(cache, clamped=torch.tensor(0.0))
    with pytest.raises(
        ShapeError, match=r"rope_ratio must be a scalar tensor .* on cpu, got .* meta"
    ):
        replace(cache, rope_ratio=torch.ones((), device="meta"))
    with pytest.raises(ShapeError, match="rope_ratio must be a tensor, got float"):
        replace(cache, rope_ratio=2.0)  # type: ignore[arg-type]


def calibration(layer: MLAAttention, hidden: Tensor, padding: int = 0) -> tuple[Any, ...]:
    """A prompt as the layer's forward takes it."""
    T = len(hidden)
    cache = allocate_cache(layer.config, num_blocks=30, block_size=4, format="fp32")
    slots = torch.cat([torch.arange(T), torch.full((padding,), -1)])
    batch = Batch([T], [T], torch.arange(30, dtype=torch.int32)[None], slots, padding=padding)
    plan = make_plan(batch, layer.config, cache, dtype=torch.float32)
    hidden = torch.cat([hidden, hidden.new_full((padding, hidden.shape[1]), torch.nan)])
    return hidden, torch.arange(T + padding), cache, plan


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear", "deepseek_v32"])
def test_calibrate(family: str) -> None:
    """The largest of what the cache would hold and of the absorbed query, over all batches."""
    layer, hidden = make_peer(family).ours, sequence(40)
    batches = [calibration(layer, 3 * hidden[:10], padding=3), calibration(layer, hidden)]
    found = calibrate(layer, batches, headroom=1.5)
    assert isinstance(found, LayerScales)
    largest = dict.fromkeys(("q", "latent", "k_pe"), 0.0)
    C = layer.config.kv_lora_rank
    for (given, positions, cache, plan), n in zip(batches, (10, 40), strict=True):
        assert not cache.latent.data.any()  # nothing was written
        layer(given, positions, cache, plan)
        rows = cache.latent.data.flatten(0, 1)[:n]
        absorbed_query(layer, given[:n], positions[:n], largest)
        largest["latent"] = max(largest["latent"], float(rows[:, :C].abs().max()))
        largest["k_pe"] = max(largest["k_pe"], float(rows[:, C:].abs().max()))
    scale = {name: 2.0 ** math.ceil(math.log2(v * 1.5 / 448)) for name, v in largest.items()}
    assert (found.v, found.k_pe, found.q) == (scale["latent"], scale["k_pe"], scale["q"])
    assert found.q == max(found.q_nope, found.q_pe)  # type: ignore[type-var]
    assert found.k == max(found.v, scale["k_pe"])


def absorbed_query(
    layer: MLAAttention, hidden: Tensor, positions: Tensor, largest: dict[str, float]
) -> None:
    """Rotated by hand, in complex numbers."""
    config = layer.config
    P, T = config.qk_nope_head_dim, len(hidden)
    q = hidden
    q = layer.q_proj(q) if config.q_lora_rank is None else layer.q_b_proj(
        layer.q_a_layernorm(layer.q_a_proj(q))
    )  # fmt: skip
    q = q.view(T, config.num_heads, -1)
    q_pe = q[..., P:]
    if layer.rope_table is not None:
        cos, sin = layer.rope_table.table[positions].chunk(2, -1)
        pairs = q_pe.unflatten(-1, (-1, 2))
        turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
        q_pe = torch.view_as_real(turned)
    into = torch.einsum("thp,hpc->thc", q[..., :P], layer.absorbed.w_uk)
    largest["q"] = max(largest["q"], float(q_pe.abs().max()), float(into.abs().max()))


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "batches must contain at least 1 token, got 0"),
        ([sequence(3)], {}, r"a layer's batch must be the arguments of its forward\(\)"),
        ([(1, 2, 3, 4)], {}, "cache must be of type LayerCache, got int"),
        ([], {"headroom": 0.5}, "headroom must be at least 1, got 0.5"),
        ([], {"headroom": torch.nan}, "headroom must be at least 1, got nan"),
        ([], {"headroom": "2"}, "headroom must be a number, got '2'"),
    ],
)
def test_calibrate_refuses(batches: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"calibrate: {message}"):
        calibrate(make_peer("deepseek_v3").ours, batches, **options)


def test_calibrate_refuses_what_is_not_finite() -> None:
    layer = make_peer("deepseek_v3").ours
    hidden = sequence(4)
    hidden[2] = torch.nan
    with pytest.raises(ConfigError, match="calibrate: latent must be finite, got nan"):
        calibrate(layer, [calibration(layer, hidden)])
