"""`openmla eval`: bits per byte of a text for every cache format, dense and sparse."""

from __future__ import annotations

import argparse
import math
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from openmla.cache import check_formats, latent_formats
from openmla.cli.calibrate import calibrate_on
from openmla.cli.checkpoint import checked_device, open_checkpoint, read_text
from openmla.cli.generate import cache_bytes
from openmla.cli.hub import called
from openmla.cli.looked_at import LOOKED, draw_looked, look
from openmla.cli.models import (
    attentions,
    check_attention,
    cut_windows,
    demo_text,
    load_model,
    load_tokenizer,
    read_config,
    run_once,
)
from openmla.cli.terminal import note, shows_progress, warn
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations import Scales
from openmla.integrations.transformers import attach, detach
from openmla.layers.measure import HEADROOM

FORMATS = ("fp32", "bf16", "fp16", "fp8", "fp8+scales", "fp8_ds_mla", "fp8_dsv4")
SCALED = "fp8+scales"  # calibrated on the first window; plain fp8 has the scale 1
# Tokens per forward pass: all keys but these come out of the cache, through its format.
CHUNK = 64
EIGHT_BITS = "fp8-weights"  # a row of its own: what is absorbed, not what is cached
PLAIN = "transformers"  # a row of its own beside a picture: the model as it is, with its own cache
QUERIES = "fp8-queries"  # and one of what meets fp8+scales
FP8_PREFILL = "fp8-prefill"  # likewise: what is expanded


class Result(NamedTuple):
    """Bits of every token of every window, in one attention and cache format."""

    attention: str
    format: str
    bits: Tensor  # [windows, context - 1]
    bytes_per_token: float


def run_eval(options: argparse.Namespace) -> int:
    """Check everything, measure every combination, print a table and a small plot."""
    checkpoint = open_checkpoint(
        options.model, allow_pickle=options.allow_pickle, revision=options.revision
    )
    device = checked_device(options.device)
    if options.text is None and options.model != "demo":
        raise ConfigError("eval: --text must be a file, got none. Only the demo brings its own.")
    if options.plot and find_spec("matplotlib") is None:
        raise UnsupportedError('eval: --plot needs matplotlib: pip install "openmla[plot]".')
    text = read_text("eval: --text", options.text) if options.text else demo_text()
    config = read_config(checkpoint.folder)
    check_attention(options.attention, config)
    formats = chosen_formats(options.formats, options.index_format, checkpoint.config)
    tokenizer = load_tokenizer(checkpoint.folder)
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    windows = cut_windows("eval", tokenizer, text, options, checkpoint.config, vocab_size)
    num_bytes = sum(
        len(tokenizer.decode(row[1:].tolist(), skip_special_tokens=True).encode())
        for row in windows
    )
    results: list[Result] = []
    for attention in [options.attention] if options.attention else attentions(config):
        model = load_model(checkpoint, device, options.dtype, dense=attention == "dense")
        run_once(model, checkpoint.folder)
        for format in formats:
            scales: Scales | float | None = 1.0 if format == "fp8" else None
            if format == SCALED:
                scales = calibrate_on(model, windows[:1], HEADROOM)
            attach(
                model,
                cache_format=format_of(format),
                kv_scale=scales,
                index_format=options.index_format,
            )
            results.append(measure(model, windows.to(device), attention, format))
            detach(model)
        if options.formats is None and checkpoint.config.compressor is None:
            results.append(measure_eight_bits(model, windows.to(device), attention, options))
            results.append(measure_queries(model, windows.to(device), attention, options))
            results.append(measure_fp8_prefill(model, windows.to(device), attention, options))
        if options.plot:
            results.append(measure(model, windows.to(device), attention, PLAIN))
        if options.plot and attention == "sparse":
            title = f"{called(checkpoint.folder)}: which keys each layer chooses"
            draw_keys(model, windows[0], checkpoint.config, options, title)
    print_table(results, num_bytes)
    print_curves(results)
    if options.plot:
        count, context = windows.shape
        tokens = f"{count} window{'s' * (count > 1)} of {context} tokens"
        title = f"{called(checkpoint.folder)}: what a cache format costs, {tokens}"
        draw(results, num_bytes, Path(options.plot), title)
    return 0


def draw_keys(
    model: Any, window: Tensor, config: MLAConfig, options: argparse.Namespace, title: str
) -> None:
    """A second picture of a sparse model, beside the first: what it looks at."""
    assert config.indexer is not None
    tokens = window[:LOOKED].to(model.device)
    first = Path(options.plot)
    path = first.with_name(f"{first.stem}-keys{first.suffix}")
    ratio = 1 if config.compressor is None else INDEXED_RATIO
    if len(tokens) <= config.indexer.topk * ratio:
        warn(
            f"no picture of chosen keys: {len(tokens)} tokens see no more than the "
            f"{config.indexer.topk} that a layer may choose. Give a longer --context"
        )
        return
    found = look(model, tokens, config, index_format=options.index_format)
    draw_looked(found, path, f"{title}, {len(tokens)} tokens")


def chosen_formats(named: str | None, index_format: str, config: MLAConfig) -> list[str]:
    """The formats asked for, checked before anything is loaded, or all the model can use."""
    usual = [name for name in FORMATS if format_of(name) in latent_formats(config)]
    chosen = usual if named is None else named.split(",")
    for name in chosen:
        check_formats(config, format_of(name), index_format)
    return chosen


