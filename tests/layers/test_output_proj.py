"""A quantised o_proj: attention hands it outputs in the format it reads, and refuses others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openmla import PRESETS, MLAAttention, decode_output, make_plan, plan_buffers
from openmla.attention import quantized
from openmla.errors import ConfigError
from openmla.layers.output_proj import (
    multiplies_scaled,
    output_buffers,
    output_format,
    project_output,
)
from openmla.ops import quantize_out
from tests.layers.compiling import Compiled
from tests.layers.serving import Server, record, relative_error, sequence
from tests.plan.groups import ends_of

DENSE = replace(PRESETS["tiny-v3"], v_head_dim=32)  # H * V = 128, hidden 64
SPARSE = replace(PRESETS["tiny-v3.2"], v_head_dim=32)
GATED = replace(DENSE, output_gate="head")


class FP8Linear(nn.Linear):
    """What transformers' class of that name is made of; never called here."""

    def __init__(
        self,
        weight: Tensor,
        scheme: str,
        block_size: tuple[int, int] | None = (128, 128),
        activation_scale: float = 0.01,
        bias: bool = False,
    ) -> None:
        rows, columns = weight.shape
        super().__init__(columns, rows, bias=bias)
        self.activation_scheme, self.block_size = scheme, block_size
        if block_size is None:
            scale = (weight.abs().max() / 448).reshape(())
            spread = scale
        else:
            blocks = -(-rows // 128), -(-columns // 128)
            scale = (0.5 + torch.rand(blocks)) * weight.abs().max() / 448
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale.clone())
        self.dense = (codes.float() * spread).detach()
        if scheme == "static":
            self.activation_scale = nn.Parameter(torch.tensor(activation_scale))

    def forward(self, hidden: Tensor) -> Tensor:
        raise AssertionError("quantised outputs were to be handed over")


def layer_of(
    config: Any, scheme: str = "dynamic", absorbed_format: str | None = None, **options: Any
) -> MLAAttention:
    torch.manual_seed(0)
    layer = MLAAttention(config, absorbed_format=absorbed_format)
    weight = torch.randn(64, config.num_heads * config.v_head_dim) / 6
    layer.o_proj = FP8Linear(weight, scheme, **options)
    return layer


def plain_relative(layer: MLAAttention) -> MLAAttention:
    """The same layer with a plain o_proj of the same weight."""
    other = MLAAttention(layer.config)
    o_proj: Any = layer.o_proj
    state = {k: v for k, v in layer.state_dict().items() if not k.startswith("o_proj")}
    other.load_state_dict({**state, "o_proj.weight": o_proj.dense})
    return other


@pytest.mark.parametrize("config", [DENSE, SPARSE, GATED], ids=["dense", "sparse", "gated"])
@pytest.mark.parametrize(("scheme", "format"), [("dynamic", "fp8_128"), ("static", "fp8")])
def test_outputs_are_handed_over(config: Any, scheme: str, format: str, device: str) -> None:
    """Prompts, decode and both at once: off the plain layer by what fp8 rounds, no more."""
    layer = layer_of(config, scheme, block_size=None if scheme == "static" else (128, 128))
    assert layer.output_format == format
    outs = []
    for each, output in ((layer, format), (plain_relative(layer), None)):
        server = Server(
            each, {"a": sequence(70), "b": sequence(50, seed=2)}, device=device,
            workspace_tokens=16, output=output,
        )  # fmt: skip
        for wanted in ([("a", 40)], [("a", 1), ("b", 20)], [("b", 29), ("a", 5)], [("b", 1)]):
            server.step(wanted)
        outs.append(torch.cat([server.output("a"), server.output("b")]))
    assert 0 < relative_error(*outs) < 0.05


