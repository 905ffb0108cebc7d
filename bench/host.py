"""Host time of an op call outside a graph, compared with FlashMLA's if that package is installed.

    python3 -m bench.host --json host.json
    python3 -m bench.host --profile       time per function

Timing ends when the call returns, while the GPU is still working. Calls come in bursts that fit in
the launch queue, contenders take turns, and times are medians of single calls.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.latent import compressed, errors, paged, sparse
from bench.report import BURST, Report, host_times, script_parser

CASES = {
    "dense-bf16-h16-1x4096": partial(paged, "1x4096", 16, 1, 1),
    "dense-bf16-h128-64x1024": partial(paged, "64x1024", 128, 1, 1),
    "dense-fp8-h16-16x1024": partial(paged, "16x1024", 16, 1, 1, "fp8"),
    "sparse-fp8_ds_mla-h16-b1": partial(sparse, 1, 16, "fp8_ds_mla", 65536, 1),
    "sparse-fp8_ds_mla-h128-b16": partial(sparse, 16, 128, "fp8_ds_mla", 65536, 1),
    "v4-h64-b16": partial(compressed, 16, 64, 512, 1),
}
PEERS = ("openmla", "flashmla", "triton")


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
    parser = script_parser("host", __doc__, "cases")
    parser.add_argument("--profile", action="store_true", help="also print functions by own time")
    header = f"{'case':<28} {'contender':<10} {'us':>7}  of FlashMLA's"
    report = Report(parser, arguments, header)
    torch.manual_seed(0)
    with torch.inference_mode():
        for title, make in CASES.items():
            if not report.wants(title):
                continue
            shape = make()
            calls = {name: call for name, call in shape.contenders.items() if name in PEERS}
            wrong = {name: errors(call(), shape.exact)[0] for name, call in calls.items()}
            calls = {name: call for name, call in calls.items() if wrong[name] < 0.05}
            times = host_times(calls)
            for name, us in times.items():
                ratio = us / times["flashmla"] if "flashmla" in times else None
                shown = "" if ratio is None else f"{ratio:.2f}"
                print(f"{title:<28} {name:<10} {us:>7.1f}  {shown}", flush=True)
                row = {"case": title, "contender": name, "us": us, "of_flashmla": ratio}
                report.rows.append(row)
            if report.options.profile:
                show_profile(calls["openmla"])
            report.save()


if __name__ == "__main__":
    run()
