"""Latent attention on a GPU beside FlashMLA, where that package is installed.

    python3 -m bench.latent --json latent.json

One process: each shape's contenders are checked against float64, captured in CUDA graphs of several
calls, and replayed in rotation; medians. FlashMLA takes 64 or 128 heads: fewer are padded for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import describe_machine
from openmla.cache.format import get_format
from openmla.ops import Segment, mqa_paged, mqa_sparse
from openmla.plan.splits import run_length, split_bounds

D, C, K, BS = 576, 512, 2048, 64
SCALE = D**-0.5
ROUNDS = 9
Contender = Callable[[], tuple[Tensor, Tensor]]  # out [T, H, C], lse [T, H]


class Shape(NamedTuple):
    name: str
    contenders: dict[str, Contender]
    exact: tuple[Tensor, Tensor]  # of the first tokens, float64
    calls: int  # in one graph
    rows: int  # read, for the bandwidth
    row_bytes: int


def cached(num_rows: int, format: str) -> Tensor:
    """Random rows in a cache of blocks."""
    layout = get_format(format)
    data = torch.empty(num_rows // BS, BS, layout.width(D), dtype=layout.dtype, device="cuda")
    one = torch.ones((), device="cuda")
    for start in range(0, num_rows, 65536):
        slots = torch.arange(start, min(start + 65536, num_rows), device="cuda")
        layout.write(data, slots, torch.randn(len(slots), D, device="cuda") / 3, one)
    return data


def attended(q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Float64 attention of q [n, H, D] over rows [n, S, D]."""
    scores = q.double() @ rows.mT * SCALE
    return scores.softmax(-1) @ rows[..., :C], scores.logsumexp(-1)


def sparse(T: int, H: int, format: str, num_rows: int, calls: int) -> Shape:
    cache, one = cached(num_rows, format), torch.ones((), device="cuda")
    q = (torch.randn(T, H, D, device="cuda") / 3).bfloat16()
    slots = torch.randint(0, num_rows, (T, K), device="cuda", dtype=torch.int32)
    lens = torch.full((T,), K, device="cuda", dtype=torch.int32)
    start_loc = torch.arange(T + 1, device="cuda", dtype=torch.int32)
    positions = torch.full((T,), num_rows - 1, device="cuda")
    segment = Segment(cache, one, format, "slots", rows=slots, row_lens=lens)

    def ours() -> tuple[Tensor, Tensor]:
        return mqa_sparse(q, start_loc, positions, segment, C=C, scale=SCALE, backend="triton")

    few = slots[:2].flatten().long()
    rows = get_format(format).read(cache, few, one, torch.float64, D).view(-1, K, D)
    contenders: dict[str, Contender] = {"triton": ours}
    if find_spec("flash_mla") is not None:
        contenders["flashmla"] = _flash_sparse(q, cache, slots, format)
    kind = "prefill" if T > 1024 else "decode"
    name = f"sparse-{kind}-{format}-h{H}-{'t' if T > 1024 else 'b'}{T}"
    exact = attended(q[:2], rows)
    return Shape(name, contenders, exact, calls, T * K, get_format(format).row_bytes(D))


def _flash_sparse(q: Tensor, cache: Tensor, slots: Tensor, format: str) -> Contender:
    flash = import_module("flash_mla")
    T, H, _ = q.shape
    padded = q if H >= 64 else torch.zeros(T, 64, D, device="cuda", dtype=q.dtype)
    padded[:, :H] = q
    metadata, _ = flash.get_mla_metadata()

    def decode() -> tuple[Tensor, Tensor]:
        out, lse = flash.flash_mla_with_kvcache(
            padded.unsqueeze(1), cache.unsqueeze(2), None, None, C, metadata,
            softmax_scale=SCALE, is_fp8_kvcache=True, indices=slots.unsqueeze(1),
        )  # fmt: skip
        return out[:, 0, :H], lse[:, :H, 0]

    def prefill() -> tuple[Tensor, Tensor]:
        flat = cache.view(-1, 1, D)
        out, _, lse = flash.flash_mla_sparse_fwd(padded, flat, slots.unsqueeze(1), SCALE)
        return out[:, :H], lse[:, :H]

    return prefill if format == "bf16" else decode


