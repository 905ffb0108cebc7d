"""What ops that attend to expanded heads in e4m3 check alike: dtypes, scales, where values lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops._register import bind

E4M3 = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALES = ("q_scale", "k_scale", "v_scale")
_SPEC = "q_scale:T H f32, k_scale:B H f32, v_scale:B H f32"


def check_eight_bits(
    op: str,
    heads: Sequence[tuple[str, Tensor | None]],  # q, k, v, and k_pe where the op has it
    scales: Sequence[Tensor | None],
    out_dtype: torch.dtype | None,
    B: int,  # requests
) -> None:
    """Raise unless heads are of one dtype, and have scales and an out_dtype where it is e4m3."""
    q = heads[0][1]
    assert q is not None
    for name, tensor in heads[1:]:
        wide = name == "v" and q.dtype == E4M3 and out_dtype in OUT_DTYPES
        if wide and tensor is not None and tensor.dtype not in (E4M3, out_dtype):
            raise ShapeError(f"{op}: v must be {E4M3} or {out_dtype}, got {tensor.dtype}.")
        if tensor is not None and tensor.dtype != q.dtype and not wide:
            raise ShapeError(f"{op}: {name} must be {q.dtype} like q, got {tensor.dtype}.")
    if q.dtype != E4M3:
        for name, scale in zip(SCALES, scales, strict=True):
            if scale is not None:
                raise ShapeError(f"{op}: {name} must be None but for e4m3 heads, got {q.dtype}.")
        if out_dtype not in (None, q.dtype):
            raise ShapeError(f"{op}: out_dtype must be {q.dtype} like q, got {out_dtype}.")
        return
    for name, scale in zip(SCALES, scales, strict=True):
        if scale is None:
            raise ShapeError(f"{op}: {name} must be given with e4m3 heads, got None.")
    if len(heads) > 3 and heads[3][1] is not None:
        raise ShapeError(f"{op}: k_pe must be None with e4m3 heads: quantize_heads joins it to k.")
    if out_dtype not in OUT_DTYPES:
        names = ", ".join(map(str, OUT_DTYPES))
        raise ShapeError(f"{op}: out_dtype must be one of {names} for e4m3 heads, got {out_dtype}.")
    v = heads[2][1]
    assert v is not None
    given = (q, *(scale for scale in scales if scale is not None))
    bind(op, "q:T H E q row, " + _SPEC, given, {"B": B})
    if v.dim() == 3 and v.stride(2) != 1 and v.stride(0) != 1 and min(v.shape) > 1:
        raise ShapeError(
            f"{op}: v must be contiguous along its last dimension or along keys, "
            f"got strides {v.stride()}."
        )


def heads_spec(q: Tensor) -> str:
    """Of q, k and v: in e4m3, v may have its keys contiguous. Where q is neither that nor a wider
    float, the error names both."""
    if q.dtype == E4M3 or q.dtype not in (*OUT_DTYPES, torch.float64):
        return "q:T H E q row, k:S H E q row, v:S H V q"
    return "q:T H E f row, k:S H E f row, v:S H V f row"


def out_of(q: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return q.dtype if out_dtype is None else out_dtype