def test_beside_absorbed_weights_of_eight_bits(device: str) -> None:
    """w_uv is read in e4m3 and the output written so, by one op; a cache in fp8 with it."""
    layer = layer_of(DENSE, absorbed_format="fp8")
    outs = []
    for each, output in ((layer, "fp8_128"), (plain_relative(layer), None)):
        server = Server(each, {"a": sequence(30)}, device=device, format="fp8", output=output)
        plan = server.step([("a", 25)], form="absorbed")
        server.step([("a", 5)])
        outs.append(server.output("a"))
        if output is not None and device == "cpu":
            assert ends_of(plan) == {"absorbed": "project_quantize"}
    assert 0 < relative_error(*outs) < 0.08


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_it_is_the_quantised_step_times_the_weight(scheme: str) -> None:
    layer = layer_of(DENSE, scheme)
    format = layer.output_format
    assert format is not None
    server = Server(layer, {"a": sequence(9)}, output=format)
    seen: list[Any] = []
    server.step([("a", 9)])
    other = Server(plain_relative(layer), {"a": sequence(9)}, output=None)
    other.layer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    other.step([("a", 9)])
    wanted = output_buffers(layer.o_proj, format, 9)
    quantize_out(
        wanted.values, wanted.scales, seen[0].view(9, 4, 32), wanted.global_scale, format=format
    )
    o_proj: Any = layer.o_proj
    expected = decode_output(wanted) @ o_proj.dense.T
    assert relative_error(server.output("a"), expected) < 2e-3  # few values round the other way


def test_bias_and_no_rows() -> None:
    linear = FP8Linear(torch.randn(64, 128), "dynamic", bias=True)
    out = output_buffers(linear, "fp8_128", 0)
    assert project_output(linear, out, torch.bfloat16).shape == (0, 64)
    out = output_buffers(linear, "fp8_128", 3)
    quantize_out(out.values, out.scales, torch.zeros(3, 4, 32), format="fp8_128")
    assert torch.equal(project_output(linear, out, torch.float32), linear.bias.expand(3, 64))


def test_output_format_follows_the_linear_layer() -> None:
    weight = torch.randn(64, 128)
    assert output_format(nn.Linear(128, 64)) is None
    assert output_format(FP8Linear(weight, "dynamic")) == "fp8_128"
    assert output_format(FP8Linear(weight, "static", None)) == "fp8"
    assert output_format(FP8Linear(weight, "dynamic", None)) is None
    assert output_format(FP8Linear(weight, "dynamic", (64, 64))) is None
    assert output_format(FP8Linear(torch.randn(64, 96), "dynamic")) is None
    hooked = FP8Linear(weight, "dynamic")
    hooked.register_forward_hook(lambda *_: None)
    assert output_format(hooked) is None
    powers = FP8Linear(weight, "dynamic")
    powers.weight_scale_inv = nn.Parameter(
        torch.ones(1, 1).to(torch.float8_e8m0fnu), requires_grad=False
    )
    assert output_format(powers) == "fp8_128_pow2"


def test_transformers_own_class_is_known() -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    for scheme, block, format in (("dynamic", (128, 128), "fp8_128"), ("static", None, "fp8")):
        linear = module.FP8Linear(128, 64, block_size=block, activation_scheme=scheme)
        assert output_format(linear) == format
        linear.weight.data.zero_()
        linear.weight_scale_inv.data.fill_(1.0)
        out = output_buffers(linear, format, 3)
        quantize_out(out.values, out.scales, torch.ones(3, 4, 32), out.global_scale, format=format)
        assert not project_output(linear, out, torch.bfloat16).any()


@pytest.mark.parametrize(
    ("linear", "output", "message"),
    [
        (None, "fp8_128", "output must be the format of o_proj, None, got 'fp8_128'"),
        ("static", "fp8_128", "output must be the format of o_proj, 'fp8', got 'fp8_128'"),
        ("dynamic", "nvfp4", "output must be the format of o_proj, 'fp8_128', got 'nvfp4'"),
    ],
)
def test_other_formats_are_refused_before_a_row_is_written(
    linear: str | None, output: str, message: str
) -> None:
    layer = MLAAttention(DENSE) if linear is None else layer_of(DENSE, linear)
    server = Server(layer, {"a": sequence(9)}, output=output)
    assert server.cache.latent is not None
    before = server.cache.latent.data.view(torch.uint8).clone()
    with pytest.raises(ConfigError) as error:
        server.step([("a", 9)])
    assert message in str(error.value)
    assert torch.equal(server.cache.latent.data.view(torch.uint8), before)


def test_compiled() -> None:
    """One graph serves decode steps of all sizes, and its bytes are the plain layer's."""
    layer = layer_of(DENSE)
    sequences = {name: sequence(30, seed) for seed, name in enumerate("abcde")}
    outs = []
    for run in (layer, Compiled(layer)):
        server = Server(layer, sequences, output="fp8_128")
        server.layer = run  # type: ignore[assignment]
        compiled = {"compiled": run is not layer}
        server.step([(name, 7) for name in "abcde"], **compiled)
        for names in ("abc", "abcde", "ab", "abcd"):
            server.step([(name, 1) for name in names], **compiled)
        outs.append(torch.cat([server.output(name) for name in "abcde"]))
    assert torch.equal(*outs)
    assert isinstance(run, Compiled) and run.graphs <= 3


