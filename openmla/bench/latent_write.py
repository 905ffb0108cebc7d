"""A step's rows normalized, rotated and stored, with its queries rotated too, for V3 and V4."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from openmla.bench.harness import Job, main
from openmla.cache.format import get_format
from openmla.ops import latent_write
from openmla.ops.latent_write import cost
from openmla.testing import Inputs, out_budget

BS, R, Q = 64, 64, 4096
V3: dict[str, Any] = {"E": 192, "D": 576, "normed": 512, "norm_queries": False}
V4: dict[str, Any] = {"E": 512, "D": 512, "normed": 512, "norm_queries": True}
SHAPES: dict[str, tuple[int, int, dict[str, Any], str]] = {
    "tiny-64": (64, 16, V3, "bf16"),
    "v3-decode-1": (1, 128, V3, "bf16"),
    "v3-decode-128": (128, 128, V3, "bf16"),
    "v3-decode-128-16-heads-packed": (128, 16, V3, "fp8_ds_mla"),
    "v3-prefill-8k-packed": (8192, 128, V3, "fp8_ds_mla"),
    "v4-decode-128-packed": (128, 64, V4, "fp8_dsv4"),
    "v4-prefill-8k-packed": (8192, 64, V4, "fp8_dsv4"),
}


def check(inputs: Inputs, backend: str) -> float:
    """The larger error of rows and queries, against float64."""
    mine, theirs, exact = inputs.clone(), inputs.clone(), inputs.double().clone()
    mine.run(latent_write, backend=backend)
    theirs.run(latent_write, backend="reference")
    exact.run(latent_write, backend="reference")
    return max(out_budget(mine[name], exact[name], theirs[name]) for name in ("q", "kv"))


def job(T: int, H: int, shape: dict[str, Any], format: str, device: str) -> Job:
    E, D, layout = shape["E"], shape["D"], get_format(format)
    half = torch.arange(0, R, 2, device=device) / R
    angles = torch.outer(torch.arange(float(Q), device=device), 10000.0**-half)
    data = torch.zeros(-(-2 * T // BS), BS, layout.width(D), device=device).to(layout.dtype)
    tensors = {
        "cache": data,
        "q": torch.randn(T, H, E, device=device).bfloat16(),
        "kv": torch.randn(T, D, device=device).bfloat16(),
        "norm_weight": torch.rand(shape["normed"], device=device).bfloat16() + 0.5,
        "positions": torch.randint(0, Q, (T,), device=device),
        "slot_mapping": torch.randperm(2 * T, device=device)[:T],
        "kv_scale": torch.tensor(1.0, device=device),
        "table": torch.cat([angles.cos(), angles.sin()], dim=1),
    }
    norm_queries = shape["norm_queries"]
    scalars = {"format": format, "pairing": "pairs", "eps": 1e-6, "norm_queries": norm_queries}
    needed = cost(T, H=H, E=E, D=D, R=R, format=format, itemsize=2, norm_queries=norm_queries)
    return Job(Inputs(tensors, scalars, ("q", "kv", "norm_weight")), needed, check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        latent_write,
        {name: partial(job, *shape) for name, shape in SHAPES.items()},
    )


if __name__ == "__main__":
    run()
