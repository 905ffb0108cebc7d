"""What a sparse model looks at: the keys its layers chose, and the attention that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.bisect import record
from openmla.bisect.dump import Dump
from openmla.cli.terminal import note, progress
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.integrations.transformers.check import DEFAULTS, check_model

LOOKED = 2048  # tokens, at most
CELLS = 64  # of a heat map's side
SHOWN = 11  # layers drawn, at most
ROWS = 128  # queries whose attention is computed at a time


class Looked(NamedTuple):
    """One layer. Shares are of what all keys before a token hold, means over heads, [T]."""

    layer: int
    chosen: Tensor  # [T, S] bool
    visible: Tensor  # [S of each token] i64
    topk: int
    ratio: int  # tokens of a key: V4's entries stand for several
    share: Tensor
    recent: Tensor  # of as many keys, the last ones
    best: Tensor  # of as many keys, those that hold most


@torch.no_grad()
def look(model: Any, tokens: Tensor, config: MLAConfig, **options: Any) -> list[Looked]:
    """Run tokens [T] with attach()'s options; every layer whose tokens choose keys."""
    dump = record(model, tokens, **options)
    modules = check_model(model, DEFAULTS).modules
    found, shared = [], None
    with progress(len(dump.layers)) as tell:
        for place, number in enumerate(dump.layers):
            tell(f"attention of layer {number}", place)
            tensors = dump.layer(number)
            shared = tensors.get("chosen", shared)
            ratio = 1 if config.compressor is None else config.compressor.ratio(number)
            if shared is not None and ratio in (1, INDEXED_RATIO):
                q, keys = _queries_and_keys(dump, number, config, modules[number])
                found.append(_looked(number, q, keys, shared, ratio, config))
    return found


def _queries_and_keys(
    dump: Dump, number: int, config: MLAConfig, module: Any
) -> tuple[Tensor, Tensor]:
    """[H, T, E] and [H or 1, S, E], rotated, as the scores of the layer are made."""
    tensors, H = dump.layer(number), config.num_heads
    if config.compressor is not None:
        q, entries = tensors["q_rotated"], tensors["entries"]
        return q.view(len(q), H, -1).transpose(0, 1).float(), entries[None].float()
    P = config.qk_nope_head_dim
    T = len(tensors["kv_c"])
    q_nope = tensors["q"].view(T, H, -1)[..., :P]
    q = torch.cat([q_nope, tensors["q_pe"].view(T, H, -1)], -1).float()
    device = next(module.kv_b_proj.parameters()).device
    expanded = module.kv_b_proj(tensors["kv_c"].to(device)).cpu().view(T, H, -1)
    k_pe = tensors["k_pe"].view(T, 1, -1).expand(-1, H, -1)
    keys = torch.cat([expanded[..., :P], k_pe], -1).float()
    return q.transpose(0, 1), keys.transpose(0, 1)


def _looked(
    number: int, q: Tensor, keys: Tensor, chosen: Tensor, ratio: int, config: MLAConfig
) -> Looked:
    assert config.indexer is not None
    T, S, K = q.shape[1], keys.shape[1], config.indexer.topk
    visible = torch.arange(1, T + 1) // ratio
    picked = torch.zeros(T, S + 1, dtype=torch.bool)
    picked.scatter_(1, torch.where((chosen < 0) | (chosen >= S), S, chosen.long()), True)
    places, shares = torch.arange(S), []
    for start in range(0, T, ROWS):
        rows = slice(start, min(start + ROWS, T))
        limits = visible[rows, None]
        scores = config.scale * q[:, rows] @ keys.mT
        scores.masked_fill_(places >= limits, -torch.inf)
        held = scores.softmax(-1).nan_to_num_().mean(0)  # [rows, S]; none where none is seen
        recent = (places < limits) & (places >= limits - K)
        picks = picked[rows, :S] & (places < limits)
        best = held.topk(min(K, S), -1).values.sum(-1)
        shares.append(torch.stack([(held * picks).sum(-1), (held * recent).sum(-1), best]))
    share, recent_share, best_share = torch.cat(shares, 1)
    return Looked(
        number, picked[:, :S], visible, K, ratio, share, recent_share, best_share
    )  # fmt: skip


