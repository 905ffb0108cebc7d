"""How a step's tokens stand in FlashMLA's batch, and its schedule: made once for all its layers.

Both follow from the lengths, which are on the device and may change there. So they are made again
unless everything says that this is the same step:
- the very tensors of the last call, none written to since. Inference tensors do not tell, and what
  a replayed graph writes is not told: such steps end with the next point at the latest;
- another layer's cache than all before: a layer that comes again is the next step;
- both in a graph's capture or both outside: a graph that is replayed makes its own again.
A caller whose lengths change between the layers of one step, by a graph or a kernel of its own, has
to hand over new tensors.
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
    """Sequences of as many query tokens each."""

    table: Tensor  # [sequences, M] i32
    lens: Tensor  # [sequences] i32
    taken: Tensor | None  # [sequences * queries] i64: their tokens; None: the tokens as they are
    given: Tensor | None  # [T] i64: where each token went
    none: Tensor  # [T] bool: of no request, or one without keys
    schedule: Any


class _Kept(NamedTuple):
    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    key: tuple[Any, ...]
    served: set[int]  # addresses of caches
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
        # its fp8 kernel reads outside of the cache for sequences without keys: of these, one key
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
    """With one token a request at most, tokens are sequences, and none is moved. With more, each
    request's stand at the end of its sequence: FlashMLA's causal mask ends there too."""
    B = block_table.shape[0]
    owner = owners(query_start_loc, T)
    padded_lens = torch.nn.functional.pad(seq_lens, (0, 1))  # of no request: no keys
    none = padded_lens[owner] == 0
    schedule, _ = flash_mla().get_mla_metadata()
    if queries == 1:
        lens = padded_lens[owner]
        # blocks of a request without keys may be anything
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
