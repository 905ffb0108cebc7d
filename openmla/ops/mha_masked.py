"""mha_masked: ordinary attention over packed keys and values, restricted by one bit per pair.

    s   = scale * q @ k.T per head,  where bit j of mask[t] is set (key j of the request)
    lse = log(sum(exp(s)))
    out = exp(s - lse) @ v

Request b owns query rows query_start_loc[b] .. query_start_loc[b+1]-1 and key rows
key_start_loc[b] .. key_start_loc[b+1]-1; bits from its number of keys on are not looked at. Words
are pack_mask's. Nothing else restricts: causality is in the bits. A query that sees no key, and
every query row past query_start_loc[B], gets out 0 and lse -inf. lse is natural-log, includes
scale, and is float32 (float64 for float64 queries). max_query_len and max_key_len bound requests.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, check_scale, decided, refuse_grad, register
from openmla.ops._values import check_start_loc

_SPEC = (
    "q:T H E f row, k:S H E f row, v:S H V f row, query_start_loc:B+1 i32, key_start_loc:B+1 i32,"
    " mask:T words i32 row"
)


def _check(tensors: tuple[Tensor, ...], max_key_len: int) -> dict[str, int]:
    q, k, v, *_ = tensors
    dims = bind("mha_masked", _SPEC, tensors)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ShapeError(f"mha_masked: {name} must be {q.dtype} like q, got {tensor.dtype}.")
    if 32 * dims["words"] < max_key_len:
        raise ShapeError(
            f"mha_masked: mask must have a bit for each of max_key_len={max_key_len} keys, "
            f"got {dims['words']} words of 32."
        )
    return dims


def _check_values(
    dims: Mapping[str, int], tensors: tuple[Tensor, ...], max_query_len: int, max_key_len: int
) -> None:
    _, _, _, query_start_loc, key_start_loc, _ = tensors
    check_start_loc("mha_masked", "query_start_loc", query_start_loc, dims["T"], "q")
    check_start_loc("mha_masked", "key_start_loc", key_start_loc, dims["S"], "k")
    for name, start_loc, given in (
        ("max_query_len", query_start_loc, max_query_len),
        ("max_key_len", key_start_loc, max_key_len),
    ):
        longest = int(start_loc.diff().max()) if dims["B+1"] > 1 else 0
        if longest > given:
            raise ShapeError(f"mha_masked: {name} must be at least {longest}, got {given}.")


def problem(
    device: torch.device, dtype: torch.dtype, *, E: int, V: int, batch_invariant: bool = False
) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "mha_masked", dtype=dtype, E=E, V=V, batch_invariant=batch_invariant)


def _decide(
    *tensors: Tensor, scale: float, max_query_len: int, max_key_len: int, backend: str,
    batch_invariant: bool = False,
) -> Decided:  # fmt: skip
    q, dims = tensors[0], _check(tensors, max_key_len)
    check_scale("mha_masked", scale)
    E, V = dims["E"], dims["V"]
    asked = problem(q.device, q.dtype, E=E, V=V, batch_invariant=batch_invariant)
    return decided(dims, asked, backend)


def _run(
    known: Decided, *tensors: Tensor, scale: float, max_query_len: int, max_key_len: int,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_grad("mha_masked", tensors[:3])
    if tensors[0].device.type == "cpu":
        _check_values(known.dims, tensors, max_query_len, max_key_len)
    result: tuple[Tensor, Tensor] = known.runner.run(
        *tensors, scale=scale, max_query_len=max_query_len, max_key_len=max_key_len
    )
    return result


def _fake(*tensors: Tensor, max_key_len: int, **_: object) -> tuple[Tensor, Tensor]:
    dims = _check(tensors, max_key_len)
    q = tensors[0]
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty((dims["T"], dims["H"], dims["V"])),
        q.new_empty((dims["T"], dims["H"]), dtype=lse_dtype),
    )


_OP = register(
    "mha_masked(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor key_start_loc,"
    " Tensor mask, *, float scale, SymInt max_query_len, SymInt max_key_len,"
    " bool batch_invariant=False, str backend) -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def mha_masked(
    q: Tensor,  # [T, H, E]
    k: Tensor,  # [S, H, E]
    v: Tensor,  # [S, H, V]
    query_start_loc: Tensor,  # [B+1] i32
    key_start_loc: Tensor,  # [B+1] i32
    mask: Tensor,  # [T, words] i32
    *,
    scale: float,
    max_query_len: int,
    max_key_len: int,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out [T, H, V], lse [T, H] f32
    """Attend where bits are set; see the module's text for the contract."""
    out, lse = _OP(
        q,
        k,
        v,
        query_start_loc,
        key_start_loc,
        mask,
        scale=scale,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    return out, lse


def cost(n: int, S: int, *, H: int, E: int, V: int, itemsize: int) -> Cost:
    """Of one request: everything read once, every pair computed whatever its bit says."""
    num_bytes = H * itemsize * (n + S) * (E + V) + n * S // 8 + 4 * n * H
    return Cost(num_bytes, 2 * n * S * H * (E + V))
