"""absorbed_format="fp8": a checkpoint's own e4m3 as it is, a copy of everything else, all told."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openmla import PRESETS, MLAAttention, calibrate, make_plan
from openmla.attention import attend_step
from openmla.config import MLAConfig
from openmla.errors import ConfigError, OpenMLAError, ShapeError
from openmla.layers.eight_bits import own_blocks, quantize_heads, unpack
from tests.layers.quantised_linears import Decoding, FP8Linear, with_fp8
from tests.layers.serving import Server, relative_error, sequence

TINY = PRESETS["tiny-v3"]  # H = 4, P = 16, V = 24, C = 32
E4M3 = torch.float8_e4m3fn


def wide(P: int, V: int, C: int = 128, H: int = 2) -> MLAConfig:
    return replace(TINY, num_heads=H, qk_nope_head_dim=P, v_head_dim=V, kv_lora_rank=C)


class Blocks(nn.Linear):
    """fp8 weights with scales as checkpoints ship them; who holds them cannot be called."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight = nn.Parameter(weight.to(E4M3), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)


def blocks(config: MLAConfig, kind: str = "block") -> Blocks:
    rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    weight = torch.randn(rows, config.kv_lora_rank) * 60
    shape = {
        "block": (-(-rows // 128), -(-config.kv_lora_rank // 128)),
        "tensor": (1, 1),
        "row": (rows, 1),
    }[kind]
    return Blocks(weight, torch.rand(shape) * 0.002 + 0.001)


def served(layer: MLAAttention, **options: Any) -> Tensor:
    """A prompt, two decode steps, a prompt that goes on."""
    server = Server(layer, {"r": sequence(140)}, **options)
    for n in (40, 1, 1, 98):
        server.step([("r", n)])
    return server.output("r")


def twins(config: MLAConfig = TINY, linear: nn.Module | None = None) -> list[MLAAttention]:
    """The same layer as it is, and in eight bits."""
    torch.manual_seed(0)
    layer = MLAAttention(config)
    if linear is not None:
        layer.kv_b_proj = linear
    other = deepcopy(layer)
    other.absorbed_format = "fp8"
    return [layer, other]


def test_a_plain_layer_keeps_a_copy_and_says_so(device: str) -> None:
    plain, eight = (layer.to(device) for layer in twins())
    error = relative_error(served(eight, device=device), served(plain, device=device))
    assert 0 < error < 0.03
    absorbed, weight = eight.absorbed, eight.kv_b_proj.weight
    assert absorbed.kv_b is weight and absorbed.linear is None  # prefill multiplies by it
    assert absorbed.w_uk.dtype == absorbed.w_uv.dtype == E4M3
    assert eight.copied_bytes == 160 * 32 + 4 * 16 and plain.copied_bytes == 0
    assert 0.01 < eight.absorbed_error < 0.04 and plain.absorbed_error == 0
    assert absorbed.uk_scale is not None and absorbed.uv_scale is not None
    assert isinstance(weight, Tensor)
    parts = weight.view(4, 40, 32).split([16, 24], 1)
    decoded = (
        absorbed.w_uk.float() * absorbed.uk_scale,
        absorbed.w_uv.mT.float() * absorbed.uv_scale,
    )
    for part, scale, values in zip(parts, absorbed[-2:], decoded, strict=True):
        largest = part.abs().amax((1, 2), keepdim=True)
        assert scale is not None and torch.equal(scale, largest / torch.full_like(largest, 448))
        errors = (values - part).flatten(1).norm(dim=1) / part.flatten(1).norm(dim=1)
        assert float(errors.max()) <= eight.absorbed_error * (1 + 1e-6)


def test_fresh_weights_go_where_the_old_were() -> None:
    _, layer = twins()
    first = layer.absorbed
    before = first.w_uk.float()
    state = {name: 2 * tensor for name, tensor in layer.state_dict().items()}
    assert "kv_b_eight" not in state
    layer.load_state_dict(state)
    second = layer.absorbed
    assert second.w_uk.data_ptr() == first.w_uk.data_ptr()
    assert torch.equal(second.w_uk.float(), before)
    assert second.uk_scale is not None and first.uk_scale is not None
    assert second.uk_scale.data_ptr() == first.uk_scale.data_ptr()  # twice as large by now
    layer.absorbed_format = None
    layer.refresh_weights()
    assert layer.copied_bytes == 0 and layer.absorbed.uk_scale is None


@pytest.mark.parametrize("kind", ["eight bits", "decoded"])
def test_weights_are_refreshed_in_any_mode(kind: str) -> None:
    """Made by a first step in inference mode, refreshed by what loads weights outside of it."""
    with torch.inference_mode(False):
        layer = twins(linear=Decoding(torch.randn(160, 32)))[kind == "eight bits"]
        with torch.inference_mode():
            first = layer.absorbed.w_uk.data_ptr()
        layer.refresh_weights()
        assert layer.absorbed.w_uk.data_ptr() == first


def test_casts_leave_the_bytes_alone() -> None:
    _, layer = twins()
    before = layer.absorbed
    scale = before.uk_scale.clone() if before.uk_scale is not None else None
    layer.to(torch.bfloat16)
    absorbed = layer.absorbed
    assert absorbed.w_uk.dtype == E4M3 and absorbed.uk_scale is not None and scale is not None
    assert absorbed.uk_scale.dtype == torch.float32 and torch.equal(absorbed.uk_scale, scale)
    assert served_in_bf16(layer).isfinite().all()


def served_in_bf16(layer: MLAAttention) -> Tensor:
    server = Server(
        layer, {"r": sequence(20).bfloat16()}, format="bf16", dtype=torch.bfloat16
    )  # fmt: skip
    for n in (12, 1, 7):
        server.step([("r", n)])
    return server.output("r")


@pytest.mark.parametrize(
    ("config", "kind", "copied"),
    [
        (wide(128, 128), "block", 0),
        (wide(256, 128, 256), "block", 0),
        (wide(192, 256), "block", 2 * 7 * 4),  # scales of 128 rows, for halves of them
        (wide(64, 64, 192, 3), "block", 3 * 2 * 3 * 4),
        (wide(48, 80), "tensor", 0),
        (TINY, "tensor", 0),
    ],
    ids=["128+128", "256+128", "192+256", "64+64", "one scale", "tiny"],
)
def test_a_checkpoints_own_blocks_are_read_as_they_are(
    config: MLAConfig, kind: str, copied: int, device: str
) -> None:
    linear = blocks(config, kind)
    plain, eight = (layer.to(device) for layer in twins(config, linear))
    actual, expected = served(eight, device=device), served(plain, device=device)
    assert relative_error(actual, expected) < 1e-5  # no rounding but sums'
    assert (eight.copied_bytes, eight.absorbed_error) == (copied, 0)
    assert plain.copied_bytes == 4 * linear.weight.numel()
    absorbed, own = eight.absorbed, eight.kv_b_proj
    places = {t.untyped_storage().data_ptr() for t in own.parameters()}
    for view in absorbed[:3]:
        assert view.untyped_storage().data_ptr() in places
    for scale in absorbed[-2:]:
        assert scale is not None
        assert (scale.untyped_storage().data_ptr() in places) == (copied == 0)
    torch.testing.assert_close(absorbed.dense(torch.float32), plain.absorbed.kv_b)


@pytest.mark.parametrize("kind", ["row", "unknown", "odd"])
def test_what_does_not_fit_is_copied(kind: str) -> None:
    """One scale per row, no scales that are known, heads that begin inside blocks of 16 rows."""
    config = wide(24, 40, H=5) if kind == "odd" else TINY
    linear: Any = Decoding(torch.randn(160, 32) / 6) if kind == "unknown" else None
    if linear is None:
        linear = blocks(config, "block" if kind == "odd" else "row")
    assert own_blocks(linear, config) is None
    plain, eight = twins(config, linear)
    assert relative_error(served(eight), served(plain)) < 0.05
    rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    assert eight.copied_bytes == rows * config.kv_lora_rank + 16 * config.num_heads
    assert 0.01 < eight.absorbed_error < 0.04
    called = eight.absorbed.linear
    assert (called is eight.kv_b_proj) == (kind == "unknown")  # the others cannot be called


def test_prompts_call_a_linear_that_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or multiply by the eight bits, decoded each time, where that is asked for."""
    plain, eight = twins(TINY, Decoding(torch.randn(160, 32) / 6))
    expected, linear = served(plain), eight.kv_b_proj
    assert isinstance(linear, Decoding)
    outputs = {}
    for eight.expand_by, wanted in (("auto", [40, 140]), ("copy", []), ("linear", [40, 140])):
        _ = eight.absorbed
        linear.rows.clear()
        outputs[eight.expand_by] = served(eight)
        assert linear.rows == wanted
    assert torch.equal(outputs["auto"], outputs["linear"])
    assert relative_error(outputs["auto"], expected) < relative_error(outputs["copy"], expected)
    _, fp8 = twins(TINY, FP8Linear(torch.randn(160, 32) / 6))
    assert fp8.absorbed.linear is None  # its own bytes, decoded for prompts: exact
    with_fp8(monkeypatch)
    assert fp8.absorbed.linear is fp8.kv_b_proj and fp8.copied_bytes == 0


def test_scales_are_found_by_them_too() -> None:
    """calibrate() of a layer in eight bits, and an fp8 cache beside them."""
    found, outputs = [], []
    for layer in twins():
        server = Server(layer, {"r": sequence(20)})
        batch = server.batch([("r", 20)])
        plan = make_plan(batch, TINY, server.cache, dtype=torch.float32)
        given = sequence(20), torch.arange(20), server.cache, plan
        found.append(calibrate(layer, [given], headroom=2.0))
        outputs.append(served(layer, format="fp8"))
    assert found[0] == found[1]  # powers of two: weights are not so far off
    assert relative_error(outputs[1], outputs[0]) < 0.05


def test_decode_is_one_graph() -> None:
    _, layer = twins()
    server = Server(layer, {"r": sequence(14)})
    server.step([("r", 12)])
    batch = server.batch([("r", 1)])
    plan = make_plan(batch, TINY, server.cache, dtype=torch.float32, compiled=True)
    hidden, positions = sequence(14)[12:13], torch.tensor([12])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = compiled(hidden, positions, server.cache, plan)
    assert torch.equal(actual, layer(hidden, positions, server.cache, plan))


def test_extreme_heads() -> None:
    """Zeros, one large value and tiny ones: scales are finite and above 0, no byte is NaN."""
    weight = torch.randn(160, 32)
    weight[:40] = 0
    weight[40:80] *= 1e-42
    weight[100, 3] = 1e30
    kept = quantize_heads(weight, TINY)
    stored, scales, errors = unpack(kept, TINY)
    assert bool((scales.isfinite() & (scales > 0)).all()) and bool(errors.isfinite().all())
    assert not bool(stored.float().isnan().any()) and float(stored[100, 3].float()) == 448
    assert bool((stored[:40].float() == 0).all()) and bool((errors[:, 0] == 0).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: setattr(layer, "absorbed_format", "int8"), "absorbed_format must be None"),
        (
            lambda layer: layer.kv_b_proj.weight.fill_(torch.nan),
            "the weight of kv_b_proj must be fini",
        ),
        (
            lambda layer: own_scale(layer, 0.0),
            "weight_scale_inv of kv_b_proj must be positive and finite.",
        ),
        (
            lambda layer: own_scale(layer, -1.0),
            "weight_scale_inv of kv_b_proj must be positive and finite.",
        ),
        (
            lambda layer: own_scale(layer, torch.nan),
            "weight_scale_inv of kv_b_proj must be positive",
        ),
    ],
)
def test_bad_weights_are_refused_before_a_row_is_written(change: Any, message: str) -> None:
    _, layer = twins()
    change(layer)
    server = Server(layer, {"r": sequence(30)})
    assert server.cache.latent is not None
    before = server.cache.latent.data.clone()
    with pytest.raises(OpenMLAError, match=message):
        server.step([("r", 30)])
    assert torch.equal(server.cache.latent.data.view(torch.uint8), before.view(torch.uint8))


def own_scale(layer: MLAAttention, value: float) -> None:
    layer.kv_b_proj = Blocks(torch.randn(160, 32), torch.full((1, 1), value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uk_scale": None}, "step: w_scale must be given for torch.float8_e4m3fn weights"),
        ({"uv_scale": -torch.ones(4, 1, 1)}, "step: w_uv's scale must be finite and above 0, got"),
        ({"uv_scale": torch.ones(4, 3, 1)}, "step: w_scale must cut 32 x 24 weights into equal"),
        ({"uk_scale": None, "uv_scale": None}, "step: w_uk must be torch.float32"),
    ],
)
def test_bad_scales_of_an_engine_are_refused_before_a_row_is_written(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, layer = twins()
    bad = layer.absorbed._replace(**changes)

    def spoilt(projected: Any, absorbed: Any, *args: Any, **options: Any) -> Tensor:
        return attend_step(projected, bad, *args, **options)

    monkeypatch.setattr("openmla.layers.mla.attend_step", spoilt)
    server = Server(layer, {"r": sequence(30)})
    assert server.cache.latent is not None
    before = server.cache.latent.data.clone()
    with pytest.raises(ShapeError, match=message):
        server.step([("r", 30)])
    assert torch.equal(server.cache.latent.data.view(torch.uint8), before.view(torch.uint8))


def test_the_constructor_looks_too() -> None:
    assert MLAAttention(TINY, absorbed_format="fp8").absorbed.w_uk.dtype == E4M3
    with pytest.raises(ConfigError, match="absorbed_format must be None or 'fp8', got 'fp16'"):
        MLAAttention(TINY, absorbed_format="fp16")
