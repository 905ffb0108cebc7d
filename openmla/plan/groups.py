"""Absorbed groups, and the tokens that select their keys.

Each kind of group is made in two steps: tensors by name, computed on the host, and then the parts
of the plan that hold them. A captured step substitutes its buffers, and an engine its own tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from openmla.cache import PagedCache
from openmla.config import MLAConfig
from openmla.plan.batch import Batch
from openmla.plan.rows import cumulative, integers, owners, pick, repeated, some, start_locs
from openmla.plan.types import (
    Absorbed,
    Group,
    Keys,
    Pool,
    Rows,
    ScoreChunk,
    Select,
    Tensors,
    latent_row,
)
from openmla.plan.upload import upload
from openmla.plan.workspace import LATENT_BYTES, LOGITS_BYTES

Roles = dict[str, Tensor]


def absorbed_roles(batch: Batch, requests: Sequence[int]) -> Roles:
    """Tensors of requests that attend to all their keys; one without tokens reads none."""
    query_lens = some(batch.query_lens, requests)
    if batch.device_seq_lens is None:
        seq_lens = integers(some(batch.read_lens, requests))
    else:
        seq_lens = pick(batch.device_seq_lens, requests)
        if 0 in query_lens:  # true lengths never exceed the host's
            (most,) = upload((integers(some(batch.read_lens, requests)),), seq_lens.device)
            seq_lens = seq_lens.minimum(most)
    return {
        "block_table": pick(batch.block_table, requests),
        "seq_lens": seq_lens,
        "query_start_loc": cumulative(query_lens),
    }


def absorbed_group(
    roles: Roles,
    rows: Rows,
    max_query_len: int,
    requests: Sequence[int],
    *,
    causal: bool = True,
) -> Group:
    keys = Keys("latent", "paged", roles["block_table"], roles["seq_lens"])
    part = Absorbed((keys,), max_query_len, (roles["query_start_loc"],), causal=causal)
    return Group("absorbed", rows, part, requests=requests)


def window_roles(batch: Batch, requests: Sequence[int], cuts: Sequence[slice]) -> Roles:
    """Tensors of requests whose tokens attend to their last keys."""
    query_lens = some(batch.query_lens, requests)
    lens = row_lens(query_lens, some(batch.seq_lens, requests))
    start = start_locs(cumulative(query_lens), cuts, lens.shape[0])
    return {
        "block_table": pick(batch.block_table, requests),
        "positions": true_row_lens(batch, requests, lens).long() - 1,
        **numbered("query_chunk_start_locs", start),
    }


def window_group(
    roles: Roles, rows: Rows, window: int, cuts: tuple[slice, ...], requests: Sequence[int]
) -> Group:
    keys = Keys("latent", "window", roles["block_table"], span=window)
    return Group("absorbed", rows, _over_cuts(keys, roles, cuts), requests=requests)


def _over_cuts(keys: Keys, roles: Roles, cuts: tuple[slice, ...]) -> Absorbed:
    """Tokens by position, in calls of bounded size."""
    start = listed(roles, "query_chunk_start_locs", len(cuts))
    return Absorbed((keys,), 0, start, cuts, roles["positions"])


def select_roles(
    batch: Batch,
    K: int,
    requests: Sequence[int],  # the "chosen" group first
    num_absorbed: int,  # their tokens
    lens: Tensor,  # [n] i32, row_lens() of these requests
    chunks: Sequence[ScoreChunk],
    cuts: Sequence[slice],
) -> Roles:
    """Tensors of tokens that select their keys; the first `num_absorbed` attend absorbed."""
    bounds, n = cumulative(some(batch.query_lens, requests)), lens.shape[0]
    true_lens = true_row_lens(batch, requests, lens)
    attended = true_lens if num_absorbed == n else true_lens[:num_absorbed]
    return {
        "block_table": pick(batch.block_table, requests),
        "row_lens": true_lens,
        "topk_lens": attended.clamp(max=K),
        "positions": attended.long() - 1,
        "row_starts": no_starts(chunks, K),
        "first_keys": first_keys(chunks, K),
        **numbered("score_start_locs", start_locs(bounds, [c.rows for c in chunks], n)),
        **numbered("query_chunk_start_locs", start_locs(bounds, cuts, n)),
    }


def select_parts(
    roles: Roles,
    rows: Rows,  # of all tokens that select
    chosen_rows: Rows,
    num_rows: int,
    num_absorbed: int,
    chunks: tuple[ScoreChunk, ...],
    cuts: tuple[slice, ...],
    query_bytes: int,
    requests: Sequence[int],  # of the "chosen" group
) -> tuple[Select, Group | None]:
    select = _select(roles, rows, num_rows, chunks, query_bytes)
    if not num_absorbed:
        return select, None
    part = _over_cuts(Keys("latent", "listed", roles["block_table"]), roles, cuts)
    group = Group("chosen", chosen_rows, part, slice(0, num_absorbed), requests=requests)
    return select, group


def compressed_parts(
    roles: Roles,
    config: MLAConfig,
    ratio: int,
    chunks: tuple[ScoreChunk, ...],
    num_rows: int,
    max_entries: int,
    query_bytes: int,
    requests: Sequence[int],
) -> tuple[tuple[Group, ...], Select | None, Pool | None]:
    """V4: every token attends to its window and, if the ratio is not 0, to entries: all finished
    ones, or with `chunks` the ones that it selects."""
    assert config.compressor is not None
    everyone, select, pool = slice(0, num_rows), None, None
    reads = [Keys("window", "window", roles["window_table"], span=config.compressor.window)]
    if ratio:
        kind = "listed" if chunks else "prefix"
        span = 0 if chunks else ratio
        reads.append(Keys("compressed", kind, roles["block_table"], span=span))
        pool = Pool(
            ratio,
            roles["positions"],
            roles["query_start_loc"],
            roles["block_table"],
            roles["state_slots"],
            max_entries,
        )
    if chunks:
        select = _select(roles, everyone, num_rows, chunks, query_bytes)
    part = Absorbed(tuple(reads), 0, (roles["query_start_loc"],), positions=roles["positions"])
    form, selected = ("chosen", everyone) if chunks else ("absorbed", None)
    return (Group(form, everyone, part, selected, requests=requests),), select, pool


def _select(
    roles: Roles, rows: Rows, num_rows: int, chunks: tuple[ScoreChunk, ...], query_bytes: int
) -> Select:
    return Select(
        rows,
        roles["block_table"],
        roles["row_starts"],
        roles["first_keys"],
        roles["row_lens"],
        roles["topk_lens"],
        listed(roles, "score_start_locs", len(chunks)),
        num_rows,
        chunks,
        query_bytes,
    )


def numbered(name: str, tensors: Sequence[Tensor]) -> Roles:
    """A tuple of tensors, each of which is a buffer of its own."""
    return {f"{name}.{i}": tensor for i, tensor in enumerate(tensors)}


def listed(roles: Roles, name: str, count: int) -> Tensors:
    return tuple([roles[f"{name}.{i}"] for i in range(count)])


def row_lens(query_lens: Sequence[int], seq_lens: Sequence[int], causal: bool = True) -> Tensor:
    """[n] i32: the number of keys each token sees, including its own. The last token sees all;
    without causality, every token does."""
    if set(query_lens) == {1}:  # decode, at every step
        return integers(seq_lens)
    if not causal:
        return repeated(seq_lens, query_lens)
    stops = accumulate(query_lens)
    # the k-th of all tokens sees k + 1 keys and what its request has more than all up to it
    more = [S - stop for S, stop in zip(seq_lens, stops, strict=True)]
    lens = repeated(more, query_lens)
    return lens + torch.arange(1, lens.shape[0] + 1, dtype=torch.int32)


def true_row_lens(batch: Batch, requests: Sequence[int], lens: Tensor) -> Tensor:
    """row_lens() when only the device knows the lengths: the host's are upper bounds."""
    if batch.device_seq_lens is None:
        return lens
    true, query_lens = pick(batch.device_seq_lens, requests), some(batch.query_lens, requests)
    if set(query_lens) == {1}:
        return true.clamp_min(0)
    hidden = repeated(some(batch.seq_lens, requests), query_lens) - lens  # tokens after each token
    mine, hidden = upload((owners(query_lens), hidden), true.device)
    return (true[mine] - hidden).clamp_min(0)


