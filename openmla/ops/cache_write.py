"""cache_write: encode this step's latent rows and write them into their slots of a paged cache.

    for i < T', slot_mapping[i] >= 0:
        cache[slot // BS, slot % BS] = encode(concat(kv_c[i], k_pe[i]))

kv_c [T, C] and k_pe [T, R] may have more rows than there are slots [T'] (graph padding); surplus
rows are ignored. A negative slot skips its row. No two rows may share a slot. Bytes of other slots
and of padding between pages do not change. R may be 0.
cache/format.py defines the encoding: a bit copy or rounding to nearest even; fp8 saturates.
With `rope_ratio`, a power of two, rows with a single scale store k_pe / rope_ratio instead of k_pe.
`clamped`, if given, grows by the number of values that saturated (CacheFormat.num_clamped).
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.cache.format import check_blocks_apart, check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost
from openmla.ops._shapes import row_width
from openmla.ops._values import check_slots


def sizes(kv_c: Tensor, k_pe: Tensor, format: str) -> dict[str, int]:
    return {"W": row_width(get_format(format), kv_c, k_pe)}


def check(op: str, kv_c: Tensor, k_pe: Tensor) -> None:
    if kv_c.dtype != k_pe.dtype:
        raise ShapeError(f"{op}: k_pe must be {kv_c.dtype} like kv_c, got {k_pe.dtype}.")


def check_written(
    op: str, cache: Tensor, format: str, S: int, T: int, rope_ratio: Tensor | None = None
) -> None:
    """Check the metadata of an op that writes one token's row per slot."""
    check_pages(op, cache, format)
    check_blocks_apart(op, "cache", cache)
    if S > T:
        raise ShapeError(f"{op}: slot_mapping must have at most T={T} slots, got {S}.")
    if rope_ratio is not None and not get_format(format).scaled:
        raise ShapeError(f"{op}: rope_ratio must be None for format {format}.")


def check_slot_mapping(op: str, slot_mapping: Tensor, N: int, BS: int) -> None:
    check_slots(op, slot_mapping, N * BS)


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "cache_write", dtype=dtype, format=format)


@op(
    problem=problem,
    dtype_of="kv_c",
    sizes=sizes,
    check=[check_written, check],
    check_values=check_slot_mapping,
    mutates_args=["cache", "clamped"],
    no_grad=["kv_c", "k_pe"],
)
def cache_write(
    cache: Annotated[Tensor, "[N, BS, W] row"],
    kv_c: Annotated[Tensor, "[T, C] float row"],
    k_pe: Annotated[Tensor, "[T, R] float row"],
    slot_mapping: Annotated[Tensor, "[S] i64"],  # S = T' <= T
    kv_scale: Annotated[Tensor, "[] f32"],
    rope_ratio: Annotated[Tensor | None, "[] f32"] = None,
    clamped: Annotated[Tensor | None, "[] i64"] = None,
    *,
    format: str,
    backend: str = "auto",
) -> None:
    """Write T' rows; see the module docstring for the contract.

    Args:
        cache: cache to write to, in place.
        kv_c: normalized latents.
        k_pe: rotated RoPE columns.
        slot_mapping: slot (block * BS + offset) of each row. Negative: not written.
        kv_scale: scale of format fp8; other formats ignore it.
        rope_ratio: power of two that stored k_pe are divided by. Only for format fp8.
        clamped: counter that grows by the number of saturated values.
        format: the cache format, a key of openmla.FORMATS.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or kv_c or k_pe requires grad while grad
            mode is on.

    ```python
    import torch
    from openmla.ops import cache_write

    cache = torch.zeros(2, 4, 6)  # 2 blocks of 4 rows
    kv_c, k_pe = torch.randn(3, 4), torch.randn(3, 2)
    slots = torch.tensor([5, 0, -1])  # the last row is not written
    cache_write(cache, kv_c, k_pe, slots, torch.tensor(1.0), format="fp32")
    print(cache[1, 1])  # the first row
    ```
    """


def cost(num_rows: int, *, D: int, format: str, itemsize: int) -> Cost:
    """Every input row read once, every stored row written once, one i64 slot per row."""
    return Cost(num_rows * (D * itemsize + get_format(format).row_bytes(D) + 8), 0)
