"""mha_ragged, Gluon: packed requests of any lengths; keys whole or in two parts; e4m3 heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.backends import Problem
from openmla.backends.expanded import aligned, joined
from openmla.backends.gluon import _expanded
from openmla.backends.gluon._launch import NUM_WARPS
from openmla.backends.gluon._shapes import needs_nvidia
from openmla.backends.triton._mha_launch import HEADS
from openmla.backends.triton._prepare import Address
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.hardware import multiprocessors

LAUNCHES = 2  # the first sets the counter of tiles
E4M3 = torch.float8_e4m3fn
BOX = _expanded.BOX.value  # bytes
BLOCK_M, ROWS = _expanded.BLOCK_M.value, _expanded.ROWS.value
# By the bytes of a query's or key's column. Registers are of a thread: with others 16 bits spill.
# Eight bits, H200, 192/128, 128 heads, 1 x 8192: 3449 us; 224 and 56 took 3707, 240 and 24 3516.
TUNED = {
    2: {"STAGES": 2, "ATTEND_REGISTERS": 224, "LOAD_REGISTERS": 56},
    1: {"STAGES": 3, "ATTEND_REGISTERS": 232, "LOAD_REGISTERS": 40},
}


class Columns(NamedTuple):
    """How a head's columns are cut: a first tile of a power of two, and what is left of them."""

    first: int
    rest: int
    values: int
    block_n: int  # keys of a tile


# By widths of keys and values: V3 and its kin, GLM-5, Mistral 4, Kimi's draft, MiniCPM3.
COLUMNS = {
    (192, 128): Columns(128, 64, 128, 128),
    (256, 256): Columns(256, 0, 256, 64),
    (128, 128): Columns(128, 0, 128, 128),
    (160, 128): Columns(128, 32, 128, 128),
    (96, 64): Columns(64, 32, 64, 128),
}


def why_not(problem: Problem) -> str | None:
    if needs_nvidia():
        return needs_nvidia()
    if problem.capability != (9, 0):
        return "needs SM90"
    if problem.dtype not in (torch.float16, torch.bfloat16, E4M3):
        return f"takes queries of 16 bits and e4m3, this is {problem.dtype}"
    if (problem.E, problem.V) not in COLUMNS:
        known = ", ".join(f"{E}/{V}" for E, V in COLUMNS)
        return f"takes heads of {known} columns, these are {problem.E}/{problem.V}"
    return None


def reads_apart(problem: Problem) -> bool:
    """Whether keys may stay in two parts: boxes must not cross where they meet, and what is left of
    the columns has boxes of its own width."""
    return problem.dtype != E4M3 and fit(COLUMNS[problem.E, problem.V], problem.E - problem.R)


