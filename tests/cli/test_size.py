"""`openmla size`: its table, JSON and picture say the same; bad input gets one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from openmla import PRESETS
from openmla.cli.__main__ import main
from openmla.cli.gpus import SIZED, gpu
from openmla.cli.roofline import predict
from openmla.cli.sizes import Split, Step
from openmla.cli.weights import FIELDS, estimated

ROOT = Path(__file__).parents[2]
V32 = ["--model", "deepseek-v3.2", "--gpu", "h200", "--format", "fp8_ds_mla"]


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["size", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence on the error stream; nothing else is printed."""
    assert main(["size", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("openmla: ") and shown.err.count("\n") == 1
    return shown.err


def test_the_page_shows_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = (ROOT / "docs" / "size.md").read_text()
    command, shown = re.findall(r"```(?:bash|text)\n(.*?)```", page, re.DOTALL)[:2]
    arguments = command.replace("\\\n", " ").split()
    assert arguments[0] == "openmla" and main(arguments[1:]) == 0
    printed = capsys.readouterr().out
    assert len(shown.splitlines()) > 15 and shown.rstrip("\n") in printed


def test_json_has_the_numbers_of_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "8", "--link-gbps", "3600", "--link-us", "10", "--batch", "4"]
    report = found(capsys, *V32, *options, "--context", "100000", "--weights-gib", "16")
    assert report["token_bytes"] == {"latent": 61 * 656, "keys": 61 * 132, "total": 61 * 788}
    ranks = [row["ranks"] for row in report["rows"]]
    assert ranks == [2**n for n in range(11)]
    config, machine = PRESETS["deepseek-v3.2"], SIZED["h200"]._replace(link=450e9, latency=1e-5)
    for row in [report["asked"], *report["rows"]]:
        if row["ranks"] > 128:
            assert row["refused"].startswith("128 heads do not divide")
            continue
        step = Step(config, "fp8_ds_mla", "index_fp8", 4, 100000, Split(row["ranks"]))
        step_found = predict(step, machine, 16 * 2**30)
        assert row["seconds"]["total"] == pytest.approx(step_found.time)
        assert row["memory_bytes"]["total"] == step_found.moved
        assert row["sent_bytes"]["total"] == sum(step_found.sent.values())
        room = 0.9 * 141e9 - 16 * 2**30 / row["ranks"]
        assert 0 <= room / (61 * 788) - row["tokens_that_fit"] / row["ranks"] < 64
    assert report["asked"]["ranks"] == 8
    assert set(report["counts"]) <= {*report, *report["asked"]}


def test_every_preset_and_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """In the format made for it, by name and by hand."""
    for name, config in PRESETS.items():
        layers = ["--layers", "7"] if config.model_type == "kimi_linear" else []
        report = found(capsys, "--model", name, "--gpu", "141,4800,989", "--heads", "all", *layers)
        sizes = [row["ranks"] for row in report["rows"]]
        assert sizes == [2**n for n in range(11)]
        assert all(row["seconds"]["total"] > 0 for row in report["rows"])
        assert main(["size", "--model", name, "--gpu", "H200", *layers]) == 0
        text = capsys.readouterr().out
        assert ("tokens that fit" in text) == (report["weights_bytes"] is not None)
    for name, machine in SIZED.items():
        assert gpu(name) == machine and 20 < machine.flops / machine.bandwidth < 500


def test_no_model_fits_without_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Estimated by the config, or unknown; then nothing is claimed."""
    one = found(capsys, "deepseek-v3", "--gpu", "h100")
    assert one["asked"]["fits"] is False and one["asked"]["tokens_that_fit"] == 0
    assert next(row["ranks"] for row in one["rows"] if row.get("fits")) == 16
    assert one["weights_bytes"] == pytest.approx(671e9, rel=0.01)
    assert one["read_weights_bytes"] == pytest.approx(37e9, rel=0.02)  # its active parameters
    assert main(["size", "deepseek-v3", "--gpu", "h100"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(estimated)" in text and "do not fit" in text and "671.0 B parameters in fp8" in text
    unknown = found(capsys, "longcat-flash", "--gpu", "h100")
    assert unknown["weights_bytes"] is None and unknown["asked"]["fits"] is None
    assert main(["size", "longcat-flash", "--gpu", "h100"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "cannot say whether the model fits" in text and "tokens that fit" not in text
    assert "not included" in text and "--weights-gib" in text


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek-v2", 236), ("deepseek-v2-lite", 15.7), ("kimi-k2", 1026), ("glm-5", 744),
     ("glm-4.7-flash", 29.9), ("minicpm3", 4.07)],
)  # fmt: skip
def test_parameters_are_those_that_were_published(name: str, billions: float) -> None:
    config, fields = PRESETS[name], FIELDS[name]
    weights = estimated(config, fields)
    size = 1 if fields.get("quantization_config") else 2
    assert weights is not None and weights.total / size == pytest.approx(1e9 * billions, rel=0.01)
    assert 0 < weights.read <= weights.total
    assert estimated(config, {**fields, "quantization_config": {"quant_method": "gptq"}}) is None
    assert estimated(config, {}) is None


def test_a_hub_model_needs_its_config_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = tmp_path / "models--who--model" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "openmla" / "demo" / "config.json", folder)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(folder.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    report = found(capsys, "who/model", "--gpu", "l4")
    assert report["layers"] == 5 and "estimated" in report["weights_source"]
    assert main(["size", "who/else", "--gpu", "l4"]) == 2
    assert "'who/else'" in capsys.readouterr().err.splitlines()[-1]


def test_times_have_units(capsys: pytest.CaptureFixture[str]) -> None:
    for context, unit in (("64", "us"), ("200000", "ms")):
        asked = [*V32, "--weights-gib", "0", "--context", context, "--batch", "64"]
        seconds = found(capsys, *asked)["asked"]["seconds"]["total"]
        assert main(["size", *asked]) == 0
        line = re.search(r"^time +([\d.]+) (us|ms)", capsys.readouterr().out, re.M)
        assert line is not None and line[2] == unit == ("ms" if seconds > 1e-3 else "us")
        scale = {"us": 1e6, "ms": 1e3}[unit]
        assert float(line[1]) == pytest.approx(scale * seconds, rel=0.01)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_text_wraps_at_the_terminals_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["size", *V32, "--ranks", "8", "--link-gbps", "3600"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if not re.match(r" *(ranks|\d+)  ", line)]
    assert len(lines) > 15 and max(map(len, lines)) <= columns


def test_what_a_table_warns_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", *V32, "--context", "200000", "--batch", "64", "--gpu", "l4"]) == 0
    text = capsys.readouterr().out
    text = " ".join(text.split())
    for part in ("--read-gib", "--link-gbps", "* less than the 12,800,000 tokens"):
        assert part in text
    assert "163,840 positions" in text
    assert "Not for 256, 512, 1024 ranks: 128 heads" in text
    assert main(["size", "--model", "deepseek-v4-pro", "--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    assert "docs/context-parallel-v4.md" in text
    # as allocated: docs/context-parallel-v4.md counts those of one request
    assert re.search(r"^windows and states +\d+\.\d MiB", text, re.MULTILINE)


def test_columns_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--batch", "65536", "--context", "16777216", "--ranks", "1000", "--heads", "all"]
    for options in (large, ["--batch", "1", "--context", "1"]):
        assert main(["size", *V32, *options]) == 0
        rows = re.findall(r"^ *\d+  .*$", capsys.readouterr().out, re.MULTILINE)
        assert len(rows) in (8, 12)
        assert all(len(re.split(r" {2,}", row.strip().replace("* ", "  "))) == 8 for row in rows)


def test_whole_models_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*V32, "--ranks", "3", "--weights-gib", "100", "--read-gib", "10", "--heads", "all"]
    report = found(capsys, *options)
    assert report["asked"]["memory_bytes"]["weights"] == 10 * 2**30
    assert [row["ranks"] for row in report["rows"]][:4] == [1, 2, 3, 4]
    fits = [row["tokens_that_fit"] for row in report["rows"]]
    assert fits[2] == 3 * fits[0] > 0


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    demo = found(capsys, "--model", "demo", "--gpu", "l4")
    file = ROOT / "openmla" / "demo" / "model.safetensors"
    assert demo["weights_bytes"] == file.stat().st_size
    shutil.copy(file.parent / "config.json", tmp_path)
    here = ["--model", str(tmp_path), "--gpu", "l4"]
    counted = json.loads((tmp_path / "config.json").read_text())
    assert found(capsys, *here)["weights_bytes"] == pytest.approx(2 * file.stat().st_size, rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps({**counted, "num_experts": 8}))
    assert found(capsys, *here)["weights_bytes"] is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 1000)  # counted, not opened
    assert found(capsys, *here)["weights_bytes"] == 1000
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert "must be a whole safetensors file" in refused(capsys, *here)
    assert found(capsys, *here, "--weights-gib", "2")["weights_bytes"] == 2 * 2**30
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type 'llama' is not supported" in refused(capsys, *here)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h200"], "MODEL --model is required"),
        (["--model", "deepseek-v3"], "arguments are required: --gpu"),
        (["--model", "deepseek-v33", "--gpu", "h200"], "'deepseek-v33' is no preset"),
        (["--model", "a" * 5000, "--gpu", "h200"], "is no preset"),
        ([*V32, "--gpu", "abacus"], "--gpu must be one of a100"),
        ([*V32, "--gpu", "141,4800"], "or GB,GB/s,TFLOP/s by hand, got '141,4800'"),
        ([*V32, "--gpu", "141,0,989"], "got '141,0,989'"),
        ([*V32, "--gpu", "nan,4800,989"], "got 'nan,4800,989'"),
        ([*V32, "--ranks", "0"], "--ranks must be a whole number from 1 to 1024, got '0'"),
        ([*V32, "--ranks", "2048"], "from 1 to 1024, got '2048'"),
        ([*V32, "--ranks", "3"], "size must divide the model's 128 heads"),
        ([*V32, "--format", "fp7"], "format 'fp7' is not known"),
        ([*V32, "--format", "fp8_dsv4", "--model", "tiny-v3"], "fp8_dsv4 needs rows"),
        ([*V32, "--index-format", "bf16"], "'bf16' is not known for index rows"),
        ([*V32, "--link-gbps", "0"], "--link-gbps must be a number from 0.001"),
        ([*V32, "--link-gbps", "fast"], "got 'fast'"),
        ([*V32, "--link-us", "-1"], "--link-us must be a number from 0"),
        ([*V32, "--batch", "0"], "--batch must be a whole number from 1"),
        ([*V32, "--context", "1" + "0" * 30], "--context must be a whole number from 1"),
        ([*V32, "--heads", "few"], "argument --heads: invalid choice: 'few'"),
        ([*V32, "--read-gib", "999"], "--read-gib 999 exceeds the weights' size, which is 625."),
        (["longcat-flash", "--gpu", "l4", "--read-gib", "1"], "--read-gib 1 exceeds"),
        ([*V32, "--weights-gib", "nan"], "--weights-gib must be a number from 0"),
        ([*V32, "--memory-share", "2"], "--memory-share must be a number from 0.01 to 1"),
        ([*V32, "--plot", "/nowhere/at/all.png"], "--plot must be a file in an existing folder"),
        ([*V32, "--plot", "size.foo"], "--plot must be a file that ends in .png, .svg, .pdf"),
        (["--model", "kimi-linear", "--gpu", "h200"], "Give their number by --layers"),
        (["--model", "glm-5.2", "--gpu", "h200", "--layers", "3"], "one per layer (3)"),
        (["--model", "deepseek-v4-pro", "--gpu", "h200", "--ranks", "3"], "size must divide"),
        (
            ["--model", "deepseek-v4-pro", "--gpu", "h200", "--block-size", "64"],
            "block_size must be a multiple of 128",
        ),
        (["--model", "deepseek-v4-pro", "--gpu", "h200", "--format", "fp8_ds_mla"], "fp8_dsv4"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refusals(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *arguments)


def test_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing = [*V32, "--plot", str(tmp_path / "size.png")]
    monkeypatch.setattr("openmla.cli.pictures.find_spec", lambda name: None)
    assert "--plot needs matplotlib" in refused(capsys, *drawing)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    pytest.importorskip("matplotlib").use("Agg")
    assert main(["size", *drawing]) == 0
    assert (tmp_path / "size.png").read_bytes().startswith(b"\x89PNG")
