"""index_logits, reference: one request after another, with its keys decoded at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.kernels import Variant
from openmla.cache.format import get_format

PRODUCTS = 2**22  # head products held at once; more queries are processed in chunks


def why_not(problem: Problem) -> str | None:
    return None


def kernel_for(problem: Problem) -> Variant:
    return Variant(run=partial(run, alone=problem.batch_invariant))


def kernel_of(problem: Problem) -> str:
    return "row by row" if problem.batch_invariant else ""


def run(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    *,
    format: str,
    num_keys: int,
    alone: bool = False,
) -> Tensor:
    T, _, DI = q_idx.shape
    BS = cache.shape[1]
    wide = w_idx.dtype
    logits = w_idx.new_full((T, num_keys), -torch.inf)
    bounds, lens = query_start_loc.tolist(), row_lens.tolist()
    one = torch.ones((), device=cache.device)
    for b in range(len(bounds) - 1):
        start, stop = bounds[b], bounds[b + 1]
        S = max(lens[start:stop], default=0)
        if S == 0:
            continue
        places = torch.arange(S, device=cache.device)
        slots = block_table[b].long()[places // BS] * BS + places % BS
        keys = get_format(format).read(cache, slots, one, wide, DI)
        if alone:  # no product includes other tokens, or keys that this token does not see
            for t in range(start, stop):
                products = (q_idx[t].to(wide, copy=True) @ keys[: lens[t]].T).relu_()  # [HI, S]
                logits[t, : lens[t]] = w_idx[t].clone() @ products
            continue
        mine = slice(start, stop)
        none = torch.zeros_like(row_lens[mine])
        score(logits[mine, :S], q_idx[mine], w_idx[mine], keys, none, row_lens[mine])
    return logits


def score(
    out: Tensor, q_idx: Tensor, w_idx: Tensor, keys: Tensor, starts: Tensor, ends: Tensor
) -> None:
    """Write the sum over heads of w * relu(q . k) from starts to ends to out [n, S], in chunks."""
    n, HI, _ = q_idx.shape
    places = torch.arange(keys.shape[0], device=keys.device)
    step = max(PRODUCTS // max(HI * keys.shape[0], 1), 1)
    for i in range(0, n, step):
        chunk = slice(i, i + step)
        products = (q_idx[chunk].to(keys.dtype) @ keys.T).relu_()  # [step, HI, S]
        out[chunk] = (w_idx[chunk, None, :] @ products)[:, 0]
        outside = (places < starts[chunk, None]) | (places >= ends[chunk, None])
        out[chunk].masked_fill_(outside, -torch.inf)
