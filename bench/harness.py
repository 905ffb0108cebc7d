"""Checks every backend of an op, then times them round robin in one process.

A backend outside its error budget is printed as WRONG and not timed. Times are medians over
rotated rounds with the L2 cache flushed between; the share of the roof is what the op's cost()
needs over what this machine was just seen to do.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from openmla.backends import BACKENDS
from openmla.errors import UnsupportedError
from openmla.ops._register import Cost
from openmla.testing import Inputs

Check = Callable[[Inputs, str], float]


@dataclass(frozen=True)
class Job:
    """One shape of an op: its inputs, what the mathematics costs, and how a backend is judged."""

    inputs: Inputs
    cost: Cost
    check: Check  # inputs, backend -> share of the budget used


def main(op: Callable[..., Any], shapes: Mapping[str, Callable[[str], Job]]) -> None:
    """Command line of one op's benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", choices=[*shapes, []], help="default: tiny ones")
    parser.add_argument("--all", action="store_true", help="every shape, big ones included")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--baseline", default="reference")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    name = op.__name__
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = list(shapes) if options.all else options.shapes
    chosen = chosen or [shape for shape in shapes if shape.startswith("tiny")]
    machine = describe_machine(device)
    roofs = measure_roofs(device)
    print(machine)
    print(f"{name}: {roofs.bytes / 1e9:.0f} GB/s and {roofs.flops / 1e9:.0f} GFLOP/s seen here")
    rows = []
    with torch.inference_mode():
        for shape in chosen:
            rows += run_shape(op, shape, shapes[shape](device), roofs, options, device)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=2)


def run_shape(
    op: Callable[..., Any],
    shape: str,
    job: Job,
    roofs: Cost,
    options: argparse.Namespace,
    device: str,
) -> list[dict[str, Any]]:
    """Check, time and print one shape."""
    timed: dict[str, list[float]] = {}
    used: dict[str, float] = {}
    print(f"\n{shape}")
    for backend in BACKENDS[op.__name__]:
        try:
            used[backend] = job.check(job.inputs, backend)
        except UnsupportedError as reason:
            print(f"  {backend:<10} {str(reason).splitlines()[-1].split(maxsplit=1)[-1]}")
            continue
        if used[backend] > 1:
            print(f"  {backend:<10} WRONG: {used[backend]:.2f} times its error budget")
            continue
        timed[backend] = []
    for _ in range(options.rounds + 2):  # the first two rounds warm up
        for backend, times in timed.items():
            times.append(time_once(partial(job.inputs.run, op, backend=backend), device))
    medians = {backend: statistics.median(times[2:]) for backend, times in timed.items()}
    rows = []
    for backend, median in medians.items():
        ratio = medians.get(options.baseline, median) / median
        roof = max(job.cost.bytes / roofs.bytes, job.cost.flops / roofs.flops) / median
        low, high = min(timed[backend][2:]), max(timed[backend][2:])
        print(
            f"  {backend:<10} {median * 1e6:>10.1f} us  ({low * 1e6:.1f} to {high * 1e6:.1f})"
            f"  {ratio:>7.2f} x {options.baseline}  {roof:>6.1%} of roof"
            f"  {used[backend]:.2f} of budget"
        )
        rows.append(
            {
                "shape": shape,
                "backend": backend,
                "us": median * 1e6,
                "ratio": ratio,
                "baseline": options.baseline,
                "roof": roof,
                "budget": used[backend],
            }
        )
    return rows


def time_once(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call, device work included, with a cold L2."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    torch.empty(128 << 20, dtype=torch.uint8, device=device).zero_()  # larger than any L2
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure_roofs(device: str) -> Cost:
    """Bytes and flops per second that a large copy and a large product reach here, now."""
    size = (1 << 30) if device == "cuda" else (1 << 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192 if device == "cuda" else 1024
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(n, n, device=device).to(dtype)
    copy = min(time_once(lambda: target.copy_(source), device) for _ in range(8))
    product = min(time_once(lambda: a @ a, device) for _ in range(8))
    return Cost(round(2 * size / copy), round(2 * n**3 / product))


def describe_machine(device: str) -> str:
    """One line that says where and with what the numbers were made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    where = platform.processor() or platform.machine()
    if device == "cuda":
        where = torch.cuda.get_device_name()
    return f"{where}, torch {torch.__version__}, commit {commit.stdout.strip() or 'unknown'}"
