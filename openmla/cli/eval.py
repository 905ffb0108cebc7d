"""`openmla eval`: bits per byte of a text for every cache format, dense and sparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from openmla.cache import check_formats, latent_formats
from openmla.cli.calibrate import calibrate_on
from openmla.cli.generate import cache_bytes
from openmla.cli.hub import called
from openmla.cli.looked_at import LOOKED, draw_looked, look
from openmla.cli.models import attentions, load_model, open_windows, run_once
from openmla.cli.pictures import COLORS, INK, check_plot, picture
from openmla.cli.terminal import note, progress, shows_progress, warn
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.integrations.transformers import attach, detach
from openmla.layers.measure import HEADROOM
from openmla.plan.explanation import counted

FORMATS = ("fp32", "bf16", "fp16", "fp8", "fp8+scales", "fp8_ds_mla", "fp8_dsv4")
SCALED = "fp8+scales"  # calibrated on the first window; plain fp8 has scale 1
# Tokens per forward pass: all keys except these are read from the cache, in its format.
CHUNK = 64
# Rows that are not cache formats.
EIGHT_BITS = "fp8-weights"  # the model's own format, kv_b_proj in fp8 wherever it is absorbed
QUERIES = "fp8-queries"  # fp8+scales, and absorbed queries in fp8
FP8_PREFILL = "fp8-prefill"  # the model's own format, expanded heads in fp8
PLAIN = "transformers"  # the unmodified model with its own cache; only with a picture


class Result(NamedTuple):
    """Bits of every token of every window, for one attention and cache format."""

    attention: str
    format: str
    bits: Tensor  # [windows, context - 1]
    bytes_per_token: float


def run_eval(options: argparse.Namespace) -> int:
    """Check everything, measure every combination, print a table and a small plot."""
    check_plot("eval", options.plot)
    checkpoint, device, config, tokenizer, windows = open_windows("eval", options)
    index = {"index_format": options.index_format}
    formats = chosen_formats(options.formats, options.index_format, checkpoint.config)
    num_bytes = sum(
        len(tokenizer.decode(row[1:].tolist(), skip_special_tokens=True).encode())
        for row in windows
    )
    if options.formats is None and checkpoint.config.compressor is None:
        formats += [EIGHT_BITS, QUERIES, FP8_PREFILL]
    formats += [PLAIN] if options.plot else []
    results: list[Result] = []
    forms = [options.attention] if options.attention else attentions(config)
    watched, context = shows_progress(), windows.shape[1]
    with progress(len(forms) * len(formats) * context) as advance:
        for attention in forms:
            advance(f"{attention}: loading the model", len(results) * context)
            model = load_model(checkpoint, device, options.dtype, dense=attention == "dense")
            run_once(model, checkpoint.folder)
            for format in formats:
                row = f"{attention} {format}, {len(results) + 1} of {len(forms) * len(formats)}"
                if not watched:
                    note(f"measuring {row}")

                def tell(tokens: int, row: str = row, done: int = len(results) * context) -> None:
                    advance(row, done + tokens)

                tell(0)
                if format != PLAIN:
                    attach(model, **options_of(format, model, windows), **index)
                results.append(measure(model, windows.to(device), attention, format, tell))
                if format != PLAIN:
                    detach(model)
            if options.plot and attention == "sparse":
                title = f"{called(checkpoint.folder)}: which keys each layer selects"
                draw_keys(model, windows[0], checkpoint.config, options, title)
    print_table(results, num_bytes)
    print_curves(results)
    if options.plot:
        count = len(windows)
        title = f"{called(checkpoint.folder)}: bits per byte by cache format"
        title += f", {counted(count, 'chunk')} of {counted(context, 'token')}"
        draw(results, num_bytes, Path(options.plot), title)
    return 0


def draw_keys(
    model: Any, window: Tensor, config: MLAConfig, options: argparse.Namespace, title: str
) -> None:
    """Draw a second picture for a sparse model, next to the first: which keys it selects."""
    assert config.indexer is not None
    tokens = window[:LOOKED].to(model.device)
    first = Path(options.plot)
    path = first.with_name(f"{first.stem}-keys{first.suffix}")
    ratio = 1 if config.compressor is None else INDEXED_RATIO
    if len(tokens) <= config.indexer.topk * ratio:
        warn(
            f"no picture of selected keys: {counted(len(tokens), 'token')} see no more than the "
            f"{config.indexer.topk} keys that a layer may select. Give a longer --context"
        )
        return
    found = look(model, tokens, config, index_format=options.index_format)
    draw_looked(found, path, f"{title}, {len(tokens)} tokens")


def chosen_formats(named: str | None, index_format: str, config: MLAConfig) -> list[str]:
    """The requested formats, checked before anything is loaded, or all that the model supports."""
    usual = [name for name in FORMATS if format_of(name) in latent_formats(config)]
    chosen = usual if named is None else named.split(",")
    for name in chosen:
        check_formats(config, format_of(name), index_format)
    return chosen


def format_of(name: str) -> str:
    """The cache format behind a row of the table."""
    return "fp8" if name == SCALED else name


def options_of(format: str, model: Any, windows: Tensor) -> dict[str, Any]:
    """attach()'s arguments for a row of the table."""
    if format in (SCALED, QUERIES):
        scaled = {"cache_format": "fp8", "kv_scale": calibrate_on(model, windows[:1], HEADROOM)}
        return scaled | ({"query_dtype": "fp8"} if format == QUERIES else {})
    others: dict[str, dict[str, Any]] = {
        "fp8": {"cache_format": "fp8", "kv_scale": 1.0},
        EIGHT_BITS: {"absorbed_format": "fp8"},
        FP8_PREFILL: {"prefill_dtype": "fp8"},
    }
    return others.get(format, {"cache_format": format})