def score_chunks(lens: Sequence[int], query_bytes: int, least: int = 0) -> tuple[ScoreChunk, ...]:
    """Chunks of rows, in order, each as large as the bound on scores allows. `lens` is the number
    of keys that each row sees.

    `least` is the minimum width of a chunk: K + 1 makes every row select. `query_bytes` is the
    memory of a row's queries while they are quantized for a packed cache.
    """
    chunks: list[ScoreChunk] = []
    start, widest = 0, least
    for row, length in enumerate(lens):
        wider = max(widest, length)
        if row > start and (row + 1 - start) * (wider * 4 + query_bytes) > LOGITS_BYTES:
            chunks.append(ScoreChunk(slice(start, row), widest))
            start, wider = row, max(length, least)
        widest = wider
    if lens:
        chunks.append(ScoreChunk(slice(start, len(lens)), widest))
    return tuple(chunks)


def chunks_of(
    lens: Tensor, longest: int, query_bytes: int, least: int = 0
) -> tuple[ScoreChunk, ...]:
    """score_chunks() for rows on the host whose longest is known. Rows are only visited one by one
    if they do not fit at once."""
    num_rows, widest = lens.shape[0], max(longest, least)
    if num_rows and num_rows * (widest * 4 + query_bytes) <= LOGITS_BYTES:
        return (ScoreChunk(slice(0, num_rows), widest),)
    return score_chunks(lens.tolist(), query_bytes, least)


