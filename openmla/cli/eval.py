"""`openmla eval`: bits per byte of a text for every cache format, dense and sparse."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from openmla.cache.format import GROUP, get_format
from openmla.cli.models import (
    DTYPES,
    can_be_dense,
    demo_text,
    load_model,
    load_tokenizer,
    model_folder,
    note,
)
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers import REFUSED, attach, attachment_of, detach

FORMATS = ("fp32", "bf16", "fp16", "fp8", "fp8_ds_mla")
# Tokens per forward pass: all keys but these come out of the cache, through its format.
CHUNK = 64


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openmla eval", description=__doc__)
    parser.add_argument("--model", required=True, help="demo, or a folder with config and weights")
    parser.add_argument("--text", help="a file; default: what was held out of the demo's training")
    parser.add_argument("--windows", type=int, default=4, help="how many stretches of the text")
    parser.add_argument("--context", type=int, help="tokens of a stretch; default: 4096 at most")
    parser.add_argument("--formats", help="cache formats, with commas; default: those that fit")
    parser.add_argument("--index-format", default="index_fp32", help="of a sparse model's keys")
    parser.add_argument("--attention", choices=("dense", "sparse"), help="default: what there is")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's, if it runs")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--plot", help="a picture of bits per byte along the context, as .png")
    return parser.parse_args(arguments)


class Result(NamedTuple):
    """Bits of every token of every window, in one attention and cache format."""

    attention: str
    format: str
    bits: Tensor  # [windows, context - 1]
    bytes_per_token: float


def run_eval(arguments: Sequence[str]) -> int:
    """Measure every combination, print a table and a small plot."""
    options = parse_arguments(arguments)
    folder = model_folder(options.model)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.text is None and options.model != "demo":
        raise ConfigError("eval: --text must be a file, got none. Only the demo brings its own.")
    if options.plot and find_spec("matplotlib") is None:
        raise UnsupportedError('eval: --plot needs matplotlib: pip install "openmla[plot]".')
    text = Path(options.text).read_text(encoding="utf-8") if options.text else demo_text()
    tokenizer = load_tokenizer(folder)
    results: list[Result] = []
    num_bytes = 0
    for attention in [options.attention] if options.attention else ["dense", "sparse"]:
        if attention == "dense" and options.attention is None and not can_be_dense(folder):
            note(f"{folder.name} is left out as dense")
            continue
        model = load_model(folder, device, options.dtype, dense=attention == "dense")
        found = "sparse" if hasattr(model.config, "index_topk") else "dense"
        refused = found != attention or model.config.model_type in REFUSED
        if refused and options.attention is None:
            note(f"{model.config.model_type} is left out as {attention}")
            continue
        if found != attention:
            raise UnsupportedError(
                f"eval: {model.config.model_type} has no {attention} attention. Leave it out."
            )
        windows = cut_windows(tokenizer, text, options, model.config)
        num_bytes = sum(
            len(tokenizer.decode(row[1:].tolist(), skip_special_tokens=True).encode())
            for row in windows
        )
        for format in chosen_formats(options.formats, model.config):
            attach(model, cache_format=format, index_format=options.index_format)
            results.append(measure(model, windows.to(device), attention, format))
            detach(model)
    if not results:
        raise UnsupportedError(f"eval: {folder.name} cannot be attached to.")
    print_table(results, num_bytes)
    print_curves(results)
    if options.plot:
        draw(results, Path(options.plot))
    return 0


def chosen_formats(named: str | None, config: Any) -> list[str]:
    """The formats asked for, checked before anything is measured, or all the model can use."""
    if named is not None:
        return [get_format(name, "latent").name for name in named.split(",")]
    packed = getattr(config, "kv_lora_rank", 0) % GROUP == 0
    return [name for name in FORMATS if packed or not get_format(name).packed]


def cut_windows(
    tokenizer: Any, text: str, options: argparse.Namespace, config: Any
) -> Tensor:  # [windows, context]
    """Stretches of the text, evenly spread."""
    ids = torch.tensor(tokenizer.encode(text))
    context = options.context or min(config.max_position_embeddings, 4096)
    if context < 2 or options.windows < 1 or len(ids) < context:
        raise ConfigError(
            f"eval: --windows must be at least 1 and --context from 2 to the text's {len(ids)} "
            f"tokens, got {options.windows} and {context}."
        )
    starts = torch.linspace(0, len(ids) - context, options.windows).long()
    return torch.stack([ids[start : start + context] for start in starts.tolist()])


@torch.no_grad()
def measure(model: Any, windows: Tensor, attention: str, format: str) -> Result:
    """All windows side by side, in chunks, so that the context is read from the cache."""
    past, parts = DynamicCache(config=model.config), []
    last = None
    context = windows.shape[1]
    for start in range(0, context, CHUNK):
        ids = windows[:, start : start + CHUNK]
        logits = model(ids, past_key_values=past, use_cache=True).logits.float()
        if last is None:  # nothing predicts the first token
            predictions, targets = logits[:, :-1], ids[:, 1:]
        else:
            predictions, targets = torch.cat([last, logits[:, :-1]], 1), ids
        last = logits[:, -1:]
        losses = F.cross_entropy(predictions.flatten(0, 1), targets.flatten(), reduction="none")
        parts.append(losses.view(targets.shape).cpu() / math.log(2))
        done = min(start + CHUNK, context)
        if done == context or sys.stderr.isatty():
            line = f"\r{attention} {format}: {done} of {context} tokens"
            print(line, end="\n" if done == context else "", file=sys.stderr, flush=True)
    used = attachment_of(model).used_bytes() / windows.numel()
    return Result(attention, format, torch.cat(parts, 1), used)


def print_table(results: list[Result], num_bytes: int) -> None:
    first = results[0]
    base = first.bits.sum().item()
    windows, tokens = first.bits.shape
    print(f"\n{windows} windows of {tokens + 1} tokens, {CHUNK} at a time, context from the cache")
    against = f"against {first.attention} {first.format}"
    print(f"{'attention':<11}{'cache':<12}{'bytes/token':>12}{'bits/byte':>11}  {against}")
    for result in results:
        bits = result.bits.sum().item()
        print(
            f"{result.attention:<11}{result.format:<12}{result.bytes_per_token:>12.1f}"
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
        print(f"{result.attention + ' ' + result.format:<20}{drawn}  {numbers}")


def draw(results: list[Result], path: Path) -> None:
    """The same as a picture."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for result in results:
        each = curve(result)
        style = "o-" if result.attention == "dense" else "o--"
        label = f"{result.attention} {result.format}"
        axes.plot(list(each), list(each.values()), style, markersize=3, label=label)
    axes.set(xscale="log", xlabel="position in the context", ylabel="bits per token")
    axes.set_xticks(list(curve(results[0])), [str(edge) for edge in curve(results[0])])
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    note(f"wrote {path.name}")
