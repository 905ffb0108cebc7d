"""Bad input gets one sentence, exit status 2 and no traceback; interrupts and pipes their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from openmla.cli.__main__ import main
from tests.integrations.models import make_model

Damage = Callable[[Path], object]
ROOT = Path(__file__).parents[2]
ASK = ["--prompt", "hello", "--max-new-tokens", "2"]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4}
INDEX = "model.safetensors.index.json"


def config(**changes: Any) -> Damage:
    """Fields of config.json changed, or taken out where None."""

    def damage(folder: Path) -> None:
        fields = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps(fields))

    return damage


def written(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.self_attn.kv_b_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def stored_as(dtype: torch.dtype, part: str = "") -> Damage:
    """Weights cast, all of them or those with a part of a name."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        for name in weights:
            if part in name:
                weights[name] = weights[name].to(dtype)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def generation(**fields: Any) -> Damage:
    return written("generation_config.json", json.dumps(fields).encode())


def ending_with(token: Any) -> Damage:
    """config.json says it, no generation_config.json is there to say otherwise."""

    def damage(folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        config(eos_token_id=token)(folder)

    return damage


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    weight_map = {"model.norm.weight": "one.safetensors", "lm_head.weight": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / INDEX).write_text("[1, 2]")


# Options of generate, with {here} for a folder of odd files, and what the sentence says.
OPTIONS: dict[str, tuple[list[str], str]] = {
    "no command": ([], "the following arguments are required: command. See"),
    "unknown command": (["dance"], "argument command: invalid choice: 'dance'"),
    "unknown option": (["generate", "--model", "demo", "--colour"], "unrecognized arguments"),
    "no model": (["generate", "--prompt", "x"], "one of the arguments MODEL --model is required"),
    "model nowhere": (["generate", "--model", "{here}/none", *ASK], "a folder with config.json"),
    "model too long": (["generate", "--model", "a" * 5000, *ASK], "a folder with config.json"),
    "prompt missing": (["--prompt", "@{here}/none.txt"], "none.txt' cannot be read: No such file"),
    "prompt a folder": (["--prompt", "@{here}"], "Is a directory"),
    "prompt binary": (["--prompt", "@{here}/binary"], "is not text in UTF-8"),
    "prompt file empty": (["--prompt", "@{here}/empty"], "is empty"),
    "prompt empty": (["--prompt", ""], "--prompt is empty"),
    "prompt no text": (["--prompt", "a\udce9b"], "--prompt must be text in UTF-8"),
    "device unknown": (["--device", "abacus"], "--device 'abacus' is not a device"),
    "device cuda": (["--device", "cuda"], "--device cuda needs a GPU"),
    "device meta": (["--device", "meta"], "--device meta has no memory"),
    "device absent": (["--device", "xla"], "--device xla cannot be used"),
    "seed negative": (["--seed", "-1"], "--seed must be a whole number from 0"),
    "temperature nan": (["--temperature", "nan"], "--temperature must be 0 or a number from"),
    "temperature inf": (["--temperature", "inf"], "got 'inf'"),
    "temperature negative": (["--temperature", "-0.5"], "got '-0.5'"),
    "temperature tiny": (["--temperature", "1e-30"], "got '1e-30'"),
    "temperature word": (["--temperature", "warm"], "got 'warm'"),
    "no tokens": (["--max-new-tokens", "0"], "--max-new-tokens must be a whole number from 1"),
    "fewer tokens": (["--max-new-tokens", "-5"], "got '-5'"),
    "all the tokens": (["--max-new-tokens", "1" + "0" * 30], "from 1 to 16777216, got '1000"),
    "format unknown": (["--cache-format", "fp7"], "format 'fp7' is not known"),
    "format of keys": (["--cache-format", "index_fp8"], "not known for latent rows"),
    "format too wide": (["--cache-format", "fp8_ds_mla"], "needs kv_lora_rank to be a multiple"),
    "index format": (["--index-format", "fp32"], "'fp32' is not known for index rows"),
    "backend unknown": (["--backend", "abacus"], "--backend must be auto or one of"),
    "backend elsewhere": (["--backend", "triton"], "--backend triton cannot run this model"),
    "backend of an op": (
        ["--backend", "mqa_paged=tritom"],
        "--backend: backend of mqa_paged must be auto or one of",
    ),
    "backend of no op": (["--backend", "mqa=triton"], "--backend: op 'mqa' is not known"),
    "backend in bits": (["--backend", "mqa_paged=triton,"], "--backend must be a name, or op=name"),
    "backend in part": (["--backend", "sdpa"], "--backend sdpa cannot run this model: has no"),
    "attention": (["--attention", "sparse"], "deepseek_v3 has no sparse attention"),
}
EVAL: dict[str, tuple[list[str], str]] = {
    "text missing": (["--text", "{here}/none.txt"], "No such file or directory"),
    "text a folder": (["--text", "{here}"], "Is a directory"),
    "text binary": (["--text", "{here}/binary"], "is not text in UTF-8"),
    "text none": ([], "no text is given"),
    "text short": (["--text", "{here}/letter"], "from 2 to the text's 1 tokens, got 1"),
    "windows": (["--text", "{here}/letters", "--windows", "0"], "--windows must be a whole number"),
    "context": (["--text", "{here}/letters", "--context", "99"], "to the text's 6 tokens, got 99"),
    "formats": (["--text", "{here}/letters", "--formats", "fp32,"], "format '' is not known"),
    "plot": (["--text", "{here}/letters", "--plot", "{here}/none/a.png"], "in an existing folder"),
    "plot kind": (
        ["--text", "{here}/letters", "--plot", "a.foo"],
        "--plot must be a file that ends",
    ),
}
CHECKPOINTS: dict[str, tuple[Damage, str]] = {
    "weights truncated": (cut, "must be a whole safetensors file"),
    "weights empty": (written("model.safetensors", b""), "it is empty or no file"),
    "weights no format": (written("model.safetensors", b"hello" * 9), "whole safetensors file"),
    "weights missing": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "the folder has no weights",
    ),
    "shard missing": (without_a_shard, "names 'two.safetensors', which is missing"),
    "index a list": (broken_index, "must hold a weight_map of tensors to files"),
    "tensor missing": (without_a_tensor, "such as model.layers.1.self_attn.kv_b_proj.weight"),
    "pickles": (pickled, "Give --allow-pickle if you trust them"),
    "config broken": (written("config.json", b"{"), "is not valid JSON"),
    "config binary": (written("config.json", b"\xff\x00"), "is not valid JSON"),
    "config a list": (written("config.json", b"[]"), "must contain a JSON object, got list"),
    "type unknown": (config(model_type="abacus"), "model_type 'abacus' is not supported"),
    "type not MLA": (config(model_type="llama"), "model_type 'llama' is not supported"),
    "type a number": (config(model_type=7), "model_type 7 is not supported"),
    "hidden mistyped": (config(hidden_size="x"), "hidden_size must be an integer, got 'x'"),
    "hidden zero": (config(hidden_size=0), "hidden_size must be a positive integer, got 0"),
    "hidden other": (config(hidden_size=80), "must be [256, 80] by config.json, got [256, 64]"),
    "eps nan": (config(rms_norm_eps=float("nan")), "rms_norm_eps must be a finite number"),
    "layers absurd": (config(num_hidden_layers=2**40), "num_hidden_layers must be at most 100000"),
    "layers too many": (config(num_hidden_layers=9999), "must have no more layers than the wei"),
    "heads negative": (config(num_attention_heads=-4, num_key_value_heads=-4), "num_heads must be"),
    "vocab mistyped": (config(vocab_size="many"), "transformers cannot read config.json"),
    "vocab negative": (config(vocab_size=-4), "vocab_size must be a positive integer, got -4"),
    "vocab absurd": (config(vocab_size=10**12), "vocab_size must be at most 2147483648"),
    "vocab small": (config(vocab_size=100), "outside the model's vocab_size of 100"),
    "dtype": (config(dtype="float99"), "transformers cannot read config.json"),
    "dtype odd": (config(dtype="float64"), "dtype must be float32, bfloat16 or float16"),
    "gptq": (config(quantization_config=GPTQ), "model requires optimum"),
    "quantised oddly": (config(quantization_config={"quant_method": "x"}), "transformers knows"),
    "quantised, a list": (config(quantization_config=[1]), "transformers cannot read config.json"),
    "tokenizer": (written("tokenizer.json", b"{"), "transformers cannot load the tokenizer"),
    "generation broken": (written("generation_config.json", b"{"), "use generation_config.json"),
    "generation a list": (written("generation_config.json", b"[]"), "use generation_config.json"),
    "generation mistyped": (generation(repetition_penalty="x"), "must be a finite number, got 'x"),
    "end a word": (generation(eos_token_id="x"), "must be a token from 0 to 255, got 'x'"),
    "ends a word": (generation(eos_token_id=[1, "x"]), "eos_token_id in generation_config.json"),
    "end past the words": (generation(eos_token_id=256), "from 0 to 255, got 256"),
    "end negative": (ending_with(-3), "eos_token_id in config.json must be a token from 0 to 255"),
    "end absurd": (ending_with(2**70), "eos_token_id in config.json must be a token from 0 to 25"),
    "weights int8": (stored_as(torch.int8), "must be stored in 16 bits or wider where config.js"),
    "weights bool": (stored_as(torch.bool), "has no quantization_config, got BOOL. Add the one"),
    "weights e4m3": (stored_as(torch.float8_e4m3fn, "kv_b_proj"), "kv_b_proj.weight must be sto"),
    "weights int64": (stored_as(torch.int64, "kv_b_proj"), "quantization_config, got I64"),
}
WITH_EXPERTS: dict[str, tuple[Damage, str]] = {
    "experts": (config(num_experts_per_tok=99), "transformers cannot run it: RuntimeError: selec"),
    "experts e4m3": (stored_as(torch.float8_e4m3fn, "experts"), "got F8_E4M3. Add the one"),
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "letter").write_text("a")
    (tmp_path / "letters").write_text("abcdef")
    return tmp_path


def sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str], *, may_load: bool = False
) -> str:
    """The one line that a refusal prints, behind notes of progress."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    notes = ["openmla: no tokenizer", *(["openmla: loading"] if may_load else [])]
    lines = captured.err.splitlines()
    while lines and lines[0].startswith(tuple(notes)):
        lines.pop(0)
    assert len(lines) == 1 and lines[0].startswith("openmla: "), captured.err
    assert captured.out == ""
    return lines[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_options(
    name: str, tiny: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = OPTIONS[name]
    if name == "device cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    if options[:1] != ["generate"] and not name.endswith("command"):
        rest = [] if "--prompt" in options else ["--prompt", "hello"]
        options = ["generate", "--model", str(tiny["dense"]), *rest, *options]
    said = sentence([option.replace("{here}", str(here)) for option in options], capsys)
    assert message in said


@pytest.mark.parametrize("name", EVAL)
def test_eval(
    name: str, tiny: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = EVAL[name]
    options = [option.replace("{here}", str(here)) for option in options]
    assert message in sentence(["eval", "--model", str(tiny["dense"]), *options], capsys)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(
    name: str, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = CHECKPOINTS[name]
    if name == "gptq" and find_spec("optimum") is not None:
        pytest.skip("it is installed")
    folder = tmp_path / "model"
    shutil.copytree(tiny["dense"], folder)
    damage(folder)
    said = sentence(["generate", "--model", str(folder), *ASK], capsys, may_load=True)
    assert message in said


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_checkpoints_with_experts(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = WITH_EXPERTS[name]
    folder = here / "model"
    with torch.no_grad():
        model = make_model("deepseek_v3", first_k_dense_replace=1)
        model.resize_token_embeddings(256)
        model.save_pretrained(folder)
    capsys.readouterr()
    damage(folder)
    for command in (
        ["generate", "--model", str(folder), *ASK],
        ["eval", "--model", str(folder), "--text", str(here / "letters")],
    ):
        assert message in sentence(command, capsys, may_load=True)


def test_fp8_without_accelerate(
    tiny: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: False)
    folder = tmp_path / "model"
    shutil.copytree(tiny["dense"], folder)
    config(quantization_config=FP8)(folder)
    said = sentence(["generate", "--model", str(folder), *ASK], capsys, may_load=True)
    assert "an FP8 quantized model requires accelerate" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_prompt_that_may_not_be_read(
    tiny: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "letters").chmod(0)
    asked = ["generate", "--model", str(tiny["dense"]), "--prompt", f"@{here}/letters"]
    assert "Permission denied" in sentence(asked, capsys)


def test_pickles_that_are_trusted(
    tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny["dense"], folder)
    pickled(folder)
    assert main(["generate", "--model", str(folder), *ASK, "--allow-pickle"]) == 0
    assert "--- generated ---" in capsys.readouterr().out


def test_tensors_left_over_are_told(
    tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for those that transformers' class lists: V3's draft layer 61."""
    folder = tmp_path / "model"
    shutil.copytree(tiny["dense"], folder)
    weights = load_file(folder / "model.safetensors")
    listed, other = {"model.layers.61.a": torch.ones(2)}, {"model.extra": torch.ones(2)}
    for more, told in ((listed, False), ({**listed, **other}, True)):
        save_file({**weights, **more}, folder / "model.safetensors", metadata={"format": "pt"})
        assert main(["generate", "--model", str(folder), *ASK]) == 0
        said = "warning: the model does not use 1 tensor of the checkpoint, such as model.extra"
        assert (said in capsys.readouterr().err) == told


