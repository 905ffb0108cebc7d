"""merge_quantize, reference: merge, round to out's dtype, then quantize."""

from __future__ import annotations

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._quantize import write_quantized
from openmla.backends.reference.merge_states import merge


def why_not(problem: Problem) -> str | None:
    return None


def run(
    values: Tensor,
    scales: Tensor | None,
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    global_scale: Tensor | None,
    *,
    rows: Tensor | None,
    first_row: int,
    format: str,
) -> None:
    merged = merge(out, lse, other_out, other_lse)[0].to(out.dtype)
    write_quantized(
        values, scales, merged.flatten(1), global_scale, rows=rows, first_row=first_row,
        format=format,
    )  # fmt: skip
