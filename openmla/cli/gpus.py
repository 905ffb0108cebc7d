"""GPUS by their common names: chip, multiprocessors, and published speed."""

from __future__ import annotations

import argparse
import math
import re
from typing import NamedTuple

from openmla.cli.roofline import Machine

RAN = {"sm_90": "run on an H200"}  # all other targets are compiled, never run


class GPU(NamedTuple):
    """A GPU. Without a published dense bf16 throughput it has no Machine."""

    title: str
    target: str  # target of its kernels
    multiprocessors: int
    machine: Machine | None = None


def _machine(gigabytes: float, gigabytes_a_second: float, teraflops: float) -> Machine:
    return Machine(gigabytes * 1e9, gigabytes_a_second * 1e9, teraflops * 1e12)


# GB (10^9 bytes), GB/s, bf16 TFLOP/s without sparsity and with float32 sums; SXM or OAM boards if
# there are several. Drivers show some percent more memory than these, or, with ECC, less. The first
# GPU of a target represents it.
GPUS = {
    "a100": GPU("A100", "sm_80", 108, _machine(80, 2039, 312)),
    "a100-40": GPU("A100", "sm_80", 108, _machine(40, 1555, 312)),
    "rtx3090": GPU("RTX 3090", "sm_86", 82, _machine(24, 936, 71)),
    "a6000": GPU("A6000", "sm_86", 84, _machine(48, 768, 155)),
    "rtx4090": GPU("RTX 4090", "sm_89", 128, _machine(24, 1008, 165)),
    "l40s": GPU("L40S", "sm_89", 142, _machine(48, 864, 362)),
    "l4": GPU("L4", "sm_89", 58, _machine(24, 300, 121)),
    "h100": GPU("H100", "sm_90", 132, _machine(80, 3350, 989)),
    "h100-pcie": GPU("H100", "sm_90", 114, _machine(80, 2000, 756)),
    "h200": GPU("H200", "sm_90", 132, _machine(141, 4800, 989)),
    "h20": GPU("H20", "sm_90", 78, _machine(96, 4000, 148)),
    "b200": GPU("B200", "sm_100", 148, _machine(180, 8000, 2250)),
    "rtx5090": GPU("RTX 5090", "sm_120", 170, _machine(32, 1792, 209)),
    "rtx-pro-6000": GPU("RTX PRO 6000", "sm_120", 188),
    "gb10": GPU("DGX Spark (GB10)", "sm_121", 48),
    "mi300x": GPU("AMD MI300X", "gfx942", 304, _machine(192, 5300, 1307)),
}
# The GPU that represents each target.
TARGETS = {gpu.target: gpu for gpu in reversed(GPUS.values())}
TARGETS = {target: TARGETS[target] for target in dict.fromkeys(g.target for g in GPUS.values())}
SIZED = {name: gpu.machine for name, gpu in GPUS.items() if gpu.machine is not None}


def named(text: str) -> str:
    """A GPU's key in GPUS, in any spelling: RTX 4090, rtx-4090, rtx4090; "" if none."""
    plain = _plain(text)
    return next((name for name in GPUS if _plain(name) == plain), "")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def target(text: str) -> GPU:
    """Option type: a name in GPUS, or a target such as sm_80, for its first GPU."""
    if text in TARGETS:
        return TARGETS[text]
    if not named(text):
        raise argparse.ArgumentTypeError(
            f"must be a GPU ({', '.join(GPUS)}) or a target ({', '.join(TARGETS)}), "
            f"got {text[:40]!r}"
        )
    return GPUS[named(text)]


def gpu(text: str) -> Machine:
    """Option type: a name in SIZED, or GB,GB/s,TFLOP/s such as 141,4800,989."""
    if named(text) in SIZED:
        return SIZED[named(text)]
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and 0 < n <= 1e9 for n in numbers):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(SIZED)}, or GB,GB/s,TFLOP/s by hand, got {text[:40]!r}"
        )
    return _machine(*numbers)
