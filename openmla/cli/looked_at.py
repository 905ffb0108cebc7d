"""What a sparse model attends to: the keys its layers select, and their share of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from openmla.bisect import record
from openmla.cli.pictures import COLORS, picture
from openmla.cli.terminal import progress
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.integrations.transformers import attach, attachment_of, detach
from openmla.integrations.transformers.attachment import Attended

LOOKED = 2048  # maximum number of tokens
CELLS = 64  # per side of a heat map
SHOWN = 11  # maximum number of layers drawn
ROWS = 128  # queries per chunk of attention


class Looked(NamedTuple):
    """One layer's selection. Shares are fractions of a token's attention, means over heads, [T]."""

    layer: int
    chosen: Tensor  # [T, S] bool
    visible: Tensor  # [T] i64, number of keys each token sees
    topk: int
    ratio: int  # tokens per key: a V4 entry stands for several
    share: Tensor
    recent: Tensor  # share of the same number of most recent keys
    best: Tensor  # share of the same number of highest-scoring keys


class Seen(NamedTuple):
    """Inputs of one layer's attention for some tokens: [H, T, E], [H or 1, S, E], [T, K]."""

    layer: int
    queries: Tensor
    keys: Tensor
    chosen: Tensor


@torch.no_grad()
def look(model: Any, tokens: Tensor, config: MLAConfig, **options: Any) -> list[Looked]:
    """Run tokens [T] with attach()'s options; returns every layer whose tokens select keys."""
    seen = _entries if config.compressor is not None else _rows
    found = []
    with progress(config.num_layers) as tell:
        for each in seen(model, tokens, config, options):
            tell(f"attention of layer {each.layer}", each.layer)
            found.append(_looked(each, config))
    return found


def _entries(
    model: Any, tokens: Tensor, config: MLAConfig, options: dict[str, Any]
) -> Iterator[Seen]:
    """V4: layers whose entries are selected."""
    dump = record(model, tokens, **options)
    for number in dump.layers:
        tensors = dump.layer(number)
        if "chosen" in tensors:
            q = tensors["q_rotated"].view(len(tokens), config.num_heads, -1).transpose(0, 1)
            yield Seen(number, q, tensors["entries"][None], tensors["chosen"])


def _rows(model: Any, tokens: Tensor, config: MLAConfig, options: dict[str, Any]) -> Iterator[Seen]:
    """All other models: layer by layer from one pass, with keys expanded by the layer itself."""
    T, H, P, C = len(tokens), config.num_heads, config.qk_nope_head_dim, config.kv_lora_rank
    steps: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def watch(step: Attended) -> None:
        assert step.plan.select is not None and step.selection is not None  # more than K tokens
        given = (step.queries, step.rows, step.selection.positions)
        queries, rows, chosen = (part.to("cpu", copy=True) for part in given)
        steps.append((step.layer, queries, rows, chosen))

    attach(model, capture=False, **options)
    attachment = attachment_of(model)
    attachment.watcher = watch
    try:
        model(tokens[None], past_key_values=DynamicCache(config=model.config), use_cache=True)
    finally:
        detach(model)
    for number, queries, rows, chosen in steps:
        linear: Any = attachment.modules[number].kv_b_proj
        latents = rows[:, :C].to(next(linear.parameters()).device)
        expanded = linear(latents).cpu().view(T, H, -1)[..., :P]
        keys = torch.cat([expanded, rows[:, None, C:].expand(-1, H, -1)], -1)
        yield Seen(number, queries.view(T, H, -1).transpose(0, 1), keys.transpose(0, 1), chosen)


def _looked(seen: Seen, config: MLAConfig) -> Looked:
    assert config.indexer is not None
    q, keys, chosen = seen.queries.float(), seen.keys.float(), seen.chosen
    ratio = 1 if config.compressor is None else INDEXED_RATIO
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
        held = scores.softmax(-1).nan_to_num_().mean(0)  # [rows, S]; 0 if no key is visible
        recent = (places < limits) & (places >= limits - K)
        picks = picked[rows, :S] & (places < limits)
        best = held.topk(min(K, S), -1).values.sum(-1)
        shares.append(torch.stack([(held * picks).sum(-1), (held * recent).sum(-1), best]))
    share, recent_share, best_share = torch.cat(shares, 1)
    return Looked(
        seen.layer, picked[:, :S], visible, K, ratio, share, recent_share, best_share
    )  # fmt: skip


def heat(looked: Looked) -> Tensor:
    """[cells, cells]: the fraction of selected keys among those that a range of tokens sees in a
    range of the context; NaN if it sees none."""
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
    """Draw heat maps of all or some layers, then the share of attention of every layer."""
    step = -(-len(found) // SHOWN)
    shown = list(found)[::step]
    lines = -(-len(shown) // 2)
    some = f", one of {step} layers" if step > 1 else ""
    T = len(found[0].share)
    with picture(path, 3.0 * lines + 3.6, f"{title}{some}") as figure:
        grid = figure.add_gridspec(lines + 1, 2, height_ratios=[*[1.0] * lines, 1.05])
        drawn = []
        for place, looked in enumerate(shown):
            axes = figure.add_subplot(grid[divmod(place, 2)])
            image = axes.imshow(
                heat(looked).tolist(), extent=(0, T, T, 0), vmin=0, vmax=1, aspect="auto",
                interpolation="nearest",
            )  # fmt: skip
            mean = looked.share[first_choice(looked) :].mean().item()
            axes.set_title(f"layer {looked.layer}: {mean:.0%} of attention")
            axes.set_xlabel("position of the key")
            axes.set_ylabel("position of the query")
            drawn.append(axes)
        bar = figure.colorbar(image, ax=drawn, location="bottom", aspect=50, shrink=0.8)
        bar.set_label("selected keys, of those that a query sees")
        _draw_shares(figure.add_subplot(grid[lines, :]), found)


def first_choice(looked: Looked) -> int:
    """The first token that sees more keys than it may select."""
    return min(looked.topk * looked.ratio, len(looked.share) - 1)


def _draw_shares(axes: Any, found: Sequence[Looked]) -> None:
    """Draw means over tokens that have to select, compared with other selections of K keys."""
    K, layers = found[0].topk, [looked.layer for looked in found]

    def means(values: Sequence[Tensor]) -> list[float]:
        pairs = zip(found, values, strict=True)
        return [each[first_choice(looked) :].mean().item() for looked, each in pairs]

    axes.bar(layers, means([looked.share for looked in found]), color=COLORS[0], label="selected")
    others = (
        ("best possible", "_", COLORS[2], [looked.best for looked in found]),
        ("most recent", "o", COLORS[1], [looked.recent for looked in found]),
        ("at random", "x", COLORS[4], [K / looked.visible.clamp(min=K) for looked in found]),
    )
    for name, mark, color, values in others:
        axes.plot(layers, means(values), mark, color=color, ms=9, mew=2, label=name)
    axes.set_xticks(layers[:: -(-len(layers) // 12)])
    axes.set_ylim(0, 1.35)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    what = "keys of a token" if found[0].ratio == 1 else "entries, of that of all entries,"
    axes.set_title(f"share of attention on {K} {what} by how they are selected")
    axes.set_xlabel("layer")
    axes.legend(loc="upper center", ncols=4)
