"""Plans of V4's layers, one per compress ratio: windows, entries, who chooses among them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.segments import alignment, sparse_problem
from openmla.cache import LayerCache, PagedCache
from openmla.cache.format import get_format, state_rows, state_width
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.hardware import capability
from openmla.ops._values import check_block_table, check_slots
from openmla.plan.batch import Batch
from openmla.plan.problems import chosen, index_problem
from openmla.plan.rows import cumulative
from openmla.plan.sparse import query_bytes, row_lens, score_chunks, true_row_lens
from openmla.plan.types import CompressedPlan, Plan
from openmla.plan.upload import upload
from openmla.plan.workspace import Workspace


def plan_compressed(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    *,
    dtype: torch.dtype | None,
    backend: str,
    form: str,
    workspace: Workspace | None,
    workspace_tokens: int | None,
    batch_invariant: bool,
    into: dict[str, Tensor] | None,
) -> Plan:
    """make_plan for a model with a compressor."""
    window = check_caches(config, cache)
    if batch_invariant:
        raise UnsupportedError(
            f"plan: batch_invariant is not supported for {config.model_type}: whether a token's "
            "entries are listed or counted depends on the others in its batch."
        )
    if workspace_tokens is not None:
        raise ConfigError(
            f"plan: workspace_tokens must not be given for {config.model_type}, which expands "
            "nothing."
        )
    if form not in ("auto", "absorbed"):
        raise ConfigError(
            f"plan: form must be auto or absorbed for {config.model_type}, got {form!r}."
        )
    num_tokens = batch.num_tokens if into is None else into["slot_mapping"].shape[0]
    _check_workspace(config, cache, workspace, num_tokens)
    if dtype is None:
        dtype = torch.bfloat16 if window.layout.packed else window.data.dtype
    check_batch(batch, config, cache, window)
    step = _describe(batch, config, cache)
    slots = window_slots(step, window.block_size)
    if slots.device.type == "cpu":
        check_slots("batch", slots, window.num_blocks * window.block_size)
    captured = None if into is None else captured_step(batch, config, cache, step, into)
    problems = find_compressed_problems(config, cache, window, dtype, captured or step)
    backends = chosen(problems, backend)
    step, slots = upload((step, slots), window.data.device)
    if into is not None and captured is not None:
        slots = fill_buffers(into, step, slots)
        step = captured
    return Plan(
        config=config,
        num_tokens=step.num_rows,
        slot_mapping=slots,
        decode=None,
        prefill=None,
        compressed=step,
        backends=backends,
        problems=problems,
        workspace=workspace,
        geometry=cache.geometry,
    )


def check_caches(config: MLAConfig, cache: LayerCache) -> PagedCache:
    """The parts of a layer's cache belong together; returns the window."""
    assert config.compressor is not None
    if cache.window is None:
        raise ConfigError(
            f"plan: cache must have window rows for {config.model_type}, got none. "
            "allocate_cache makes it, a layer at a time."
        )
    get_format(cache.window.format, "latent")
    ratio = cache.ratio
    if ratio not in (0, *config.compressor.ratios):
        raise ConfigError(
            f"plan: cache must be of a compress ratio of this model, "
            f"{', '.join(map(str, sorted({0, *config.compressor.ratios})))}, got {ratio}."
        )
    for name, wanted in (
        ("compressed", ratio > 0),
        ("state", ratio > 0),
        ("index", ratio == INDEXED_RATIO),
    ):
        if (getattr(cache, name) is not None) != wanted:
            verb = "have" if wanted else "not have"
            raise ConfigError(f"plan: cache must {verb} {name} rows for ratio {ratio}.")
    entries, index, state, D = cache.compressed, cache.index, cache.state, config.latent_dim
    cache.window.check_width("plan", "window", D)
    if entries is not None and state is not None:
        get_format(entries.format, "latent")
        entries.check_width("plan", "compressed", D)
        width = state_width(D, overlap=index is not None)
        if index is not None and config.indexer is not None:
            width += state_width(config.indexer.head_dim, overlap=True)
        state.check_width("plan", "state", width)
        least = state_rows(ratio, overlap=index is not None)
        if state.block_size < least:
            raise ConfigError(
                f"plan: state must have at least {least} rows for ratio {ratio}, "
                f"got {state.block_size}."
            )
    if index is not None and entries is not None and config.indexer is not None:
        get_format(index.format, "index")
        index.check_width("plan", "index", config.indexer.head_dim)
        if (index.num_blocks, index.block_size) != (entries.num_blocks, entries.block_size):
            raise ConfigError(
                f"plan: index rows must be in {entries.num_blocks} blocks of "
                f"{entries.block_size} like the entries, got {index.num_blocks} of "
                f"{index.block_size}."
            )
    return cache.window


