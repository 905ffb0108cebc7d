"""mqa_paged, sdpa: torch's batched matmul over parts of 512 keys on CPUs, merged by their softmax.

A latent row is both key and value and is shared by all heads, so heads become query rows. Two
matmuls read each row, so a few parts at a time are copied to a float32 buffer that stays in the CPU
cache; in 16 bits torch's matmul would round the logits. Whole pages are gathered, not rows;
consecutive pages of the cache are a view, and float32 ones are not copied at all. Keys are split
at fixed positions, so a row's bits depend neither on where its blocks are nor on other requests.
With run_length > 0 they do not depend on the other queries of its request either: each query is
multiplied separately with the keys it sees, one part at a time, with everything copied to one
address.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.cache.format import CacheFormat, ScalesBehind, get_format, raw_view

PART = 512  # keys of a partial attention; parts run in parallel
PARTS = 4  # parts read at once, or one per thread: 4.7 MB of float32 rows
MOST_PARTS = 16  # parts read at once with any number of threads: bounds the logits held
MERGED = 32  # parts merged at once: bounds the partial outputs held
QUERY_ROWS = 512  # queries times heads at once; more are processed in chunks


def why_not(problem: Problem) -> str | None:
    if problem.dtype == torch.float8_e4m3fn:
        return "takes queries of 16 bits and wider, this is torch.float8_e4m3fn"
    return None if problem.device == "cpu" else f"runs on cpu, this is {problem.device}"


def run(
    q_latent: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    T, H, D = q_latent.shape
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    out = q_latent.new_zeros((T, H, C))
    lse = q_latent.new_full((T, H), -torch.inf, dtype=wide)
    bounds, lengths = query_start_loc.tolist(), seq_lens.tolist()  # CPU tensors
    alone = run_length > 0
    step = 1 if alone else max(QUERY_ROWS // H, 1)
    longest = max(lengths, default=0)
    pages = _Pages(cache, kv_scale, get_format(format), wide, D, longest, alone=alone)
    for b, S in enumerate(lengths):
        start, stop = bounds[b], bounds[b + 1]
        if start == stop or S == 0:
            continue
        pages.turn_to(block_table[b], S)
        for first in range(start, stop, step):
            chunk = slice(first, min(first + step, stop))
            q = q_latent[chunk].to(wide, copy=alone).reshape(-1, D)
            seen = S - stop + chunk.stop if causal else S  # keys that the last query sees
            fewest = S - stop + chunk.start + 1 if causal else S  # keys that the first query sees
            merge = _Merge()
            for key, rows in pages.read(seen):
                masked = key + rows.shape[0] * rows.shape[1] > fewest
                hidden = _hidden(key, rows, fewest, seen, H) if masked else None
                merge.add(*_attend(q, rows, hidden, scale, C))
            merged_out, merged_lse = merge.finish()
            out[chunk] = merged_out.view(-1, H, C)
            lse[chunk] = merged_lse.view(-1, H)
    return out, lse


def _hidden(key: int, rows: Tensor, fewest: int, seen: int, H: int) -> Tensor:
    """Mask keys [X, n * H, m] that queries do not see; each sees one more than the one before."""
    X, m, _ = rows.shape
    positions = torch.arange(key, key + X * m).view(X, 1, m)
    return positions >= torch.arange(fewest, seen + 1).repeat_interleave(H)[:, None]


def _attend(
    q: Tensor,  # [n * H, D]
    rows: Tensor,  # [X, m, D]
    hidden: Tensor | None,
    scale: float,
    C: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits' max and sum of weights [X, n * H, 1] of X parts, and weights times rows."""
    logits = torch.bmm(q.expand(rows.shape[0], -1, -1), rows.transpose(1, 2)).mul_(scale)
    if hidden is not None:
        logits.masked_fill_(hidden, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    if hidden is not None:  # a part of which a query sees no key has weights 0, not NaN
        largest.clamp_(min=torch.finfo(largest.dtype).min)
    weights = logits.sub_(largest).exp_()
    return largest, weights.sum(-1, keepdim=True), torch.bmm(weights, rows[:, :, :C])


class _Merge:
    """Merges partial attentions into one, MERGED at a time in key order."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.count = 0

    def add(self, largest: Tensor, total: Tensor, out: Tensor) -> None:
        self.parts.append((largest, total, out))
        self.count += largest.shape[0]
        if self.count >= MERGED:
            self.parts, self.count = [self._merged()], 0

    def _merged(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.count == 1 and len(self.parts) == 1:
            return self.parts[0]
        largest, total, out = (torch.cat(each) for each in zip(*self.parts, strict=True))
        top = largest.amax(0, keepdim=True)
        rescale = largest.sub_(top).exp_()
        out = torch.bmm(rescale.permute(1, 2, 0), out.transpose(0, 1)).transpose(0, 1)
        return top, total.mul_(rescale).sum(0, keepdim=True), out

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return out [n * H, C] and lse [n * H]."""
        largest, total, out = self._merged()
        return (out / total)[0], (total.log() + largest)[0, :, 0]


class _Kept(threading.local):
    """Buffers that a thread keeps between calls. The system maps the pages of a new buffer one by
    one on first write: 3 of the 7 ms of one request of 8192 keys and 8 heads."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        held = self.buffers.get(name)
        if held is None or held.numel() < num_bytes:
            with torch.inference_mode(False):  # so that later calls may write in any mode
                held = torch.empty(num_bytes, dtype=torch.uint8)
            self.buffers[name] = held
        return held[:num_bytes].view(dtype).view(shape)


_KEPT = _Kept()


class _Pages:
    """Reads the rows of a request, a few parts at a time, into buffers that all calls share."""

    def __init__(
        self, cache: Tensor, kv_scale: Tensor, layout: CacheFormat, dtype: torch.dtype, D: int,
        longest: int, *, alone: bool = False,
    ) -> None:  # fmt: skip
        self.cache, self.kv_scale, self.layout, self.dtype = cache, kv_scale, layout, dtype
        self.D, self.BS = D, cache.shape[1]
        at_once = 1 if alone else min(max(PARTS, torch.get_num_threads()), MOST_PARTS)
        self.keys, self.copied = PART * at_once, alone
        self.in_rows = not isinstance(layout, ScalesBehind)  # a row's bytes are contiguous
        in_order = self.in_rows and cache.stride(0) == self.BS * cache.stride(1)
        self.flat = cache.flatten(0, 1) if in_order else None
        most = min(self.keys, longest)
        num_pages = 0 if self.keys < self.BS else most // self.BS + 2
        gathered = _KEPT.take("pages", (num_pages, *cache.shape[1:]), cache.dtype)
        self.raw, self.gathered = raw_view(cache), raw_view(gathered)  # no fp8 index_select
        self.gathered_rows = gathered.flatten(0, 1)
        self.wide = _KEPT.take("wide", (most, D), dtype)

    def turn_to(self, table: Tensor, S: int) -> None:
        """Select the request whose rows are read next."""
        self.table = table[: -(-S // self.BS)]
        self.blocks: list[int] = self.table.tolist()

    def read(self, S: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first position, rows [X, m, D]): X parts of PART keys or the last, shorter one."""
        for first in range(0, S, self.keys):
            rows = self._rows(first, min(first + self.keys, S))
            end = rows.shape[0] // PART * PART
            if end:
                yield first, rows[:end].view(-1, PART, self.D)
            if end < rows.shape[0]:
                yield first + end, rows[None, end:]

    def _rows(self, first: int, end: int) -> Tensor:  # [end - first, D]
        stored = self._stored(first, end)
        if stored is None:
            positions = torch.arange(first, end)
            slots = self.table.long()[positions // self.BS] * self.BS + positions % self.BS
            return self.layout.read(self.cache, slots, self.kv_scale, self.dtype, self.D)
        if stored.dtype == self.dtype and not self.copied:
            return stored
        if self.layout.scaled or self.layout.dtype == torch.uint8:
            return self.layout.decode(stored, self.kv_scale, self.dtype, self.D)
        return self.wide[: end - first].copy_(stored)

    def _stored(self, first: int, end: int) -> Tensor | None:
        """Return stored rows [end - first, W]: a view or gathered pages; None if neither works."""
        if not self.in_rows:
            return None
        begin, offset = divmod(first, self.BS)
        blocks = self.blocks[begin : -(-end // self.BS)]
        rows = slice(offset, offset + end - first)
        if len(blocks) == 1:
            return self.cache[blocks[0], rows]
        if self.flat is not None and blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            return self.flat[blocks[0] * self.BS :][rows]
        if len(blocks) > self.gathered.shape[0]:  # blocks have more rows than are read at once
            return None
        index = self.table[begin : begin + len(blocks)]
        torch.index_select(self.raw, 0, index, out=self.gathered[: len(blocks)])
        return self.gathered_rows[rows]
