"""`openmla generate`: text, table and comparison from a tiny model on disk."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from openmla.cli.__main__ import main
from tests.integrations.models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level model: no tokenizer, one token per byte."""
    path = tmp_path_factory.mktemp("model")
    model = make_model("deepseek_v3", vocab_size=256)
    model.resize_token_embeddings(256)
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("capture", [[], ["--capture"], ["--no-capture"]], ids=str)
def test_compare(folder: str, capture: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", folder, "--prompt", "hello there", "--compare", *capture]
    assert main([*arguments, "--max-new-tokens", "12", "--dtype", "fp32"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("--- prompt ---\nhello there\n--- generated ---\n")
    assert "12 of 12 tokens the same" in text and "\033" not in text
    assert re.search(r"decode (is|takes) .+, prefill (is|takes) ", text)
    assert re.search(r"decode +[\d.]+ tok/s +[\d.]+ tok/s", text)
    assert "mqa_paged" in text and "absorbed" in text


def test_long_prompt_from_a_file_shows_progress(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("abc " * 110)
    arguments = ["generate", "--model", folder, "--prompt", f"@{prompt}", "--cache-format", "fp8"]
    assert main([*arguments, "--max-new-tokens", "3"]) == 0
    captured = capsys.readouterr()
    assert "prefill 440 tokens" in captured.out and "loading" in captured.err


def test_a_backend_per_op(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", "2"]
    assert main([*arguments, "--backend", "mqa_paged=reference, mha_ragged=sdpa"]) == 0
    assert re.search(r"mqa_paged +reference \(asked for\)", capsys.readouterr().out)


def test_a_checkpoint_that_asks_for_beams(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"num_beams": 4}')
    arguments = ["generate", "--model", str(tmp_path / "m"), "--prompt", "hello"]
    assert main([*arguments, "--max-new-tokens", "2"]) == 0
    assert "--- generated ---" in capsys.readouterr().out


def test_float32_where_bf16_dies(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from openmla.cli import models as generate

    for works, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(generate, "cpu_bf16_works", lambda works=works: works)
        model = generate.load_model(Path(folder), "cpu", "bf16")
        assert next(model.parameters()).dtype == dtype
    assert "using float32" in capsys.readouterr().err


def test_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openmla.cli.__main__.find_spec", lambda name: None)
    assert main(["generate", "--model", "x", "--prompt", "y"]) == 2
    assert 'pip install "openmla[hf]"' in capsys.readouterr().err


def test_refusals(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 2
    assert "neither demo nor a folder with config.json" in capsys.readouterr().err
    assert main(["generate", "--model", folder, "--prompt", ""]) == 2
    assert "--prompt is empty" in capsys.readouterr().err


def test_the_verdict_is_in_plain_words() -> None:
    from openmla.cli.generate import Run, verdict

    ours, theirs = Run([1, 2, 3], 1.2, 1.0, 10, 0), Run([1, 2, 4], 1.0, 3.1, 80, 0)
    lines = verdict(ours, theirs).splitlines()
    assert lines[0].startswith("2 of 3 tokens the same")
    assert max(map(len, lines)) <= 100 and " ".join(lines[1:]) == (
        "With openmla, decode is 3.1x as fast, prefill takes 1.2x as long, and the cache takes 12% "
        "of the memory."
    )
    same = " ".join(verdict(ours, ours).split())
    assert "decode takes about as long" in same and "the cache takes about as much memory" in same
    one = verdict(Run([1], 1.0, 0.0, 20, 0), Run([1], 2.0, 0.0, 10, 0))
    assert one.endswith("prefill is 2.0x as fast, and the cache takes 2.0x the memory.")


def test_a_terminal_sees_the_prompt_dim_and_headings_bold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from openmla.cli.generate import print_prompt

    print_prompt("hello")
    assert capsys.readouterr().out == "--- prompt ---\nhello\n--- generated ---\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_prompt("hello")
    out = capsys.readouterr().out
    assert "\033[2mhello\033[0m" in out and "\033[1m--- generated ---\033[0m" in out


def test_progress_of_what_is_not_shown(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal: the second generation of --compare prints no text."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    arguments = ["generate", "--model", folder, "--prompt", "hello", "--compare"]
    assert main([*arguments, "--max-new-tokens", "3"]) == 0
    err = capsys.readouterr().err
    assert "running plain transformers" in err and "\r3 of 3 tokens\n" in err
