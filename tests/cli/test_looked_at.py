"""`openmla eval --plot`: what formats cost, and what a sparse model looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from openmla.cli.__main__ import main
from openmla.cli.checkpoint import open_checkpoint
from openmla.cli.looked_at import CELLS, Looked, heat, look
from openmla.cli.models import load_model
from openmla.integrations.options import AttachOptions
from openmla.integrations.transformers.check import check_model
from tests.integrations.models import SPARSE, make_sparse

T = 150  # the tiny models choose 32 keys, or entries of 4 tokens


def looked_at(folder: Path) -> tuple[Any, list[Looked]]:
    checkpoint = open_checkpoint(str(folder))
    model = load_model(checkpoint, "cpu", "fp32")
    tokens = torch.randint(0, 256, (T,), generator=torch.Generator().manual_seed(0))
    return (model, tokens, checkpoint.config), look(model, tokens, checkpoint.config)


def test_shares_are_those_of_transformers_own_attention(tiny: dict[str, Path]) -> None:
    """Its eager attention, told to choose as many keys as there are, says what each key holds."""
    (model, tokens, config), found = looked_at(tiny["sparse"])
    assert [looked.layer for looked in found] == list(range(config.num_layers))
    model.set_attn_implementation("eager")
    seen: dict[int, torch.Tensor] = {}
    first = model.model.layers[0].self_attn
    first.indexer.index_topk = T
    hook = first.register_forward_hook(lambda module, args, out: seen.update({0: out[1]}))
    with torch.no_grad():
        model(tokens[None], use_cache=False)
    hook.remove()
    held = seen[0][0].mean(0)  # [T, T]
    looked, K = found[0], config.indexer.topk
    assert int(looked.chosen.sum(1).max()) == K
    chosen = looked.chosen & torch.ones(T, T).tril().bool()
    torch.testing.assert_close(looked.share, (held * chosen).sum(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(looked.best, held.topk(K).values.sum(-1), atol=1e-5, rtol=1e-4)
    window = torch.ones(T, T).tril().bool() & ~torch.ones(T, T).tril(-K).bool()
    torch.testing.assert_close(looked.recent, (held * window).sum(-1), atol=1e-5, rtol=1e-4)
    assert (looked.share[K:] < 0.999).all() and (looked.share <= looked.best + 1e-5).all()


@pytest.mark.parametrize("family", SPARSE)
def test_every_sparse_family(family: str) -> None:
    """Layers that share a choice have the one that was made; a choice is better than chance."""
    model = make_sparse(family, vocab_size=256)
    config = check_model(model, AttachOptions()).config
    tokens = torch.randint(0, 256, (T,), generator=torch.Generator().manual_seed(0))
    found = look(model, tokens, config)
    assert [looked.layer for looked in found] == [0, 1, 2] and config.indexer is not None
    for looked in found:
        assert (looked.chosen.sum(1) == looked.visible.clamp(max=config.indexer.topk)).all()
        assert (looked.share > 0).all() and (looked.share <= looked.best + 1e-5).all()
    assert found[1].chosen.equal(found[0].chosen) == config.indexer.is_shared(1)


def test_entries_of_v4(tiny: dict[str, Path]) -> None:
    (_, _, config), found = looked_at(tiny["v4"])
    (looked,) = found  # the one layer of three that chooses
    assert looked.ratio == 4 and looked.layer == 1
    assert looked.chosen.shape == (T, T // 4) and looked.visible[-1] == T // 4
    K = config.indexer.topk
    assert (looked.chosen.sum(1) == looked.visible.clamp(max=K)).all()
    enough = looked.visible > 0
    assert (looked.share[enough] <= looked.best[enough] + 1e-5).all()
    assert (looked.share[~enough] == 0).all() and 0 < looked.share[-1] < 1


def test_heat_counts_what_was_chosen_of_what_is_seen() -> None:
    n = 2 * CELLS
    chosen = torch.eye(n).bool()
    zeros = torch.zeros(n)
    looked = Looked(0, chosen, torch.arange(1, n + 1), 1, 1, zeros, zeros, zeros)
    cells = heat(looked)
    assert cells.shape == (CELLS, CELLS)
    # two tokens, two keys: three are seen and two chosen on the diagonal, none of four below it
    assert torch.allclose(cells.diagonal(), torch.tensor(2 / 3))
    assert cells.isnan().equal(torch.ones(CELLS, CELLS).triu(1).bool())
    assert not cells.tril(-1).any()


@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
def test_pictures(
    kind: str, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, picture = tmp_path / "text.txt", tmp_path / "bits.png"
    text.write_text("".join(map(str, range(90))))
    given = ["eval", "--model", str(tiny[kind]), "--text", str(text), "--windows", "1"]
    assert main([*given, "--formats", "fp32,bf16", "--plot", str(picture)]) == 0
    told = capsys.readouterr()
    assert picture.read_bytes().startswith(b"\x89PNG") and "transformers" in told.out
    keys = tmp_path / "bits-keys.png"
    assert keys.exists() == (kind != "dense")
    if kind != "dense":
        keys.unlink()
        short = [*given, "--context", "6", "--formats", "fp32", "--plot", str(picture)]
        assert main(short) == 0
        assert "warning: no picture of selected keys: 6 tokens" in capsys.readouterr().err
        assert not keys.exists()


def test_every_format_has_a_color_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    from openmla.cli import eval as module

    names = [*module.FORMATS, module.EIGHT_BITS, module.QUERIES, module.FP8_PREFILL, module.PLAIN]
    bits = torch.ones(1, 4)
    results = [module.Result("dense", name, bits, 100.0 + i) for i, name in enumerate(names)]
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    module.draw(results, 4, tmp_path / "bits.png", "title")
    (axes,) = pyplot.gcf().axes
    assert len({line.get_markeredgecolor() for line in axes.lines}) == len(names)
    monkeypatch.undo()
    pyplot.close("all")


def test_ticks_of_logarithmic_axes_are_words() -> None:
    from matplotlib import pyplot

    from openmla.cli.pictures import label_decades, short_count, short_time

    figure, axes = pyplot.subplots()
    axes.plot([1, 2], [20.0, 4000.0])
    axes.set_yscale("log")
    label_decades(axes.yaxis, short_time)
    figure.canvas.draw()
    texts = {label.get_text() for label in axes.get_yticklabels()}
    assert {"50 us", "100 us", "1 ms", "2 ms"} <= texts
    assert all(label.get_text() == "" for label in axes.get_yticklabels(minor=True))
    assert [short_count(n) for n in (5, 2e4, 3e6)] == ["5", "20k", "3M"]
    pyplot.close(figure)


def test_many_layers_are_a_picture_of_some(tmp_path: Path) -> None:
    from openmla.cli.looked_at import draw_looked

    n = 40
    ones = torch.ones(n)
    given = (torch.ones(n, n).tril().bool(), torch.arange(1, n + 1), 8, 1, ones, ones, ones)
    path = tmp_path / "many.png"
    draw_looked([Looked(layer, *given) for layer in range(61)], path, "many")
    assert path.read_bytes().startswith(b"\x89PNG")
