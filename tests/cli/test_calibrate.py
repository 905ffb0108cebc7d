"""`openmla calibrate`, and calibrated fp8 on the demo and on copies with latents of other sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from openmla import Scales, attach, calibrate, detach
from openmla.cli.__main__ import main
from openmla.cli.checkpoint import DEMO
from openmla.cli.eval import measure
from openmla.cli.models import demo_text, load_model
from openmla.integrations.transformers import attachment_of
from tests.cli.conftest import KINDS


def bits_per_byte(model: Any, windows: torch.Tensor, kv_scale: Scales | float) -> float:
    attach(model, cache_format="fp8", kv_scale=kv_scale)
    result = measure(model, windows, "dense", "fp8")
    detach(model)
    return result.bits.mean().item()


@torch.no_grad()
def test_latents_of_any_size() -> None:
    """Scale 1 fails where latents are 4096 times as large or as small; calibrated scales do not."""
    text = torch.tensor(list(demo_text().encode()))
    windows = torch.stack([text[:512], text[-512:]])
    found = {}
    for factor in (1.0, 2.0**12, 2.0**-12):
        model = load_model(DEMO, "cpu", dense=True)
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight.mul_(factor)
            layer.self_attn.kv_b_proj.weight.div_(factor)
        scales = calibrate(model, [windows[:1]])
        assert isinstance(scales, Scales)
        found[factor] = (
            bits_per_byte(model, windows, 1.0),
            bits_per_byte(model, windows, scales),
        )
    one, calibrated = found[1.0]
    assert calibrated < one + 0.002  # no worse, but for chance
    for factor in (2.0**12, 2.0**-12):
        assert found[factor][0] > one + 0.1
        assert abs(found[factor][1] - calibrated) < 0.005


@pytest.mark.parametrize("kind", KINDS)
def test_calibrate(
    kind: str, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scales found on a text, of every layer, and generate takes them."""
    text, out = tmp_path / "text.txt", tmp_path / "scales.safetensors"
    text.write_text("".join(map(str, range(60))))
    arguments = ["calibrate", "--model", str(tiny[kind]), "--text", str(text), "--windows", "2"]
    assert main([*arguments, "--out", str(out), "--context", "50"]) == 0
    captured = capsys.readouterr()
    assert "wrote scales.safetensors: scales of 3 layers" in captured.err
    assert len(re.findall(r"^layers\.\d\.self_attn( +[\d.e-]+){4}$", captured.out, re.M)) == 3
    assert len(Scales.load(out).layers) == 3
    generate = ["generate", "--model", str(tiny[kind]), "--prompt", "hello", "--cache-format"]
    assert main([*generate, "fp8", "--kv-scale", str(out), "--max-new-tokens", "3"]) == 0
    assert "clamped: no value was too large for its scale" in capsys.readouterr().out
    assert main([*generate, "fp8", "--kv-scale", "1e-3", "--max-new-tokens", "3"]) == 0
    assert re.search(r"^clamped: \d+ values were too large", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "v4"])
def test_scales_of_the_first_prompt(
    kind: str, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    generate = ["generate", "--model", str(tiny[kind]), "--prompt", "hello", "--kv-scale", "first"]
    queries = ["--query-dtype", "fp8_static", "--max-new-tokens", "3"]
    assert main([*generate, "--cache-format", "fp8", *queries]) == 0
    out = capsys.readouterr().out
    assert "found in the first pass: kv_scale" in out and "one calibrated scale per layer" in out
    assert main([*generate, "--max-new-tokens", "3"]) != 0
    assert "kv_scale must be None with cache_format=None" in capsys.readouterr().err


def test_the_demo_brings_its_own_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "scales.safetensors")
    assert main(["calibrate", "--model", "demo", "--context", "64", "--out", out]) == 0
    assert "scales of 5 layers" in capsys.readouterr().err


def test_a_checkpoint_with_scales(
    tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scales are used, and are no tensors that nobody knows."""
    for file in tiny["sparse"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        weights[f"model.layers.{layer}.self_attn.attn.k_scale"] = torch.tensor(0.03)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for attention in ("dense", "sparse"):
        model = load_model(tmp_path, "cpu", dense=attention == "dense")
        assert "not used" not in capsys.readouterr().err
        attach(model, cache_format="fp8")
        assert attachment_of(model).scales[2].k == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "--model", "nowhere"], "neither demo nor a folder"),
        (["calibrate", "--model", "TINY"], "calibrate: no text is given"),
        (["calibrate", "--model", "demo", "--text", "nowhere"], "'nowhere' cannot be read"),
        (["calibrate", "--model", "demo", "--context", "1"], "--context must be a whole number"),
        (["calibrate", "--model", "demo", "--headroom", "0.5"], "--headroom must be a number from"),
        (
            ["calibrate", "--model", "demo", "--out", "no/where"],
            "--out must be a file in an existing folder",
        ),
        (["calibrate", "--model", "demo", "--device", "x"], "--device 'x' is not a device"),
        (["generate", "--model", "demo", "--kv-scale", "0"], "--kv-scale must be positive and"),
        (["generate", "--model", "demo", "--kv-scale", "-1"], "--kv-scale must be positive and"),
        (["generate", "--model", "demo", "--kv-scale", "nan"], "--kv-scale must be positive and"),
        (["generate", "--model", "demo", "--kv-scale", "inf"], "--kv-scale must be positive and"),
        (
            ["generate", "--model", "demo", "--kv-scale", "1e38"],
            "from 1e-12 to 1e+12, or a file",
        ),
        (["generate", "--model", "demo", "--kv-scale", "1e-30"], "from 1e-12 to 1e+12, or a file"),
    ],
)
def test_refusals(
    arguments: list[str], message: str, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tiny["dense"]) if part == "TINY" else part for part in arguments]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
