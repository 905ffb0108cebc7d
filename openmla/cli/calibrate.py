"""`openmla calibrate`: the scales of a model's fp8 cache, found on a text, into a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from openmla.cli.checkpoint import checked_device, open_checkpoint, read_text
from openmla.cli.models import (
    check_attention,
    cut_windows,
    demo_text,
    load_model,
    load_tokenizer,
    read_config,
    run_once,
)
from openmla.cli.terminal import note
from openmla.errors import ConfigError
from openmla.integrations import Scales, calibrate


def run_calibrate(options: argparse.Namespace) -> int:
    """Check everything, load, measure, write, and say what was found."""
    checkpoint = open_checkpoint(
        options.model, allow_pickle=options.allow_pickle, revision=options.revision
    )
    device = checked_device(options.device)
    if options.text is None and options.model != "demo":
        raise ConfigError(
            "calibrate: --text must be a file, got none. Only the demo brings its own."
        )
    text = read_text("calibrate: --text", options.text) if options.text else demo_text()
    config = read_config(checkpoint.folder)
    check_attention(options.attention, config)
    tokenizer = load_tokenizer(checkpoint.folder)
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    windows = cut_windows("calibrate", tokenizer, text, options, checkpoint.config, vocab_size)
    dense = options.attention == "dense" or (options.attention is None and options.model == "demo")
    model = load_model(checkpoint, device, options.dtype, dense=dense)
    run_once(model, checkpoint.folder)
    scales = calibrate_on(model, windows, options.headroom)
    scales.save(options.out)
    print_scales(scales, options.headroom)
    note(f"wrote {Path(options.out).name}: scales of {len(scales.layers)} layers")
    note(f"to use them: openmla generate ... --cache-format fp8 --kv-scale {options.out}")
    return 0


def calibrate_on(model: Any, windows: Tensor, headroom: float) -> Scales:
    """A window at a time, with progress."""
    found = calibrate(model, _shown(windows), headroom=headroom)
    assert isinstance(found, Scales)
    return found


def _shown(windows: Tensor) -> Iterator[Tensor]:
    """A bar on the error stream: what is done, of how much."""
    count = len(windows)
    for done, window in enumerate(windows):
        if sys.stderr.isatty():
            _draw(done, count, "")
        yield window[None]
    _draw(count, count, "\n")


def _draw(done: int, count: int, end: str) -> None:
    bar = ("#" * (20 * done // count)).ljust(20, ".")
    line = f"\rcalibrate [{bar}] {done} of {count} stretches of text"
    print(line, end=end, file=sys.stderr, flush=True)


def print_scales(scales: Scales, headroom: float) -> None:
    """Of every layer, apart and together."""
    print(f"scales: powers of two that hold {headroom:g} times the largest value seen")
    print(f"{'layer':<28}{'latent':>12}{'k_pe':>12}{'latent, k_pe':>14}{'query':>12}")
    for place, each in scales.layers.items():
        k_pe, q = ("-" if one is None else f"{one:.4g}" for one in (each.k_pe, each.q))
        print(f"{place:<28}{each.v:>12.4g}{k_pe:>12}{each.k:>14.4g}{q:>12}")
