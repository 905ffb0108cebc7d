"""Launching expanded attention over e4m3 queries and keys: widths, descriptors, builds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.backends.expanded import aligned
from openmla.backends.gluon import _expanded, _expanded_fp8
from openmla.backends.gluon._launch import FP_FUSION, NUM_WARPS
from openmla.backends.triton._build import Build, signature_of
from openmla.backends.triton._mha_launch import HEADS
from openmla.backends.triton._prepare import Address, Launch, prepare
from openmla.hardware import multiprocessors

E4M3 = torch.float8_e4m3fn
BLOCK_M, ROWS = _expanded.BLOCK_M.value, _expanded.ROWS.value
BLOCK_N = _expanded_fp8.BLOCK_N.value
VALUES_BOX = _expanded.BOX.value
# Of a thread. H200, 192/128, 128 heads, 1 x 8192: 3449 us; 224 and 56 took 3707, 240 and 24 3516.
REGISTERS = {"ATTEND_REGISTERS": 232, "LOAD_REGISTERS": 40}


class Columns(NamedTuple):
    """How a head's columns are cut: a first tile of a power of two, and what is left of them."""

    first: int
    rest: int
    values: int


# By widths of keys and values: V3 and its kin, Mistral 4.
COLUMNS = {(192, 128): Columns(128, 64, 128), (128, 128): Columns(128, 0, 128)}


def run_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    causal: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Where there are queries and keys."""
    (T, H, E), V = q.shape, v.shape[2]
    columns = COLUMNS[E, V]
    q, k, v = heads_of(q), heads_of(k), heads_of(sixteen_bits(v))
    q_scale, k_scale, v_scale = scales
    out = q.new_empty((T, H, V), dtype=out_dtype)
    lse = q.new_empty((T, H), dtype=torch.float32)
    B = query_start_loc.shape[0] - 1
    programs = min(multiprocessors(q.device), (T // BLOCK_M + B + 1) * H)
    counter = torch.full((1,), programs, dtype=torch.int32, device=q.device)
    launch = launch_of(columns, H, causal)
    launch(
        (programs,),
        boxes(q, ROWS, columns.first),
        boxes(q, ROWS, columns.rest or columns.first),
        boxes(k, BLOCK_N, columns.first),
        boxes(k, BLOCK_N, columns.rest or columns.first),
        boxes(v, BLOCK_N, VALUES_BOX),
        q_scale,
        k_scale.contiguous(),
        v_scale.contiguous(),
        query_start_loc.contiguous(),
        key_start_loc.contiguous(),
        out,
        lse,
        counter,
        T,
        B,
        scale,
        q.stride(1),
        k.stride(1),
        v.stride(1),
        q_scale.stride(0),
        q_scale.stride(1),
    )
    return out, lse


@lru_cache(maxsize=64)
def launch_of(columns: Columns, H: int, causal: bool) -> Launch:
    kernel, constants = _expanded_fp8._expanded_fp8_kernel, constants_of(columns, H, causal=causal)
    return prepare(kernel, constants, num_warps=NUM_WARPS, enable_fp_fusion=FP_FUSION)


def heads_of(tensor: Tensor) -> Tensor:
    """Aligned, and with columns of all heads within 31 bits."""
    S, H, E = tensor.shape
    if (H - 1) * tensor.stride(1) + E >= 2**31 or (S > 1 and tensor.stride(0) == 0):
        return tensor.contiguous()
    return aligned(tensor)


def sixteen_bits(v: Tensor) -> Tensor:
    """Values as they are multiplied: e4m3 fits into fp16, float32 is rounded to bf16."""
    if v.dtype.itemsize == 2:
        return v
    return v.to(torch.float16 if v.dtype == E4M3 else torch.bfloat16).contiguous()


def boxes(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """All heads of [S, H, E] side by side, for bulk copies of so many rows and columns."""
    S, H, E = tensor.shape
    width = (H - 1) * tensor.stride(1) + E
    stride = tensor.stride(0) if S > 1 else 16 * -(-width // 16)
    return described(tensor.data_ptr(), S, width, stride, tensor.dtype, rows, columns)


@lru_cache(maxsize=1024)
def described(
    address: int, S: int, width: int, stride: int, dtype: torch.dtype, rows: int, columns: int
) -> TensorDescriptor:
    base, layout = Address(address, dtype), layout_of(columns, dtype.itemsize)
    return TensorDescriptor(base, [S, width], [stride, 1], [rows, columns], layout)


def layout_of(columns: int, size: int) -> Any:
    """In shared memory, swizzled by as many bytes as a row of a box has."""
    return gl.NVMMASharedLayout(columns * size, 8 * size, 2)


def constants_of(columns: Columns, H: int, *, causal: bool) -> dict[str, Any]:
    return {
        "H": H,
        "A": columns.first,
        "REST": columns.rest,
        "V": columns.values,
        "CAUSAL": causal,
        **REGISTERS,
    }


def fp8_builds() -> Iterator[Build]:
    kernel = _expanded_fp8._expanded_fp8_kernel
    for (E, V), H, causal, dtype in (
        ((192, 128), 128, True, torch.bfloat16), ((192, 128), 16, False, torch.float16),
        ((128, 128), 32, True, torch.bfloat16),
    ):  # fmt: skip
        columns = COLUMNS[E, V]
        constants = constants_of(columns, H, causal=causal)
        types = {"out": f"*{HEADS[dtype]}", "qk_scale": "fp32"}
        types |= dict.fromkeys(("lse", "q_scale", "k_scale", "v_scale"), "*fp32")
        types |= dict.fromkeys(("query_start_loc", "key_start_loc", "counter"), "*i32")
        rest = columns.rest or columns.first
        for name, rows, width, kind in (
            ("q", ROWS, columns.first, E4M3), ("q_rest", ROWS, rest, E4M3),
            ("k", BLOCK_N, columns.first, E4M3), ("k_rest", BLOCK_N, rest, E4M3),
            ("v", BLOCK_N, VALUES_BOX, dtype),
        ):  # fmt: skip
            layout = layout_of(width, kind.itemsize)
            types[name] = f"tensordesc<{HEADS[kind]}[{rows}, {width}],{layout!r}>"
        name = f"expanded-E{E}-V{V}-H{H}-{'causal' if causal else 'all'}-{HEADS[E4M3]}"
        signature = signature_of(kernel, constants, types)
        yield Build(name, kernel, signature, constants, NUM_WARPS, 1, 90, FP_FUSION)
