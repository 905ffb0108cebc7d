"""A step's rows normalized, rotated and stored, with its queries rotated too, for V3 and V4."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from openmla.bench.harness import Job, checked, rounded
from openmla.bench.inputs import blank_cache, rotation
from openmla.ops.latent_write import cost
from openmla.testing import Inputs

BS, R, Q = 64, 64, 4096
V3: dict[str, Any] = {"E": 192, "D": 576, "normed": 512, "norm_queries": False}
V4: dict[str, Any] = {"E": 512, "D": 512, "normed": 512, "norm_queries": True}


def job(T: int, H: int, shape: dict[str, Any], format: str, device: str) -> Job:
    E, D, norm_queries = shape["E"], shape["D"], shape["norm_queries"]
    tensors = {
        "cache": blank_cache(2 * T, BS, format, D, device),
        "q": torch.randn(T, H, E, device=device).bfloat16(),
        "kv": torch.randn(T, D, device=device).bfloat16(),
        "norm_weight": torch.rand(shape["normed"], device=device).bfloat16() + 0.5,
        "positions": torch.randint(0, Q, (T,), device=device),
        "slot_mapping": torch.randperm(2 * T, device=device)[:T],
        "kv_scale": torch.tensor(1.0, device=device),
        "table": rotation(Q, R, device),
    }
    scalars = {"format": format, "pairing": "pairs", "eps": 1e-6, "norm_queries": norm_queries}
    inputs = Inputs(tensors, scalars, ("q", "kv", "norm_weight"))
    needed = cost(T, H=H, E=E, D=D, R=R, format=format, itemsize=2, norm_queries=norm_queries)
    return Job(inputs, needed, checked(rounded, "q", "kv"))


SHAPES = {
    "tiny-64": partial(job, 64, 16, V3, "bf16"),
    "v3-decode-1": partial(job, 1, 128, V3, "bf16"),
    "v3-decode-128": partial(job, 128, 128, V3, "bf16"),
    "v3-decode-128-16-heads-packed": partial(job, 128, 16, V3, "fp8_ds_mla"),
    "v3-prefill-8k-packed": partial(job, 8192, 128, V3, "fp8_ds_mla"),
    "v4-decode-128-packed": partial(job, 128, 64, V4, "fp8_dsv4"),
    "v4-prefill-8k-packed": partial(job, 8192, 64, V4, "fp8_dsv4"),
}