@torch.no_grad()
def measure(
    model: Any,
    windows: Tensor,
    attention: str,
    format: str,
    tell: Callable[[int], None] = lambda tokens: None,
) -> Result:
    """Run all chunks of text in one batch, CHUNK tokens at a time, so that the context is read from
    the cache. fp8-prefill runs in one pass, since a few tokens over a context would use absorption.
    `tell` is called with the number of context tokens done."""
    past, parts = DynamicCache(config=model.config), []
    last, context = None, windows.shape[1]
    chunk = context if format == FP8_PREFILL else CHUNK
    for start in range(0, context, chunk):
        ids = windows[:, start : start + chunk]
        logits = model(ids, past_key_values=past, use_cache=True).logits.float()
        if last is None:  # the first token has no prediction
            predictions, targets = logits[:, :-1], ids[:, 1:]
        else:
            predictions, targets = torch.cat([last, logits[:, :-1]], 1), ids
        last = logits[:, -1:]
        losses = F.cross_entropy(predictions.flatten(0, 1), targets.flatten(), reduction="none")
        parts.append(losses.view(targets.shape).cpu() / math.log(2))
        tell(min(start + chunk, context))
    used = cache_bytes(model, past) / windows.numel()
    return Result(attention, format, torch.cat(parts, 1), used)


def print_table(results: list[Result], num_bytes: int) -> None:
    first = results[0]
    base = first.bits.sum().item()
    windows, tokens = first.bits.shape
    whole = f"; {FP8_PREFILL} in one pass" if any(r.format == FP8_PREFILL for r in results) else ""
    at_once = f"{CHUNK} at a time with context from the cache"
    print(f"\n{counted(windows, 'chunk')} of {counted(tokens + 1, 'token')}, {at_once}{whole}")
    against = f"vs {first.attention} {first.format}"
    print(f"{'attention':<11}{'cache':<14}{'bytes/token':>12}{'bits/byte':>11}  {against}")
    for result in results:
        bits = result.bits.sum().item()
        print(
            f"{result.attention:<11}{result.format:<14}{result.bytes_per_token:>12.1f}"
            f"{bits / num_bytes:>11.4f}  {100 * (bits / base - 1):+.3f}%"
        )


def curve(result: Result) -> dict[int, float]:
    """Mean bits per token by position: the first 64, then every doubling of the context."""
    edges = [0, 64]
    while edges[-1] < result.bits.shape[1]:
        edges.append(2 * edges[-1])
    return {end: result.bits[:, start:end].mean().item() for start, end in pairwise(edges)}


def print_curves(results: list[Result]) -> None:
    """A small plot: one row per combination, one bar per doubling of the context."""
    curves = [curve(result) for result in results]
    top = max(max(each.values()) for each in curves)
    bars = "▁▂▃▄▅▆▇█"
    print(f"\nbits per token by position, up to {', '.join(map(str, curves[0]))}")
    for result, each in zip(results, curves, strict=True):
        drawn = "".join(bars[min(int(value / top * 8), 7)] * 3 for value in each.values())
        numbers = "  ".join(f"{value:.2f}" for value in each.values())
        print(f"{result.attention + ' ' + result.format:<22}{drawn}  {numbers}")


def draw(results: list[Result], num_bytes: int, path: Path, title: str) -> None:
    """Plot cache bytes against bits per byte: a mark per format, compared with plain transformers.

    Marks are rings, later ones smaller, so that coinciding formats stay visible.
    """
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(result.format for result in results))
    marks = {"dense": "o", "sparse": "s"}
    sizes = {name: 17 - 13 * i / max(len(names) - 1, 1) for i, name in enumerate(names)}
    colors = dict(zip(names, COLORS, strict=False))
    with picture(path, 5.6, f"{title}\n(left and low is better)") as figure:
        axes = figure.subplots()
        for result in results:
            bits, name = result.bits.sum().item() / num_bytes, result.format
            axes.plot(
                result.bytes_per_token, bits, marks[result.attention], mfc="none", mew=1.8,
                mec=colors[name], ms=sizes[name],
            )  # fmt: skip
        ring = {"ls": "", "mfc": "none", "mew": 1.8}
        legend = [
            Line2D([], [], marker="o", mec=colors[name], **ring,
                   label="plain transformers" if name == PLAIN else name)
            for name in names
        ]  # fmt: skip
        for attention in dict.fromkeys(result.attention for result in results):
            mark = marks[attention]
            legend.append(
                Line2D([], [], marker=mark, mec=INK, **ring, label=f"{attention} attention")
            )
        figure.legend(handles=legend, loc="outside lower center", ncols=3)
        axes.set_xlim(0, 1.1 * max(result.bytes_per_token for result in results))
        axes.margins(y=0.12)
        axes.ticklabel_format(useOffset=False)
        axes.set_xlabel("cache, bytes per token of context, all layers")
        axes.set_ylabel("bits per byte of text")
        axes.grid()
