"""Mistral Large 4's layers against their definition in float64: RoPE or none, shared latents."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    PRESETS,
    Batch,
    BlockPool,
    ConfigError,
    LayerCache,
    MLAAttention,
    MLAConfig,
    RopeTable,
    allocate_cache,
    make_plan,
)
from openmla.attention import Selection, carry_selection
from openmla.testing import poison
from tests.config.checkpoints import MISTRAL_LARGE4_TINY
from tests.layers.serving import relative_error

H, HI, DI, C, P, R, V, HIDDEN, K = 4, 16, 16, 32, 8, 8, 24, 64, 16
FIELDS = MISTRAL_LARGE4_TINY
YARN: dict[str, Any] = FIELDS["rope_parameters"]
SHARED = {**FIELDS, "kv_source_layers": [0, 1, 0, 1, 0, 1]}
LATENTS_AND_CHOICES = {
    **SHARED, "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
}  # fmt: skip
MODELS = {"own": FIELDS, "shared": SHARED, "shared-choices": LATENTS_AND_CHOICES}


def make_layers(fields: dict[str, Any], seed: int = 0) -> tuple[list[MLAAttention], Tensor]:
    """All layers with random weights, learned scales and frequencies that are not neutral."""
    torch.manual_seed(seed)
    config, alpha = MLAConfig.from_hf(fields), 0.3 * torch.randn(R // 2)
    table = RopeTable(config.layer(0).rope, R, config.max_positions, alpha=alpha)
    layers = [MLAAttention(config, layer=n, rope_table=table) for n in range(config.num_layers)]
    for layer in layers:
        for name, parameter in layer.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif "softmax_scaling" in name:
                parameter.copy_(noise.abs() * 0.3 + (1 if name.endswith("bias") else 0))
            else:
                parameter.add_(0.2 * noise)
    return layers, alpha


def turned(x: Tensor, alpha: Tensor) -> Tensor:
    """Rotate pairs of columns [S, heads, R] by YaRN's angles times exp(alpha)."""
    pairs = torch.arange(R // 2, dtype=torch.float64)
    base = YARN["rope_theta"] ** (-2 * pairs / R)
    original = YARN["original_max_position_embeddings"]
    ends = [
        R * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(YARN["rope_theta"]))
        for turns in (YARN["beta_fast"], YARN["beta_slow"])
    ]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), R - 1)
    slow = ((pairs - low) / (high - low)).clamp(0, 1)
    frequencies = base * (slow / YARN["factor"] + 1 - slow) * alpha.double().exp()
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequencies
    phase = torch.polar(torch.ones_like(angles), angles)[:, None]
    z = torch.view_as_complex(x.unflatten(-1, (R // 2, 2)).contiguous()) * phase
    return torch.view_as_real(z).flatten(-2)


def definition(
    layer: MLAAttention, source: MLAAttention, x: Tensor, from_x: Tensor, alpha: Tensor,
    chosen: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output of a sequence of hidden states x, and which keys [S, S] each token selects. The
    latents are those that `source` makes of from_x."""
    S, C = x.shape[0], layer.config.kv_lora_rank
    w = {name: weight.double() for name, weight in layer.state_dict().items()}
    their = {name: weight.double() for name, weight in source.state_dict().items()}
    x, from_x = x.double(), from_x.double()
    rope = layer.rope_table is not None
    nope, rotary = (P, R) if rope else (P + R, 0)
    log = torch.arange(1, S + 1, dtype=torch.float64).log()[:, None]

    def scaled(q: Tensor, name: str) -> Tensor:
        return q * (w[f"{name}scale"] * log + w[f"{name}bias"])[:, :, None]

    def rotated(z: Tensor) -> Tensor:
        return torch.cat([turned(z[..., :R], alpha), z[..., R:]], -1) if rope else z

    row = from_x @ their["kv_a_proj_with_mqa.weight"].T
    c = row[:, :C] / (row[:, :C].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    c, k_pe = c * their["kv_a_layernorm.weight"], row[:, C:]
    q = (x @ w["q_proj.weight"].T).view(S, H, P + R)
    if rope:
        k_pe = turned(k_pe[:, None], alpha)[:, 0]
        q = torch.cat([q[..., :P], turned(q[..., P:], alpha)], -1)
    q = scaled(q, "softmax_scaling.")
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    if layer.indexer is not None:
        w |= {n.removeprefix("indexer."): value for n, value in w.items() if "indexer." in n}

        def layer_norm(y: Tensor, name: str, weights: dict[str, Tensor]) -> Tensor:
            y = (y - y.mean(-1, keepdim=True)) / (
                y.var(-1, correction=0, keepdim=True) + 1e-6
            ) ** 0.5
            return y * weights[f"{name}.weight"] + weights[f"{name}.bias"]

        iq = layer_norm(x, "q_input_norm", w) @ w["wq_b.weight"].T
        own = layer.indexer.state_dict()
        factor = own["softmax_scaling.scale"].double() * log + own["softmax_scaling.bias"].double()
        iq = rotated(iq.view(S, HI, DI) * factor[:, :, None])
        ik = rotated(layer_norm(x @ w["wk.weight"].T, "k_norm", w)[:, None])[:, 0]
        scores = (torch.einsum("shd,td->sht", iq, ik) * DI**-0.5).relu()
        scores = torch.einsum("sht,sh->st", scores, x @ w["weights_proj.weight"].T * HI**-0.5)
        best = scores.masked_fill(~causal, -torch.inf).topk(min(K, S), -1).indices
        chosen = torch.zeros_like(causal).scatter(1, best, True)
    assert chosen is not None
    up = w["kv_b_proj.weight"].view(H, nope + V, C)
    logits = torch.einsum("shp,hpc,tc->hst", q[..., :nope], up[:, :nope], c)
    logits = logits + torch.einsum("shr,tr->hst", q[..., nope:], k_pe) if rotary else logits
    logits = (logits * (P + R) ** -0.5).masked_fill(~(causal & chosen), -torch.inf)
    out = torch.einsum("hst,tc,hvc->shv", logits.softmax(-1), c, up[:, nope:]).flatten(1)
    return out @ w["o_proj.weight"].T, chosen


def run(
    layers: list[MLAAttention], hidden: list[Tensor], lens: list[int], format: str = "fp32"
) -> list[Tensor]:
    """Each layer's outputs for its own hidden states, in steps of these lengths: a plan per kind
    and step, one block pool."""
    pool = BlockPool(60, 4)
    config = MLAConfig.from_layers([layer.config for layer in layers])
    sizes = {"num_blocks": 60, "block_size": 4, "format": format, "index_format": "index_fp32"}
    caches: list[LayerCache] = []
    for number, layer in enumerate(layers):
        cache = allocate_cache(config, layer=number, **sizes)  # type: ignore[arg-type]
        for part in cache.parts:
            raw = part.data.view(torch.uint8)
            raw.copy_(poison(raw.shape, torch.uint8, "cpu"))
        caches.append(cache if layer.reads == number else cache.reading(caches[layer.reads]))
    outputs: list[list[Tensor]] = [[] for _ in layers]
    for start, stop in pairwise([0, *torch.tensor(lens).cumsum(0).tolist()]):
        pool.take({"r": stop - start})
        batch = Batch(
            [stop - start], [stop], pool.block_table(["r"]), pool.slot_mapping([("r", start, stop)])
        )
        plans: dict[int, Any] = {}
        selection: Selection | None = None
        before = None
        for number, layer in enumerate(layers):
            kind = config.kind(number)
            if kind not in plans:
                plans[kind] = make_plan(
                    batch, config.layer(number), caches[number], dtype=torch.float32
                )
            if layer.indexer is None:
                assert before is not None
                selection = carry_selection(selection, before, caches[number], plans[kind])
            before = plans[kind]
            rows = hidden[number][start:stop]
            positions = torch.arange(start, stop)
            out, selection = layer.attend(
                rows, positions, caches[number], plans[kind], selection=selection
            )
            outputs[number].append(out)
    return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_definition(name: str) -> None:
    """Whole sequences below, at and past K, and steps that cross it, of all layers."""
    for seed in range(3):
        layers, alpha = make_layers(MODELS[name], seed)
        hidden = [
            torch.randn(41, HIDDEN, generator=torch.Generator().manual_seed(10 * seed + n))
            for n in range(len(layers))
        ]
        expected, chosen = [], None
        for number, layer in enumerate(layers):
            source = layers[layer.reads]
            given = (layer, source, hidden[number], hidden[layer.reads], alpha, chosen)
            out, chosen = definition(*given)
            expected.append(out)
        for lens in ([K - 1], [K], [41], [K - 1, 1, 1, 20, 1, 3], [1] * 20):
            total = sum(lens)
            for actual, wanted in zip(run(layers, hidden, lens), expected, strict=True):
                assert relative_error(actual.double(), wanted[:total]) < 1e-5


def test_packed_rows_of_both_widths() -> None:
    """fp8_ds_mla: e4m3 latents of layers with RoPE and without, and latents read back to share."""
    fields = {**SHARED, "kv_lora_rank": 128}
    config = MLAConfig.from_hf(fields)
    assert [config.layer(n).latent_dim for n in (0, 1)] == [128 + R, 128]
    layers, alpha = make_layers(fields)
    hidden = [torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    actual = run(layers, hidden, [20, 1, 8, 1], format="fp8_ds_mla")
    for number, layer in enumerate(layers):
        given = (layer, layers[layer.reads], hidden[number], hidden[layer.reads], alpha, None)
        expected, _ = definition(*given)
        assert relative_error(actual[number].double(), expected) < 0.05


def test_either_form_of_the_config_is_read() -> None:
    """no_rope_layer_interval, as in a checkpoint, or no_rope_layers, as transformers saves it."""
    fields = {name: value for name, value in SHARED.items() if name != "no_rope_layer_interval"}
    saved = {**fields, "no_rope_layers": [1, 0] * 3}
    assert MLAConfig.from_hf(saved) == MLAConfig.from_hf(SHARED)
    default = MLAConfig.from_hf({**fields, "kv_source_layers": None})
    assert default.layer_kinds == (0, 0, 0, 1, 0, 0) and default.kv_sources == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # all with RoPE: transformers would read layer 2's latents in layer 4
        (
            {"no_rope_layers": [1] * 6, "kv_source_layers": [0, 1, 2, 2, 0, 2]},
            r"kv_source_layers\[4\] must be 2, the last earlier layer of its kind .*, got 0",
        ),
        ({"kv_source_layers": [0, 1, 1, 3, 4, 5]}, r"kv_source_layers\[2\] must be None, the last"),
        ({"kv_source_layers": [0, 1]}, "kv_source_layers must list a layer for each of 6 layers"),
        ({"no_rope_layers": [1, 2] * 3}, "no_rope_layers must be 0 or 1 for each of 6 layers"),
        ({"rope_parameters": None}, "rope_parameters is missing for mistral_large4_text"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MLAConfig.from_hf({**FIELDS, **changes})


def test_what_a_layer_needs() -> None:
    layers, alpha = make_layers(SHARED)
    config = MLAConfig.from_hf(SHARED)
    with pytest.raises(ConfigError, match="rope: alpha is missing: the config has learned RoPE"):
        MLAAttention(config, layer=0)
    with pytest.raises(ConfigError, match="rope: alpha is unused"):
        RopeTable(PRESETS["tiny-v3"].rope, R, 16, alpha=alpha)
    with pytest.raises(ConfigError, match=r"kv_sources\[3\] must be the layer itself, or an earl"):
        replace(config.layer(0), kv_sources=(0, 1, 0, 2, 4, 5))
    cache = allocate_cache(config, layer=2, num_blocks=4, block_size=4, format="fp32")
    assert cache.latent is None and cache.index is not None
    rows = allocate_cache(config, num_blocks=4, block_size=4, format="fp32")
    pool = BlockPool(4, 4)
    pool.take({"r": 3})
    batch = Batch([3], [3], pool.block_table(["r"]), pool.slot_mapping([("r", 0, 3)]))
    plan = make_plan(batch, config.layer(0), rows, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"reads those of layer 0\. Call cache\.reading"):
        layers[2](torch.zeros(3, HIDDEN), torch.arange(3), cache, plan)
    with pytest.raises(ConfigError, match="both plans must be of the same step"):
        other = make_plan(
            Batch([2], [3], pool.block_table(["r"]), pool.slot_mapping([("r", 1, 3)])),
            config.layer(0), rows, dtype=torch.float32, form="chosen",
        )  # fmt: skip
        keys = torch.zeros((2, K), dtype=torch.int32)
        carry_selection(Selection(keys, keys[:, 0], keys, keys[:, 0]), other, rows, plan)