def heat(looked: Looked) -> Tensor:
    """[cells, cells]: of the keys that a stretch of tokens sees in a stretch of the context, the
    share that was chosen; NaN where it sees none."""
    T, S = looked.chosen.shape
    seen = torch.arange(S) < looked.visible[:, None]
    sides = [torch.arange(n) * CELLS // n for n in (T, S)]
    total, chosen = (
        torch.zeros(CELLS, S).index_add_(0, sides[0], part.float()) for part in
        (seen, looked.chosen & seen)
    )  # fmt: skip
    total, chosen = (
        torch.zeros(CELLS, CELLS).index_add_(1, sides[1], part) for part in (total, chosen)
    )
    return torch.where(total > 0, chosen / total, torch.nan)


def draw_looked(found: Sequence[Looked], path: Path, title: str) -> None:
    """A heat map for each layer, or some of many; then the share of attention of every layer."""
    from matplotlib import pyplot

    step = -(-len(found) // SHOWN)
    shown = list(found)[::step]
    columns = min(len(shown) + 1, 3 if len(shown) < 6 else 4)
    lines = -(-(len(shown) + 1) // columns)
    size = (3.3 * columns + 0.9, 3.1 * lines + 0.9)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
    places = list(grid.flat)
    T = len(found[0].share)
    for axes, looked in zip(places, shown, strict=False):
        image = axes.imshow(
            heat(looked).tolist(), extent=(0, T, T, 0), vmin=0, vmax=1, aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        mean = looked.share[first_choice(looked) :].mean().item()
        axes.set_title(f"layer {looked.layer}: {mean:.0%} of attention", fontsize=9)
        axes.set_xlabel("position of the key", fontsize=8)
        axes.set_ylabel("position of the query", fontsize=8)
    _draw_shares(places[len(shown)], found)
    for axes in places[len(shown) + 1 :]:
        axes.set_axis_off()
    for axes in places:
        axes.tick_params(labelsize=7)
    some = f", one of {step} layers" if step > 1 else ""
    figure.suptitle(f"{title}{some}", fontsize=10)
    figure.tight_layout(rect=(0, 0, 0.92, 1))
    bar = figure.colorbar(image, cax=figure.add_axes((0.93, 0.15, 0.012, 0.7)))
    bar.set_label("keys chosen, of those that a query sees", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    note(f"wrote {path.name}")


def first_choice(looked: Looked) -> int:
    """The first token that sees more keys than it may choose."""
    return min(looked.topk * looked.ratio, len(looked.share) - 1)


def _draw_shares(axes: Any, found: Sequence[Looked]) -> None:
    """Means over tokens that have to choose, beside other choices of as many keys."""
    K, layers = found[0].topk, [looked.layer for looked in found]

    def means(values: Sequence[Tensor]) -> list[float]:
        pairs = zip(found, values, strict=True)
        return [each[first_choice(looked) :].mean().item() for looked, each in pairs]

    axes.bar(layers, means([looked.share for looked in found]), color="#3b5bbf", label="chosen")
    others = (
        ("best possible", "_", "#2e8b57", [looked.best for looked in found]),
        ("the last ones", "o", "#d9822b", [looked.recent for looked in found]),
        ("at random", "x", "#c0392b", [K / looked.visible.clamp(min=K) for looked in found]),
    )
    for name, mark, colour, values in others:
        axes.plot(layers, means(values), mark, color=colour, ms=9, mew=2, label=name)
    axes.set_xticks(layers[:: -(-len(layers) // 12)])
    axes.set_ylim(0, 1.35)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_title(f"attention that {K} keys of a token hold", fontsize=9)
    axes.set_xlabel("layer", fontsize=8)
    axes.legend(fontsize=7, loc="upper center", ncols=2)