def paged(B: int, S: int, H: int, calls: int) -> Shape:
    """Dense decode over a bf16 cache, keys cut as a plan cuts them."""
    cache, one = cached(B * S, "bf16"), torch.ones((), device="cuda")
    table = torch.randperm(B * S // BS, device="cuda").int().view(B, S // BS)
    q = (torch.randn(B, H, D, device="cuda") / 3).bfloat16()
    lens = torch.full((B,), S, dtype=torch.int32)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    length = run_length(
        [S] * B, multiprocessors=sms, block_size=BS, batch_invariant=False, num_heads=H
    )
    starts, seq_lens = split_bounds(lens, length).cuda(), lens.cuda()
    start_loc = torch.arange(B + 1, device="cuda", dtype=torch.int32)

    def ours() -> tuple[Tensor, Tensor]:
        return mqa_paged(
            q, cache, one, table, seq_lens, start_loc, starts, format="bf16", C=C, scale=SCALE,
            causal=True, max_query_len=1, backend="triton",
        )  # fmt: skip

    exact = attended(q[:1], cache[table[0].long()].view(1, -1, D).double())
    return Shape(f"paged-decode-bf16-h{H}-b{B}-s{S}", {"triton": ours}, exact, calls, B * S, 2 * D)


def shapes() -> Iterator[Callable[[], Shape]]:
    for H in (16, 128):
        for B in (1, 4, 16, 64, 128):
            yield partial(sparse, B, H, "fp8_ds_mla", 524288, 20)
    for H in (16, 128):
        for format in ("bf16", "fp8_ds_mla"):
            yield partial(sparse, 4096, H, format, 32768, 2)
    for B, S, H in ((64, 16384, 16), (1, 32768, 16), (64, 4096, 128)):
        yield partial(paged, B, S, H, 10)


def errors(contender: Contender, exact: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Relative error of out, largest of lse, over the tokens that were computed exactly."""
    out, lse = contender()
    n = len(exact[0])
    wrong = (out[:n].double() - exact[0]).norm() / exact[0].norm()
    return float(wrong), float((lse[:n].double() - exact[1]).abs().max())


def timed(contenders: dict[str, Contender], calls: int) -> dict[str, float]:
    """Microseconds a call, medians over rounds in rotation."""
    graphs = {}
    for name, contender in contenders.items():
        contender()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(calls):
                contender()
    seen: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            seen[name].append(1000 * begin.elapsed_time(end) / calls)
    return {name: statistics.median(times) for name, times in seen.items()}


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.latent")
    parser.add_argument("--json", help="write the rows here too")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    machine = describe_machine("cuda")
    print(machine)
    print(f"{'shape':<36} {'contender':<9} {'us':>9} {'ratio':>6} {'TB/s':>6} {'error':>8}")
    rows: list[dict[str, Any]] = []
    for make in shapes():
        shape = make()
        checked = {name: errors(run, shape.exact) for name, run in shape.contenders.items()}
        right = {name: run for name, run in shape.contenders.items() if checked[name][0] < 4e-3}
        times = timed(right, shape.calls)
        for name in shape.contenders:
            if name not in times:
                print(f"{shape.name:<36} {name:<9} WRONG, error {checked[name][0]:.4f}")
                continue
            ratio = times["flashmla"] / times[name] if "flashmla" in times else None
            rate = shape.rows * shape.row_bytes / times[name] / 1e6
            shown = "" if ratio is None else f"{ratio:.2f}"
            print(
                f"{shape.name:<36} {name:<9} {times[name]:>9.1f} {shown:>6} {rate:>6.2f} "
                f"{checked[name][0]:>8.5f}",
                flush=True,
            )
            rows.append(
                {"shape": shape.name, "contender": name, "us": times[name], "ratio": ratio,
                 "error": checked[name][0], "lse_error": checked[name][1]}
            )  # fmt: skip
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    run()
