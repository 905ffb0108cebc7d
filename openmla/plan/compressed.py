"""Plans of V4's layers, one per compress ratio: windows, entries, who chooses among them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.backends import Problem, bucketed
from openmla.backends.asked import Asked
from openmla.cache import LayerCache, PagedCache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.ops._values import check_slots
from openmla.ops.cache_write import problem as cache_write_problem
from openmla.ops.compress_kv import problem as compress_kv_problem
from openmla.ops.latent_write import problem as latent_write_problem
from openmla.ops.mqa_sparse import problem as mqa_sparse_problem
from openmla.ops.rope import problem as rope_problem
from openmla.plan.batch import Batch
from openmla.plan.captured import captured_score_chunks, captured_step, fill
from openmla.plan.compressed_checks import (
    check_batch,
    check_beside,
    check_caches,
    check_options,
    check_workspace,
)
from openmla.plan.places import last_slots
from openmla.plan.problems import (
    CacheKind,
    Choice,
    FrozenAsked,
    cache_kind,
    chosen,
    frozen,
    requested,
    scoring_problems,
    thawed,
)
from openmla.plan.rows import cumulative, integers, owners, padded, start_locs
from openmla.plan.sparse import (
    chunks_of,
    first_keys,
    no_starts,
    query_bytes,
    row_lens,
    true_row_lens,
)
from openmla.plan.types import CompressedPlan, Plan, ScoreChunk, fixed_run
from openmla.plan.upload import upload
from openmla.plan.workspace import Workspace


def plan_compressed(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    *,
    dtype: torch.dtype | None,
    backend: Asked,
    form: str,
    workspace: Workspace | None,
    workspace_tokens: int | None,
    batch_invariant: bool,
    into: dict[str, Tensor] | None,
    beside: Plan | None,
    uniform: bool,
) -> Plan:
    """make_plan for a model with a compressor."""
    window = check_caches(config, cache)
    check_options(config, form, workspace_tokens)
    num_tokens = batch.num_tokens if into is None else into["slot_mapping"].shape[0]
    check_workspace(config, cache, workspace, num_tokens)
    if dtype is None:
        dtype = torch.bfloat16 if window.layout.packed else window.data.dtype
    if beside is not None:
        check_beside(beside, batch, config, cache, num_tokens)
    check_batch(batch, config, cache, window, again=beside is not None)
    shared = _shared(batch, window) if beside is None else _shared_with(beside)
    chunks = None if into is None else captured_score_chunks(config, cache, into)
    bounds = shared.query_start_loc if beside is None else None
    slots = shared.slots
    run_length = fixed_run(config.num_heads) if batch_invariant else 0
    step = _describe(batch, config, cache, shared, bounds, chunks, uniform, listed=batch_invariant)
    if into is not None:
        step, values = captured_step(batch, cache, step, slots, into)
    read = [window] if cache.compressed is None else [window, cache.compressed]
    kind, tokens = cache_kind(read, cache.index), bucketed(step.num_rows)
    choice = choose(config, kind, dtype, bool(step.chunks), tokens, run_length, frozen(backend))
    if into is None:
        step, slots = upload((step, slots), window.data.device)
    else:
        fill(into, values)
        slots = into["slot_mapping"]
    return Plan(
        config=config,
        num_tokens=step.num_rows,
        slot_mapping=slots,
        decode=None,
        prefill=None,
        compressed=step,
        backends=dict(choice.backends),
        requested=dict(choice.requested),
        problems=choice.problems,
        workspace=workspace,
        geometry=cache.geometry,
        padding=batch.padding if into is None else 0,
        batch_key=batch.key,
        run_length=run_length,
    )


class Shared(NamedTuple):
    """What layers of all ratios have in common in a step."""

    query_start_loc: Tensor  # [B+1] i32
    positions: Tensor  # [T] i64
    window_table: Tensor  # [B, M] i32
    block_table: Tensor  # [B, M] i32
    state_slots: Tensor  # [B] i32
    slots: Tensor  # [T] i64


def _shared(batch: Batch, window: PagedCache) -> Shared:
    table, states = batch.window_table, batch.state_slots
    assert table is not None and states is not None
    seen = row_lens(batch.query_lens, batch.seq_lens)  # tokens, this one included
    positions = true_row_lens(batch, range(len(batch.query_lens)), seen).long() - 1
    BS, lens = window.block_size, batch.device_seq_lens
    if table.device.type == "cpu" and lens is None:
        written = last_slots(table, batch.query_lens, batch.seq_lens, BS)
        check_slots("batch", written, window.num_blocks * BS)
        slots = integers(written, torch.int64)
    else:
        # slots are worked out where the table or the lengths are
        device = table.device if lens is None or table.device.type != "cpu" else lens.device
        given = table, states, lens, owners(batch.query_lens), positions
        table, states, lens, mine, there = upload(given, device)
        states = states if lens is None else states.where(lens > 0, -1)
        slots = window_slots(table, mine, there, BS)
        if slots.device.type == "cpu":
            check_slots("batch", slots, window.num_blocks * BS)
    positions, slots = padded(positions, batch.padding), padded(slots, batch.padding, -1)
    bounds = cumulative(batch.query_lens)
    return Shared(bounds, positions, table, batch.block_table, states, slots)


def _shared_with(beside: Plan) -> Shared:
    """As it was uploaded, or put into buffers, for another ratio."""
    step = beside.compressed
    assert step is not None  # check_beside looked
    return Shared(
        step.query_start_loc,
        step.positions,
        step.window_table,
        step.block_table,
        step.state_slots,
        beside.slot_mapping,
    )


def _describe(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    shared: Shared,
    bounds: Tensor | None,  # shared.query_start_loc, where it is as made here
    chunks: tuple[ScoreChunk, ...] | None,  # of a captured step
    uniform: bool,  # tokens choose, however few entries they see
    *,
    listed: bool,  # entries are, also where all are taken: others have no say in it
) -> CompressedPlan:
    assert config.indexer is not None
    ratio, T, K = cache.ratio, batch.num_tokens, config.indexer.topk
    most = max(batch.read_lens, default=0) // ratio if ratio else 0
    held = 0 if cache.index is None else query_bytes(config, cache.index)
    entries = nothing = integers(())
    # else nobody looks at them
    if ratio == INDEXED_RATIO and (chunks or most > K or uniform or listed):
        seen = padded(row_lens(batch.query_lens, batch.seq_lens), batch.padding)
        entries = seen // ratio
    if chunks is None:
        chunks = chunks_of(entries, most, held, K + 1 if uniform else 0)
    if chunks and batch.device_seq_lens is not None:
        entries = (shared.positions[:T].int() + 1) // ratio
    if bounds is None:
        bounds = cumulative(batch.query_lens) if chunks else nothing
    return CompressedPlan(
        ratio=ratio,
        query_start_loc=shared.query_start_loc,
        positions=shared.positions,
        window_table=shared.window_table,
        block_table=shared.block_table,
        state_slots=shared.state_slots,
        row_starts=no_starts(chunks, K) if chunks else nothing,
        first_keys=first_keys(chunks, K) if chunks else nothing,
        row_lens=entries,
        topk_lens=entries.clamp(max=K) if chunks else nothing,
        score_start_locs=start_locs(bounds, [chunk.rows for chunk in chunks], T),
        num_rows=T,
        max_entries=most,
        chunks=chunks,
        query_bytes=held if chunks else 0,
    )


def window_slots(table: Tensor, owners: Tensor, positions: Tensor, BS: int) -> Tensor:
    """[T] i64: where the step's raw rows go, each token of the request that owns it."""
    columns = (positions // BS) % max(table.shape[1], 1)
    slots = table[owners, columns].long() * BS + positions % BS
    return slots.masked_fill(positions < 0, -1)  # of a request only the device knows to be empty


@lru_cache(maxsize=4096)
def choose(
    config: MLAConfig,
    kind: CacheKind,
    dtype: torch.dtype,
    choosing: bool,
    tokens: int,
    run_length: int,
    backend: FrozenAsked,
) -> Choice:
    """The ops of a plan and who runs them: most steps ask what an earlier one did."""
    problems = find_compressed_problems(config, kind, dtype, choosing, tokens, run_length)
    asked = thawed(backend)
    return Choice(problems, chosen(problems, asked), requested(asked))


def find_compressed_problems(
    config: MLAConfig, kind: CacheKind, dtype: torch.dtype, choosing: bool, tokens: int,
    run_length: int,
) -> tuple[Problem, ...]:  # fmt: skip
    """The ops a V4 layer of this ratio calls, as the backends are asked about them."""
    device, H, D = kind.device, config.num_heads, config.latent_dim
    *read, index_format = kind.formats
    problems = [
        latent_write_problem(device, dtype, read[0], D=D, E=D),
        cache_write_problem(device, dtype, read[0]),
        rope_problem(device, dtype),
    ]
    kinds = ["window"]
    if len(read) > 1:  # entries
        kinds.append("positions" if choosing else "prefix")
        wide = torch.promote_types(dtype, torch.float32)  # as Compressor projects
        alone = run_length > 0
        problems.append(compress_kv_problem(device, wide, read[1], D=D, batch_invariant=alone))
    if choosing:
        problems += scoring_problems(config, device, index_format, dtype, run_length > 0)
    attending = mqa_sparse_problem(
        device, dtype, read, tuple(kinds), H=H, D=D, C=D, tokens=tokens, aligned=kind.aligned,
        run_length=run_length,
    )  # fmt: skip
    return (*problems, attending)
