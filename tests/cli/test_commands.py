"""Every command and every example runs, on a tiny model of each kind; the slow ones as programs."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from openmla.cli.__main__ import COMMANDS, OPTIONS, main
from tests.cli.conftest import KINDS

ROOT = Path(__file__).parents[2]
FORMATS = {
    "dense": [
        "fp32",
        "bf16",
        "fp16",
        "fp8",
        "fp8+scales",
        "fp8-weights",
        "fp8-queries",
        "fp8-prefill",
    ],
    "sparse": [
        "fp32",
        "bf16",
        "fp16",
        "fp8",
        "fp8+scales",
        "fp8-weights",
        "fp8-queries",
        "fp8-prefill",
    ],
    "v4": ["fp32", "bf16", "fp16", "fp8", "fp8+scales", "fp8_dsv4"],
}
ATTENTIONS = {"dense": ["dense"], "sparse": ["dense", "sparse"], "v4": ["sparse"]}


@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind: str, tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(tiny[kind]), "--prompt", "hello there " * 4]
    assert main([*arguments, "--max-new-tokens", "6", "--compare"]) == 0
    text = capsys.readouterr().out
    assert "6 of 6 tokens the same" in text
    assert re.search(r"^cache +[\d.]+ MiB +[\d.]+ MiB$", text, re.MULTILINE)


def test_generate_with_a_wrapper_and_another_rope(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vision model around a text model, and a kind of rope that only transformers knows."""
    from tests.integrations.models import make_mistral3, make_model

    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with torch.no_grad():
        text = make_model("mistral4").config.to_dict()
        make_mistral3({**text, "vocab_size": 256}).save_pretrained(tmp_path / "wrapper")
        stretched = make_model("deepseek_v2", rope_parameters=linear, rope_scaling=None)
        stretched.resize_token_embeddings(256)
        stretched.save_pretrained(tmp_path / "rope")
    for name in ("wrapper", "rope"):
        arguments = ["generate", "--model", str(tmp_path / name), "--prompt", "hello there"]
        assert main([*arguments, "--max-new-tokens", "6", "--compare"]) == 0
        assert "6 of 6 tokens the same" in capsys.readouterr().out


def test_generate_with_layers_of_two_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.integrations.models import make_dots3

    with torch.no_grad():
        make_dots3(vocab_size=256).save_pretrained(tmp_path)
    arguments = ["generate", "--model", str(tmp_path), "--prompt", "longer than the window"]
    assert main([*arguments, "--max-new-tokens", "6", "--compare"]) == 0
    out = capsys.readouterr().out
    assert "6 of 6 tokens the same" in out and "3 layers of kind 1: 2, 3, 4" in out
    assert main(["size", "--model", str(tmp_path), "--gpu", "H200"]) == 2
    assert "dots3_note_text is not supported, because its layers differ" in capsys.readouterr().err


