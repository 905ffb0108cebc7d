"""`openmla bench`: tables, JSON, and refusals; numbers themselves are never asserted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from openmla.backends import BACKENDS
from openmla.bench.harness import Job, able, time_graphs
from openmla.cli.__main__ import main as openmla
from openmla.errors import ConfigError
from openmla.ops import rope
from openmla.ops._register import Cost
from openmla.testing import PAGED_SHAPES, RAGGED_SHAPES, SPARSE_SHAPES, Inputs


@pytest.mark.parametrize("op", BACKENDS)
def test_every_op_has_a_tiny_benchmark(
    op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert openmla(["bench", op, "--json", str(path)]) == 0
    assert "torch" in capsys.readouterr().out.splitlines()[0]  # the machine line
    saved = json.loads(path.read_text())
    assert saved["rows"] and {row["contender"] for row in saved["rows"]} <= set(BACKENDS[op])
    for row in saved["rows"]:
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"] and row["error"] <= 1


def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over several contexts, which makes a picture of lines."""
    pytest.importorskip("transformers")
    path, picture = tmp_path / "rows.json", tmp_path / "step.svg"
    arguments = ["bench", "step", "--keys", "300", "64", "--plot", str(picture)]
    assert openmla([*arguments, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "8.9x" in text and "71.1x" in text and "WRONG" not in text
    saved = json.loads(path.read_text())
    assert len(saved["rows"]) == 8 and saved["plan_us"] > 0
    assert "<svg" in picture.read_text()


def test_batch_invariant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from openmla.bench import invariance

    monkeypatch.setattr(invariance, "REQUESTS", (1, 3))
    monkeypatch.setattr(invariance, "HEADS", (4,))
    path = tmp_path / "rows.json"
    command = ["bench", "--batch-invariant", "--json", str(path), "--run-lengths", "32"]
    assert openmla(command) == 0
    text = capsys.readouterr().out
    assert "| decode, 4 heads, 3 x 1 over 256 |" in text and "WRONG" not in text
    assert "projections, 3 tokens" in text and "mqa_paged, us by run length" in text
    assert len(json.loads(path.read_text())["rows"]) == 7


def test_models_of_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from openmla.bench import generate

    seen = []

    def made(name: str, device: str, dtype: torch.dtype) -> None:
        seen.append(name)
        raise ConfigError("enough")

    monkeypatch.setattr(generate, "make_model", made)
    for named in ([], ["v2-lite"], ["--model", "v2-lite"], ["--rounds", "20", "v2-lite"]):
        openmla(["bench", "generate", *named])
    assert seen == ["small", "v2-lite", "v2-lite", "v2-lite"]
    capsys.readouterr()
    assert openmla(["bench", "generate", "huge"]) == 2 and "'huge'" in capsys.readouterr().err


def test_wrong_contenders_are_not_timed() -> None:
    x = torch.ones(1, 1, 2)
    inputs = Inputs({"x": x}, {}, ())
    job = Job(inputs, Cost(1, 1), lambda op, inputs, backend: 1.5)
    calls, _, left_out = able(rope, job)
    assert calls == {} and left_out[-1].why == "WRONG: 1.50 times its error budget"


def test_graphs_hold_all_calls_and_are_replayed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake of torch.cuda whose clock is the number of calls: 1 ms each."""
    capturing: list[list[str]] = []
    replayed: list[str] = []

    class Graph:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def replay(self) -> None:
            replayed.extend(self.calls)

    class Event:
        def __init__(self, **options: bool) -> None:
            assert options == {"enable_timing": True}

        def record(self) -> None:
            self.at = len(replayed)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    @contextmanager
    def graph(made: Graph) -> Iterator[None]:
        capturing.append(made.calls)
        yield
        capturing.pop()

    for name, fake in {"CUDAGraph": Graph, "Event": Event, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def contender(name: str) -> None:
        if capturing:
            capturing[-1].append(name)

    calls = {name: partial(contender, name) for name in ("a", "b")}
    assert time_graphs(calls, 3) == {"a": 1000.0, "b": 1000.0}
    assert replayed == ["a", "a", "a", "b", "b", "b"] * 9


def test_json_alone_prints_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert openmla(["bench", "rope", "tiny-64x4-pairs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["shape"] == "tiny-64x4-pairs"
    assert {each["contender"] for each in found["left_out"]} <= set(BACKENDS["rope"])
    assert openmla(["bench", "rope", "--json", "tiny-64x4-pairs"]) == 2
    assert "shapes must come before --json" in capsys.readouterr().err


def test_markdown_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rope.png"
    assert openmla(["bench", "rope", "--markdown", "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "**tiny, 64 tokens x 4, pairs**" in text
    assert re.search(
        r"^\| reference \| [\d.]+ [um]s \| [\d.]+ [um]s to [\d.,]+ [um]s \| 1.00 \|", text, re.M
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bars_begin_at_0_in_a_panel_per_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are as times: 1.42x looks like 1.42x. Pictures are transparent."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from openmla.bench.output import Row
    from openmla.bench.pictures import draw_bars

    def row(shape: str, name: str, us: float) -> Row:
        return Row(shape, name, us, us, us, 142 / us, "reference", 0.5, 0.1)

    rows = [row("tiny-4x4", "reference", 142.0), row("tiny-4x4", "triton", 100.0)]
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    draw_bars([*rows, row("v3-4x4", "reference", 9000.0)], "title", "here", str(tmp_path / "a.png"))
    first, second = pyplot.gcf().axes
    widths = [bar.get_width() for bar in first.patches]
    assert widths[0] / widths[1] == pytest.approx(1.42)
    assert first.get_xlim()[0] == second.get_xlim()[0] == 0 and first.get_xscale() == "linear"
    assert first.get_xlim()[1] < 250 < second.get_xlim()[1]
    assert "9.00 ms" in second.texts[0].get_text() and "1.42x" in first.texts[1].get_text()
    assert pyplot.imread(tmp_path / "a.png")[0, 0, 3] == 0
    monkeypatch.undo()
    pyplot.close("all")


def test_no_code_of_a_shape_in_words() -> None:
    from openmla.bench.titles import in_words

    assert in_words("v3-tp8-decode-b64-s8k") == (
        "DeepSeek-V3, heads of one of 8 GPUs, decode, 64 requests, 8k keys each"
    )
    assert in_words("v32-score-2k-on-32k") == "DeepSeek-V3.2, scores, 2k new tokens over 32k keys"
    assert in_words("v3-decode-b1-s8k") == "DeepSeek-V3, decode, 1 request, 8k keys each"
    assert in_words("one token over 300 keys") == "one token over 300 keys"
    for shape in (*PAGED_SHAPES, *RAGGED_SHAPES, *SPARSE_SHAPES):
        assert not re.search(r"\b[bsk]\d|\btp\d|\bc\d|v32", in_words(shape)), shape


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert openmla(["bench", "nothing"]) == 2
    assert "invalid choice: 'nothing' (choose from" in capsys.readouterr().err
    for arguments in (
        ["bench"],
        ["bench", "rope", "--rounds", "3"],
        ["bench", "rope", "no-such-shape"],
        ["bench", "rope", "--baseline", "nobody"],
        ["bench", "rope", "--json", "no/such/folder/rows.json"],
        ["bench", "step", "--keys", "0"],
        ["doctor", "--nonsense"],
    ):
        assert openmla(arguments) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"openmla: {arguments[0]}") and told.count("\n") == 1