def _check_workspace(
    config: MLAConfig, cache: LayerCache, workspace: Workspace | None, num_tokens: int
) -> None:
    if workspace is None or cache.index is None or config.indexer is None:
        return
    if workspace.selection.shape[1] != config.indexer.topk:
        raise ConfigError(
            "plan: workspace must be of a layer that chooses, got another. Give warmup() its cache."
        )
    if workspace.selection.device != cache.index.data.device:
        raise ConfigError(
            f"plan: workspace must be on {cache.index.data.device} like the cache, "
            f"got {workspace.selection.device}."
        )
    most = workspace.selection.shape[0]
    if num_tokens > most:
        raise ConfigError(
            f"plan: a step may have at most {most} tokens in this workspace, got {num_tokens}. "
            "Give warmup() a larger max_tokens, or split the step."
        )


def check_batch(batch: Batch, config: MLAConfig, cache: LayerCache, window: PagedCache) -> None:
    """Values are checked on the host; tensors that are on the device already are trusted."""
    if batch.window_table is None or batch.state_slots is None:
        raise ShapeError(
            f"batch: window_table and state_slots must be given for {config.model_type}, got none."
        )
    longest = max(batch.seq_lens, default=0)
    if longest > config.max_positions:
        raise ShapeError(
            f"batch: seq_lens must be at most max_positions={config.max_positions}, got {longest}."
        )
    device = window.data.device
    for name in ("block_table", "window_table", "state_slots", "device_seq_lens"):
        tensor = getattr(batch, name)
        if tensor is not None and tensor.device.type not in ("cpu", device.type):
            raise ShapeError(f"batch: {name} must be on cpu or {device}, got {tensor.device}.")
    _check_window(batch, config, window)
    if cache.compressed is None or cache.state is None:
        return
    if batch.block_table.device.type == "cpu":
        finished = [S // cache.ratio for S in batch.seq_lens]
        ends = torch.tensor(finished, dtype=torch.int32)
        N, BS = cache.compressed.num_blocks, cache.compressed.block_size
        check_block_table("batch", batch.block_table, None, ends, N, BS)
        _check_entries(batch, cache.ratio, N, BS)
    if batch.state_slots.device.type == "cpu":
        used = batch.state_slots[torch.tensor(batch.query_lens) > 0].long()
        if used.numel() and int(used.min()) < 0:
            raise ShapeError(
                f"batch: state_slots must not be negative for requests with tokens, "
                f"got {int(used.min())}."
            )
        check_slots("batch", used, cache.state.num_blocks, "state_slots")


def _check_entries(batch: Batch, ratio: int, N: int, BS: int) -> None:
    """No two requests finish the same entry in this step."""
    firsts = torch.tensor([(S - n) // ratio for n, S in _lens(batch)], dtype=torch.int64)
    counts = torch.tensor([S // ratio for _, S in _lens(batch)], dtype=torch.int64) - firsts
    owners = torch.arange(len(batch.seq_lens)).repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    entries = torch.arange(owners.shape[0]) - starts[owners] + firsts[owners]
    blocks = batch.block_table[owners, entries // BS].long() if owners.numel() else owners
    check_slots("batch", blocks * BS + entries % BS, N * BS, "entries of block_table")


def _check_window(batch: Batch, config: MLAConfig, window: PagedCache) -> None:
    """Rings hold the step's tokens and the window before them, in blocks that exist."""
    assert config.compressor is not None and batch.window_table is not None
    span, BS, N = config.compressor.window, window.block_size, window.num_blocks
    table = batch.window_table
    room = table.shape[1] * BS
    for b, (n, S) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        needed = min(S, n + span - 1)
        if n and needed > room:
            raise ShapeError(
                f"batch: window_table must have room for the {needed} rows that request {b} "
                f"needs in this step ({n} new ones), got {table.shape[1]} blocks of {BS}. "
                "Give the step fewer tokens, or the table more columns."
            )
    if table.device.type != "cpu" or batch.device_seq_lens is not None:
        return
    starts = torch.tensor([max(S - n - span + 1, 0) for n, S in _lens(batch)])
    ends = torch.tensor([S if n else 0 for n, S in _lens(batch)])
    firsts = starts // BS
    most = int(((ends + BS - 1) // BS - firsts).clamp_min(0).max()) if len(starts) else 0
    columns = firsts[:, None] + torch.arange(most)
    blocks = table.long().gather(1, columns % max(table.shape[1], 1)) if most else table[:, :0]
    wrong = (columns * BS < ends[:, None]) & ((blocks < 0) | (blocks >= N))
    if bool(wrong.any()):
        b, k = (int(index) for index in wrong.nonzero()[0])
        column = int(columns[b, k]) % table.shape[1]
        raise ShapeError(
            f"batch: window_table[{b}, {column}] must be a block of the cache (0..{N - 1}), "
            f"got {int(blocks[b, k])}."
        )


def _lens(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.query_lens, batch.seq_lens, strict=True))


def _describe(batch: Batch, config: MLAConfig, cache: LayerCache) -> CompressedPlan:
    assert batch.window_table is not None and batch.state_slots is not None
    seen = row_lens(batch.query_lens, batch.seq_lens)  # tokens, this one included
    everyone = range(len(batch.query_lens))
    true_lens = true_row_lens(batch, everyone, seen)
    table, states = batch.window_table, batch.state_slots
    if batch.device_seq_lens is not None:  # slots are worked out where positions are
        device = batch.device_seq_lens.device
        table = table.to(device, non_blocking=True)
        states = states.to(device, non_blocking=True).where(batch.device_seq_lens > 0, -1)
    ratio = cache.ratio
    entries = true_lens // max(ratio, 1) if ratio else torch.zeros_like(true_lens)
    most = int(seen.max()) // ratio if ratio and seen.numel() else 0
    step = CompressedPlan(
        ratio=ratio,
        query_start_loc=cumulative(batch.query_lens),
        positions=true_lens.long() - 1,
        window_table=table,
        block_table=batch.block_table,
        state_slots=states,
        row_lens=entries,
        num_rows=batch.num_tokens,
        max_entries=most,
    )
    if ratio != INDEXED_RATIO:
        return step
    assert config.indexer is not None and cache.index is not None
    if most <= config.indexer.topk:
        return step
    held = query_bytes(config, cache.index)
    return replace(step, chunks=score_chunks((seen // ratio).tolist(), held), query_bytes=held)


def window_slots(step: CompressedPlan, BS: int) -> Tensor:
    """[T] i64: where the step's raw rows go."""
    table = step.window_table
    owners = torch.repeat_interleave(
        torch.arange(table.shape[0], device=table.device),
        step.query_start_loc.to(table.device).diff().long(),
        output_size=step.num_rows,
    )
    positions = step.positions.to(table.device)
    columns = (positions // BS) % max(table.shape[1], 1)
    slots = table[owners, columns].long() * BS + positions % BS
    return slots.masked_fill(positions < 0, -1)  # of a request only the device knows to be empty


def compressed_buffers(
    config: MLAConfig,
    cache: LayerCache,
    *,
    max_requests: int,
    max_tokens: int,
    max_blocks: int,
) -> dict[str, Tensor]:
    """plan_buffers for a model with a compressor, for layers of the cache's ratio only: each kind
    has its own. Window rings have the columns a step needs."""
    window = check_caches(config, cache)
    assert config.compressor is not None
    back = cache.geometry.rollback if cache.geometry is not None else 0
    most = config.compressor.window - 1 + max_tokens // max_requests + back
    shapes = {
        "block_table": (max_requests, max_blocks),
        "window_table": (max_requests, -(-most // window.block_size) + 1),
        "state_slots": (max_requests,),
        "query_start_loc": (max_requests + 1,),
        "row_lens": (max_tokens,),
    }
    device = window.data.device
    buffers = {
        name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in shapes.items()
    }
    for name, nothing in (("positions", 0), ("slot_mapping", -1)):
        buffers[name] = torch.full((max_tokens,), nothing, dtype=torch.int64, device=device)
    buffers["ratio"] = torch.tensor(cache.ratio)  # on the host: whose buffers these are
    return buffers


def captured_step(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    step: CompressedPlan,
    buffers: dict[str, Tensor],
) -> CompressedPlan:
    """A step over the buffers of a captured graph: every token chooses, short ones all they have.

    What would not fit raises; no buffer is touched.
    """
    max_requests, max_blocks = buffers["block_table"].shape
    max_tokens = buffers["slot_mapping"].shape[0]
    rings = buffers["window_table"].shape[1]
    if int(buffers["ratio"]) != cache.ratio:
        raise ConfigError(
            f"plan: buffers must be of layers of ratio {cache.ratio}, got {int(buffers['ratio'])}. "
            "Each kind of layer needs its own plan_buffers()."
        )
    if step.window_table.shape[1] != rings:
        raise ConfigError(
            f"plan: window_table must have {rings} columns to replay, "
            f"got {step.window_table.shape[1]}. A ring's columns decide where its rows are."
        )
    B, M = batch.block_table.shape
    longest = max(batch.query_lens, default=0)
    for name, value, most in (
        ("requests", B, max_requests),
        ("tokens", batch.num_tokens, max_tokens),
        ("block table columns", M, max_blocks),
        ("query tokens of one request", longest, max_tokens // max_requests),
    ):
        if value > most:
            raise ConfigError(f"plan: {name} must be at most {most} to replay, got {value}.")
    entries = max_blocks * cache.compressed.block_size if cache.compressed is not None else 0
    held = query_bytes(config, cache.index) if cache.index is not None else 0
    turns = score_chunks([entries] * max_tokens, held) if cache.index is not None else ()
    return replace(
        step,
        block_table=buffers["block_table"],
        window_table=buffers["window_table"],
        state_slots=buffers["state_slots"],
        query_start_loc=buffers["query_start_loc"],
        positions=buffers["positions"],
        row_lens=buffers["row_lens"],
        num_rows=max_tokens,
        max_entries=entries,
        chunks=turns,
        query_bytes=held,
    )


def fill_buffers(buffers: dict[str, Tensor], step: CompressedPlan, slots: Tensor) -> Tensor:
    """An uploaded step into the buffers, what is left over empty; returns the buffer of slots."""
    (B, M), T = step.block_table.shape, step.num_rows
    surplus = buffers["block_table"].shape[0] - B
    buffers["block_table"][:B, :M].copy_(step.block_table, non_blocking=True)
    buffers["window_table"][:B].copy_(step.window_table, non_blocking=True)
    buffers["state_slots"].fill_(-1)[:B].copy_(step.state_slots, non_blocking=True)
    ends = step.query_start_loc
    buffers["query_start_loc"].copy_(torch.cat([ends, ends[-1:].expand(surplus)]))
    buffers["positions"].zero_()[:T].copy_(step.positions, non_blocking=True)
    buffers["row_lens"].zero_()[:T].copy_(step.row_lens, non_blocking=True)
    buffers["slot_mapping"].fill_(-1)[:T].copy_(slots, non_blocking=True)
    return buffers["slot_mapping"]


def find_compressed_problems(
    config: MLAConfig,
    cache: LayerCache,
    window: PagedCache,
    dtype: torch.dtype,
    step: CompressedPlan,
) -> tuple[Problem, ...]:
    """The ops a V4 layer of this ratio calls, as the backends are asked about them."""
    assert config.compressor is not None
    device = window.data.device
    common = Problem(
        op="cache_write",
        device=device.type,
        capability=capability(device),
        dtype=dtype,
        format=window.format,
        D=config.latent_dim,
        C=config.latent_dim,
    )
    R, H = config.qk_rope_head_dim, config.num_heads
    problems = [
        replace(common, op="latent_write", H=H, E=config.latent_dim),
        common,
        replace(common, op="rope", format="", H=H, D=R, C=0),
    ]
    kinds, formats = ["window"], [window.format]
    if cache.compressed is not None:
        entries = cache.compressed
        kinds.append("positions" if step.chunks else "prefix")
        formats.append(entries.format)
        problems.append(
            replace(
                common,
                op="compress_kv",
                dtype=torch.float32,
                format=entries.format,
                C=0,
            )
        )
    if step.chunks:
        assert config.indexer is not None
        for op in ("index_logits", "index_topk"):
            problems.append(index_problem(op, config.indexer, cache, dtype, device))
    caches = [window.data] if cache.compressed is None else [window.data, cache.compressed.data]
    problems.append(
        sparse_problem(
            device,
            dtype,
            formats,
            tuple(kinds),
            H=H,
            D=config.latent_dim,
            C=config.latent_dim,
            tokens=step.num_rows,
            aligned=alignment(caches) | {"queries"},
            run_length=0,
        )
    )
    return tuple(problems)
