"""`openmla generate` as other commands do it: streams, chats, pipes, JSON, hub ids, device maps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from openmla.cli.__main__ import main
from openmla.cli.generate import Setting, generate_once
from openmla.cli.models import ByteTokenizer, demo_prompt, load_model
from openmla.cli.streaming import TextStream
from openmla.integrations.transformers import attach, detach
from tests.integrations.models import make_model

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if messages[-1].content == 'forbidden' %}{{ raise_exception('no') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = "naïve 東京 🙂 ok"


def byte_level_tokenizer(template: str | None) -> Any:
    """Of bytes, as the models' own are, without merges: most characters are several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer that has a chat template."""
    path: Path = tmp_path_factory.mktemp("cache") / "models--who--model" / "snapshots" / ("0" * 40)
    path.mkdir(parents=True)
    model = make_model("deepseek_v3", vocab_size=256)
    model.resize_token_embeddings(256)
    model.save_pretrained(path)
    byte_level_tokenizer(TEMPLATE).save_pretrained(path)
    (path.parents[1] / "refs").mkdir()
    (path.parents[1] / "refs" / "main").write_text(path.name)
    return path


def given(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    """Standard input is a pipe with this; None: one that nobody writes to."""
    read, write = os.pipe()
    if content is not None:
        os.write(write, content)
        os.close(write)
    monkeypatch.setattr(sys, "stdin", os.fdopen(read))


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(None), ByteTokenizer()], ids=type)
def test_parts_of_a_stream_are_the_whole_text(tokenizer: Any) -> None:
    tokens = tokenizer.encode(LETTERS)
    for step in (1, 2, 3):
        stream = TextStream(tokenizer)
        parts = [stream.put(tokens[i : i + step]) for i in range(0, len(tokens), step)]
        assert "".join([*parts, stream.end()]) == LETTERS
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts) and len(set(parts)) >= 4
    stream = TextStream(tokenizer)
    cut = [stream.put([token]) for token in tokenizer.encode("a🙂")[:-1]]
    assert cut == ["a", "", "", ""] and stream.end() == tokenizer.decode(
        tokenizer.encode("🙂")[:-1]
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_streaming_changes_no_token(
    sampled: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(folder, "cpu", "fp32")
    tokenizer = byte_level_tokenizer(None)
    arguments = {"max_new_tokens": 24, "do_sample": sampled, "num_beams": 1}
    setting = Setting(model, tokenizer, {"seed": 3, "arguments": arguments}, torch.device("cpu"))
    prompt = tokenizer.encode("hello there")
    attach(model)
    capsys.readouterr()
    run = generate_once(setting, prompt, shown=True)
    shown = capsys.readouterr().out
    torch.manual_seed(3)
    ids = torch.tensor([prompt])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    detach(model)
    assert run.tokens == plain[0, len(prompt) :].tolist()
    assert run.text == tokenizer.decode(run.tokens) and shown == f"{run.text}\n"
    assert run.prompt_tokens == len(prompt) and run.prefill_s > 0 and run.decode_s > 0


def test_quiet_prints_the_text_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several prompts, one from standard input; and JSON has the same text."""
    asked = ["generate", str(folder), "--prompt", "hello", "--prompt", "-", "--max-tokens", "5"]
    given(monkeypatch, "naïve\n".encode())
    assert main([*asked, "--json", "--compare"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    results = found["results"]
    assert [result["prompt"] for result in results] == ["hello", "naïve"]
    assert [result["prompt_tokens"] for result in results] == [5, 6]
    for result in results:
        assert len(result["tokens"]) == 5 and result["finish_reason"] == "length"
        assert result["transformers"]["same_tokens"] == 5
        assert result["prefill_tokens_per_second"] > 0 < result["decode_tokens_per_second"]
    assert "loading who/model" in told.err and "prefill" in found["counts"]
    given(monkeypatch, "naïve\n".encode())
    assert main([*asked, "--quiet"]) == 0
    told = capsys.readouterr()
    assert told.out == "".join(f"{result['text']}\n" for result in results) and told.err == ""


def test_standard_input_without_being_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, b"hello\n")
    assert main(["generate", str(folder), "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("--- prompt ---\nhello\n--- generated ---\n")


@pytest.mark.parametrize("command", ["generate", "bisect"])
def test_piped_text_is_the_demos_prompt(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing is piped in, or nobody ever writes to the pipe, the demo has its own."""
    from openmla.cli import prompts

    monkeypatch.setattr(prompts, "PATIENCE", 0.01)

    def prompt_of(content: bytes | None) -> str:
        given(monkeypatch, content)
        return prompts.read_prompt(None, "demo", command)

    assert prompt_of(b"def f(\n") == "def f("
    assert "own" not in capsys.readouterr().err
    for nothing in (b"", None):
        assert prompt_of(nothing) == demo_prompt()
        assert "using the demo's own" in capsys.readouterr().err


def test_chat_by_the_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", str(folder), "--chat", "--prompt", "hi", "--system-prompt", "be", "--json"]
    assert main([*asked, "--max-tokens", "3"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["prompt"] == "hi"
    assert result["prompt_tokens"] == len("<|system|>be<|user|>hi<|assistant|>")


def test_a_chat_in_turns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a terminal: each turn has the ones before it, empty lines are passed over."""
    from openmla.cli import prompts

    seen: list[list[dict[str, str]]] = []
    encode = prompts.encode_chat

    def kept(tokenizer: Any, history: list[dict[str, str]]) -> list[int]:
        seen.append([dict(message) for message in history])
        return encode(tokenizer, history)

    lines = iter(["hi", "  ", "more"])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("openmla.cli.generate.encode_chat", kept)
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main(["generate", str(folder), "--chat", "--max-tokens", "2"]) == 0
    assert [[m["role"] for m in history] for history in seen] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert capsys.readouterr().err.count("decode ") == 2


def test_a_hub_id_in_the_hubs_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offline, as every test is: what the cache has is found, all else is one sentence."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder.parents[2]))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["generate", "who/model", "--prompt", "hello", "-q", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.endswith("\n")
    for asked in (["who/else"], ["who/model", "--revision", "none"]):
        assert main(["generate", *asked, "--prompt", "hello", "-q"]) == 2
        told = capsys.readouterr()
        assert "'who/" in told.err and told.err.count("\n") == 1
    assert main(["generate", str(folder), "--prompt", "x", "-q", "--revision", "main"]) == 2
    assert "--revision" in capsys.readouterr().err


def test_device_map(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    texts = []
    for more in ([], ["--device-map", "cpu"], ["--device-map", "auto"]):
        asked = ["generate", str(folder), "--prompt", "hello", "-q", "--max-tokens", "8", *more]
        assert main(asked) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] != "\n"
    assert main(["generate", "demo", "--prompt", "x", "--device-map", "nowhere"]) == 2
    assert "but found nowhere" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("asked", "stdin", "message"),
    [
        (["--prompt", " \n\t "], b"", "the prompt is only white space, ' \\n\\t '"),
        (["--prompt", "-"], b"", "standard input is empty"),
        ([], b"", "standard input is empty"),
        (["--prompt", "-"], b"\xff\xfe", "standard input must be text in UTF-8"),
        (["--prompt", "-", "--prompt", "-"], b"x", "--prompt - is given more than once"),
        (["--prompt", "x", "--quiet", "--json"], b"", "not allowed with argument --quiet"),
        (["--prompt", "x", "--quiet", "--compare"], b"", "has nothing to print with --quiet"),
        (["--prompt", "x", "--system-prompt", "y"], b"", "--system-prompt needs --chat"),
        (["--prompt", "x", "--device", "cpu", "--device-map", "auto"], b"", "with --device"),
        (["--prompt", "x", "--top-k", "4"], b"", "need a --temperature above 0"),
        (["--prompt", "x", "--top-p", "0"], b"", "--top-p must be above 0 and at most 1"),
        (["--prompt", "x", "--dtype", "fp7"], b"", "--dtype must be one of auto, fp32"),
        (["--prompt", "x", "--model", "demo"], b"", "--model: not allowed with argument MODEL"),
        (["--prompt", "forbidden", "--chat"], b"", "the chat template rejects this conversation"),
    ],
)
def test_refusals(
    asked: list[str],
    stdin: bytes,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given(monkeypatch, stdin)
    assert main(["generate", str(folder), *asked]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and told.out == ""


def test_chat_without_a_template(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "demo", "--chat", "--prompt", "hi"]) == 2
    assert "--chat needs a tokenizer, and the folder has none" in capsys.readouterr().err
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    byte_level_tokenizer(None).save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--chat", "--prompt", "hi"]) == 2
    assert "--chat needs a tokenizer with a chat template" in capsys.readouterr().err


def test_an_interrupt_leaves_the_text_so_far(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from openmla.cli.streaming import Watch

    put = Watch.put

    def pressed(self: Watch, value: torch.Tensor) -> None:
        put(self, value)
        if len(self.tokens) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "put", pressed)
    assert main(["generate", str(folder), "--prompt", "hello", "-q"]) == 130
    told = capsys.readouterr()
    assert len(told.out) >= 2 and told.out.endswith("\n")
    assert told.err == "openmla: interrupted.\n"
