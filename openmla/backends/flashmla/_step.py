"""Layout of a step's tokens in FlashMLA's batch, and its schedule: built once for all layers.

Both depend on the lengths, which are on the device and may change there. They are therefore rebuilt
unless all of this shows that it is the same step:
- the same tensor objects as in the last call, not written to since. Inference tensors do not track
  writes, nor are those of a replayed graph visible: the next point ends such steps at the latest;
- a cache that no earlier layer used: a layer that appears again starts the next step;
- both calls inside a graph capture or both outside: a replayed graph rebuilds its own.
A caller whose lengths change between the layers of one step, through a graph or a kernel of its
own, must pass new tensors.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backends.flashmla._entries import owners
from openmla.backends.flashmla._package import capturing, fill_schedule, flash_mla


class Step(NamedTuple):
    """Sequences with the same number of query tokens each."""

    table: Tensor  # [sequences, M] i32
    lens: Tensor  # [sequences] i32
    taken: Tensor | None  # [sequences * queries] i64: their tokens; None: tokens in order
    given: Tensor | None  # [T] i64: row of each token
    none: Tensor  # [T] bool: token without a request or without keys
    schedule: Any


class _Kept(NamedTuple):
    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    key: tuple[Any, ...]
    served: set[int]  # cache addresses
    step: Step


_LAST = threading.local()


def step_of(
    cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, T: int, H: int,
    queries: int,
) -> Step:  # fmt: skip
    tensors = (block_table, seq_lens, query_start_loc)
    key = (T, H, queries, cache.dtype, capturing())
    address, kept = cache.data_ptr(), getattr(_LAST, "kept", None)
    if kept is not None and address not in kept.served and _same(kept, tensors, key):
        kept.served.add(address)
        return kept.step
    step = _make(block_table, seq_lens, query_start_loc, T, queries)
    if cache.dtype == torch.float8_e4m3fn:
        # the fp8 kernel reads outside the cache for sequences without keys: give these one key
        step = step._replace(lens=step.lens.clamp_min(1))
        fill_schedule(step.schedule, step.lens, queries, H)
    _LAST.kept = None
    if not any(tensor.is_inference() for tensor in tensors):
        refs, versions = tuple(map(weakref.ref, tensors)), tuple(t._version for t in tensors)
        _LAST.kept = _Kept(refs, versions, key, {address}, step)
    return step


def _same(kept: _Kept, tensors: tuple[Tensor, ...], key: tuple[Any, ...]) -> bool:
    return kept.key == key and all(
        ref() is tensor and tensor._version == version
        for ref, tensor, version in zip(kept.tensors, tensors, kept.versions, strict=True)
    )


def _make(
    block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, T: int, queries: int
) -> Step:
    """Build a step. With at most one token per request, tokens are the sequences and stay in order.
    With more, each request's tokens end its sequence, where FlashMLA's causal mask ends too."""
    B = block_table.shape[0]
    owner = owners(query_start_loc, T)
    padded_lens = torch.nn.functional.pad(seq_lens, (0, 1))  # no request: no keys
    none = padded_lens[owner] == 0
    schedule, _ = flash_mla().get_mla_metadata()
    if queries == 1:
        lens = padded_lens[owner]
        # the block table of a request without keys may hold anything
        table = block_table[owner.clamp_max(B - 1)].masked_fill(none[:, None], 0)
        return Step(table.contiguous(), lens, None, None, none, schedule)
    ends = query_start_loc[1:].long()
    asked = ends > query_start_loc[:-1]
    lens = seq_lens.masked_fill(~asked, 0)
    slots = torch.arange(-queries, 0, device=ends.device)
    taken = (ends[:, None] + slots).clamp(0, T - 1).flatten()
    last = torch.nn.functional.pad(ends, (0, 1))[owner]
    tokens = torch.arange(T, device=ends.device)
    given = ((owner + 1) * queries + tokens - last).masked_fill(owner >= B, 0)
    table = block_table.masked_fill((lens == 0)[:, None], 0)
    return Step(table.contiguous(), lens.contiguous(), taken, given, none, schedule)
