"""V4's compressor: pool tokens into entries of a paged cache."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from openmla.bench.harness import Job, Op, results
from openmla.bench.inputs import rotation
from openmla.cache.format import get_format, state_rows, state_width
from openmla.ops.compress_kv import cost
from openmla.testing import Inputs, out_budget, start_loc

R = 64
# V4's three compressors; a block of each covers 256 tokens.
C4A: dict[str, Any] = {"D": 512, "ratio": 4, "overlap": True, "format": "fp8_dsv4"}
C128A: dict[str, Any] = {"D": 512, "ratio": 128, "overlap": False, "format": "fp8_dsv4"}
INDEX: dict[str, Any] = {**C4A, "D": 128, "format": "index_fp8"}
# Each request's tokens, and where the first request starts. Each of the next ones starts one later,
# so that a decode step completes an entry for one request in `ratio`.
DECODE: dict[str, Any] = {"lens": (1,) * 128, "start": 8192}
PREFILL: dict[str, Any] = {"lens": (8192,), "start": 0}
SIZES: dict[str, dict[str, Any]] = {
    "tiny-c4a-decode-8": {**C4A, "lens": (1,) * 8, "start": 64},
    "tiny-c128a-prefill-256": {**C128A, "lens": (256,), "start": 0},
    "tiny-index-prefill-64": {**INDEX, "lens": (64,), "start": 0},
    "v4-c4a-decode-128": {**C4A, **DECODE},
    "v4-c128a-decode-128": {**C128A, **DECODE},
    "v4-c4a-prefill-8k": {**C4A, **PREFILL},
    "v4-c128a-prefill-8k": {**C128A, **PREFILL},
    "v4-index-prefill-8k": {**INDEX, **PREFILL},
}


def finished(inputs: Inputs) -> Tensor:
    """[n] i64 slots of the entries that a step writes."""
    ratio, BS = inputs.scalars["ratio"], inputs["cache"].shape[1]
    bounds = inputs["query_start_loc"].tolist()
    slots = []
    for b, (begin, end) in enumerate(pairwise(bounds)):
        start = int(inputs["positions"][begin])
        i = torch.arange(start // ratio, (start + end - begin) // ratio, device=inputs["kv"].device)
        slots.append(inputs["block_table"][b, i // BS].long() * BS + i % BS)
    return torch.cat(slots)


def left_behind(op: Op, inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """Entries [n, D] and state that a backend writes into fresh copies."""
    cache, state = results(op, inputs, backend, ("cache", "state"))
    layout, D = get_format(inputs.scalars["format"]), inputs["norm_weight"].shape[0]
    return layout.read(cache, finished(inputs), inputs["kv_scale"], torch.float32, D), state


def check(op: Op, inputs: Inputs, backend: str) -> float:
    """Compare with entries that were not rounded to the format; the state counts as much."""
    actual, peer = (left_behind(op, inputs, name) for name in (backend, "reference"))
    wide = inputs.double()
    D = wide["norm_weight"].shape[0]
    data = torch.zeros((*wide["cache"].shape[:2], D), device=wide["cache"].device)
    tensors, scalars = {**wide.tensors, "cache": data}, {**wide.scalars, "format": "fp32"}
    exact = left_behind(op, Inputs(tensors, scalars, ()), "reference")
    return max(out_budget(*each) for each in zip(actual, exact, peer, strict=True))


def job(size: dict[str, Any], device: str) -> Job:
    D, ratio, overlap = size["D"], size["ratio"], size["overlap"]
    lens, layout = size["lens"], get_format(size["format"])
    B, T = len(lens), sum(lens)
    starts = range(size["start"], size["start"] + B)
    Q = max(start + n for start, n in zip(starts, lens, strict=True))
    BS = max(256 // ratio, 1)
    M = -(-Q // (ratio * BS))
    pages = torch.zeros(B * M, layout.page_width(D, BS), device=device).to(layout.dtype)
    W, CD = layout.width(D), 2 * D if overlap else D
    V = state_rows(ratio, overlap=overlap) + 1  # one draft token: it reads rows it does not write
    state = torch.randn(B, V, state_width(D, overlap=overlap), device=device)
    if not overlap:
        state[..., D : 2 * D] = state[..., D : 2 * D].abs() + 1  # a sum that includes its maximum
    positions = [p for start, n in zip(starts, lens, strict=True) for p in range(start, start + n)]
    tensors = {
        "cache": pages[:, : BS * W].unflatten(1, (BS, W)),
        "kv_scale": torch.ones((), device=device),
        "state": state,
        "kv": torch.randn(T, CD, device=device),
        "score": torch.randn(T, CD, device=device),
        "bias": torch.randn(ratio, CD, device=device),
        "norm_weight": torch.randn(D, device=device),
        "table": rotation(Q, R, device),
        "positions": torch.tensor(positions, device=device),
        "query_start_loc": start_loc(lens, device),
        "block_table": torch.randperm(B * M, device=device).int().view(B, M),
        "state_slots": torch.randperm(B, device=device).int(),
    }
    form = {"ratio": ratio, "overlap": overlap, "format": layout.name}
    needed = cost(T, B, D=D, itemsize=4, **form)
    return Job(Inputs(tensors, {**form, "eps": 1e-6}, ("state", "kv", "score")), needed, check)


SHAPES = {name: partial(job, size) for name, size in SIZES.items()}