def even_chunks(num_rows: int, num_keys: int, query_bytes: int) -> tuple[ScoreChunk, ...]:
    """score_chunks() if every row may see `num_keys`."""
    step = max(LOGITS_BYTES // max(num_keys * 4 + query_bytes, 1), 1)
    firsts = range(0, num_rows, step)
    return tuple(ScoreChunk(slice(i, min(i + step, num_rows)), num_keys) for i in firsts)


def no_starts(chunks: Sequence[ScoreChunk], K: int) -> Tensor:
    """[n] i32 zeros, one per row of the longest scored chunk: where its scores begin."""
    scored = (chunk.rows for chunk in chunks if chunk.num_keys > K)
    most = max((rows.stop - rows.start for rows in scored), default=0)
    return torch.zeros(most, dtype=torch.int32)


def first_keys(chunks: Sequence[ScoreChunk], K: int) -> Tensor:
    """[K] i32: the selection from at most K keys; empty if every chunk sees more."""
    unscored = any(chunk.num_keys <= K for chunk in chunks)
    return torch.arange(K if unscored else 0, dtype=torch.int32)


def query_bytes(config: MLAConfig, index: PagedCache) -> int:
    """Bytes for quantizing one row's index queries: three float32 copies and the fp8 one."""
    assert config.indexer is not None
    return 13 * config.indexer.num_heads * config.indexer.head_dim if index.layout.packed else 0


def query_chunks(num_rows: int, config: MLAConfig, itemsize: int) -> tuple[slice, ...]:
    """Chunks of rows that attend to selected keys, within the bound on latent queries."""
    step = max(LATENT_BYTES // (latent_row(config) * itemsize), 1)
    step -= step % 4 if step > 4 else 0  # equal alignment: no recompilation
    return tuple(slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))
