"""A quantised kv_b_proj: absorbed rows read a decoded copy, prefill may call the linear itself."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openmla import PRESETS, MLAAttention
from openmla.errors import ConfigError
from openmla.layers.weights import absorb, expands_itself
from tests.layers.quantised_linears import Decoding, FP8Linear, with_fp8
from tests.layers.serving import Server, relative_error, sequence

CONFIG = PRESETS["tiny-v3"]  # H * (P + V) = 160, C = 32


def served(layer: MLAAttention, **options: Any) -> tuple[Tensor, list[int]]:
    """A prompt, a decode step, a prompt that goes on: what comes out, and the linear's calls."""
    _ = layer.absorbed  # what decoding calls is not counted
    linear: Any = layer.kv_b_proj
    linear.rows.clear()
    server = Server(layer, {"r": sequence(140)}, **options)
    for n in (40, 1, 99):
        server.step([("r", n)])
    return server.output("r"), list(linear.rows)


@pytest.fixture
def layer() -> MLAAttention:
    torch.manual_seed(0)
    layer = MLAAttention(CONFIG)
    layer.kv_b_proj = FP8Linear(torch.randn(160, 32) / 6)
    return layer


def test_prefill_calls_a_linear_that_multiplies_fp8(
    layer: MLAAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, calls = served(layer)
    assert not calls and layer.absorbed.linear is None  # this CPU does not
    with_fp8(monkeypatch)
    itself, calls = served(layer)
    assert calls == [40, 140] and layer.absorbed.linear is layer.kv_b_proj  # not the decode step
    assert (
        0 < relative_error(itself, copied) < 0.05
    )  # its activations are rounded, as in the model itself


@pytest.mark.parametrize("linear", [FP8Linear, Decoding])
def test_either_can_be_asked_for(linear: Any) -> None:
    layer = MLAAttention(CONFIG)
    layer.kv_b_proj = linear(torch.randn(160, 32) / 6)
    outputs = {}
    for layer.expand_by, wanted in (("auto", []), ("copy", []), ("linear", [40, 140])):
        outputs[layer.expand_by], calls = served(layer)
        assert calls == wanted
    assert torch.equal(outputs["auto"], outputs["copy"])
    error = relative_error(outputs["linear"], outputs["copy"])
    assert error < (1e-5 if linear is Decoding else 0.05)


def test_it_runs_where_gradients_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are parameters there, which would make keys want a gradient after rows are written."""
    with_fp8(monkeypatch)
    with torch.inference_mode(False):
        layer = MLAAttention(CONFIG)
        layer.kv_b_proj = FP8Linear(torch.randn(160, 32) / 6)
        server = Server(layer, {"r": sequence(30)})
        with torch.enable_grad():
            server.step([("r", 30)])
        assert not server.output("r").requires_grad and layer.kv_b_proj.rows == [30]


def test_another_value_is_refused_before_a_row_is_written(layer: MLAAttention) -> None:
    server = Server(layer, {"r": sequence(30)})
    assert server.cache.latent is not None
    before = server.cache.latent.data.clone()
    layer.expand_by = "both"
    with pytest.raises(
        ConfigError, match="expand_by must be one of 'auto', 'linear', 'copy', got 'both'"
    ):
        server.step([("r", 30)])
    assert torch.equal(server.cache.latent.data.view(torch.uint8), before.view(torch.uint8))


def test_what_expands_itself(layer: MLAAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, linear = torch.device("cpu"), layer.kv_b_proj
    assert not expands_itself(linear, cpu)
    with_fp8(monkeypatch)
    assert expands_itself(linear, cpu)
    monkeypatch.setattr("openmla.layers.weights.capability", lambda device: (8, 6))
    assert not expands_itself(linear, cpu)
    with_fp8(monkeypatch)
    for change in ("no scheme", "16 bits", "offloaded", "a plain forward"):
        other: Any = deepcopy(linear)
        if change == "no scheme":
            other.activation_scheme = None
        elif change == "16 bits":
            other.weight = nn.Parameter(torch.zeros(160, 32), requires_grad=False)
        elif change == "offloaded":
            other._hf_hook = object()
        else:
            other = nn.Linear(32, 160, bias=False)
            other.weight, other.activation_scheme = linear.weight, "dynamic"
        assert not expands_itself(other, cpu), change


def test_the_copy_is_counted(layer: MLAAttention) -> None:
    assert MLAAttention(CONFIG).copied_bytes == layer.copied_bytes == 0  # none is made yet
    served(layer)
    assert layer.copied_bytes == 160 * 32 * 4
    plain = MLAAttention(CONFIG)
    _ = plain.absorbed
    assert plain.copied_bytes == 0


def test_a_workspace_holds_what_the_linear_made(
    layer: MLAAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openmla.attention.expanded import expand, whole_keys

    with_fp8(monkeypatch)
    kv_c, k_pe = torch.randn(5, 32), torch.randn(5, CONFIG.qk_rope_head_dim)
    made = absorb(layer.absorbed.kv_b, CONFIG, layer.kv_b_proj)

    class Space:
        expanded = torch.zeros(9, 160)
        keys = torch.zeros(9, CONFIG.num_heads, CONFIG.qk_head_dim)

    class WithSpace:
        config, workspace, fixed_by = CONFIG, Space, None

    class Without:
        config, workspace, fixed_by = CONFIG, None, None

    one, other = (expand(kv_c, made, plan) for plan in (WithSpace, Without))  # type: ignore[arg-type]
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)
    assert one[1].untyped_storage().data_ptr() == Space.expanded.untyped_storage().data_ptr()
    keys = whole_keys(one[0], k_pe, WithSpace)  # type: ignore[arg-type]
    assert torch.equal(keys, whole_keys(one[0], k_pe, Without))  # type: ignore[arg-type]
    assert keys.data_ptr() == Space.keys.data_ptr()


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
)
def test_torchao_expands_either_way(config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    with torch.inference_mode(False):  # torchao takes no weights made in that mode
        layer = MLAAttention(CONFIG)

        def chosen(module: nn.Module, name: str) -> bool:
            return name == "kv_b_proj"

        quantization.quantize_(layer, getattr(quantization, config)(), chosen)
        outputs = []
        for layer.expand_by in ("copy", "linear"):
            server = Server(layer, {"r": sequence(140)})
            for n in (40, 1, 99):
                server.step([("r", n)])
            outputs.append(server.output("r").detach())
    assert layer.copied_bytes == 160 * 32 * 4
    assert relative_error(outputs[1], outputs[0]) < 0.05
