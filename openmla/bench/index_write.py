"""Write indexer keys into a paged cache, for every format."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmla.bench.harness import Job, Op, results
from openmla.bench.inputs import blank_cache, rotation
from openmla.cache.format import get_format
from openmla.ops.index_write import cost
from openmla.testing import INDEX_FORMATS, Inputs, out_budget

BS, DI, R, Q = 64, 128, 64, 4096
V32: dict[str, Any] = {"pairing": "halves", "eps": 1e-6}
GLM5: dict[str, Any] = {"pairing": "pairs", "eps": 1e-6}


def written(op: Op, inputs: Inputs, backend: str) -> Tensor:
    """[T, DI] the keys that a backend writes into a fresh copy of the cache."""
    (cache,) = results(op, inputs, backend, ["cache"])
    one = torch.ones((), device=cache.device)
    layout = get_format(inputs.scalars["format"])
    return layout.read(cache, inputs["slot_mapping"], one, torch.float32, DI)


def check(op: Op, inputs: Inputs, backend: str) -> float:
    """Compare with keys that were not rounded to the format."""
    actual, peer = written(op, inputs, backend), written(op, inputs, "reference")
    wide = inputs.double()
    data = torch.zeros((*wide["cache"].shape[:2], DI), device=wide["cache"].device)
    tensors, scalars = {**wide.tensors, "cache": data}, {**wide.scalars, "format": "index_fp32"}
    return out_budget(actual, written(op, Inputs(tensors, scalars, ()), "reference"), peer)


def job(T: int, scalars: dict[str, Any], format: str, device: str) -> Job:
    tensors = {
        "cache": blank_cache(2 * T, BS, format, DI, device),
        "k_raw": torch.randn(T, DI, device=device).bfloat16(),
        "norm_weight": torch.randn(DI, device=device),
        "norm_bias": torch.randn(DI, device=device),
        "positions": torch.randint(0, Q, (T,), device=device),
        "table": rotation(Q, R, device),
        "slot_mapping": torch.randperm(2 * T, device=device)[:T],
    }
    needed = cost(T, DI=DI, R=R, format=format, itemsize=2)
    all_scalars = {**scalars, "format": format, "rope_start": 0}
    return Job(Inputs(tensors, all_scalars, ("k_raw",)), needed, check)


SHAPES = {
    f"{size}-{format}": partial(job, T, scalars, format)
    for size, T, scalars in (
        ("tiny-64", 64, V32),
        ("v32-decode-128", 128, V32),
        ("v32-prefill-8k", 8192, V32),
        ("v32-prefill-8k-hadamard", 8192, {**V32, "hadamard": True}),
        ("glm5-prefill-8k", 8192, GLM5),
    )
    for format in INDEX_FORMATS
}
