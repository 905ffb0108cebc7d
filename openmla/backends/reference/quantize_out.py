"""quantize_out, reference: quantize the flattened rows."""

from __future__ import annotations

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._quantize import write_quantized


def why_not(problem: Problem) -> str | None:
    return None


def run(
    values: Tensor,
    scales: Tensor | None,
    out: Tensor,
    global_scale: Tensor | None,
    *,
    rows: Tensor | None,
    first_row: int,
    format: str,
) -> None:
    write_quantized(
        values, scales, out.flatten(1), global_scale, rows=rows, first_row=first_row, format=format
    )
