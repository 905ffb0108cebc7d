"""e4m3 queries: checks of their scales and cache formats, and the outputs they give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla.errors import ShapeError, UnsupportedError
from openmla.hardware import capability

E4M3 = torch.float8_e4m3fn
EIGHT_BITS = ("fp8", "fp8_ds_mla")  # cache formats that e4m3 queries support


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device is a GPU that multiplies fp8 in hardware."""
    found = capability(device)
    return device.type == "cuda" and found is not None and found >= (8, 9)


def check_chip(where: str, device: torch.device) -> None:
    """Raise on a GPU without fp8 products: queries would lose bits in fp8 for no speedup."""
    found = capability(device)
    if device.type == "cuda" and found is not None and not multiplies_fp8(device):
        raise UnsupportedError(
            f"{where}: fp8 queries must be on SM89 or newer, which multiply fp8, "
            f"got SM{found[0]}{found[1]}."
        )


def out_dtype(queries: torch.dtype) -> torch.dtype:
    """Return the dtype of outputs: that of the queries, or bf16 for e4m3 queries."""
    return torch.bfloat16 if queries == E4M3 else queries


def results(q_latent: Tensor, T: int, H: int, C: int) -> tuple[Tensor, Tensor]:
    """Return uninitialized out and lse of attention in latent space."""
    dtype = out_dtype(q_latent.dtype)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    return q_latent.new_empty((T, H, C), dtype=dtype), q_latent.new_empty((T, H), dtype=lse_dtype)


def check_products(op: str, C: int, D: int, run_length: int) -> None:
    """Check the scalars of attention in latent space."""
    if not 0 < C <= D:
        raise ShapeError(f"{op}: C must be within 1..D={D}, got {C}.")
    if run_length < 0:
        raise ShapeError(f"{op}: run_length must not be negative, got {run_length}.")


def check_queries(op: str, q: Tensor, q_scale: Tensor | None, formats: Sequence[str]) -> None:
    """Raise unless q_scale is given for e4m3 queries only, and these read an fp8 cache."""
    if q.dtype != E4M3:
        if q_scale is not None:
            raise ShapeError(f"{op}: q_scale must be None for queries of {q.dtype}, got a tensor.")
        return
    for format in formats:
        if format not in EIGHT_BITS:
            raise ShapeError(
                f"{op}: queries over a {format} cache must be 16 bits or wider, got {q.dtype}. "
                f"e4m3 queries read {', '.join(EIGHT_BITS)}."
            )
    T, H, _ = q.shape
    if q_scale is None:
        raise ShapeError(f"{op}: q_scale must be given with queries of {q.dtype}, got None.")
    if q_scale.dtype != torch.float32 or q_scale.device != q.device:
        raise ShapeError(
            f"{op}: q_scale must be float32 on {q.device}, got {q_scale.dtype} on {q_scale.device}."
        )
    check_chip(op, q.device)
    if q_scale.shape not in ((), (T, H)):
        raise ShapeError(
            f"{op}: q_scale must be [] or [T, H] with T={T}, H={H}, got {tuple(q_scale.shape)}."
        )
