"""Checks contenders, then times them round robin in one process.

A contender outside the error budget is printed as WRONG and not timed. Times are medians over
rotated rounds, with the L2 cache flushed in between. "% of peak" is the roofline time over the
median: the bytes and FLOPs that the operation needs, at the copy and matmul rates measured just
before.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openmla.backends import BACKENDS
from openmla.bench.output import STANDARD_OUTPUT, LeftOut, Output, Row
from openmla.bench.peers import Peer, peers_of
from openmla.cache.format import raw_view
from openmla.cli.options import Parser, add_plot, output_file, whole
from openmla.cli.terminal import progress
from openmla.errors import UnsupportedError
from openmla.ops._register import Cost
from openmla.testing import Inputs, budget_used, lse_budget, out_budget

MIN_ROUNDS = 15
GRAPH_ROUNDS = 9
OURS = ("reference", "triton", "gluon", "sdpa")  # their failures are errors of this package
Op = Callable[..., Any]
Results = Sequence[Tensor]
Check = Callable[[Op, Inputs, str], float]  # op, inputs, backend -> share of the error budget used
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Job:
    """One shape of an op: its inputs, its minimum cost, and how to check a backend."""

    inputs: Inputs
    cost: Cost
    check: Check


def results(op: Op, inputs: Inputs, backend: str, written: Sequence[str] = ()) -> Results:
    """What an op returns, or the arguments that it has written in a copy of its inputs."""
    if written:
        inputs = inputs.clone()
    found = inputs.run(op, backend=backend)
    if written:
        return [inputs[name] for name in written]
    return (found,) if isinstance(found, Tensor) else found


def equal(*written: str) -> Check:
    """A check that results equal the reference's: the op rounds once, or not at all."""

    def comparable(tensor: Tensor) -> Tensor:  # torch.equal does not support fp8
        return raw_view(tensor) if tensor.dtype.itemsize == 1 else tensor

    def check(op: Op, inputs: Inputs, backend: str) -> float:
        mine, theirs = (results(op, inputs, name, written) for name in (backend, "reference"))
        pairs = zip(mine, theirs, strict=True)
        same = all(torch.equal(comparable(a), comparable(b)) for a, b in pairs)
        return 0.0 if same else float("inf")

    return check


def checked(judge: Callable[[Results, Results, Results], float], *written: str) -> Check:
    """A check of results against the reference in float64 and in the inputs' precision."""

    def check(op: Op, inputs: Inputs, backend: str) -> float:
        actual = results(op, inputs, backend, written)
        exact = results(op, inputs.double(), "reference", written)
        return judge(actual, exact, results(op, inputs, "reference", written))

    return check


def attended(actual: Results, exact: Results, peer: Results) -> float:
    """The larger share of the budgets of out and lse."""
    (out, lse), (exact_out, exact_lse), (peer_out, peer_lse) = actual, exact, peer
    return max(budget_used((out, lse), (exact_out, exact_lse), (peer_out, peer_lse)))


def rounded(actual: Results, exact: Results, peer: Results) -> float:
    """The largest share of out's budget among the results."""
    return max(out_budget(*each) for each in zip(actual, exact, peer, strict=True))


def scored(actual: Results, exact: Results, peer: Results) -> float:
    """The larger share of two budgets: lse's for the largest error, out's for the RMS error."""
    finite = exact[0].isfinite()
    used = out_budget(actual[0][finite], exact[0][finite], peer[0][finite])
    return max(lse_budget(actual[0], exact[0], peer[0]), used)