def format_of(name: str) -> str:
    """The cache format behind a row of the table."""
    return "fp8" if name == SCALED else name


@torch.no_grad()
def measure(
    model: Any, windows: Tensor, attention: str, format: str, chunk: int | None = None
) -> Result:
    """All windows side by side, in chunks, so that the context is read from the cache."""
    chunk = chunk or CHUNK
    past, parts = DynamicCache(config=model.config), []
    last = None
    context = windows.shape[1]
    for start in range(0, context, chunk):
        ids = windows[:, start : start + chunk]
        logits = model(ids, past_key_values=past, use_cache=True).logits.float()
        if last is None:  # nothing predicts the first token
            predictions, targets = logits[:, :-1], ids[:, 1:]
        else:
            predictions, targets = torch.cat([last, logits[:, :-1]], 1), ids
        last = logits[:, -1:]
        losses = F.cross_entropy(predictions.flatten(0, 1), targets.flatten(), reduction="none")
        parts.append(losses.view(targets.shape).cpu() / math.log(2))
        done = min(start + chunk, context)
        if done == context or shows_progress():
            line = f"\r{attention} {format}: {done} of {context} tokens"
            print(line, end="\n" if done == context else "", file=sys.stderr, flush=True)
    used = cache_bytes(model, past) / windows.numel()
    return Result(attention, format, torch.cat(parts, 1), used)


def measure_eight_bits(
    model: Any, windows: Tensor, attention: str, options: argparse.Namespace
) -> Result:
    """The model's own cache format, and kv_b_proj in eight bits wherever it is absorbed."""
    attach(model, index_format=options.index_format, absorbed_format="fp8")
    result = measure(model, windows, attention, EIGHT_BITS)
    detach(model)
    return result


def measure_queries(
    model: Any, windows: Tensor, attention: str, options: argparse.Namespace
) -> Result:
    """fp8 rows with calibrated scales, and absorbed queries in fp8 as well."""
    scales = calibrate_on(model, windows[:1].cpu(), HEADROOM)
    attach(
        model, cache_format="fp8", kv_scale=scales, index_format=options.index_format,
        query_dtype="fp8",
    )  # fmt: skip
    result = measure(model, windows, attention, QUERIES)
    detach(model)
    return result


def measure_fp8_prefill(
    model: Any, windows: Tensor, attention: str, options: argparse.Namespace
) -> Result:
    """The model's own cache format, and expanded heads in e4m3: windows in one pass, for a few
    tokens over a context are absorbed."""
    attach(model, index_format=options.index_format, prefill_dtype="fp8")
    result = measure(model, windows, attention, FP8_PREFILL, chunk=windows.shape[1])
    detach(model)
    return result


def print_table(results: list[Result], num_bytes: int) -> None:
    first = results[0]
    base = first.bits.sum().item()
    windows, tokens = first.bits.shape
    whole = f"; {FP8_PREFILL} in one pass" if any(r.format == FP8_PREFILL for r in results) else ""
    at_once = f"{CHUNK} at a time, context from the cache"
    print(f"\n{windows} windows of {tokens + 1} tokens, {at_once}{whole}")
    against = f"against {first.attention} {first.format}"
    print(f"{'attention':<11}{'cache':<14}{'bytes/token':>12}{'bits/byte':>11}  {against}")
    for result in results:
        bits = result.bits.sum().item()
        print(
            f"{result.attention:<11}{result.format:<14}{result.bytes_per_token:>12.1f}"
            f"{bits / num_bytes:>11.4f}  {100 * (bits / base - 1):+.3f} %"
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


COLOURS = ("#3b5bbf", "#d9822b", "#2e8b57", "#8e44ad", "#c0392b", "#16a2b8", "#b8860b", "#444444")


def draw(results: list[Result], num_bytes: int, path: Path, title: str) -> None:
    """Bytes of cache against bits per byte: a mark per format, beside plain transformers.

    Marks are rings, the later ones smaller: formats that coincide are seen within each other.
    """
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, axes = pyplot.subplots(figsize=(8.5, 4.8))
    names = list(dict.fromkeys(result.format for result in results))
    marks = {"dense": "o", "sparse": "s"}
    sizes = {name: 17 - 13 * i / max(len(names) - 1, 1) for i, name in enumerate(names)}
    given = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for result in results:
        bits, name = result.bits.sum().item() / num_bytes, result.format
        axes.plot(
            result.bytes_per_token, bits, marks[result.attention], mfc="none", mew=1.8,
            mec=given[name], ms=sizes[name],
        )  # fmt: skip
    legend = [
        Line2D([], [], ls="", marker="o", mfc="none", mew=1.8, mec=given[name], ms=sizes[name],
               label="plain transformers" if name == PLAIN else name)
        for name in names
    ]  # fmt: skip
    for attention in dict.fromkeys(result.attention for result in results):
        mark = {"marker": marks[attention], "mfc": "none", "mec": "black"}
        legend.append(Line2D([], [], ls="", **mark, label=f"{attention} attention"))
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.01, 1), labelspacing=1.1)
    axes.set_xlim(0, 1.1 * max(result.bytes_per_token for result in results))
    axes.margins(y=0.12)
    axes.ticklabel_format(useOffset=False)
    axes.set(xlabel="cache, bytes per token of context, all layers", ylabel="bits per byte of text")
    axes.set_title(f"{title}\n(left and low is better)", fontsize=9)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    note(f"wrote {path.name}")