@pytest.mark.slow
@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("options", [{}, {"form": "expanded", "workspace_tokens": 16}], ids=str)
def test_prompts_compiled(config: Any, options: dict[str, Any]) -> None:
    """Chunks that end some rows and go on with others, chosen keys, listed rows, no context."""
    layer = layer_of(config)
    sequences = {name: sequence(120, seed) for seed, name in enumerate("abc")}
    outs = []
    for run in (layer, Compiled(layer)):
        server = Server(layer, sequences, output="fp8_128", **options)
        server.layer = run  # type: ignore[assignment]
        compiled = {"compiled": run is not layer}
        for wanted in (
            [("a", 40), ("b", 7)],
            [("b", 5), ("c", 33), ("a", 6)],
            [("a", 1), ("b", 50), ("c", 1)],
            [("c", 3), ("a", 2), ("b", 1)],
        ):
            server.step(wanted, **compiled)
        outs.append(torch.cat([server.output(name) for name in "abc"]))
    assert relative_error(*outs) < 1e-3


def test_a_captured_step(device: str) -> None:
    """Replayed with other requests in the same buffers."""
    layer = layer_of(DENSE).to(device)
    usual = Server(
        layer, {"a": sequence(30), "b": sequence(30, 2)}, output="fp8_128", device=device
    )
    usual.step([("a", 20), ("b", 9)])
    kept = plan_buffers(DENSE, usual.cache, max_requests=4, max_tokens=4, max_blocks=16)
    hidden = torch.zeros(4, 64, device=device)
    positions = torch.zeros(4, dtype=torch.int64, device=device)
    given: dict[str, Any] = {"dtype": torch.float32, "output": "fp8_128"}

    def planned(wanted: list[tuple[str, int]]) -> Any:
        rows = torch.cat(
            [usual.sequences[name][usual.pool.seq_len(name)][None] for name, _ in wanted]
        )
        hidden[: len(wanted)] = rows
        for i, (name, _) in enumerate(wanted):
            positions[i] = usual.pool.seq_len(name)
        return make_plan(usual.batch(wanted), DENSE, usual.cache, into=kept, **given)

    plan = planned([("a", 1)])
    for _ in range(2):  # compile before capture
        expected = layer(hidden, positions, usual.cache, plan).clone()
    again, out = record(lambda: layer(hidden, positions, usual.cache, plan), device)
    again()
    torch.testing.assert_close(out[:1], expected[:1])
    plan = planned([("b", 1), ("a", 1)])
    again()
    torch.testing.assert_close(out[:2], layer(hidden, positions, usual.cache, plan)[:2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's scaled products")
@pytest.mark.parametrize("T", [1, 3, 16, 129])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_scaled_products(scheme: str, T: int) -> None:
    """torch's own product of the same values, where this GPU has it."""
    torch.manual_seed(0)
    block = None if scheme == "static" else (128, 128)
    linear = FP8Linear(torch.randn(256, 2048) / 45, scheme, block).cuda()
    format = output_format(linear)
    assert format is not None
    if not multiplies_scaled(format, linear.weight, linear.weight_scale_inv, torch.bfloat16):
        pytest.skip("this GPU or CUDA has no such product")
    out = output_buffers(linear, format, T)
    x = torch.randn(T, 16, 128, device="cuda", dtype=torch.bfloat16)
    quantize_out(out.values, out.scales, x, out.global_scale, format=format)
    expected = decode_output(out, torch.float64) @ linear.dense.cuda().double().T
    assert relative_error(project_output(linear, out, torch.bfloat16).double(), expected) < 5e-3


def test_a_gated_step_quantises_after_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(GATED)
    server = Server(layer, {"a": sequence(9)}, output="fp8_128")
    monkeypatch.setattr(quantized, "project_quantize", None)  # would be called before the gate
    plan = server.step([("a", 9)])
    assert set(ends_of(plan).values()) == {"quantize_out"}
    assert "after the gate" in plan.explain()
