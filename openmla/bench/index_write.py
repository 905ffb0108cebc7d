"""Write indexer keys into a paged cache, for every format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmla.bench.harness import Job, main
from openmla.cache.format import get_format
from openmla.ops import index_write
from openmla.ops.index_write import cost
from openmla.testing import INDEX_FORMATS, Inputs, out_budget

BS, DI, R, Q = 64, 128, 64, 4096

V32: dict[str, Any] = {"pairing": "halves", "eps": 1e-6}
GLM5: dict[str, Any] = {"pairing": "pairs", "eps": 1e-6}
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "tiny-64": (64, V32),
    "v32-decode-128": (128, V32),
    "v32-prefill-8k": (8192, V32),
    "v32-prefill-8k-hadamard": (8192, {**V32, "hadamard": True}),
    "glm5-prefill-8k": (8192, GLM5),
}


def written(inputs: Inputs, backend: str) -> Tensor:
    """[T, DI] the keys that a backend writes into a fresh copy of the cache."""
    fresh = inputs.clone()
    fresh.run(index_write, backend=backend)
    one = torch.ones((), device=fresh["cache"].device)
    layout = get_format(fresh.scalars["format"])
    return layout.read(fresh["cache"], fresh["slot_mapping"], one, torch.float32, DI)


def check(inputs: Inputs, backend: str) -> float:
    """Compare with keys that were not rounded to the format."""
    actual, peer = written(inputs, backend), written(inputs, "reference")
    wide = inputs.double()
    data = torch.zeros((*wide["cache"].shape[:2], DI), device=wide["cache"].device)
    tensors, scalars = {**wide.tensors, "cache": data}, {**wide.scalars, "format": "index_fp32"}
    return out_budget(actual, written(Inputs(tensors, scalars, ()), "reference"), peer)


def job(T: int, scalars: dict[str, Any], format: str, device: str) -> Job:
    layout = get_format(format)
    data = torch.zeros(-(-2 * T // BS), BS, layout.width(DI), device=device).to(layout.dtype)
    half = torch.arange(0, R, 2, device=device) / R
    angles = torch.outer(torch.arange(float(Q), device=device), 10000.0**-half)
    tensors = {
        "cache": data,
        "k_raw": torch.randn(T, DI, device=device).bfloat16(),
        "norm_weight": torch.randn(DI, device=device),
        "norm_bias": torch.randn(DI, device=device),
        "positions": torch.randint(0, Q, (T,), device=device),
        "table": torch.cat([angles.cos(), angles.sin()], dim=1),
        "slot_mapping": torch.randperm(2 * T, device=device)[:T],
    }
    needed = cost(T, DI=DI, R=R, format=format, itemsize=2)
    all_scalars = {**scalars, "format": format, "rope_start": 0}
    return Job(Inputs(tensors, all_scalars, ("k_raw",)), needed, check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        index_write,
        {
            f"{size}-{format}": partial(job, T, scalars, format)
            for size, (T, scalars) in SIZES.items()
            for format in INDEX_FORMATS
        },
    )


if __name__ == "__main__":
    run()