@pytest.mark.parametrize("kind", ["dense", "v4"])
def test_more_tokens_than_the_context_is_a_warning(
    kind: str, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny[kind], folder)
    config(max_position_embeddings=16)(folder)
    asked = ["generate", "--model", str(folder), "--max-new-tokens", "8", "--compare", "--prompt"]
    assert main([*asked, "hello " * 2]) == 0
    captured = capsys.readouterr()
    said = "openmla: warning: 20 tokens, the prompt's included, exceed the model's context of 16"
    assert said in captured.err
    assert "8 of 8 tokens the same" in captured.out


def test_an_interrupt_exits_with_130(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("openmla.cli.generate.generate_once", interrupted)
    assert main(["generate", "--model", str(tiny["dense"]), *ASK]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "openmla: interrupted."


def test_a_closed_pipe_exits_with_141(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, os.fdopen(write, "w", buffering=1) as stream:
        patch.setattr(sys, "stdout", stream)
        assert main(["doctor", "--json"]) == 141
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # for the close to come
    assert capsys.readouterr().err == ""


def start(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "openmla.cli", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **streams)


def test_a_closed_pipe_of_a_program() -> None:
    """`| head` that leaves before there is anything to read."""
    read, write = os.pipe()
    child = start("doctor", stdout=write)
    os.close(read)
    os.close(write)
    assert child.communicate(timeout=60)[1] == "" and child.returncode == 141


@pytest.mark.slow
def test_an_interrupt_of_a_program(tiny: dict[str, Path]) -> None:
    child = start(
        "generate", "--model", str(tiny["dense"]), "--prompt", "hello",
        "--max-new-tokens", "100000", stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    while "generated" not in child.stdout.readline():
        assert child.poll() is None
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[1].splitlines()[-1] == "openmla: interrupted."
    assert child.returncode == 130
