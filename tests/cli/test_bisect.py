"""`openmla bisect`: verdict, picture, and a sentence for whatever is wrong with a dump."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from openmla.cli.__main__ import main

PROMPT = "Which of them is wrong, and since when?"
Tiny = dict[str, Path]


def arguments(folder: Path | str, *more: str) -> list[str]:
    return ["bisect", "--model", str(folder), "--prompt", PROMPT, *more]


@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
def test_our_own_step(kind: str, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tiny[kind])) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"openmla's own step: {len(PROMPT)} tokens, 3 layers")
    assert re.search(r"All \d+ components of 3 layers are within their budgets", text)
    assert re.search(r"q_a +\d +[\d.e-]+ +[\d.e-]+ +[\d.e-]+\n", text)


def test_a_dump_a_fault_and_a_picture(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one command saves another judges; then one value of it is off."""
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "dump.safetensors", tmp_path / "errors.png"
    saved = arguments(tiny["dense"], "--cache-format", "fp8", "--kv-scale", "0.05")
    assert main([*saved, "--save", str(path)]) == 0
    assert "wrote dump.safetensors" in capsys.readouterr().err
    against = arguments(tiny["dense"], "--against", str(path), "--plot", str(picture))
    assert main(against) == 0
    assert capsys.readouterr().out.startswith("dump.safetensors: ")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["layers.2.kv_scale"] *= 2
    save_file(tensors, path, metadata)
    assert main(against) == 1
    captured = capsys.readouterr()
    assert "outside its budget is cache (cache rows) of layer 2." in " ".join(captured.out.split())
    assert "as if everything were multiplied by 2." in " ".join(captured.out.split())
    assert "outside in 1 of 3 layers" in captured.out and "wrote errors.png" in captured.err
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--attention", "sparse", "--cache-format", "fp8_ds_mla", "--dtype", "bf16"]):
        assert main(["bisect", "--model", "demo", *more]) == 0
        assert "256 tokens, 5 layers" in capsys.readouterr().out


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("openmla: ") and "Traceback" not in error
    return error


def test_refusals(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, folder = tmp_path / "dump.safetensors", tiny["dense"]
    against = arguments(folder, "--against", str(path))
    assert "--against must be a file, got" in said(against, capsys)
    path.write_bytes(b"no tensors at all")
    assert "--against must be a valid safetensors file" in said(against, capsys)
    assert "--cache-format does not apply to --against" in said(
        [*against, "--cache-format", "fp8"], capsys
    )
    tokens = torch.tensor(list(PROMPT.encode()))
    for tensors, metadata, sentence in (
        (
            {"layers.0.q_a": (39, 16)},
            {"model_type": "deepseek_v4"},
            "model_type of the dump must be deepseek_v3",
        ),
        ({"layers.7.q_a": (39, 16)}, {}, "must be in 0..2 for this model, got layer 7"),
        ({"layers.0.q_a": (39, 17)}, {}, "layers.0.q_a must be [39, "),
        ({"layers.0.cache": (39, 40)}, {"cache_format": "fp8"}, "must be torch.float8_e4m3fn"),
        ({"weights": (2, 2)}, {}, "has no tensors named layers.{i}.{component}"),
        ({"layers.0.q_a": (39, 16)}, {"rope_order": "odd"}, "must be one of kept, split"),
    ):
        made = {name: torch.zeros(shape) for name, shape in tensors.items()}
        save_file({**made, "tokens": tokens}, path, metadata)
        assert sentence in said(against, capsys)
    save_file({"tokens": tokens.flip(0), "layers.0.q_a": torch.zeros(39, 16)}, path)
    assert "must be the 39 tokens of the prompt" in said(against, capsys)
    monkeypatch.setattr("sys.stdin", None)
    assert "no prompt is given" in said(["bisect", "--model", str(folder)], capsys)
    assert "--plot must be a file that ends in" in said(
        arguments(folder, "--plot", "errors.txt"), capsys
    )


def test_nothing_to_judge(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dump.safetensors"
    save_file({"layers.0.output": torch.zeros(39, 64)}, path)
    assert main(arguments(tiny["dense"], "--against", str(path))) == 2
    text = capsys.readouterr().out
    assert "Nothing could be judged" in text and "needs hidden_in, which is not in the dump" in text
