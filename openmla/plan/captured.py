"""Plans for captured graphs: buffers of fixed size, filled anew for every step."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.cache import LayerCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.hardware import multiprocessors
from openmla.plan.batch import Batch
from openmla.plan.compressed import compressed_buffers
from openmla.plan.problems import choose_backends, find_problems, latent_of
from openmla.plan.rows import cumulative, long_context_rows
from openmla.plan.sparse import chosen_turns, query_bytes, row_lens, score_chunks, true_row_lens
from openmla.plan.splits import FIXED_RUN, fixed_run, run_length, split_bounds
from openmla.plan.types import DecodePlan, Plan, SparsePlan


def plan_buffers(
    config: MLAConfig, cache: LayerCache, *, max_requests: int, max_tokens: int, max_blocks: int
) -> dict[str, Tensor]:
    """Device tensors for make_plan(into=): the largest step a captured graph will replay.

    Empty requests and tokens fill up smaller steps: they see no key and write no row. V4 needs a
    set for each kind of layer, from a cache of that kind.
    """
    for name, value in (
        ("max_requests", max_requests),
        ("max_blocks", max_blocks),
        ("max_tokens // max_requests", max_tokens // max(max_requests, 1)),
    ):
        if value < 1:
            raise ConfigError(f"plan_buffers: {name} must be positive, got {value}.")
    if config.compressor is not None:
        return compressed_buffers(
            config,
            cache,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_blocks=max_blocks,
        )
    latent = latent_of(cache)
    device = latent.data.device
    runs = -(-max_blocks * latent.block_size // FIXED_RUN)
    X = min(1 << (runs - 1).bit_length(), 2 * max(multiprocessors(device), 1))
    shapes = {
        "block_table": (max_requests, max_blocks),
        "seq_lens": (max_requests,),
        "query_start_loc": (max_requests + 1,),
        "split_starts": (max_requests, X + 1),
    }
    buffers = {
        name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in shapes.items()
    }
    buffers["slot_mapping"] = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
    if config.indexer is not None:
        buffers["row_lens"] = torch.zeros(max_tokens, dtype=torch.int32, device=device)
    if config.rope.kind == "longrope":
        buffers["long_context"] = torch.zeros(max_tokens, dtype=torch.int64, device=device)
    return buffers


def captured_plan(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    buffers: dict[str, Tensor],
    dtype: torch.dtype,
    backend: str,
    batch_invariant: bool,
) -> Plan:
    """Fill the buffers of a captured graph; what would not fit raises before any is touched."""
    latent = latent_of(cache)
    assert batch.slot_mapping is not None  # make_plan looked
    max_requests, max_blocks = buffers["block_table"].shape
    max_tokens = buffers["slot_mapping"].shape[0]
    X = buffers["split_starts"].shape[1] - 1
    max_query_len = max_tokens // max_requests
    B, M = batch.block_table.shape
    for name, value, most in (
        ("requests", B, max_requests),
        ("tokens", batch.num_tokens, max_tokens),
        ("block table columns", M, max_blocks),
        ("query tokens of one request", max(batch.query_lens, default=0), max_query_len),
    ):
        if value > most:
            raise ConfigError(f"plan: {name} must be at most {most} to replay, got {value}.")
    padding = max_requests - B
    seq_lens = torch.tensor([*batch.seq_lens, *[0] * padding], dtype=torch.int32)
    length = run_length(
        batch.seq_lens,
        multiprocessors=multiprocessors(latent.data.device),
        block_size=latent.block_size,
        batch_invariant=batch_invariant,
        num_heads=config.num_heads,
    )
    filled = {
        "seq_lens": seq_lens,
        "query_start_loc": cumulative([*batch.query_lens, *[0] * padding]),
        "split_starts": split_bounds(seq_lens, length, X),
    }
    for name, values in filled.items():
        buffers[name].copy_(_pinned(values, buffers[name].device), non_blocking=True)
    device = buffers["seq_lens"].device
    if batch.device_seq_lens is not None:
        buffers["seq_lens"][:B].copy_(batch.device_seq_lens, non_blocking=True)
    buffers["block_table"][:B, :M].copy_(_pinned(batch.block_table, device), non_blocking=True)
    slots = buffers["slot_mapping"].fill_(-1)
    slots[: batch.num_tokens].copy_(_pinned(batch.slot_mapping, device), non_blocking=True)
    long_context = long_context_rows(batch, config)
    if "long_context" in buffers:
        flags = buffers["long_context"].zero_()
        if long_context is not None:
            flags[: batch.num_tokens].copy_(_pinned(long_context, device), non_blocking=True)
    decode, sparse = None, None
    if config.indexer is None:
        decode = DecodePlan(
            rows=slice(0, max_tokens),
            block_table=buffers["block_table"],
            seq_lens=buffers["seq_lens"],
            query_start_loc=buffers["query_start_loc"],
            split_starts=buffers["split_starts"],
            max_query_len=max_query_len,
        )
    else:  # every row chooses, short ones all they have: one graph for all lengths
        everyone = range(B)
        lens = row_lens(batch.query_lens, batch.seq_lens)
        seen = buffers["row_lens"].zero_()
        true_lens = true_row_lens(batch, everyone, lens)
        seen[: batch.num_tokens].copy_(_pinned(true_lens, device), non_blocking=True)
        assert cache.index is not None
        held = query_bytes(config, cache.index)
        sparse = SparsePlan(
            rows=slice(0, max_tokens),
            block_table=buffers["block_table"],
            query_start_loc=buffers["query_start_loc"],
            row_lens=seen,
            num_rows=max_tokens,
            num_absorbed=max_tokens,
            max_query_len=max_query_len,
            chunks=score_chunks([max_blocks * latent.block_size] * max_tokens, held),
            query_bytes=held,
            turns=chosen_turns(max_tokens, config, dtype.itemsize),
        )
    fixed = fixed_run(batch_invariant)
    problems = find_problems(config, cache, dtype, decode, None, sparse, fixed)
    problems, backends = choose_backends(problems, backend)
    return Plan(
        config=config,
        num_tokens=max_tokens,
        slot_mapping=buffers["slot_mapping"],
        decode=decode,
        prefill=None,
        sparse=sparse,
        backends=backends,
        problems=problems,
        num_blocks=latent.num_blocks,
        block_size=latent.block_size,
        run_length=fixed,
        long_context=buffers.get("long_context"),
        query_lens=batch.query_lens,
        seq_lens=batch.seq_lens,
        bounded=batch.device_seq_lens is not None,
        form="captured",
        routes={"absorbed" if sparse is None else "chosen": range(B)},
    )


def _pinned(values: Tensor, device: torch.device) -> Tensor:
    return values.pin_memory() if device.type == "cuda" and values.device.type == "cpu" else values
