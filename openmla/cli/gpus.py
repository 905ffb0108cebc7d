"""GPUS: what their makers publish: memory, its speed, and bf16 products a second, dense."""

from __future__ import annotations

import argparse
import math

from openmla.plan.roofline import Machine


def _gpu(gigabytes: float, gigabytes_a_second: float, teraflops: float) -> Machine:
    return Machine(gigabytes * 1e9, gigabytes_a_second * 1e9, teraflops * 1e12)


# GB (10^9 bytes), GB/s, bf16 TFLOP/s without sparsity and with float32 sums; SXM or OAM boards
# where there are several. Drivers show some percent more memory than these, or, with ECC, less.
GPUS = {
    "a100": _gpu(80, 2039, 312),
    "a100-40": _gpu(40, 1555, 312),
    "h20": _gpu(96, 4000, 148),
    "h100": _gpu(80, 3350, 989),
    "h100-pcie": _gpu(80, 2000, 756),
    "h200": _gpu(141, 4800, 989),
    "b200": _gpu(180, 8000, 2250),
    "l4": _gpu(24, 300, 121),
    "l40s": _gpu(48, 864, 362),
    "rtx-4090": _gpu(24, 1008, 165),
    "rtx-5090": _gpu(32, 1792, 209),
    "mi300x": _gpu(192, 5300, 1307),
}


def gpu(text: str) -> Machine:
    """A type of option: a name of GPUS, or GB,GB/s,TFLOP/s as 141,4800,989."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and 0 < n <= 1e9 for n in numbers):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(GPUS)}, or GB,GB/s,TFLOP/s by hand, got {text[:40]!r}"
        )
    return _gpu(*numbers)
