"""make_plan: which request runs in which form, by which backend, cut where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from openmla.backends import BACKENDS, Problem, select
from openmla.cache import LayerCache, PagedCache
from openmla.cache.format import get_format
from openmla.config import IndexerConfig, MLAConfig
from openmla.errors import ConfigError, ShapeError
from openmla.hardware import capability, multiprocessors
from openmla.ops._values import check_block_table, check_slots
from openmla.plan.batch import Batch
from openmla.plan.chunks import cut_contexts
from openmla.plan.forms import choose_absorbed, choose_sparse_absorbed
from openmla.plan.sparse import (
    chosen_turns,
    masked_chunks,
    query_bytes,
    row_lens,
    score_chunks,
)
from openmla.plan.splits import FIXED_RUN, run_length, split_bounds
from openmla.plan.types import ContextChunk, DecodePlan, Plan, PrefillPlan, Rows, SparsePlan
from openmla.plan.upload import upload
from openmla.plan.workspace import Workspace, default_workspace_tokens


def make_plan(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    form: str = "auto",
    workspace: Workspace | None = None,
    workspace_tokens: int | None = None,
    batch_invariant: bool = False,
    into: dict[str, Tensor] | None = None,
) -> Plan:
    """Decide one step, for every layer that shares this cache geometry.

    `dtype` is the queries'; by default the cache's, or bf16 for a packed cache. `form` "absorbed"
    or "expanded" forces one form on all requests; "auto" takes the cheaper per request.
    `workspace` comes from warmup(); without one, `workspace_tokens` (default: the rule of
    default_workspace_tokens) bounds the context rows gathered at once. `batch_invariant` cuts the
    keys of absorbed rows at fixed positions of the row itself; how prefill is cut into chunks
    depends on the batch. `into` takes the buffers of plan_buffers() and fills them, so that
    addresses stay for graph replay; such a plan is absorbed only.
    """
    latent = _latent(cache)
    _check_index(config, cache, latent)
    _check_batch(batch, latent)
    if dtype is None:
        layout = latent.layout
        dtype = torch.bfloat16 if layout.scaled or layout.packed else layout.dtype
    if into is not None:
        if form == "expanded":
            raise ConfigError("plan: form must be auto or absorbed with into=, got 'expanded'.")
        return _captured(batch, config, cache, into, dtype, backend, batch_invariant)
    device = latent.data.device
    absorbed = _forms(batch, config, latent, dtype, form)
    choosing = _choosing(batch, config)
    decoding = [b for b, chosen in enumerate(absorbed) if chosen and b not in choosing]
    prefilling = [b for b, chosen in enumerate(absorbed) if not chosen and b not in choosing]
    starts = list(accumulate(batch.query_lens, initial=0))
    rows_at_once = workspace.num_rows if workspace is not None else workspace_tokens
    if rows_at_once is None:
        rows_at_once = default_workspace_tokens(
            config, max_requests=len(batch.query_lens), block_size=latent.block_size
        )
    if rows_at_once < latent.block_size:
        raise ConfigError(
            f"plan: workspace_tokens must be at least one block of {latent.block_size}, "
            f"got {rows_at_once}."
        )
    if workspace is not None:
        new_tokens = sum(batch.query_lens[b] for b in prefilling)
        _check_workspace(workspace, dtype, new_tokens)
    decode = prefill = sparse = None
    if decoding or not (prefilling or choosing):
        decode = _plan_decode(batch, decoding, starts, latent, batch_invariant)
    if prefilling:
        prefill = _plan_prefill(batch, prefilling, starts, latent.block_size, rows_at_once)
    if choosing:
        routes = _sparse_forms(batch, config, latent, dtype, form, choosing)
        sparse = _plan_sparse(batch, config, cache, dtype, routes, starts, rows_at_once)
    problems = _problems(config, cache, dtype, decode, prefill, sparse)
    tensors = (decode, prefill, sparse, batch.slot_mapping, _long_context(batch, config))
    decode, prefill, sparse, slot_mapping, long_context = upload(tensors, device)
    return Plan(
        config=config,
        num_tokens=batch.num_tokens,
        slot_mapping=slot_mapping,
        decode=decode,
        prefill=prefill,
        sparse=sparse,
        backends={problem.op: select(problem, _named(problem.op, backend)) for problem in problems},
        problems=problems,
        workspace=workspace,
        long_context=long_context,
    )


def _latent(cache: LayerCache) -> PagedCache:
    if cache.latent is None:
        raise ConfigError("plan: cache must have latent rows, got none.")
    return cache.latent


def _check_index(config: MLAConfig, cache: LayerCache, latent: PagedCache) -> None:
    get_format(latent.format, "latent")
    if config.indexer is None:
        return
    index = cache.index
    if index is None:
        raise ConfigError(
            f"plan: cache must have index rows for {config.model_type}, got none. A layer that "
            "shares its selection has none: plan with the cache of one that does not."
        )
    get_format(index.format, "index")
    if (index.num_blocks, index.block_size) != (latent.num_blocks, latent.block_size):
        raise ConfigError(
            f"plan: index rows must be in {latent.num_blocks} blocks of {latent.block_size} like "
            f"the latent ones, got {index.num_blocks} of {index.block_size}."
        )


def _check_workspace(workspace: Workspace, dtype: torch.dtype, new_tokens: int) -> None:
    if workspace.rows.dtype != dtype:
        raise ConfigError(
            f"plan: workspace must be {dtype} like the queries, got {workspace.rows.dtype}. "
            "Give warmup() that dtype."
        )
    most = workspace.keys.shape[0]
    if new_tokens > most:
        raise ConfigError(
            f"plan: a step may expand at most {most} new tokens in this workspace, "
            f"got {new_tokens}. Give warmup() a larger max_tokens, or split the step."
        )


def _named(op: str, backend: str) -> str:
    """A backend named for the whole plan serves the ops it has; the others choose freely."""
    return backend if backend in BACKENDS[op] or backend == "auto" else _known(backend)


def _known(backend: str) -> str:
    names = {name for row in BACKENDS.values() for name in row}
    if backend not in names:
        raise ConfigError(
            f"plan: backend {backend!r} is not known. Known: auto, {', '.join(sorted(names))}."
        )
    return "auto"


def _check_batch(batch: Batch, latent: PagedCache) -> None:
    """Values are checked on the host; tensors that are on the device already are trusted."""
    for name in ("block_table", "slot_mapping", "device_seq_lens"):
        tensor = getattr(batch, name)
        if tensor is not None and tensor.device.type not in ("cpu", latent.data.device.type):
            raise ShapeError(
                f"batch: {name} must be on cpu or {latent.data.device}, got {tensor.device}."
            )
    if batch.block_table.device.type == "cpu":
        seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32)
        check_block_table(
            "batch", batch.block_table, None, seq_lens, latent.num_blocks, latent.block_size
        )
    if batch.slot_mapping.device.type == "cpu":
        check_slots("batch", batch.slot_mapping, latent.num_blocks * latent.block_size)


def _forms(
    batch: Batch, config: MLAConfig, latent: PagedCache, dtype: torch.dtype, form: str
) -> list[bool]:
    """Per request: absorbed or not. A request without new tokens has nothing to expand."""
    if form not in ("auto", "absorbed", "expanded"):
        raise ConfigError(f"plan: form must be auto, absorbed or expanded, got {form!r}.")
    if batch.device_seq_lens is not None:
        if form == "expanded":
            raise ConfigError("plan: form must not be expanded with device_seq_lens.")
        return [True] * len(batch.query_lens)
    if form != "auto":
        return [form == "absorbed" or n == 0 for n in batch.query_lens]
    return choose_absorbed(
        config,
        batch.query_lens,
        batch.seq_lens,
        format=latent.format,
        itemsize=dtype.itemsize,
        device=latent.data.device.type,
    )


def _pick_rows(requests: Sequence[int], starts: Sequence[int]) -> Rows:
    """Token rows of some requests: everything, one slice if they are neighbours, or indices."""
    if not requests:
        return slice(0, 0)
    if list(requests) == list(range(requests[0], requests[0] + len(requests))):
        return slice(starts[requests[0]], starts[requests[-1] + 1])
    return torch.cat([torch.arange(starts[b], starts[b + 1]) for b in requests])


def _pick(table: Tensor, requests: Sequence[int]) -> Tensor:
    if list(requests) == list(range(table.shape[0])):
        return table
    return table[torch.tensor(requests, dtype=torch.int64, device=table.device)]


def _cumulative(lens: Sequence[int]) -> Tensor:
    if len(lens) and min(lens) == max(lens) == 1:  # plain decode, at every step: kept cheap
        return torch.arange(len(lens) + 1, dtype=torch.int32)
    return torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)


def _plan_decode(
    batch: Batch,
    requests: Sequence[int],
    starts: Sequence[int],
    latent: PagedCache,
    batch_invariant: bool,
) -> DecodePlan:
    query_lens = [batch.query_lens[b] for b in requests]
    seq_lens = [batch.seq_lens[b] for b in requests]
    host_lens = torch.tensor(seq_lens, dtype=torch.int32)
    length = run_length(
        seq_lens,
        multiprocessors=multiprocessors(latent.data.device),
        block_size=latent.block_size,
        batch_invariant=batch_invariant,
    )
    true_lens = batch.device_seq_lens
    return DecodePlan(
        rows=_pick_rows(requests, starts),
        block_table=_pick(batch.block_table, requests),
        seq_lens=host_lens if true_lens is None else _pick(true_lens, requests),
        query_start_loc=_cumulative(query_lens),
        split_starts=split_bounds(host_lens, length),
        max_query_len=max(query_lens, default=0),
    )


def _plan_prefill(
    batch: Batch, requests: Sequence[int], starts: Sequence[int], BS: int, rows_at_once: int
) -> PrefillPlan:
    query_lens = [batch.query_lens[b] for b in requests]
    seq_lens = [batch.seq_lens[b] for b in requests]
    contexts = [S - n for n, S in zip(query_lens, seq_lens, strict=True)]
    table = _pick(batch.block_table, requests)
    query_start_loc = _cumulative(query_lens)
    bounds = query_start_loc.tolist()

    def chunk(first: int, key_starts: Sequence[int], key_lens: Sequence[int]) -> ContextChunk:
        stop = first + len(key_lens)
        return ContextChunk(
            rows=slice(bounds[first], bounds[stop]),
            query_start_loc=_cumulative(query_lens[first:stop]),
            max_query_len=max(query_lens[first:stop]),
            block_table=table[first:stop],
            starts=torch.tensor(key_starts, dtype=torch.int32),
            key_start_loc=_cumulative(key_lens),
            max_key_len=max(key_lens),
            num_keys=sum(key_lens),
        )

    rows = _pick_rows(requests, starts)
    longest = max(query_lens)
    if not any(contexts):
        return PrefillPlan(rows, "new", query_start_loc, longest)
    if sum(seq_lens) <= rows_at_once:
        whole = chunk(0, [0] * len(requests), seq_lens)
        ends = list(accumulate(seq_lens))
        new_rows = torch.cat(
            [torch.arange(end - n, end) for n, end in zip(query_lens, ends, strict=True)]
        )
        return PrefillPlan(rows, "one-shot", query_start_loc, longest, whole, new_rows)
    spans = cut_contexts(contexts, rows_at_once, BS)
    chunks = tuple(chunk(span.first, span.starts, span.lens) for span in spans)
    return PrefillPlan(rows, "chunked", query_start_loc, longest, chunks=chunks)


def _choosing(batch: Batch, config: MLAConfig) -> set[int]:
    """Requests with more keys than their tokens may attend to: an indexer chooses."""
    if config.indexer is None:
        return set()
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    return {b for b, (n, S) in enumerate(lens) if n > 0 and config.indexer.topk < S}


def _sparse_forms(
    batch: Batch,
    config: MLAConfig,
    latent: PagedCache,
    dtype: torch.dtype,
    form: str,
    choosing: set[int],
) -> tuple[list[int], list[int]]:
    """Those requests by route: rows gathered in latent space, or expanded and masked."""
    absorbed: list[int] = []
    masked: list[int] = []
    for b in sorted(choosing):
        n, S = batch.query_lens[b], batch.seq_lens[b]
        if form == "auto" and batch.device_seq_lens is None:
            gather = choose_sparse_absorbed(
                config,
                n,
                S,
                format=latent.format,
                itemsize=dtype.itemsize,
                device=latent.data.device.type,
            )
        else:
            gather = form != "expanded"
        (absorbed if gather else masked).append(b)
    return absorbed, masked


def _plan_sparse(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    dtype: torch.dtype,
    routes: tuple[list[int], list[int]],
    starts: Sequence[int],
    rows_at_once: int,
) -> SparsePlan:
    assert cache.index is not None
    held = query_bytes(config, cache.index)
    absorbed, masked = routes
    requests = absorbed + masked
    query_lens = [batch.query_lens[b] for b in requests]
    lens = row_lens(query_lens, [batch.seq_lens[b] for b in requests])
    table = _pick(batch.block_table, requests)
    num_absorbed = sum(batch.query_lens[b] for b in absorbed)
    cut = masked_chunks(
        [batch.query_lens[b] for b in masked],
        [batch.seq_lens[b] for b in masked],
        table[len(absorbed) :],
        first_row=num_absorbed,
        BS=cache.index.block_size,
        rows_at_once=rows_at_once,
    )
    return SparsePlan(
        rows=_pick_rows(requests, starts),
        block_table=table,
        query_start_loc=_cumulative(query_lens),
        row_lens=_true_row_lens(batch, requests, lens),
        num_rows=lens.shape[0],
        num_absorbed=num_absorbed,
        max_query_len=max(query_lens),
        chunks=score_chunks(lens.tolist(), held),
        query_bytes=held,
        turns=chosen_turns(num_absorbed, config, dtype.itemsize),
        masked=cut,
    )


def _true_row_lens(batch: Batch, requests: Sequence[int], lens: Tensor) -> Tensor:
    """What tokens see when only the device knows the lengths: as much less as the bound is high."""
    if batch.device_seq_lens is None:
        return lens
    device = batch.device_seq_lens.device
    bounds = torch.tensor([batch.seq_lens[b] for b in requests], dtype=torch.int32)
    less = bounds.to(device) - _pick(batch.device_seq_lens, requests)
    counts = torch.tensor([batch.query_lens[b] for b in requests])
    owners = torch.arange(len(requests)).repeat_interleave(counts)
    return (lens.to(device) - less[owners.to(device)]).clamp_min(0)


def _problems(
    config: MLAConfig,
    cache: LayerCache,
    dtype: torch.dtype,
    decode: DecodePlan | None,
    prefill: PrefillPlan | None,
    sparse: SparsePlan | None,
) -> tuple[Problem, ...]:
    """The ops this plan calls, as the backends are asked about them."""
    latent = _latent(cache)
    ops = ["cache_write"] if config.rope.kind == "none" else ["rope", "cache_write"]
    if decode is not None:
        ops.append("mqa_paged")
    if prefill is not None:
        ops.append("mha_ragged")
        ops += ["cache_gather"] if prefill.route != "new" else []
        ops += ["merge_states"] if prefill.route == "chunked" else []
    if config.indexer is not None:
        ops.append("index_write")
    if sparse is not None:
        ops += ["index_logits", "index_topk"]
        if sparse.num_absorbed:
            ops += ["map_slots", "mqa_sparse"]
        if sparse.masked:
            more = ["pack_mask", "mha_masked", "cache_gather", "merge_states"]
            ops += [op for op in more if op not in ops]
    device = latent.data.device
    indexer = config.indexer
    K = indexer.topk if indexer is not None else 0
    return tuple(
        _index_problem(op, indexer, cache, dtype, device)
        if op in ("index_write", "index_logits", "index_topk") and indexer is not None
        else Problem(
            op=op,
            device=device.type,
            capability=capability(device),
            dtype=dtype,
            format=latent.format,
            H=config.num_heads,
            D=config.qk_rope_head_dim if op == "rope" else config.latent_dim,
            C=config.kv_lora_rank,
            E=config.qk_head_dim,
            V=config.v_head_dim,
            BS=latent.block_size,
            K=K if op in ("map_slots", "mqa_sparse", "pack_mask") else 0,
            kinds=("slots",) if op == "mqa_sparse" else (),
            max_query_len=decode.max_query_len if op == "mqa_paged" and decode else 0,
        )
        for op in ops
    )


def _index_problem(
    op: str, indexer: IndexerConfig, cache: LayerCache, dtype: torch.dtype, device: torch.device
) -> Problem:
    index = cache.index
    return Problem(
        op=op,
        device=device.type,
        capability=capability(device),
        dtype=torch.float32 if op == "index_topk" else dtype,
        format=index.format if index is not None else "",
        H=indexer.num_heads if op == "index_logits" else 0,
        D=indexer.head_dim,
        BS=index.block_size if index is not None else 0,
        K=indexer.topk if op == "index_topk" else 0,
    )


def _long_context(batch: Batch, config: MLAConfig) -> Tensor | None:
    """Which tokens use longrope's long factors: those of requests past the original length."""
    if config.rope.kind != "longrope":
        return None
    original = config.rope.original_positions
    flags = [int(original < S) for S in batch.seq_lens]
    if not any(flags):
        return None
    return torch.repeat_interleave(torch.tensor(flags), torch.tensor(batch.query_lens))


