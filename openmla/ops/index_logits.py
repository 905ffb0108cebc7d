"""index_logits: scores of the lightning indexer over a paged cache of indexer keys.

    keys      = the cached keys of request b, decoded, at positions j < row_lens[t]
    out[t, j] = sum over heads h of w_idx[t, h] * relu(q_idx[t, h] . keys[j]),  -inf elsewhere

Request b owns rows query_start_loc[b] .. query_start_loc[b+1]-1; rows past query_start_loc[B]
(graph padding) and columns from row_lens[t] on are -inf. `row_lens` says what each token may see,
so any number of speculative tokens is a row each. All scales are in w_idx: the query's if it is
fp8, DI^-0.5 and HI^-0.5. `num_keys` is the width of out and bounds row_lens.
Arithmetic and out are float32 (float64 for float64 queries), but for products of fp8 queries and
fp8 keys: a backend may leave those to matrix units that add them up with fewer bits, out then being
off by at most 2^-12 * sum over h of |w_idx| * (|q_idx| . |keys|). Columns of block_table past the
longest row are not read. With batch_invariant a score's bits depend on its token and its key alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.cache.format import check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register
from openmla.ops._values import check_block_table, check_row_lens, check_start_loc

SPEC = (
    "q_idx:T HI DI q row, w_idx:T HI row, cache:N BS W row, block_table:B M i32,"
    " query_start_loc:B+1 i32, row_lens:T i32"
)


def check_paged(op: str, tensors: tuple[Tensor, ...], format: str, num_keys: int) -> dict[str, int]:
    """Shapes of the arguments index_logits and index_select share."""
    q_idx, w_idx, cache, block_table, *_ = tensors
    layout = get_format(format, "index")
    W = layout.width(q_idx.shape[-1]) if q_idx.dim() else 0
    B1 = block_table.shape[0] + 1 if block_table.dim() else 0
    dims = bind(op, SPEC, tensors, {"W": W, "B+1": B1})
    check_pages(op, cache, format)
    if w_idx.dtype != scores_dtype(q_idx.dtype):
        raise ShapeError(f"{op}: w_idx must be {scores_dtype(q_idx.dtype)}, got {w_idx.dtype}.")
    if num_keys < 0:
        raise ShapeError(f"{op}: num_keys must not be negative, got {num_keys}.")
    return dims


def check_paged_values(
    op: str, dims: Mapping[str, int], tensors: tuple[Tensor, ...], num_keys: int
) -> None:
    _, _, _, block_table, query_start_loc, row_lens = tensors
    check_start_loc(op, "query_start_loc", query_start_loc, dims["T"], "q_idx")
    check_row_lens(op, row_lens, num_keys)
    requests = torch.arange(dims["B"]).repeat_interleave(query_start_loc.diff().long())
    longest = torch.zeros(dims["B"], dtype=torch.int32)
    longest.scatter_reduce_(0, requests, row_lens[: requests.shape[0]], "amax")
    check_block_table(op, block_table, None, longest, dims["N"], dims["BS"])


def scores_dtype(queries: torch.dtype) -> torch.dtype:
    return torch.float64 if queries == torch.float64 else torch.float32


def problem(
    device: torch.device, dtype: torch.dtype, format: str, *, HI: int, DI: int,
    batch_invariant: bool = False,
) -> Problem:  # fmt: skip
    """A call, as backends are asked about it."""
    return problem_on(
        device, "index_logits", dtype=dtype, format=format, H=HI, D=DI,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def _decide(
    *tensors: Tensor, format: str, num_keys: int, batch_invariant: bool = False, backend: str
) -> Decided:
    q_idx = tensors[0]
    dims = check_paged("index_logits", tensors, format, num_keys)
    asked = problem(
        q_idx.device, q_idx.dtype, format, HI=dims["HI"], DI=dims["DI"],
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return decided(dims, asked, backend)


def _run(
    known: Decided, *tensors: Tensor, format: str, num_keys: int, batch_invariant: bool = False
) -> Tensor:
    refuse_grad("index_logits", tensors[:2])
    if tensors[0].device.type == "cpu":
        check_paged_values("index_logits", known.dims, tensors, num_keys)
    logits: Tensor = known.runner.run(*tensors, format=format, num_keys=num_keys)
    return logits


def _fake(*tensors: Tensor, format: str, num_keys: int, **_: object) -> Tensor:
    dims = check_paged("index_logits", tensors, format, num_keys)
    return tensors[0].new_empty((dims["T"], num_keys), dtype=scores_dtype(tensors[0].dtype))


_OP = register(
    "index_logits(Tensor q_idx, Tensor w_idx, Tensor cache, Tensor block_table,"
    " Tensor query_start_loc, Tensor row_lens, *, str format, SymInt num_keys,"
    " bool batch_invariant=False, str backend) -> Tensor",
    _decide,
    _run,
    _fake,
)


def index_logits(
    q_idx: Tensor,  # [T, HI, DI], fp8 or wider
    w_idx: Tensor,  # [T, HI] f32
    cache: Tensor,  # [N, BS, W], an index format
    block_table: Tensor,  # [B, M] i32
    query_start_loc: Tensor,  # [B+1] i32
    row_lens: Tensor,  # [T] i32, keys each token sees
    *,
    format: str,
    num_keys: int,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor:  # [T, num_keys] f32
    """Score cached keys; see the module's text for the contract."""
    tensors = (q_idx, w_idx, cache, block_table, query_start_loc, row_lens)
    logits: Tensor = _OP(
        *tensors, format=format, num_keys=num_keys, batch_invariant=batch_invariant, backend=backend
    )
    return logits


def cost(
    query_lens: Sequence[int], row_lens: Sequence[int], *, HI: int, DI: int, format: str
) -> Cost:
    """Each request's keys once, queries once, logits written once; row_lens is one per token."""
    key_bytes = get_format(format, "index").row_bytes(DI)
    num_bytes, first = 0, 0
    for n in query_lens:
        seen = row_lens[first : first + n]
        num_bytes += max(seen, default=0) * key_bytes + n * HI * (DI + 4) + 4 * sum(seen)
        first += n
    return Cost(num_bytes, 2 * sum(row_lens) * HI * (DI + 1))
