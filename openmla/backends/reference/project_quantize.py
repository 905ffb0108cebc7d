"""project_quantize, reference: project, round to the input's dtype, then quantize."""

from __future__ import annotations

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._quantize import write_quantized
from openmla.backends.reference.project_heads import product


def why_not(problem: Problem) -> str | None:
    return None


def run(
    values: Tensor,
    scales: Tensor | None,
    out_latent: Tensor,
    w_uv: Tensor,
    w_scale: Tensor | None,
    global_scale: Tensor | None,
    *,
    rows: Tensor | None,
    first_row: int,
    format: str,
) -> None:
    out = product(out_latent, w_uv, w_scale).to(out_latent.dtype)
    write_quantized(
        values, scales, out.flatten(1), global_scale, rows=rows, first_row=first_row, format=format
    )
