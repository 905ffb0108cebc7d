"""The lightning indexer on a GPU: scores, selection and both, against torch.topk and DeepGEMM.

    python3 -m bench.indexer --json indexer.json

64 heads of 128, fp8 queries and keys, top 2048. One process: contenders are checked, captured in
CUDA graphs and replayed in rotation; times are medians. DeepGEMM is included if its package is
installed. torch selects without sorting ("unsorted"), which is faster, and openmla does not sort
either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.report import Report, script_parser
from openmla.bench.harness import relative_error, time_graphs
from openmla.bench.inputs import random_cache
from openmla.cache.format import get_format
from openmla.ops import index_logits, index_select, index_topk

HI, DI, K, BS, FORMAT = 64, 128, 2048, 64, "index_fp8"
FP8 = torch.float8_e4m3fn


class Shape(NamedTuple):
    groups: dict[str, dict[str, Callable[[], Any]]]  # task: contenders
    wrong: dict[str, str]  # contenders with wrong results, and why
    calls: int


def make(
    B: int, n: int, S: int, calls: int, backend: str = "triton", device: str = "cuda"
) -> Shape:
    """B requests of S keys, of which the last n tokens are queries; n = 1 is decode."""
    torch.manual_seed(0)
    T, blocks = B * n, S // BS
    cache = random_cache(B * blocks, BS, FORMAT, DI, device)
    table = torch.randperm(B * blocks, device=device).int().view(B, blocks)
    q = torch.randn(T, HI, DI, device=device).to(FP8)
    w = torch.rand(T, HI, device=device) / 100
    start_loc = torch.arange(0, T + 1, n, device=device, dtype=torch.int32)
    lens = torch.arange(S - n + 1, S + 1, device=device, dtype=torch.int32).repeat(B)
    zeros = torch.zeros_like(lens)
    asked = (q, w, cache, table, start_loc, lens)
    common: dict[str, Any] = {"format": FORMAT, "num_keys": S, "backend": backend}

    def score() -> Tensor:
        return index_logits(*asked, **common)

    logits = score()

    def choose() -> Tensor:
        return index_topk(logits, zeros, lens, K=K, backend=backend)[0]

    def both() -> Tensor:
        return index_topk(score(), zeros, lens, K=K, backend=backend)[0]

    def fused() -> Tensor:
        return index_select(*asked, **common, K=K)[0]

    def torch_topk(scores: Tensor) -> Tensor:
        return scores.topk(K, dim=1, sorted=False).indices  # openmla does not sort either

    groups: dict[str, dict[str, Callable[[], Any]]] = {
        "scores": {"triton": score},
        "choice": {
            "triton": choose,
            "torch.topk, unsorted": partial(torch_topk, logits),
        },
        "both": {
            "triton": both,
            "index_select": fused,
            "triton, unsorted": lambda: torch_topk(score()),
        },
    }
    if find_spec("deep_gemm") is not None:
        groups["scores"]["deep_gemm"] = _deep_gemm(q, w, cache, table, lens, n, S)
        # scores that a row may not see must be -inf before torch selects
        clean = _deep_gemm(q, w, cache, table, lens, n, S, clean=n > 1)
        groups["both"]["deep_gemm, unsorted"] = lambda: torch_topk(clean())
    return Shape(groups, _problems(asked, logits, choose(), fused()), calls)


def _problems(
    asked: tuple[Tensor, ...], logits: Tensor, chosen: Tensor, fused: Tensor
) -> dict[str, str]:
    """Check the first row's scores against float64, every row's selection against the scores."""
    q, w, cache, table, _, lens = asked
    wrong = {}
    n = int(lens[0])
    keys = read_keys(cache, table, torch.float64)[:n]
    exact = ((q[0].double() @ keys.T).relu() * w[0].double()[:, None]).sum(0)
    error = relative_error(logits[0, :n], exact)
    if error > 1e-3:
        wrong["scores"] = f"off by {error:.1e}"
    print(f"  scores differ from float64 by {error:.1e}")
    for name, positions in (("choice", chosen), ("both", fused)):
        worst = logits.gather(1, positions.long()).min(1).values
        if bool(((logits > worst[:, None]).sum(1) >= K).any()):
            wrong[name] = "a better key was left out"
    return wrong


def read_keys(cache: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """All keys of the first request."""
    slots = (table[0].long()[:, None] * BS + torch.arange(BS, device=table.device)).flatten()
    one = torch.ones((), device=table.device)
    return get_format(FORMAT).read(cache, slots, one, dtype, DI)


def _deep_gemm(
    q: Tensor, w: Tensor, cache: Tensor, table: Tensor, lens: Tensor, n: int, S: int,
    clean: bool = False,
) -> Callable[[], Tensor]:  # fmt: skip
    """DeepGEMM's scores; a decode step's plan is made beforehand and not timed."""
    gemm = import_module("deep_gemm")
    if n == 1:
        pages = cache.view(cache.shape[0], BS, 1, -1)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        plan = gemm.get_paged_mqa_logits_metadata(lens[:, None], BS, sms)
        return lambda: gemm.fp8_paged_mqa_logits(
            q[:, None], pages, w, lens[:, None], table, plan, S, clean_logits=False
        )
    keys = read_keys(cache, table, torch.float32)
    scales = keys.abs().amax(1) / 448
    k8 = (keys / scales[:, None]).to(FP8)
    zeros = torch.zeros_like(lens)
    return lambda: gemm.fp8_mqa_logits(q, (k8, scales), w, zeros, lens, clean_logits=clean)


def shapes() -> Iterator[tuple[str, Callable[[], Shape]]]:
    for n, S in ((2048, 8192), (2048, 65536), (4096, 131072)):
        yield f"prefill-{n}-on-{S // 1024}k", partial(make, 1, n, S, 1)
    for B, S in ((1, 131072), (16, 32768), (64, 32768), (128, 65536)):
        yield f"decode-b{B}-s{S // 1024}k", partial(make, B, 1, S, 10)


def run(arguments: Sequence[str] | None = None) -> None:
    report = Report(script_parser("indexer", __doc__), arguments, resume=True)
    for title, making in shapes():
        if not report.wants(title):
            continue
        print(title)
        shape = making()
        for group, contenders in shape.groups.items():
            if group in shape.wrong:
                print(f"  {group:<7} WRONG: {shape.wrong[group]}")
                continue
            for name, us in time_graphs(contenders, shape.calls).items():
                print(f"  {group:<7} {name:<22} {us:>9.1f} us", flush=True)
                row = {"shape": title, "what": group, "contender": name, "us": us}
                report.rows.append(row)
        del shape
        report.save()


if __name__ == "__main__":
    run()
