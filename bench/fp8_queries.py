"""The accuracy cost of e4m3 queries: errors against float64, compared with 16-bit queries.

    python3 -m bench.fp8_queries            # on a CPU, with the reference backend
    python3 -m bench.fp8_queries --device cuda

Rows are cached in fp8 and fp8_ds_mla; the exact result is float64 over the same bytes, with
unrounded queries. Outliers: four columns of queries and rows are 30 times the others. Logits have a
standard deviation of 1.7 in both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openmla.bench.harness import describe_machine
from openmla.ops import mqa_paged, quantize_queries
from openmla.testing import Inputs, PagedCase

CASES = {
    "random": PagedCase("", (1,) * 4, (1024, 300, 4096, 65), H=16, C=512, R=64, BS=64,
                        contiguous=True, format="fp8", kv_scale=2.0**-6),
    "outliers": PagedCase("", (1,) * 4, (1024, 300, 4096, 65), H=16, C=512, R=64, BS=64,
                          contiguous=True, format="fp8", kv_scale=2.0**-2, outliers=30.0),
}  # fmt: skip


def attend(inputs: Inputs, q: Tensor, q_scale: Tensor | None, backend: str) -> Any:
    others: dict[str, Any] = {name: inputs[name] for name in inputs.tensors if name != "q_latent"}
    return mqa_paged(q, **others, q_scale=q_scale, **inputs.scalars, backend=backend)


def errors(case: PagedCase, device: str) -> dict[str, tuple[float, float]]:
    """Relative error of out, largest error of lse, by query dtype."""
    inputs = replace(case, dtype=torch.float32).make(device)
    q, D = inputs["q_latent"], case.C + case.R
    columns = torch.ones(D, device=device)
    columns[:: D // 4] = case.outliers
    q = q * (D**0.5 / (q * columns).norm(dim=-1, keepdim=True))
    exact, lse = attend(inputs, q.double(), None, "reference")
    C, found = case.C, {}
    each = quantize_queries(q[..., :C], q[..., C:])
    one_scale = q.abs().amax() / 448
    one = quantize_queries(q[..., :C], q[..., C:], one_scale)[0], one_scale
    for name, (queries, scale) in {
        "bf16": (q.bfloat16(), None),
        "e4m3, a scale per token and head": each,
        "e4m3, one scale": one,
    }.items():
        out, found_lse = attend(inputs, queries, scale, "auto")
        wrong = float((out.double() - exact).norm() / exact.norm())
        found[name] = wrong, float((found_lse.double() - lse).abs().max())
    return found


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.fp8_queries")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    print(describe_machine(options.device))
    print(f"{'inputs':<10} {'rows':<11} {'queries':<34} {'out':>9} {'lse':>9}")
    for title, case in CASES.items():
        for format in ("fp8", "fp8_ds_mla"):
            made = replace(case, format=format, kv_scale=case.kv_scale if format == "fp8" else 1.0)
            for name, (wrong, lse) in errors(made, options.device).items():
                print(f"{title:<10} {format:<11} {name:<34} {wrong:>9.5f} {lse:>9.5f}", flush=True)


if __name__ == "__main__":
    run()
