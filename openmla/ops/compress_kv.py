"""compress_kv: V4's compressor, which pools every `ratio` tokens into one entry of a paged cache.

    p = positions[t], z[t] = score[t] + bias[p % ratio], both per channel, as is everything up to
    the norm; entry i is written by the token at p = ratio * i + ratio - 1:
    pool     the ratio tokens of window i, kv and z [D] each;
             with `overlap` kv and score are 2 D wide, and 2 * ratio tokens are pooled: those of
             window i by their last D channels, those of window i - 1 by their first D
    v        = sum over the pool of softmax(z) * kv
    v        = v / sqrt(mean(v * v) + eps) * norm_weight
    v[D-R:]  rotated in pairs to position ratio * i, as ops/rope does
    v        = v @ H / sqrt(D) if hadamard: H the D-point Hadamard matrix, D a power of two
    cache[b, i] = encode(v), looked up in block_table[b]; packed formats encode v rounded to bf16

Request b owns rows query_start_loc[b] .. query_start_loc[b+1]-1, at consecutive positions; rows
past query_start_loc[B] are ignored. `state` holds tokens of earlier steps: request b owns the V
rows of state_slots[b], with position p in row p % V:
    overlap      [kv | z], 4 D values: the token itself
    otherwise    [max of z | sum | sum of kv], 3 D values: window p // ratio up to p, the sums
                 weighted with exp(z - max)
Rows of this step's last V tokens are written after all reads. A step may therefore restart at an
earlier position (rejected draft tokens): up to V - 2 * ratio + 1 tokens back from the furthest ever
written with overlap, V - 1 without. Entries that rejected tokens completed are written again by the
tokens that replace them. A request with a negative state_slots is skipped. An entry whose block is
-1 in the table (owned by another rank) is not written, but the state of its tokens is. No two
requests may write the same entry. `clamped` counts values of entries that fp8 saturates, as in
cache_write.
Everything before the encoding is float32 (float64 for float64 inputs); kv and score share one
floating dtype. With batch_invariant, the bits of an entry and of the state do not depend on how its
tokens were split into steps: a window's sums are rounded after each token, as the state stores
them.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.cache.format import (
    check_blocks_apart,
    check_pages,
    get_format,
    state_rows,
    state_width,
)
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost
from openmla.ops._values import check_block_table, check_positions, check_slots, check_start_loc
from openmla.ops.rope import check_table


def sizes(
    norm_weight: Tensor, state_slots: Tensor, format: str, ratio: int, overlap: bool
) -> dict[str, int]:
    D = norm_weight.shape[-1] if norm_weight.dim() else 0
    return {
        "W": get_format(format).width(D),
        "D": D,
        "CD": 2 * D if overlap else D,
        "SW": state_width(D, overlap=overlap),
        "ratio": ratio,
        "B": state_slots.shape[0] if state_slots.dim() else 0,
    }


def check(
    op: str, cache: Tensor, state: Tensor, kv: Tensor, score: Tensor, format: str, ratio: int,
    overlap: bool, hadamard: bool, D: int, R: int, V: int,
) -> None:  # fmt: skip
    check_pages(op, cache, format)
    check_blocks_apart(op, "cache", cache)
    check_blocks_apart(op, "state", state)
    wide = torch.promote_types(kv.dtype, torch.float32)
    for name, tensor, dtype in (("score", score, kv.dtype), ("state", state, wide)):
        if tensor.dtype != dtype:
            raise ShapeError(
                f"{op}: {name} must be {dtype} with kv {kv.dtype}, got {tensor.dtype}."
            )
    if R % 2 or R > D:
        raise ShapeError(f"{op}: table must have an even R of at most D={D}, got {R}.")
    if hadamard and D & (D - 1):
        raise ShapeError(f"{op}: hadamard needs D to be a power of two, got {D}.")
    if ratio < 1:
        raise ShapeError(f"{op}: ratio must be positive, got {ratio}.")
    least = state_rows(ratio, overlap=overlap)
    if least > V:
        raise ShapeError(f"{op}: state must have V>={least} rows each, got {V}.")


def check_values(
    op: str, positions: Tensor, query_start_loc: Tensor, block_table: Tensor, state_slots: Tensor,
    ratio: int, T: int, B: int, Q: int, NS: int, N: int, BS: int,
) -> None:  # fmt: skip
    check_start_loc(op, "query_start_loc", query_start_loc, T, "kv")
    lens = query_start_loc.diff().long()
    used = (lens > 0) & (state_slots >= 0)
    check_slots(op, state_slots[used].long(), NS, "state_slots")
    firsts = torch.zeros_like(lens)
    firsts[lens > 0] = positions[query_start_loc[:-1][lens > 0].long()]
    owners = torch.arange(B).repeat_interleave(lens)
    rows = used[owners].nonzero().squeeze(1)
    owners = owners[rows]
    mine = positions[rows]
    wanted = rows - query_start_loc[owners].long() + firsts[owners]
    check_positions(op, mine, Q)
    if bool((mine != wanted).any()):
        t = int((mine != wanted).nonzero()[0])
        raise ShapeError(
            f"{op}: positions of a request must be consecutive, got {int(mine[t])} at row "
            f"{int(rows[t])}, "
            f"expected {int(wanted[t])}."
        )
    starts, ends = firsts // ratio, (firsts + lens) // ratio
    nothing = torch.zeros_like(ends)
    check_block_table(
        op,
        block_table.masked_fill(block_table == -1, 0),
        starts.where(used, nothing).int(),
        ends.where(used, nothing).int(),
        N,
        BS,
    )


def problem(
    device: torch.device, dtype: torch.dtype, format: str, *, D: int, batch_invariant: bool = False
) -> Problem:
    """Describe a call to the backends."""
    return problem_on(
        device, "compress_kv", dtype=dtype, format=format, D=D, batch_invariant=batch_invariant
    )


@op(
    problem=problem,
    dtype_of="kv",
    sizes=sizes,
    check=[check, check_table],
    check_values=check_values,
    mutates_args=["cache", "state", "clamped"],
    no_grad=["kv", "score", "bias", "norm_weight"],
    optional=["batch_invariant"],
)
def compress_kv(
    cache: Annotated[Tensor, "[N, BS, W] row"],
    kv_scale: Annotated[Tensor, "[] f32"],
    state: Annotated[Tensor, "[NS, V, SW] float row"],  # f32
    kv: Annotated[Tensor, "[T, CD] float row"],  # CD = D, 2 D with overlap
    score: Annotated[Tensor, "[T, CD] float row"],
    bias: Annotated[Tensor, "[ratio, CD] float row"],
    norm_weight: Annotated[Tensor, "[D] float row"],
    table: Annotated[Tensor, "[Q, R] float row"],
    positions: Annotated[Tensor, "[T] i64"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    block_table: Annotated[Tensor, "[B, M] i32"],
    state_slots: Annotated[Tensor, "[B] i32"],
    clamped: Annotated[Tensor | None, "[] i64"] = None,
    *,
    format: str,
    ratio: int,
    overlap: bool,
    eps: float,
    hadamard: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> None:
    """Pool a step's tokens; see the module docstring for the contract.

    Args:
        cache: pages of entries, written in place.
        kv_scale: scale of format fp8; other formats ignore it.
        state: tokens of earlier steps, written in place.
        kv: values to pool, as projected.
        score: scores of the pooling, before bias.
        bias: added to scores, by position in the window.
        norm_weight: weight of the RMS norm.
        table: RoPE table, cos in the first half of a row and sin in the second.
        positions: positions of tokens.
        query_start_loc: first token of each request, then the end.
        block_table: block numbers of each request's entries.
        state_slots: row of state of each request. Negative: skip the request.
        clamped: counter that grows by the number of saturated values.
        format: the cache format, a key of openmla.FORMATS.
        ratio: tokens per entry.
        overlap: pool each window with the one before it.
        eps: epsilon of the RMS norm.
        hadamard: multiply entries by a Hadamard matrix.
        batch_invariant: make bits independent of how tokens were split into steps.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or kv, score, bias or norm_weight requires
            grad while grad mode is on.

    ```python
    import torch
    from openmla.ops import compress_kv

    cache, state = torch.zeros(2, 4, 8), torch.zeros(1, 1, 24)
    kv, score = torch.randn(2, 4, 8)
    table = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(4, 4)  # no rotation
    one = torch.tensor([1], dtype=torch.int32)
    compress_kv(
        cache, torch.tensor(1.0), state, kv, score, torch.zeros(4, 8), torch.ones(8), table,
        torch.arange(4), torch.tensor([0, 4], dtype=torch.int32), one[None], one - 1,
        format="fp32", ratio=4, overlap=False, eps=1e-6,
    )
    print(cache[1, 0])  # the entry of tokens 0 to 3
    ```
    """


def cost(
    num_tokens: int,
    num_requests: int,
    *,
    D: int,
    ratio: int,
    overlap: bool,
    format: str,
    itemsize: int,
) -> Cost:
    """Tokens read once, an entry written per `ratio` of them, one state row read and one written
    per request; a softmax and a weighted sum per channel."""
    width = 2 * D if overlap else D
    entries = num_tokens // ratio
    state = 2 * 4 * state_width(D, overlap=overlap) * num_requests
    written = entries * get_format(format).row_bytes(D)
    return Cost(2 * num_tokens * width * itemsize + written + state, 5 * num_tokens * width)
