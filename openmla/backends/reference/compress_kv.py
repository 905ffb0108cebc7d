"""compress_kv, reference: one request after another, with its windows gathered or folded."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.kernels import Variant
from openmla.backends.reference import rope
from openmla.backends.reference._rows import look_up
from openmla.backends.reference.index_write import hadamard_transform
from openmla.cache.format import get_format


def why_not(problem: Problem) -> str | None:
    return None


def kernel_for(problem: Problem) -> Variant:
    return Variant(run=partial(run, alone=problem.batch_invariant))


def kernel_of(problem: Problem) -> str:
    return "token by token" if problem.batch_invariant else ""


class Fold(NamedTuple):
    """Online softmax over the tokens seen so far, weighted with exp(z - running_max)."""

    running_max: Tensor  # [D]
    running_sum: Tensor  # [D]
    accumulator: Tensor  # [D]


def run(
    cache: Tensor,
    kv_scale: Tensor,
    state: Tensor,
    kv: Tensor,
    score: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    table: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    state_slots: Tensor,
    clamped: Tensor | None,
    *,
    format: str,
    ratio: int,
    overlap: bool,
    eps: float,
    hadamard: bool,
    alone: bool = False,
) -> None:
    D, wide = norm_weight.shape[0], state.dtype
    bounds, slots = query_start_loc.tolist(), state_slots.tolist()
    folded = _pool_alone if alone else _pool_folded
    pool = partial(_pool_overlapping, alone=alone) if overlap else folded
    for b, slot in enumerate(slots):
        begin, end = bounds[b], bounds[b + 1]
        if slot < 0 or begin == end:
            continue
        places = positions[begin:end]
        start = int(places[0])
        z = score[begin:end].to(wide) + bias.to(wide)[places % ratio]
        pooled = pool(state[slot], kv[begin:end].to(wide), z, start, ratio)
        entries = torch.arange(start // ratio, (start + end - begin) // ratio, device=cache.device)
        v = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps)
        v = v * norm_weight.to(wide)
        turned = v[:, None, D - table.shape[1] :]
        rope.run(turned, entries * ratio, table, pairing="pairs", inverse=False)
        if hadamard:
            v = hadamard_transform(v)
        owner = torch.full((1,), b, device=cache.device)
        where = look_up(entries[None], block_table, owner, cache.shape[1], cache.shape[0])[0]
        layout = get_format(format)
        if layout.packed:
            v = v.to(torch.bfloat16)
        if clamped is not None:
            clamped += layout.num_clamped(v[where >= 0], kv_scale)
        layout.write(cache, where[where >= 0], v[where >= 0], kv_scale)


def _pool_overlapping(
    state: Tensor, kv: Tensor, z: Tensor, start: int, ratio: int, *, alone: bool
) -> Tensor:
    """Return [E, D] for the windows this step completes; older tokens come from the state.
    `alone`: one window at a time, because torch sums several in another order."""
    V, n, D = state.shape[0], kv.shape[0], kv.shape[1] // 2
    first = max(start - (2 * ratio - 1), 0)
    kept = state[torch.arange(first, start, device=kv.device) % V]
    rows = torch.cat([kept, torch.cat([kv, z], dim=1)])  # positions first .. start + n - 1
    windows = torch.arange(start // ratio, (start + n) // ratio, device=kv.device)
    places = windows[:, None] * ratio + torch.arange(-ratio, ratio, device=kv.device) - first
    valid = (places >= 0)[..., None]  # the first window has no predecessor
    u, scores = rows[places.clamp_min(0)].chunk(2, dim=-1)  # [E, 2 ratio, 2 D]
    older, newer = slice(0, ratio), slice(ratio, 2 * ratio)
    u = torch.cat([u[:, older, :D], u[:, newer, D:]], dim=1).masked_fill(~valid, 0)
    scores = torch.cat([scores[:, older, :D], scores[:, newer, D:]], dim=1)
    scores = scores.masked_fill(~valid, -torch.inf)
    kept_rows = min(n, V)
    last = torch.arange(start + n - kept_rows, start + n, device=kv.device)
    state[last % V] = rows[len(rows) - kept_rows :]
    parts = zip(scores.split(1), u.split(1), strict=True) if alone else [(scores, u)]
    pooled = [(each.softmax(dim=1) * values).sum(1) for each, values in parts]
    return torch.cat(pooled) if pooled else kv.new_zeros((0, D))


def _pool_folded(state: Tensor, kv: Tensor, z: Tensor, start: int, ratio: int) -> Tensor:
    """Return [E, D] for the windows this step completes; the first continues from the state."""
    V, n, D = state.shape[0], *kv.shape
    pooled, folds = [], {}
    carry = None
    if start % ratio:
        carry = Fold(*state[(start - 1) % V].clone().chunk(3))
    for window in range(start // ratio, (start + n - 1) // ratio + 1):
        low = max(window * ratio - start, 0)
        high = min((window + 1) * ratio - start, n)
        for k in range(max(low, n - V), high):  # rows that the state keeps
            folds[k] = _fold(kv[low : k + 1], z[low : k + 1], carry)
        if high + start == (window + 1) * ratio:
            finished = _fold(kv[low:high], z[low:high], carry)
            pooled.append(finished.accumulator / finished.running_sum)
        carry = None
    for k, fold in folds.items():
        state[(start + k) % V] = torch.cat(fold)
    return torch.stack(pooled) if pooled else kv.new_zeros((0, D))


def _pool_alone(state: Tensor, kv: Tensor, z: Tensor, start: int, ratio: int) -> Tensor:
    """Pool one token at a time, so that no sum depends on the number of tokens in a step."""
    V, n, D = state.shape[0], *kv.shape
    pooled, folds = [], []
    carry = Fold(*state[(start - 1) % V].clone().chunk(3)) if start % ratio else None
    for k in range(n):
        opens_window = (start + k) % ratio == 0
        carry = _fold(kv[k : k + 1], z[k : k + 1], None if opens_window else carry)
        folds.append(carry)
        if (start + k + 1) % ratio == 0:
            pooled.append(carry.accumulator / carry.running_sum)
    for k in range(max(n - V, 0), n):
        state[(start + k) % V] = torch.cat(folds[k])
    return torch.stack(pooled) if pooled else kv.new_zeros((0, D))


def _fold(kv: Tensor, z: Tensor, carry: Fold | None) -> Fold:
    """Add rows [k, D] to the fold of the tokens before them."""
    running_max = z.amax(0) if carry is None else z.amax(0).maximum(carry.running_max)
    weights = (z - running_max).exp()
    running_sum, accumulator = weights.sum(0), (weights * kv).sum(0)
    if carry is not None:
        rescale = (carry.running_max - running_max).exp()
        running_sum, accumulator = (
            running_sum + carry.running_sum * rescale,
            accumulator + carry.accumulator * rescale,
        )
    return Fold(running_max, running_sum, accumulator)
