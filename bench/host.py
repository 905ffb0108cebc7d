"""Host time of an op call outside a graph, compared with FlashMLA's if that package is installed.

    python3 -m bench.host --json host.json
    python3 -m bench.host --profile       time per function

Timing ends when the call returns, while the GPU is still working. Calls come in bursts that fit in
the launch queue, contenders take turns, and times are medians of single calls.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bench.latent import compressed, errors, paged, sparse
from openmla.bench.harness import describe_machine

BURST, ROUNDS = 40, 9  # calls in a row, and repetitions
CASES = {
    "dense-bf16-h16-1x4096": partial(paged, "1x4096", 16, 1, 1),
    "dense-bf16-h128-64x1024": partial(paged, "64x1024", 128, 1, 1),
    "dense-fp8-h16-16x1024": partial(paged, "16x1024", 16, 1, 1, "fp8"),
    "sparse-fp8_ds_mla-h16-b1": partial(sparse, 1, 16, "fp8_ds_mla", 65536, 1),
    "sparse-fp8_ds_mla-h128-b16": partial(sparse, 16, 128, "fp8_ds_mla", 65536, 1),
    "v4-h64-b16": partial(compressed, 16, 64, 512, 1),
}
PEERS = ("openmla", "flashmla", "triton")


def host_times(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds until a call returns."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            for _ in range(BURST):
                begin = time.perf_counter()
                call()
                if turn:
                    seen[name].append(time.perf_counter() - begin)
    gc.enable()
    return {name: 1e6 * statistics.median(each) for name, each in seen.items()}


def show_profile(call: Callable[[], Any]) -> None:
    profile = cProfile.Profile()
    for _ in range(10):
        torch.cuda.synchronize()
        profile.enable()
        for _ in range(BURST):
            call()
        profile.disable()
    stats = pstats.Stats(profile)
    stats.sort_stats("tottime").print_stats(28)


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.host")
    parser.add_argument("--json", help="write the rows here too")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--profile", action="store_true", help="functions by their own time")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    machine = describe_machine("cuda")
    print(machine)
    print(f"{'case':<28} {'contender':<10} {'us':>7}  of FlashMLA's")
    rows = []
    with torch.inference_mode():
        for title, make in CASES.items():
            if options.only not in title:
                continue
            shape = make()
            calls = {name: call for name, call in shape.contenders.items() if name in PEERS}
            wrong = {name: errors(call, shape.exact)[0] for name, call in calls.items()}
            calls = {name: call for name, call in calls.items() if wrong[name] < 0.05}
            times = host_times(calls)
            for name, us in times.items():
                ratio = us / times["flashmla"] if "flashmla" in times else None
                shown = "" if ratio is None else f"{ratio:.2f}"
                print(f"{title:<28} {name:<10} {us:>7.1f}  {shown}", flush=True)
                rows.append({"case": title, "contender": name, "us": us, "of_flashmla": ratio})
            if options.profile:
                show_profile(calls["openmla"])
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    run()
