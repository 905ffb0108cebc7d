"""Families that only engines have: from_hf() and MLAAttention against their definitions in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import PRESETS, ConfigError, MLAAttention, MLAConfig
from tests.config.checkpoints import CHECKPOINTS, Json
from tests.layers.serving import Server, relative_error, sequence

_NO_Q: Json = {"q_lora_rank": None, "max_position_embeddings": 512}
_YARN: Json = {
    "type": "deepseek_yarn", "factor": 8.0, "original_max_position_embeddings": 48,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.9, "mscale_all_dim": 0.7,
}  # fmt: skip
_GIGACHAT: Json = {**CHECKPOINTS["tiny-gigachat3.5"], "max_position_embeddings": 512}
FAMILIES: dict[str, Json] = {
    "kimi_k3": CHECKPOINTS["tiny-kimi-k3"],
    "gigachat3_5": _GIGACHAT,
    "gigachat3_5-no-q-lora": {**_GIGACHAT, **_NO_Q, "layernorm_gating_weight": 1.5},
    "gigachat3_5-unscaled": {
        **_GIGACHAT, "use_mla_scaling_factor": False, "gated_attention": False,
    },
    "sarvam_mla": {
        **CHECKPOINTS["tiny-v3"], **_NO_Q, "model_type": "sarvam_mla", "rope_scaling": _YARN,
    },
    "pangu_ultra_moe": {
        **CHECKPOINTS["tiny-v3"], "max_position_embeddings": 512, "rope_scaling": None,
        "model_type": "pangu_ultra_moe", "rope_theta": 25600000,
    },
}  # fmt: skip


def make_layer(fields: Json, seed: int = 0) -> MLAAttention:
    torch.manual_seed(seed)
    layer = MLAAttention(MLAConfig.from_hf(fields))
    for parameter in layer.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * noise)
    return layer


def angles(fields: Json, positions: Tensor) -> tuple[Tensor, float, float]:
    """Angles [S, R/2] of DeepSeek's YaRN, the factor of cos and sin, and of the softmax scale."""
    R, theta = fields["qk_rope_head_dim"], fields["rope_theta"]
    yarn = fields.get("rope_scaling")
    pairs = torch.arange(R // 2, dtype=torch.float64)
    frequencies = theta ** (-2 * pairs / R)
    if yarn is None:
        return positions[:, None] * frequencies, 1.0, 1.0

    def pair(turns: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return R * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(name: str) -> float:
        return float(0.1 * yarn[name] * math.log(yarn["factor"]) + 1)

    low, high = max(math.floor(pair(yarn["beta_fast"])), 0), math.ceil(pair(yarn["beta_slow"]))
    slow = ((pairs - low) / (min(high, R - 1) - low)).clamp(0, 1)
    frequencies = frequencies * (slow / yarn["factor"] + 1 - slow)
    m = magnitude("mscale_all_dim")
    return positions[:, None] * frequencies, magnitude("mscale") / m, m * m


def definition(weights: dict[str, Tensor], fields: Json, hidden: Tensor) -> Tensor:
    """The attention of a whole sequence [S, hidden] at positions 0.., in absorbed form."""
    w = {name: weight.double() for name, weight in weights.items()}
    x, S, eps = hidden.double(), hidden.shape[0], fields["rms_norm_eps"]
    H, P, R = (fields[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    C, V, Q = (fields[n] for n in ("kv_lora_rank", "v_head_dim", "q_lora_rank"))
    scaled = fields.get("use_mla_scaling_factor", False)

    def norm(y: Tensor, name: str) -> Tensor:
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
        if "norm_type" not in fields:
            return y * w[f"{name}.weight"]
        y = y * (1 + w[f"{name}.weight"])
        low = y @ w[f"{name}.gate_up_projection.weight"].T
        low = low / (1 + (-low).exp()) @ w[f"{name}.gate_down_projection.weight"].T
        factor = (x.shape[1] / y.shape[1]) ** 0.5 if scaled else 1.0
        return y * fields["layernorm_gating_weight"] / (1 + (-low).exp()) * factor

    if Q is None:
        q = x @ w["q_proj.weight"].T
    else:
        q = norm(x @ w["q_a_proj.weight"].T, "q_a_layernorm") @ w["q_b_proj.weight"].T
    q = q.view(S, H, P + R)
    row = x @ w["kv_a_proj_with_mqa.weight"].T
    c, q_pe, k_pe = norm(row[:, :C], "kv_a_layernorm"), q[:, :, P:], row[:, C:]
    magnitude = 1.0
    if not fields.get("mla_use_nope"):
        turned, factor, magnitude = angles(fields, torch.arange(S, dtype=torch.float64))
        phase = torch.polar(torch.full_like(turned, factor), turned)

        def rotated(z: Tensor, phase: Tensor) -> Tensor:
            z = torch.view_as_complex(z.unflatten(-1, (R // 2, 2)).contiguous()) * phase
            return torch.view_as_real(z).flatten(-2)

        q_pe, k_pe = rotated(q_pe, phase[:, None]), rotated(k_pe, phase)
    up = w["kv_b_proj.weight"].view(H, P + V, C)
    latent = torch.einsum("shp,hpc->shc", q[:, :, :P], up[:, :P])
    scores = torch.einsum("shc,tc->hst", latent, c) + torch.einsum("shr,tr->hst", q_pe, k_pe)
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    scores = (scores * magnitude * (P + R) ** -0.5).masked_fill(later, -torch.inf)
    out = torch.einsum("hst,tc->shc", scores.softmax(-1), c)
    out = torch.einsum("shc,hvc->shv", out, up[:, P:]).flatten(1)
    if "g_proj.weight" in w:
        out = out / (1 + (-(x @ w["g_proj.weight"].T)).exp())
    return out @ w["o_proj.weight"].T


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_definition(family: str, form: str, device: str) -> None:
    """A whole sequence, and steps of several lengths with a workspace of three blocks."""
    for seed in range(3):
        layer, hidden = make_layer(FAMILIES[family], seed), sequence(90, seed)
        expected = definition(layer.state_dict(), FAMILIES[family], hidden)
        for lens in ([90], [40, 1, 1, 7, 30, 1, 10]):
            server = Server(layer, {"r": hidden}, form=form, workspace_tokens=12, device=device)
            for n in lens:
                server.step([("r", n)])
            assert relative_error(server.output("r"), expected) < 1e-5


@pytest.mark.parametrize("family", ["kimi_k3", "gigachat3_5"])
def test_bf16_layers(family: str) -> None:
    layer, hidden = make_layer(FAMILIES[family]).bfloat16(), sequence(60).bfloat16()
    expected = definition(layer.state_dict(), FAMILIES[family], hidden)
    server = Server(layer, {"r": hidden}, format="bf16", dtype=torch.bfloat16)
    for n in (50, 1, 9):
        server.step([("r", n)])
    assert relative_error(server.output("r").double(), expected) < 0.02


def test_a_checkpoint_of_gigachat_calls_the_gate_gate_proj() -> None:
    layer = make_layer(_GIGACHAT)
    state = {name.replace("g_proj.", "gate_proj."): w for name, w in layer.state_dict().items()}
    other = make_layer(_GIGACHAT, seed=1)
    other.load_state_dict(state)
    assert all(torch.equal(w, other.state_dict()[name]) for name, w in layer.state_dict().items())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gigachat3_5", {"norm_type": "GatedNorm"}, "norm_type must be 'ZeroCenteredGatedNorm'"),
        ("gigachat3_5", {"num_krope_heads": 2}, "num_krope_heads must be 1"),
        (
            "sarvam_mla",
            {"rope_scaling": {n: v for n, v in _YARN.items() if n != "mscale_all_dim"}},
            "mscale_all_dim must be a finite number, got None",
        ),
        ("pangu_ultra_moe", {"rope_scaling": _YARN}, "rope type 'yarn' is not supported for this"),
    ],
)
def test_what_has_no_definition_is_refused(family: str, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MLAConfig.from_hf({**FAMILIES[family], **changes})


def test_configs_are_checked() -> None:
    config = PRESETS["tiny-gigachat3.5"]
    with pytest.raises(ConfigError, match="output_gate must be None, head or element, got 'rows'"):
        replace(config, output_gate="rows")
    with pytest.raises(ConfigError, match="norm_gate must be zero or a positive number, got -1"):
        replace(config, norm_gate=-1)


def test_a_wrapper_around_kimi_linear_is_read() -> None:
    wrapped = {"model_type": "kimi_k3", "text_config": CHECKPOINTS["kimi-k3"]}
    assert MLAConfig.from_hf(wrapped) == PRESETS["kimi-k3"]