def total(costs: Iterable[Cost]) -> Cost:
    """The cost of several calls."""
    moved, flops = zip(*costs, strict=True)
    return Cost(sum(moved), sum(flops))


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of the exact values, in float64."""
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def main(name: str, arguments: Sequence[str] | None) -> None:
    """Run the command line of an op's benchmark, openmla/bench/<op>.py."""
    op = getattr(import_module("openmla.ops"), name)
    shapes: Mapping[str, Callable[[str], Job]]
    shapes = import_module(f"openmla.bench.{name}").SHAPES
    parser = argument_parser(name)
    known = ", ".join(shapes)
    parser.add_argument(
        "shapes", nargs="*", metavar="SHAPE",
        help=f"shapes to time, {known} (default: the tiny ones)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="time every shape, large ones included")
    parser.add_argument(
        "--baseline", choices=BACKENDS[name], default="reference",
        help="backend that ratios are relative to (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.json in shapes:
        parser.error(f"shapes must come before --json, which would write a file {options.json!r}")
    unknown = [shape for shape in options.shapes if shape not in shapes]
    if unknown:
        parser.error(f"shape {unknown[0]!r} is unknown; known: {known}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = list(shapes) if options.all else options.shapes
    chosen = chosen or [shape for shape in shapes if shape.startswith("tiny")]
    output, roofs = Output(options, describe_machine(device)), measure_roofs(device)
    output.say(f"peak: {roofs.bytes / 1e9:.0f} GB/s, {roofs.flops / 1e9:.0f} GFLOP/s (measured)")
    peers = []
    for peer in peers_of(name):
        reason = peer.absent(device)
        if reason is None:
            peers.append(peer)
        else:
            output.say(f"not included: {peer.name}, {reason}")
    with torch.inference_mode(), progress(len(chosen) * (options.rounds + 2)) as tell:
        for number, shape in enumerate(chosen):
            done = number * (options.rounds + 2)
            tell(f"{name}, {shape}: making inputs, checking", done)
            job = shapes[shape](device)
            calls, used, left_out = able(op, job, shape, peers)

            def turn(turns: int, shape: str = shape, done: int = done) -> None:
                tell(f"{name}, {shape}: timing", done + turns)

            guests = [guest for guest in calls if guest not in OURS]
            failed: dict[str, str] = {}
            times = time_round_robin(calls, options.rounds, device, turn, guests, failed)
            left_out += [LeftOut(shape, guest, f"failed: {why}") for guest, why in failed.items()]
            rows = make_rows(shape, times, options.baseline, job.cost, roofs, used)
            output.add(shape, rows, left_out)
    output.close()
    output.draw_bars(f"{name} by backend")


def argument_parser(name: str) -> argparse.ArgumentParser:
    """The options of a benchmark with an Output."""
    parser = Parser(
        prog=f"openmla bench {name}",
        description=f"{in_paragraphs(__doc__)}\n\nKernels of FlashMLA, FlashInfer, DeepGEMM and "
        "vLLM are included if they are installed and support the shape.",
    )
    parser.add_argument(
        "--rounds", type=whole(MIN_ROUNDS, 10**6), default=MIN_ROUNDS, metavar="N",
        help="number of timed rounds, at least 15 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", nargs="?", const=STANDARD_OUTPUT,
        help="write the rows to a file; without FILE, print JSON and nothing else",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    add_plot(parser, "the results")
    return parser


def in_paragraphs(text: str | None) -> str:
    """Join a docstring's lines into paragraphs, for help that wraps by itself."""
    parts = (text or "").strip().split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


class NotSuited(Exception):
    """A contender does not support a shape; the message says why."""


def able(
    op: Op, job: Job, shape: str = "", peers: Sequence[Peer] = ()
) -> tuple[Calls, dict[str, float], list[LeftOut]]:
    """Calls to time, each one's share of the error budget, and why the others are missing."""
    attempts = {name: partial(try_backend, op, job, name) for name in BACKENDS[op.__name__]}
    attempts |= {peer.name: partial(try_peer, op, job, peer) for peer in peers}
    calls: Calls = {}
    used: dict[str, float] = {}
    left_out = []
    for name, attempt in attempts.items():
        try:
            call, share = attempt()
        except NotSuited as reason:
            why = str(reason)
        except Exception as error:  # from another package: reported, and the run continues
            if name in OURS:
                raise
            why = f"failed: {one_line(error)}"
        else:
            if share <= 1:
                calls[name], used[name] = call, share
                continue
            why = f"WRONG: {share:.2f} times its error budget"
        left_out.append(LeftOut(shape, name, why))
    return calls, used, left_out


def try_backend(op: Op, job: Job, backend: str) -> tuple[Callable[[], Any], float]:
    """The call of a backend, and its share of the error budget."""
    try:
        share = job.check(op, job.inputs, backend)
    except UnsupportedError as reason:
        line = str(reason).splitlines()[1].strip()
        raise NotSuited(line.removeprefix(backend).strip()) from None
    return partial(job.inputs.run, op, backend=backend), share


def try_peer(op: Op, job: Job, peer: Peer) -> tuple[Callable[[], Any], float]:
    """The call of another package's kernel, and its share of the error budget."""
    why = peer.suits(job.inputs)
    if why is not None:
        raise NotSuited(why)
    prepared = peer.prepare(job.inputs)
    result = prepared.result(prepared.call())
    exact = job.inputs.double().run(op, backend="reference")
    reference = job.inputs.run(op, backend="reference")
    return prepared.call, peer.judge(result, exact, reference)


def one_line(error: Exception) -> str:
    """Shorten the message of another package's exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}".rstrip(": ")


def drop_wrong(
    title: str, calls: Calls, errors: Mapping[str, float], limit: float
) -> list[LeftOut]:
    """Remove calls whose error against transformers is above the limit. Returns them."""
    left_out = []
    for name, error in errors.items():
        if error > limit:
            why = f"WRONG: error {error:.1e} against transformers, limit {limit:.1e}"
            left_out.append(LeftOut(title, name, why))
            del calls[name]
    return left_out


def time_round_robin(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: str,
    tell: Callable[[int], None] | None = None,
    guests: Sequence[str] = (),
    failed: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call, with contenders taking turns after two warm-up rounds. Guests that fail are
    left out and reported in `failed`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        if tell is not None:
            tell(turn)
        for name in list(times):
            try:
                seconds = time_once(calls[name], device)
            except Exception as error:
                if name not in guests or failed is None:
                    raise
                failed[name] = one_line(error)
                del times[name]
                continue
            if turn >= 2:
                times[name].append(seconds)
    return times


def make_rows(
    shape: str,
    times: Mapping[str, Sequence[float]],
    baseline: str,
    cost: Cost | None,
    roofs: Cost,
    errors: Mapping[str, float],
) -> list[Row]:
    """The result rows of one shape."""
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
        rows.append(row)
    return rows


def time_once(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call, including device work, with a cold L2."""
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


def replayed(call: Callable[[], Any], device: str = "cuda", calls: int = 1) -> Callable[[], Any]:
    """`calls` calls replayed from one CUDA graph, which excludes host time; on a CPU, the call."""
    if device != "cuda":
        return call
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def time_graphs(contenders: Mapping[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """Microseconds per call: each contender's calls in one CUDA graph, replayed in rotation;
    medians. The L2 cache is not flushed: contenders whose data would fit in it read other data at
    each call."""
    graphs = {name: replayed(call, calls=calls) for name, call in contenders.items()}
    seen: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(GRAPH_ROUNDS):
        for name, replay in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            seen[name].append(1000 * begin.elapsed_time(end) / calls)
    return {name: statistics.median(times) for name, times in seen.items()}


def measure_roofs(device: str) -> Cost:
    """Bytes and FLOPs per second of a large copy and a large matrix product on this device, now."""
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
    """One line with the hardware and versions that the results depend on."""
    root = Path(__file__).parents[2]
    commit = ""
    if (root / ".git").exists() and shutil.which("git"):  # a clone, not an installed package
        command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    where = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError("bench: this benchmark needs a GPU, and torch found none.")
        where = torch.cuda.get_device_name()
    return f"{where}, torch {torch.__version__}, commit {commit or 'unknown'}"
