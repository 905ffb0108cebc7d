"""Project latent outputs out of latent space into fp8 with group scales, with fp8 weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from openmla.bench.harness import Job, Op, results
from openmla.ops.project_quantize import cost
from openmla.outputs import QuantizedOutput, decode_output, make_output
from openmla.testing import Inputs, out_budget


def decoded(op: Op, inputs: Inputs, backend: str) -> Tensor:
    """The values that the written bytes represent."""
    values, scales = results(op, inputs, backend, ("values", "scales"))
    out = QuantizedOutput(values, scales, None, inputs.scalars["format"])
    return decode_output(out, torch.float64)


def check(op: Op, inputs: Inputs, backend: str) -> float:
    """Compare with a product in float64 that is not quantized."""
    x, w, scale = (inputs[name] for name in ("out_latent", "w_uv", "w_scale"))
    exact = torch.einsum("thc,hcv->thv", x.double(), w.double() * scale.double()).flatten(1)
    return out_budget(decoded(op, inputs, backend), exact, decoded(op, inputs, "reference"))


def job(T: int, H: int, C: int, V: int, format: str, device: str) -> Job:
    out = make_output(format, T, H * V, device=device)
    assert out.scales is not None
    weights = (8 * torch.randn(H, V, C, device=device)).to(torch.float8_e4m3fn)
    tensors = {
        "values": out.values,
        "scales": out.scales,
        "out_latent": torch.randn(T, H, C, device=device).bfloat16(),
        "w_uv": weights.transpose(1, 2),
        "w_scale": torch.full((H, 1, 1), 1 / 64, device=device),
    }
    size = cost(T, H=H, C=C, V=V, itemsize=2, w_itemsize=1, format=format)
    return Job(Inputs(tensors, {"format": format}, ()), size, check)


SHAPES = {"tiny-4-fp8_128": partial(job, 4, 2, 64, 128, "fp8_128")} | {
    f"{size}-{format}": partial(job, T, H, 512, 128, format)
    for size, T, H in (
        ("v3-tp8-decode-1", 1, 16),
        ("v3-decode-16", 16, 128),
        ("v3-decode-128", 128, 128),
    )
    for format in ("fp8_128", "fp8_64_pow2")
}