def plan_buffers(
    config: MLAConfig, cache: LayerCache, *, max_requests: int, max_tokens: int, max_blocks: int
) -> dict[str, Tensor]:
    """Device tensors for make_plan(into=): the largest step a captured graph will replay.

    Empty requests and tokens fill up smaller steps: they see no key and write no row.
    """
    latent = _latent(cache)
    for name, value in (
        ("max_requests", max_requests),
        ("max_blocks", max_blocks),
        ("max_tokens // max_requests", max_tokens // max(max_requests, 1)),
    ):
        if value < 1:
            raise ConfigError(f"plan_buffers: {name} must be positive, got {value}.")
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


def _captured(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    buffers: dict[str, Tensor],
    dtype: torch.dtype,
    backend: str,
    batch_invariant: bool,
) -> Plan:
    """Fill the buffers of a captured graph; what would not fit raises before any is touched."""
    latent = _latent(cache)
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
    )
    filled = {
        "seq_lens": seq_lens,
        "query_start_loc": _cumulative([*batch.query_lens, *[0] * padding]),
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
    long_context = _long_context(batch, config)
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
        true_lens = _true_row_lens(batch, everyone, lens)
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
    problems = _problems(config, cache, dtype, decode, None, sparse)
    return Plan(
        config=config,
        num_tokens=max_tokens,
        slot_mapping=buffers["slot_mapping"],
        decode=decode,
        prefill=None,
        sparse=sparse,
        backends={problem.op: select(problem, _named(problem.op, backend)) for problem in problems},
        problems=problems,
        long_context=buffers.get("long_context"),
    )


def _pinned(values: Tensor, device: torch.device) -> Tensor:
    return values.pin_memory() if device.type == "cuda" and values.device.type == "cpu" else values
