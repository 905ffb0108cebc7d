"""The demo checkpoint: what is in the package, what it generates, and what `openmla eval` says."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from openmla.cli.__main__ import main
from openmla.cli.checkpoint import DEMO
from openmla.cli.models import demo_prompt, demo_text, load_model

ROOT = Path(__file__).parents[2]


def test_the_demo_checkpoint_is_small_sparse_and_described() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 12e6
    config = json.loads((DEMO / "config.json").read_text())
    assert config["model_type"] == "deepseek_v32" and config["n_routed_experts"] > 1
    assert 8 * config["index_topk"] <= config["max_position_embeddings"]
    assert config["index_n_heads"] >= 16
    card = (DEMO / "README.md").read_text()
    assert "python examples/train_demo.py" in card and "bits per byte" in card


def test_dense_and_sparse_are_one_set_of_weights() -> None:
    dense = load_model(DEMO, "cpu", dense=True).state_dict()
    sparse = load_model(DEMO, "cpu").state_dict()
    assert {name for name in sparse if name not in dense} == {
        name for name in sparse if ".indexer." in name
    }
    assert all(torch.equal(tensor, sparse[name]) for name, tensor in dense.items())


def test_generates_python(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", "demo", "--compare", "--max-new-tokens", "48"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "48 of 48 tokens the same" in text
    assert re.search(r"prefill (is [\d.]+x as fast|takes (about|[\d.]+x) as long)", text)
    shown, written = text[: text.index("--- times ---")].split("--- generated ---")
    assert demo_prompt()[-300:].rstrip() in shown and shown.startswith(
        "--- prompt, the last 300 of 3"
    )
    assert re.search(r"\b(self|return|if|def|None|True|False)\b", written)


def test_sparse_says_how_many_keys(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", "demo", "--attention", "sparse", "--compare"]
    prompt = demo_prompt()[:600]
    assert main([*arguments, "--max-new-tokens", "8", "--prompt", prompt]) == 0
    text = capsys.readouterr().out
    assert "8 of 8 tokens the same" in text
    last = len(prompt) + 7
    assert f"at most 256 keys, selected by the indexer; the last one to 256 of {last}." in text
    assert f"top-k selection for 1 token: 256 of up to {last} keys" in text


def test_eval_shows_dense_against_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    """The indexer's 256 keys of 1024 cost little; the weights are the same."""
    arguments = ["eval", "--model", "demo", "--context", "1024", "--windows", "2"]
    assert main([*arguments, "--formats", "fp32", "--index-format", "index_fp8"]) == 0
    rows = re.findall(r"(dense|sparse) +fp32 +([\d.]+) +([\d.]+)  [+-]", capsys.readouterr().out)
    (_, dense_bytes, dense), (_, sparse_bytes, sparse) = rows
    assert float(sparse_bytes) == float(dense_bytes) + 5 * 36
    assert 0 < abs(float(sparse) / float(dense) - 1) < 0.05


def test_the_held_out_text_is_python() -> None:
    for module in demo_text().split("\0"):
        ast.parse(module)


def test_eval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """bf16 rows are as good as fp32 ones, fp8 rows nearly; the plot is drawn."""
    picture = tmp_path / "bits.png"
    arguments = ["eval", "--model", "demo", "--attention", "dense", "--context", "512"]
    assert main([*arguments, "--windows", "6", "--plot", str(picture)]) == 0
    captured = capsys.readouterr()
    bits = {
        format: float(value)
        for format, value in re.findall(r"dense +(\S+) +[\d.]+ +([\d.]+)  [+-]", captured.out)
    }
    assert set(bits) == {
        "fp32", "bf16", "fp16", "fp8", "fp8+scales", "fp8_ds_mla", "fp8-weights", "fp8-queries",
        "fp8-prefill", "transformers",
    }  # fmt: skip
    assert abs(bits["transformers"] / bits["fp32"] - 1) < 1e-4
    assert 0.5 < bits["fp32"] < 2.0
    assert abs(bits["bf16"] / bits["fp32"] - 1) < 1e-3
    assert abs(bits["fp16"] / bits["fp32"] - 1) < 1e-3
    assert abs(bits["fp8"] / bits["fp32"] - 1) < 1e-2
    assert bits["fp8+scales"] < bits["fp8"] + 2e-3  # no worse, but for chance
    assert abs(bits["fp8_ds_mla"] / bits["fp32"] - 1) < 1e-2
    assert 0 < abs(bits["fp8-queries"] / bits["fp8+scales"] - 1) < 1e-2
    assert abs(bits["fp8-prefill"] / bits["fp32"] - 1) < 2e-2
    assert "▇" in captured.out or "█" in captured.out
    assert "measuring dense fp8, 4 of 10" in captured.err
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_eval_is_what_transformers_computes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "--model", "demo", "--attention", "dense", "--context", "200"]
    assert main([*arguments, "--windows", "2", "--formats", "fp32"]) == 0
    found = re.search(r"dense +fp32 +[\d.]+ +([\d.]+)", capsys.readouterr().out)
    assert found is not None
    model, text = load_model(DEMO, "cpu", dense=True), torch.tensor(list(demo_text().encode()))
    rows = torch.stack([text[:200], text[-200:]])
    loss = model(rows, labels=rows).loss.item() / torch.log(torch.tensor(2.0)).item()
    assert abs(float(found[1]) - loss) < 2e-4


