"""dots3's attention in float64: one sequence, no cache, every key of every token at once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from openmla import MLAAttention, MLAConfig, RopeConfig
from openmla.config import IndexerConfig

W, K = 12, 16
FULL = MLAConfig(
    model_type="dots3_note_text",
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    max_positions=512,
    rope=RopeConfig(theta=10000.0),
    latent_eps=1e-5,
    q_factor=(64 / 48) ** 0.5,
    latent_factor=(64 / 32) ** 0.5,
    output_gate="head",
    rope_norm=True,
)
INDEXED = replace(FULL, indexer=IndexerConfig(16, 16, K, pairing="pairs"))
# every number is another one than in full layers, so that a mix-up shows
SLIDING = replace(
    FULL,
    num_heads=2,
    q_lora_rank=40,
    kv_lora_rank=48,
    qk_nope_head_dim=12,
    qk_rope_head_dim=12,
    v_head_dim=20,
    rope=RopeConfig(theta=500.0),
    q_factor=(64 / 40) ** 0.5,
    latent_factor=(64 / 48) ** 0.5,
    window=W,
)
KINDS = {"indexed": INDEXED, "sliding": SLIDING, "full": FULL}


def make_layer(
    config: MLAConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> MLAAttention:
    """A layer with random weights of unit gain, and norm weights that are not 1."""
    layer = MLAAttention(config)
    torch.manual_seed(seed)
    for parameter in layer.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(0.2 * noise)
    return layer.to(dtype)


def definition(layer: MLAAttention, hidden: Tensor) -> Tensor:  # [S, hidden]
    """The layer's output at positions 0..S-1, in absorbed form."""
    config = layer.config
    weights = {name: tensor.double().cpu() for name, tensor in layer.state_dict().items()}
    x, S, H = hidden.double(), hidden.shape[0], config.num_heads
    P, R, V, C = (
        config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank,
    )  # fmt: skip

    def times(name: str, given: Tensor) -> Tensor:
        return given @ weights[f"{name}.weight"].T

    def normed(name: str, given: Tensor) -> Tensor:
        mean = given.square().mean(-1, keepdim=True)
        return given * (mean + config.latent_eps).rsqrt() * weights[f"{name}.weight"]

    def turned(given: Tensor) -> Tensor:  # [S, ..., R], pairs of columns
        theta = config.rope.theta
        angles = torch.outer(
            torch.arange(S).double(), theta ** (-torch.arange(0, R, 2).double() / R)
        ).view(S, *[1] * (given.dim() - 2), R // 2)
        first, second = given[..., 0::2], given[..., 1::2]
        out = torch.empty_like(given)
        out[..., 0::2] = first * angles.cos() - second * angles.sin()
        out[..., 1::2] = second * angles.cos() + first * angles.sin()
        return out

    assert config.q_lora_rank is not None
    low = (
        normed("q_a_layernorm", times("q_a_proj", x))
        * (config.hidden_size / config.q_lora_rank) ** 0.5
    )
    q_nope, q_pe = times("q_b_proj", low).view(S, H, P + R).split([P, R], -1)
    latent, k_pe = times("kv_a_proj_with_mqa", x).split([C, R], -1)
    latent = normed("kv_a_layernorm", latent) * (config.hidden_size / C) ** 0.5
    k_pe = turned(normed("k_rope_only_layernorm", k_pe))
    w_uk, w_uv = weights["kv_b_proj.weight"].view(H, P + V, C).split([P, V], 1)
    logits = torch.einsum("shp,hpc,jc->hsj", q_nope, w_uk, latent)
    logits = (logits + torch.einsum("shr,jr->hsj", turned(q_pe), k_pe)) * (P + R) ** -0.5
    ago = torch.arange(S)[:, None] - torch.arange(S)
    seen = ago >= 0
    if config.window:
        seen &= ago < config.window
    if config.indexer is not None:
        HI, DI, topk = config.indexer.num_heads, config.indexer.head_dim, config.indexer.topk
        q_idx = times("indexer.wq_b", low).view(S, HI, DI)
        k_idx = nn.functional.layer_norm(
            times("indexer.wk", x), (DI,), weights["indexer.k_norm.weight"],
            weights["indexer.k_norm.bias"], 1e-6,
        )  # fmt: skip
        q_idx = torch.cat([turned(q_idx[..., :R]), q_idx[..., R:]], -1)
        k_idx = torch.cat([turned(k_idx[..., :R]), k_idx[..., R:]], -1)
        scores = (torch.einsum("shd,jd->shj", q_idx, k_idx) * DI**-0.5).relu()
        scores = torch.einsum("shj,sh->sj", scores, times("indexer.weights_proj", x) * HI**-0.5)
        best = scores.masked_fill(~seen, -torch.inf).topk(min(topk, S), -1).indices
        seen &= torch.zeros(S, S, dtype=torch.bool).scatter_(1, best, True)
    probs = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("hsj,jc,hvc->shv", probs, latent, w_uv)
    out = out * torch.sigmoid(times("g_proj", x))[:, :, None]
    return times("o_proj", out.flatten(1))
