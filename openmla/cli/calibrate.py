"""`openmla calibrate`: find scales for a model's fp8 cache on a text, and write them to a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from openmla.cli.models import load_model, open_windows, run_once
from openmla.cli.terminal import note, progress
from openmla.integrations import Scales, calibrate
from openmla.plan.explanation import counted


def run_calibrate(options: argparse.Namespace) -> int:
    """Check everything, load, measure, write and print the scales."""
    checkpoint, device, _, _, windows = open_windows("calibrate", options)
    dense = options.attention == "dense" or (options.attention is None and options.model == "demo")
    model = load_model(checkpoint, device, options.dtype, dense=dense)
    run_once(model, checkpoint.folder)
    scales = calibrate_on(model, windows, options.headroom)
    scales.save(options.out)
    print_scales(scales, options.headroom)
    note(f"wrote {Path(options.out).name}: scales of {counted(len(scales.layers), 'layer')}")
    note(f"to use them: openmla generate MODEL --cache-format fp8 --kv-scale {options.out}")
    return 0


def calibrate_on(model: Any, windows: Tensor, headroom: float) -> Scales:
    """Calibrate chunk by chunk, with progress."""
    count = len(windows)
    with progress(count) as advance:

        def chunks() -> Iterator[Tensor]:
            for done, window in enumerate(windows):
                advance(f"calibrating on chunk {done + 1} of {count}", done)
                yield window[None]

        found = calibrate(model, chunks(), headroom=headroom)
    assert isinstance(found, Scales)
    return found


def print_scales(scales: Scales, headroom: float) -> None:
    """Print one line per layer."""
    print(f"scales: powers of two that cover {headroom:g} times the largest value seen")
    print(f"{'layer':<28}{'latent':>12}{'k_pe':>12}{'latent, k_pe':>14}{'query':>12}")
    for place, each in scales.layers.items():
        k_pe, q = ("-" if one is None else f"{one:.4g}" for one in (each.k_pe, each.q))
        print(f"{place:<28}{each.v:>12.4g}{k_pe:>12}{each.k:>14.4g}{q:>12}")
