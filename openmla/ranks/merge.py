"""merge_over_ranks: merges partial attention results over the keys of several ranks.

    m    = max over ranks of lse_r
    out  = sum of exp(lse_r - m) * out_r / z,  z = sum of exp(lse_r - m), in the order of ranks
    lse  = m + log(z)

A rank whose lse is -inf saw no key, and its out is ignored. If no rank saw a key, out is 0 and lse
-inf. A rank whose lse is NaN or +inf makes out and lse of its row NaN on every rank. Arithmetic is
in float32 (float64 if out is), and out is rounded once.

Two schedules compute the same sums. "gather" gathers lse from all ranks, then each rank scales its
own out and a collective adds them up. "exchange" sends out and lse in one message to the ranks that
need the row, which merge them. On two ranks the results are bitwise equal; on more, the collective
chooses the order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.errors import ConfigError, ShapeError
from openmla.ranks.collectives import (
    Link,
    all_gather,
    all_reduce,
    all_to_all,
    link_of,
    reduce_scatter,
)

SCHEDULES = ("auto", "gather", "exchange")
HEADS = ("all", "own")
SMALL = 256 * 1024  # bytes; below, the number of collectives costs more than their data


def merge_over_ranks(
    out: Tensor,  # [T, H, V], over this rank's keys
    lse: Tensor,  # [T, H] f32
    group: Any,
    *,
    heads: str = "all",
    schedule: str = "auto",
) -> tuple[Tensor, Tensor]:  # out [T, H, V], lse [T, H]; heads="own": [T, H / W, ...]
    """Merge partial attentions over the keys of several ranks. Every rank calls it.

    Shapes must be the same on all ranks.

    Args:
        out: [T, H, V] output over this rank's keys.
        lse: [T, H] float32 logsumexp over this rank's keys, natural logarithm.
        group: a process group or a device mesh of one dimension.
        heads: "all" returns all heads on every rank; "own" returns the r-th H / W heads on rank r.
        schedule: "gather" or "exchange", which give the same sums; "auto" uses the one that sends
            fewer bytes.

    Returns:
        The merged out and lse: [T, H, V] and [T, H], or with heads="own" of H / W heads.
    """
    return merge(out, lse, link_of(group), heads=heads, schedule=schedule)


def merge(
    out: Tensor, lse: Tensor, link: Link, *, heads: str, schedule: str
) -> tuple[Tensor, Tensor]:
    """Same as merge_over_ranks() for a group that is already resolved."""
    check_merge(out, lse, link.size, heads, schedule)
    wide = torch.promote_types(out.dtype, torch.float32)
    lse = lse.to(wide)
    if schedule == "auto":
        schedule = choose_schedule(out.shape, out.dtype, link.size, heads)
    if schedule == "gather":
        return _gather(out, lse, link, heads)
    return _exchange(out, lse, link, heads)


def choose_schedule(shape: Sequence[int], dtype: torch.dtype, size: int, heads: str) -> str:
    """Return the schedule that sends fewer bytes, or fewer collectives if there is little data."""
    gather, exchange = (
        sent_bytes(schedule, heads, shape, dtype, size) for schedule in ("gather", "exchange")
    )
    return "exchange" if exchange <= max(gather, SMALL) else "gather"


def sent_bytes(
    schedule: str,
    heads: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    size: int,
) -> int:
    """Return the bytes that each rank sends to merge partials of `shape` [T, H, V].

    An all-gather sends a rank's tensor to W - 1 others, an all-to-all and a reduce-scatter send
    (W - 1) / W of it, an all-reduce twice that.
    """
    T, H, V = shape
    rows, others = T * H, size - 1
    wide = torch.promote_types(dtype, torch.float32).itemsize
    row = V * dtype.itemsize + wide  # out in its dtype, then lse
    if schedule == "exchange":
        return others * rows * row if heads == "all" else others * (rows // size) * row
    added = others * rows * V * wide // size
    return others * rows * wide + (2 * added if heads == "all" else added)


def _gather(out: Tensor, lse: Tensor, link: Link, heads: str) -> tuple[Tensor, Tensor]:
    size, rank = link.size, link.rank
    weights, total = weigh(all_gather(lse, link))
    scaled = scale(out, lse, weights[rank])
    if heads == "all":
        return all_reduce(scaled, link).to(out.dtype), total
    own = out.shape[1] // size
    parts = scaled.unflatten(1, (size, own)).transpose(0, 1)  # [W, T, H / W, V]
    mine = reduce_scatter(parts, link).to(out.dtype)
    return mine, total[:, rank * own : (rank + 1) * own].contiguous()


def _exchange(out: Tensor, lse: Tensor, link: Link, heads: str) -> tuple[Tensor, Tensor]:
    packed = _packed(out, lse)  # [T, H, bytes]
    if heads == "all":
        received = all_gather(packed, link)
    else:
        received = all_to_all(packed.unflatten(1, (link.size, -1)).transpose(0, 1), link)
    outs, lses = _unpacked(received, out.dtype, lse.dtype)
    weights, total = weigh(lses)
    merged = scale(outs[0], lses[0], weights[0])
    for part, part_lse, weight in zip(outs[1:], lses[1:], weights[1:], strict=True):
        merged += scale(part, part_lse, weight)
    return merged.to(out.dtype), total


def weigh(lses: Tensor) -> tuple[Tensor, Tensor]:  # [W, T, H] -> [W, T, H] and [T, H]
    """Return each rank's weight in a row, and the row's lse: 0 and -inf if no rank saw a key, NaN
    if the lse of a rank is NaN or +inf."""
    top = lses.amax(0)
    shares = torch.where(lses == -torch.inf, 0, (lses - top).exp())
    sums = shares[0].clone()
    for share in shares[1:]:
        sums += share
    empty = sums == 0
    return shares / sums.masked_fill(empty, 1), torch.where(empty, -torch.inf, top + sums.log())


def scale(out: Tensor, lse: Tensor, weight: Tensor) -> Tensor:
    """Return out * weight in weight's dtype, and 0 where lse is -inf, whatever out holds."""
    scaled = out.to(weight.dtype) * weight[..., None]
    return torch.where((lse == -torch.inf)[..., None], 0, scaled)