def test_generate_in_v4s_own_format(
    tiny: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(tiny["v4"]), "--prompt", "hello"]
    assert main([*arguments, "--max-new-tokens", "2", "--cache-format", "fp8_dsv4"]) == 0
    assert "fp8_dsv4 and index_fp32" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_eval(
    kind: str, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every format that the model's rows can have, in every form of its attention."""
    text = tmp_path / "text.txt"
    text.write_text("".join(map(str, range(60))))
    assert main(["eval", "--model", str(tiny[kind]), "--text", str(text), "--windows", "1"]) == 0
    rows = re.findall(r"^(dense|sparse) +(\S+) +[\d.]+ +[\d.]+  ", capsys.readouterr().out, re.M)
    assert rows == [(form, name) for form in ATTENTIONS[kind] for name in FORMATS[kind]]


def test_eval_has_one_progress_bar(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all that it measures: two forms in two formats."""
    text, bars = tmp_path / "text.txt", []
    text.write_text("".join(map(str, range(60))))

    @contextmanager
    def recorded(total: int) -> Iterator[Callable[[str, int], None]]:
        done: list[int] = []
        bars.append((total, done))
        yield lambda what, so_far: done.append(so_far)

    monkeypatch.setattr("openmla.cli.eval.progress", recorded)
    command = ["eval", str(tiny["sparse"]), "--text", str(text), "--windows", "1"]
    assert main([*command, "--formats", "fp32,bf16", "--context", "80"]) == 0
    ((total, done),) = bars
    assert total == 2 * 2 * 80 and done == sorted(done) and done[-1] == total
    assert {0, 64, 80, 144, 160} <= set(done)


def test_eval_has_a_row_for_weights_in_eight_bits(
    tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One per form of attention, near the model's own; none of V4, which absorbs nothing."""
    text = tmp_path / "text.txt"
    text.write_text("".join(map(str, range(60))))
    for kind in KINDS:
        main(["eval", "--model", str(tiny[kind]), "--text", str(text), "--windows", "1"])
        out = capsys.readouterr().out
        found = re.findall(r"^(dense|sparse) +fp8-weights +[\d.]+ +[\d.]+  (\S+)%", out, re.M)
        assert [form for form, _ in found] == ([] if kind == "v4" else list(ATTENTIONS[kind]))
        assert all(abs(float(percent)) < 1 for form, percent in found if form == "dense")
        if kind != "v4":
            asked = ["--prompt", "hello", "--max-new-tokens", "4", "--absorbed-format", "fp8"]
            main(["generate", "--model", str(tiny[kind]), *asked])
            assert "fp8 copy of kv_b_proj, besides" in capsys.readouterr().out
            fp8 = ["--cache-format", "fp8", "--kv-scale", "0.1", "--query-dtype", "fp8"]
            main(
                ["generate", "--model", str(tiny[kind]), *asked[:4], *fp8, "--prefill-dtype", "fp8"]
            )
            assert "tokens" in capsys.readouterr().out
            assert main(["generate", "--model", str(tiny[kind]), *asked[:4], *fp8[4:]])
            told = capsys.readouterr().err
            assert "query_dtype must be None for a cache of the default format" in told


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    from openmla import __version__
    from openmla.backends import BACKENDS

    for arguments, parts in (
        (["--version"], [f"openmla {__version__}"]),
        (["--help"], ["doctor", "generate", "eval", "calibrate", "size", "bench"]),
        (["size", "--help"], ["--link-gbps", "--weights-gib", "one way"]),
        (["doctor", "--help"], ["--compile"]),
        (["bench", "--help"], [*BACKENDS, "step", "generate"]),
        (["bench", "rope", "--help"], ["tiny-64x4-pairs", "--rounds"]),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert all(part in text for part in parts), arguments


@pytest.mark.parametrize("command", ["", *COMMANDS, "bench rope", "bench step", "bench generate",
                                     "bench --batch-invariant"])  # fmt: skip
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_wraps_and_breaks_no_word(
    command: str,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def words(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        text = capsys.readouterr().out
        text = text[text.index("\n\n") :]  # behind the usage, which argparse wraps
        longest = max((line for line in text.splitlines() if " " in line.strip()), key=len)
        assert len(longest) <= width, longest
        return text.split()

    assert words(columns) == words(1000)


@pytest.mark.parametrize("command", [*OPTIONS, "size"])
def test_a_model_is_named_alike_in_every_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the first argument or by --model: both reach the same check; once, and not left out."""
    rest = {"size": ["--gpu", "h200"], "generate": ["--prompt", "x"], "bisect": ["--prompt", "x"]}
    told = []
    for named in (["no/such/folder"], ["--model", "no/such/folder"]):
        assert main([command, *named, *rest.get(command, [])]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] and "'no/such/folder'" in told[0]
    for named in (["demo", "--model", "demo"], []):
        assert main([command, *named, *rest.get(command, [])]) == 2
        assert "MODEL" in capsys.readouterr().err


def test_example_cached_attention(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/cached_attention.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert re.search(r"fp8_ds_mla +656", text) and "index" not in text and "dsv4" not in text


def test_example_huggingface(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/huggingface.py"))["main"](prompt_tokens=100)
    assert "tokens the same" in capsys.readouterr().out


def test_examples_are_linked() -> None:
    for page in ("README.md", "docs/cache-formats.md"):
        text = (ROOT / page).read_text()
        assert re.search(r"\]\((\.\./)?examples/cached_attention\.py\)", text), page
    text = (ROOT / "README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"](examples/{path.name})" in text, path.name


def program(*arguments: str, cwd: Path = ROOT) -> str:
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(cwd)}
    child = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.parametrize("quiet", [False, True])
def test_a_line_is_printed_before_pytorch_is_imported(quiet: bool) -> None:
    arguments = ["openmla", "generate", "demo", *(["-q"] if quiet else [])]
    code = f"import sys; sys.argv, sys.modules['openmla'] = {arguments}, None; "
    command = [sys.executable, "-c", f"{code}import openmla_command; openmla_command.main()"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "ModuleNotFoundError" in child.stderr  # openmla and PyTorch are not reached
    assert child.stderr.startswith("openmla: importing PyTorch\n") == (not quiet)


def test_bench_needs_nothing_beside_the_package(tmp_path: Path) -> None:
    """What a wheel holds of code that a benchmark may import."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "openmla", tmp_path / "openmla", ignore=ignore)
    out = program("-m", "openmla.cli", "bench", "rope", "tiny-64x4-pairs", cwd=tmp_path)
    assert "x reference" in out


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_models_as_programs(kind: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(map(str, range(60))))
    model = ["--model", str(tiny[kind])]
    out = program("-m", "openmla.cli", "generate", *model, "--prompt", "hello", "--compare")
    assert "128 of 128 tokens the same" in out
    assert "bits/byte" in program("-m", "openmla.cli", "eval", *model, "--text", str(text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["-m", "openmla.cli", "doctor"], "ops on cpu"),
        (["-m", "openmla.cli", "bench", "rope"], "x reference"),
        (["-m", "openmla.cli", "bench", "step", "--keys", "300"], "x transformers"),
        (["-m", "openmla.cli", "bench", "generate", "--keys", "64"], "tokens/s"),
        (["-m", "bench.latent", "--help"], "--sweep"),
        (["examples/cached_attention.py"], "fp8_ds_mla"),
        (["examples/huggingface.py"], "tokens the same"),
        (["examples/two_ranks.py"], "rank 1 of 2: 20 tokens after 300, tokens the same as alone"),
        (["examples/engine.py", "--device", "cpu"], "64 of 64 free at the end"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_programs(arguments: list[str], part: str) -> None:
    assert part in program(*arguments)


@pytest.mark.slow
def test_the_training_example_as_a_program(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--steps", "2", "--index-steps", "1", "--batch", "1"]
    arguments += ["--measure", "1", "--device", "cpu"]
    assert "bits per byte" in program("examples/train_demo.py", *arguments)
