"""Checks shared by ops that attend to e4m3 expanded heads: dtypes, scales, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops._shapes import check_row

E4M3 = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_eight_bits(
    op: str, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, out_dtype: torch.dtype | None, k_pe: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise unless heads share a dtype and, if it is e4m3, have scales and an out_dtype."""
    for name, tensor in (("k", k), ("v", v), ("k_pe", k_pe)):
        wide = name == "v" and q.dtype == E4M3 and out_dtype in OUT_DTYPES
        if wide and tensor is not None and tensor.dtype not in (E4M3, out_dtype):
            raise ShapeError(f"{op}: v must be {E4M3} or {out_dtype}, got {tensor.dtype}.")
        if tensor is not None and tensor.dtype != q.dtype and not wide:
            raise ShapeError(f"{op}: {name} must be {q.dtype} like q, got {tensor.dtype}.")
    scales = (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale))
    if q.dtype != E4M3:
        check_row(op, "v", v)
        for name, scale in scales:
            if scale is not None:
                raise ShapeError(f"{op}: {name} must be None but for e4m3 heads, got {q.dtype}.")
        if out_dtype not in (None, q.dtype):
            raise ShapeError(f"{op}: out_dtype must be {q.dtype} like q, got {out_dtype}.")
        return
    for name, scale in scales:
        if scale is None:
            raise ShapeError(f"{op}: {name} must be given with e4m3 heads, got None.")
    if k_pe is not None:
        raise ShapeError(f"{op}: k_pe must be None with e4m3 heads: quantize_heads joins it to k.")
    if out_dtype not in OUT_DTYPES:
        names = ", ".join(map(str, OUT_DTYPES))
        raise ShapeError(f"{op}: out_dtype must be one of {names} for e4m3 heads, got {out_dtype}.")
    if v.stride(2) != 1 and v.stride(0) != 1 and min(v.shape) > 1:
        raise ShapeError(
            f"{op}: v must be contiguous along its last dimension or along keys, "
            f"got strides {v.stride()}."
        )


def results(
    q: Tensor, out_dtype: torch.dtype | None, T: int, H: int, V: int
) -> tuple[Tensor, Tensor]:
    """Return uninitialized out and lse."""
    dtype = q.dtype if out_dtype is None else out_dtype
    lse_dtype = torch.promote_types(dtype, torch.float32)
    return q.new_empty((T, H, V), dtype=dtype), q.new_empty((T, H), dtype=lse_dtype)


def call_with_scales(
    run: Callable[..., Any], *args: Any, out_dtype: torch.dtype | None = None, **scalars: Any
) -> Any:
    """Call `run`, with scales only if given: implementations without e4m3 heads lack them."""
    *tensors, q_scale, k_scale, v_scale = args
    if q_scale is not None:
        scalars.update(scales=(q_scale, k_scale, v_scale), out_dtype=out_dtype)
    return run(*tensors, **scalars)