def _packed(out: Tensor, lse: Tensor) -> Tensor:  # [T, H, bytes] u8
    return torch.cat(
        [out.contiguous().view(torch.uint8), lse[..., None].contiguous().view(torch.uint8)], dim=-1
    )


def _unpacked(packed: Tensor, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    out, lse = packed.split([packed.shape[-1] - wide.itemsize, wide.itemsize], dim=-1)
    plain = torch.contiguous_format  # copies even a contiguous single row, for alignment
    out, lse = out.clone(memory_format=plain), lse.clone(memory_format=plain)
    return out.view(dtype), lse.view(wide)[..., 0]


def check_merge(out: Tensor, lse: Tensor, size: int, heads: str, schedule: str) -> None:
    """Check arguments. An error is the same on every rank, so no rank waits for another."""
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"merge: schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}."
        )
    if heads not in HEADS:
        raise ConfigError(f"merge: heads must be 'all' or 'own', got {heads!r}.")
    if out.dim() != 3 or lse.shape != out.shape[:2]:
        raise ShapeError(
            f"merge: out must be [T, H, V] and lse [T, H], got {tuple(out.shape)} and "
            f"{tuple(lse.shape)}."
        )
    if not out.is_floating_point() or lse.dtype not in (torch.float32, torch.float64):
        raise ShapeError(
            f"merge: out must be of a floating dtype and lse float32 or float64, got {out.dtype} "
            f"and {lse.dtype}."
        )
    if heads == "own" and out.shape[1] % size:
        raise ShapeError(
            f"merge: H must be a multiple of the {size} ranks with heads='own', got {out.shape[1]}."
        )