def fit(columns: Columns, P: int) -> bool:
    box = BOX // 2  # keys in two parts are 16 bits
    return columns.first == P or (columns.first > P > 0 and P % box == 0 and columns.rest == 0)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    k_pe: Tensor | None,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    (T, H, E), V = q.shape, v.shape[2]
    if min(max_query_len, max_key_len) == 0:  # nobody sees anything
        out = q.new_zeros((T, H, V), dtype=out_dtype or q.dtype)
        return out, q.new_full((T, H), -torch.inf, dtype=torch.float32)
    columns, size = COLUMNS[E, V], q.itemsize
    P, block_n, width = k.shape[2], columns.block_n, box_of(columns, size)
    if k_pe is not None and not fit(columns, P):
        k, k_pe = joined(k, k_pe), None
    q, k, v = heads_of(q), heads_of(k), heads_of(sixteen_bits(v))
    rest, rest_head, rest_first = k, k.stride(1), columns.first
    if k_pe is not None:
        rest, rest_head, rest_first = aligned(k_pe)[:, None], 0, 0
    out = q.new_empty((T, H, V), dtype=out_dtype or q.dtype)
    lse = q.new_empty((T, H), dtype=torch.float32)
    q_scale, k_scale, v_scale = scales or (lse, lse, lse)  # which are not read then
    B = query_start_loc.shape[0] - 1
    programs = min(multiprocessors(q.device), (T // BLOCK_M + B + 1) * H)
    counter = torch.full((1,), programs, dtype=torch.int32, device=q.device)
    launch = SPEC.launch(columns, H, columns.first if k_pe is None else P, causal, size)
    launch(
        (programs,),
        boxes(q, ROWS, width),
        boxes(q, ROWS, columns.rest or width),
        boxes(k, block_n, width),
        boxes(rest, block_n, columns.rest or width),
        boxes(v, block_n, BOX // 2),
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
        rest_head,
        rest_first,
        v.stride(1),
        q_scale.stride(0),
        q_scale.stride(1),
    )
    return out, lse


def heads_of(tensor: Tensor) -> Tensor:
    """Aligned, and with columns of all heads within 31 bits."""
    S, H, E = tensor.shape
    if (H - 1) * tensor.stride(1) + E >= 2**31 or (S > 1 and tensor.stride(0) == 0):
        return tensor.contiguous()
    return aligned(tensor)


def sixteen_bits(v: Tensor) -> Tensor:
    """Values as they are multiplied: e4m3 fits into fp16, float32 is rounded to bf16."""
    if v.itemsize == 2:
        return v
    return v.to(torch.float16 if v.dtype == E4M3 else torch.bfloat16).contiguous()


def box_of(columns: Columns, size: int) -> int:
    """Columns of queries and keys that are copied at a time."""
    return min(BOX // size, columns.first)


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


def fix(columns: Columns, H: int, own: int, causal: bool, size: int) -> Fixed:
    """`own`: columns of keys that each head has for itself."""
    constants = {
        "H": H,
        "A": columns.first,
        "REST": columns.rest,
        "OWN": own,
        "V": columns.values,
        "BLOCK_N": columns.block_n,
        "CAUSAL": causal,
        "EIGHT_BITS": size == 1,
        **TUNED[size],
    }
    return Fixed(constants, NUM_WARPS)


def cases(capability: int) -> Iterator[Case]:
    bf16, fp16 = torch.bfloat16, torch.float16
    for (E, V), own, H, causal, kind, values in (
        ((192, 128), 128, 128, True, bf16, bf16), ((192, 128), 128, 16, False, fp16, fp16),
        ((256, 256), 192, 64, True, bf16, bf16), ((128, 128), 64, 32, True, bf16, bf16),
        ((160, 128), 128, 32, True, bf16, bf16), ((96, 64), 64, 40, True, bf16, bf16),
        ((192, 128), 128, 128, True, E4M3, bf16), ((192, 128), 128, 16, False, E4M3, fp16),
        ((256, 256), 256, 64, True, E4M3, bf16), ((128, 128), 128, 32, True, E4M3, bf16),
        ((160, 128), 128, 32, True, E4M3, bf16), ((96, 64), 64, 40, True, E4M3, bf16),
    ):  # fmt: skip
        columns = COLUMNS[E, V]
        width, types = box_of(columns, kind.itemsize), {"out": f"*{HEADS[values]}"}
        for name, rows, box, dtype in (
            ("q", ROWS, width, kind), ("q_rest", ROWS, columns.rest or width, kind),
            ("k", columns.block_n, width, kind),
            ("k_rest", columns.block_n, columns.rest or width, kind),
            ("v", columns.block_n, BOX // 2, values),
        ):  # fmt: skip
            layout = layout_of(box, dtype.itemsize)
            types[name] = f"tensordesc<{HEADS[dtype]}[{rows}, {box}],{layout!r}>"
        name = f"expanded-E{E}-V{V}-H{H}-{'causal' if causal else 'all'}-{HEADS[kind]}"
        yield case(name, columns, H, own, causal, kind.itemsize, types=types)


SPEC = KernelSpec(
    _expanded._expanded_kernel,
    fix,
    types={
        "*fp32": "lse q_scale k_scale v_scale",
        "*i32": "query_start_loc key_start_loc counter",
        "fp32": "qk_scale",
    },
    cases=cases,
    targets=(90,),
    fp_fusion=True,
)
SPECS = (SPEC,)