def test_a_missing_matplotlib_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openmla.cli.pictures.find_spec", lambda name: None)
    assert main(["eval", "--model", "demo", "--plot", "x.png"]) == 2
    assert capsys.readouterr().err.endswith('pip install "openmla[plot]".\n')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1"], "--context must be a whole number from 2"),
        (["--context", "10000000"], "--context must be from 2 to the text's"),
        (["--windows", "0"], "--windows must be a whole number from 1"),
        (["--formats", "fp7"], "format 'fp7' is not known"),
    ],
)
def test_eval_refusals(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--model", "demo", "--attention", "dense", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["eval", "--model", str(ROOT)]) == 2
    assert "neither demo nor a folder" in capsys.readouterr().err


def test_options_that_do_not_fit_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said, not ignored; formats a model cannot use are left out of the default ones."""
    from tests.integrations.models import make_model, make_sparse

    folder, text = str(tmp_path / "m"), tmp_path / "t.txt"
    text.write_text("abc " * 60)
    ask = ["--model", folder, "--prompt", "abcd", "--max-new-tokens", "2"]
    measure = ["--model", folder, "--text", str(text), "--windows", "1", "--context", "40"]
    make_sparse("glm_moe_dsa", vocab_size=256).save_pretrained(folder)
    assert main(["generate", *ask, "--attention", "dense"]) == 2
    assert "glm_moe_dsa has no dense attention" in capsys.readouterr().err
    assert main(["generate", *ask[:-1], "0"]) == 2
    assert "--max-new-tokens must be a whole number from 1" in capsys.readouterr().err
    assert main(["eval", *measure]) == 0
    out = capsys.readouterr().out
    assert "sparse     fp8 " in out and "fp8_ds_mla" not in out and "dense" not in out
    make_model("deepseek_v3", vocab_size=256).save_pretrained(folder)
    assert main(["generate", *ask, "--attention", "sparse"]) == 2
    assert "deepseek_v3 has no sparse attention" in capsys.readouterr().err


@pytest.fixture
def train_demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo", ROOT / "examples/train_demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CONTEXT", 64)
    monkeypatch.setitem(module.INDEXER, "index_topk", 16)
    return module


@pytest.mark.filterwarnings("ignore")
def test_the_training_script(
    train_demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both trainings run, the loss falls, and the folder is a model again."""
    held_out = b"def a():\n    return 1\n" * 8
    texts = [torch.frombuffer(bytearray(held_out * 4), dtype=torch.uint8)] * 2
    monkeypatch.setattr(train_demo, "load_text", lambda: (texts, held_out))
    argv = ["train_demo.py", "--out", str(tmp_path), "--steps", "12", "--index-steps", "2"]
    monkeypatch.setattr("sys.argv", [*argv, "--batch", "4", "--device", "cpu"])
    losses: list[float] = []
    monkeypatch.setattr(
        train_demo.Progress, "__call__", lambda self, step, value: losses.append(value.max().item())
    )
    with torch.inference_mode(False):
        train_demo.main()
    assert losses[11] < losses[0] - 1
    assert (tmp_path / "heldout.txt").read_bytes() == held_out
    load_model(tmp_path, "cpu")


def test_the_script_scores_as_the_model_selects(train_demo: ModuleType) -> None:
    """What the indexer is trained on is what transformers' indexer picks its keys by."""
    sparse, dense = load_model(DEMO, "cpu"), load_model(DEMO, "cpu", dense=True)
    ids = torch.tensor(list(demo_text().encode()))[None, :64]
    inputs = train_demo.LayerInputs(dense)
    dense.model(ids, use_cache=False)
    rows = torch.tensor([40, 63])
    mask = torch.ones(64, 64, dtype=torch.bool).tril()[None]
    for call, layer in zip(inputs.calls, sparse.model.layers, strict=True):
        indexer = layer.self_attn.indexer
        scores = train_demo.index_scores(call, indexer, rows)
        module, hidden = call["module"], call["hidden_states"]
        indexer.index_topk = 16
        q_resid = module.q_a_layernorm(module.q_a_proj(hidden))
        chosen = indexer(hidden, q_resid, call["position_embeddings"], mask, None)
        for row, position in enumerate(rows.tolist()):
            wanted = set(chosen[0, position].tolist())
            assert set(scores[0, row].topk(16).indices.tolist()) == wanted
