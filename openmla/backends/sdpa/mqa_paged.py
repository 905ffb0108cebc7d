"""mqa_paged, sdpa: torch's CPU flash kernel over parts of 512 keys.

A latent row is key and value at once and all heads share it, so heads become query rows and one
call reads each row once. Parts whose blocks follow one another in the cache are taken as views; a
float32 cache is then not copied at all. Scattered blocks are gathered part by part: still 1.67
times the reference's speed (`openmla bench mqa_paged v2-lite-decode-b1-s16k-fp32`, 2 cores).
Keys are cut at fixed positions, so a row's bits depend neither on where its blocks lie nor on its
neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.cache.format import CacheFormat, get_format

aten = torch.ops.aten
PART = 512  # keys per partial attention; parts run in parallel
MERGED = 32  # parts merged at once: bounds the partial outputs held
DECODED = 8  # parts at once where a format must be decoded: fresh pages cost more than copying
QUERY_ROWS = 1024  # queries times heads at once; more are taken in chunks


def why_not(problem: Problem) -> str | None:
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
    BS = cache.shape[1]
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    out = q_latent.new_zeros((T, H, C))
    lse = q_latent.new_full((T, H), -torch.inf, dtype=wide)
    bounds = query_start_loc.tolist()  # CPU tensors, like the two below
    step = max(QUERY_ROWS // H, 1)
    for b, S in enumerate(seq_lens.tolist()):
        start, stop = bounds[b], bounds[b + 1]
        if start == stop or S == 0:
            continue
        blocks = block_table[b, : -(-S // BS)].tolist()
        for first_query in range(start, stop, step):
            chunk = slice(first_query, min(first_query + step, stop))
            q = q_latent[chunk].to(wide).reshape(-1, D)
            num_seen = S - stop + chunk.stop if causal else S
            first_seen = S - stop + chunk.start if causal else S - 1
            last_key = torch.arange(first_seen, num_seen).expand(chunk.stop - chunk.start)
            merge = _Merge()
            layout = get_format(format)
            for first, rows in _parts(cache, blocks, num_seen, layout, kv_scale, wide, D):
                merge.add(*_attend(q, rows, first, last_key.repeat_interleave(H), scale, C))
            chunk_out, chunk_lse = merge.finish()
            out[chunk] = chunk_out.view(-1, H, C).to(out.dtype)
            lse[chunk] = chunk_lse.view(-1, H)
    return out, lse


class _Merge:
    """Partial attentions into one, MERGED at a time in key order."""

    def __init__(self) -> None:
        self.outs: list[Tensor] = []  # [X, n * H, C] each
        self.lses: list[Tensor] = []  # [X, n * H] each
        self.count = 0

    def add(self, out: Tensor, lse: Tensor) -> None:
        self.outs.append(out)
        self.lses.append(lse)
        self.count += lse.shape[0]
        if self.count >= MERGED:
            merged_out, merged_lse = self.finish()
            self.outs, self.lses, self.count = [merged_out[None]], [merged_lse[None]], 0

    def finish(self) -> tuple[Tensor, Tensor]:
        lses = torch.cat(self.lses)
        lse = lses.logsumexp(dim=0)  # finite: every query sees the first part
        return torch.einsum("xq,xqc->qc", (lses - lse).exp(), torch.cat(self.outs)), lse


def _parts(
    cache: Tensor,
    blocks: list[int],
    S: int,
    layout: CacheFormat,
    kv_scale: Tensor,
    dtype: torch.dtype,
    D: int,
) -> Iterator[tuple[int, Tensor]]:
    """(first position, rows [X, m, D] in dtype): X parts of m keys, all of PART but the last."""
    BS = cache.shape[1]
    as_stored = layout.dtype == dtype and not layout.scaled
    flat = cache.flatten(0, 1) if cache.stride(0) == BS * cache.stride(1) else None
    first = 0
    while first < S:
        length = min(PART, S - first)
        slot = _first_slot(blocks, first, length, BS) if flat is not None else None
        if flat is None or slot is None:
            positions = torch.arange(first, first + length)
            slots = torch.tensor(blocks)[positions // BS] * BS + positions % BS
            yield first, layout.read(cache, slots, kv_scale, dtype, D)[None]
            first += length
            continue
        X, limit = 1, MERGED - first // PART % MERGED
        limit = limit if as_stored else min(limit, DECODED)
        while (
            length == PART
            and limit > X
            and first + (X + 1) * PART <= S
            and _first_slot(blocks, first + X * PART, PART, BS) == slot + X * PART
        ):
            X += 1
        stored = flat[slot : slot + X * length].unflatten(0, (X, length))
        yield first, stored if as_stored else layout.decode(stored, kv_scale, dtype, D)
        first += X * length


def _first_slot(blocks: list[int], first: int, length: int, BS: int) -> int | None:
    """The slot of a position if the next `length` positions follow it in the cache."""
    begin, end = first // BS, (first + length - 1) // BS
    neighbours = all(blocks[i + 1] == blocks[i] + 1 for i in range(begin, end))
    return blocks[begin] * BS + first % BS if neighbours else None


def _attend(
    q: Tensor, rows: Tensor, first: int, last_key: Tensor, scale: float, C: int
) -> tuple[Tensor, Tensor]:
    """Partial attentions [X, n * H, C] and lse [X, n * H] of all queries over X parts."""
    X, m, _ = rows.shape
    seen = min(max((int(last_key[0]) + 1 - first) // m, 0), X)  # parts that every query sees whole
    outs, lses = [], []
    if seen > 0:
        out, lse = _flash(q, rows[:seen], None, scale)
        outs.append(out[..., :C])
        lses.append(lse)
    if seen < X:
        positions = torch.arange(first + seen * m, first + X * m).view(X - seen, 1, m)
        hidden = positions > last_key[:, None]  # [X - seen, n * H, m]
        mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        out, lse = _flash(q, rows[seen:], mask[:, None], scale)
        blind = hidden.all(dim=-1)
        outs.append(out[..., :C].masked_fill(blind[:, :, None], 0))
        lses.append(lse.masked_fill(blind, -torch.inf))
    return torch.cat(outs), torch.cat(lses)


def _flash(q: Tensor, rows: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q.expand(rows.shape[0], 1, *q.shape),
        rows[:, None],
        rows[:, None],
        0.0,
        attn_mask=mask,
        scale=scale,
    )
    return out[:, 0], lse[:, 0]
