"""Checks contenders, then times them round robin in one process.

Whoever is outside the error budget is printed as WRONG and not timed. Times are medians over
rotated rounds with the L2 cache flushed between; the share of the roof is what the mathematics
needs over what this machine was just seen to do.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from openmla.backends import BACKENDS
from openmla.cli.options import Parser, output_file, whole
from openmla.errors import UnsupportedError
from openmla.ops._register import Cost
from openmla.testing import Inputs

MIN_ROUNDS = 15
Check = Callable[[Inputs, str], float]


@dataclass(frozen=True)
class Job:
    """One shape of an op: its inputs, what the mathematics costs, and how a backend is judged."""

    inputs: Inputs
    cost: Cost
    check: Check  # inputs, backend -> share of the budget used


@dataclass(frozen=True)
class Row:
    """One line of a result table; times in microseconds."""

    shape: str
    contender: str
    median_us: float
    min_us: float
    max_us: float
    ratio: float  # baseline's median over this one's
    baseline: str
    roof: float
    error: float  # share of the error budget used


def main(
    arguments: Sequence[str] | None,
    op: Callable[..., Any],
    shapes: Mapping[str, Callable[[str], Job]],
) -> None:
    """Command line of one op's benchmark."""
    parser = argument_parser(op.__name__)
    known = ", ".join(shapes)
    parser.add_argument("shapes", nargs="*", help=f"of: {known}; default: the tiny ones")
    parser.add_argument("--all", action="store_true", help="every shape, big ones included")
    parser.add_argument("--baseline", choices=BACKENDS[op.__name__], default="reference")
    options = parser.parse_args(arguments)
    unknown = [shape for shape in options.shapes if shape not in shapes]
    if unknown:
        parser.error(f"unknown shape {unknown[0]!r}; known: {known}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = list(shapes) if options.all else options.shapes
    chosen = chosen or [shape for shape in shapes if shape.startswith("tiny")]
    machine, roofs = describe_machine(device), measure_roofs(device)
    print(machine)
    print(f"seen here: {roofs.bytes / 1e9:.0f} GB/s, {roofs.flops / 1e9:.0f} GFLOP/s")
    rows: list[Row] = []
    with torch.inference_mode():
        for shape in chosen:
            job = shapes[shape](device)
            calls, used = able_backends(op, job)
            times = time_round_robin(calls, options.rounds, device)
            rows += tabulate(shape, times, options.baseline, job.cost, roofs, used)
    save(options.json, machine, rows)


def argument_parser(name: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"openmla bench {name}", description=__doc__)
    parser.add_argument(
        "--rounds", type=whole(MIN_ROUNDS, 10**6), default=MIN_ROUNDS, help="15 or more"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows there too")
    return parser


def able_backends(
    op: Callable[..., Any], job: Job
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Calls to time, and each one's share of the error budget; says why others are missing."""
    calls: dict[str, Callable[[], Any]] = {}
    used: dict[str, float] = {}
    for backend in BACKENDS[op.__name__]:
        try:
            used[backend] = job.check(job.inputs, backend)
        except UnsupportedError as reason:
            print(f"  {str(reason).splitlines()[1].strip()}")
            continue
        if used[backend] > 1:
            print(f"  {backend:<12} WRONG: {used[backend]:.2f} times its error budget")
            continue
        calls[backend] = partial(job.inputs.run, op, backend=backend)
    return calls, used


def time_round_robin(
    calls: Mapping[str, Callable[[], Any]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds per call, contenders taking turns; two more rounds go first to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            seconds = time_once(call, device)
            if turn >= 2:
                times[name].append(seconds)
    return times


def tabulate(
    shape: str,
    times: Mapping[str, Sequence[float]],
    baseline: str,
    cost: Cost | None,
    roofs: Cost,
    errors: Mapping[str, float],
) -> list[Row]:
    """Print one shape's table and return its rows."""
    print(f"\n{shape}")
    rows = []
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, median in medians.items():
        floor = max(cost.bytes / roofs.bytes, cost.flops / roofs.flops) if cost else 0.0
        row = Row(
            shape=shape,
            contender=name,
            median_us=median * 1e6,
            min_us=min(times[name]) * 1e6,
            max_us=max(times[name]) * 1e6,
            ratio=medians.get(baseline, median) / median,
            baseline=baseline,
            roof=floor / median,
            error=errors[name],
        )
        of_roof = f"  {row.roof:>6.1%} of roof" if cost else ""
        print(
            f"  {name:<28}{row.median_us:>11.1f} us  ({row.min_us:.1f} to {row.max_us:.1f})"
            f"  {row.ratio:>7.2f} x {baseline}{of_roof}  error {row.error:.2g}"
        )
        rows.append(row)
    return rows


def save(path: str | None, machine: str, rows: Sequence[Row], **more: Any) -> None:
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rows": [asdict(row) for row in rows], **more}, file)


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
    root = Path(__file__).parents[2]
    commit = ""
    if (root / ".git").exists() and shutil.which("git"):  # a clone, not what was installed
        command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    where = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if device == "cuda":
        where = torch.cuda.get_device_name()
    return f"{where}, torch {torch.__version__}, commit {commit or 'unknown'}"
