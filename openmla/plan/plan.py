"""make_plan: which request runs in which form, by which backend, cut where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from openmla.cache import LayerCache, PagedCache
from openmla.cache.format import get_format
from openmla.config import MLAConfig
from openmla.errors import ConfigError, ShapeError
from openmla.hardware import multiprocessors
from openmla.ops._values import check_block_table, check_slots
from openmla.plan.batch import Batch
from openmla.plan.captured import captured_plan
from openmla.plan.chunks import cut_contexts
from openmla.plan.compressed import plan_compressed
from openmla.plan.forms import choose_absorbed
from openmla.plan.problems import choose_backends, find_problems, latent_of
from openmla.plan.rows import cumulative, long_context_rows, pick, pick_rows
from openmla.plan.sparse import choosing_requests, plan_sparse, sparse_routes
from openmla.plan.splits import fixed_run, run_length, split_bounds
from openmla.plan.types import ContextChunk, DecodePlan, Plan, PrefillPlan
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
    default_workspace_tokens) bounds the context rows gathered at once. `into` takes the buffers of
    plan_buffers() and fills them, so that addresses stay for graph replay; such a plan is absorbed
    only.

    `batch_invariant` cuts the keys of absorbed rows, chosen ones too, at fixed positions of the row
    itself: mqa_paged and mqa_sparse give the same query over the same keys the same bits, whatever
    stands beside it. It does not make a step invariant. The products around those two ops, by the
    absorbed weights (torch.bmm) and in the layer's linears, take other kernels for other numbers of
    rows, so a decode row's bits still change with its neighbours; and how prefill is cut into
    chunks depends on the batch.

    V4 has three kinds of layers, by compress ratio: one plan for each, from a cache of that kind.
    """
    if not isinstance(cache, LayerCache):
        raise ConfigError(
            f"plan: cache must be the LayerCache of one layer, got {type(cache).__name__}."
        )
    if config.compressor is not None:
        return plan_compressed(
            batch,
            config,
            cache,
            dtype=dtype,
            backend=backend,
            form=form,
            workspace=workspace,
            workspace_tokens=workspace_tokens,
            batch_invariant=batch_invariant,
            into=into,
        )
    latent = latent_of(cache)
    _check_cache(config, cache, latent)
    _check_batch(batch, latent)
    if dtype is None:
        layout = latent.layout
        dtype = torch.bfloat16 if layout.scaled or layout.packed else layout.dtype
    if into is not None:
        if form == "expanded":
            raise ConfigError("plan: form must be auto or absorbed with into=, got 'expanded'.")
        return captured_plan(batch, config, cache, into, dtype, backend, batch_invariant)
    device = latent.data.device
    if workspace is not None:
        _check_workspace(workspace, config, dtype, device)
    absorbed = _forms(batch, config, latent, dtype, form)
    choosing = choosing_requests(batch, config)
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
        new_tokens, most = sum(batch.query_lens[b] for b in prefilling), workspace.keys.shape[0]
        if new_tokens > most:
            raise ConfigError(
                f"plan: a step may expand at most {most} new tokens in this workspace, "
                f"got {new_tokens}. Give warmup() a larger max_tokens, or split the step."
            )
    decode = prefill = sparse = None
    routes: dict[str, Sequence[int]] = {"absorbed": decoding, "expanded": prefilling}
    if decoding or not (prefilling or choosing):
        decode = _plan_decode(batch, config, decoding, starts, latent, batch_invariant)
    if prefilling:
        prefill = _plan_prefill(batch, prefilling, starts, latent.block_size, rows_at_once)
    if choosing:
        chosen, masked = sparse_routes(batch, config, latent, dtype, form, choosing)
        routes |= {"chosen": chosen, "masked": masked}
        sparse = plan_sparse(batch, config, cache, dtype, (chosen, masked), starts, rows_at_once)
    fixed = fixed_run(batch_invariant)
    problems = find_problems(config, cache, dtype, decode, prefill, sparse, fixed)
    problems, backends = choose_backends(problems, backend)
    assert batch.slot_mapping is not None  # _check_batch looked
    tensors = (decode, prefill, sparse, batch.slot_mapping, long_context_rows(batch, config))
    decode, prefill, sparse, slot_mapping, long_context = upload(tensors, device)
    return Plan(
        config=config,
        num_tokens=batch.num_tokens,
        slot_mapping=slot_mapping,
        decode=decode,
        prefill=prefill,
        sparse=sparse,
        backends=backends,
        problems=problems,
        num_blocks=latent.num_blocks,
        block_size=latent.block_size,
        run_length=fixed,
        workspace=workspace,
        long_context=long_context,
        query_lens=batch.query_lens,
        seq_lens=batch.seq_lens,
        bounded=batch.device_seq_lens is not None,
        form=form,
        routes=routes,
    )


def _check_cache(config: MLAConfig, cache: LayerCache, latent: PagedCache) -> None:
    get_format(latent.format, "latent")
    latent.check_width("plan", "latent", config.latent_dim)
    if config.indexer is None:
        return
    index = cache.index
    if index is None:
        raise ConfigError(
            f"plan: cache must have index rows for {config.model_type}, got none. A layer that "
            "shares its selection has none: plan with the cache of one that does not."
        )
    get_format(index.format, "index")
    index.check_width("plan", "index", config.indexer.head_dim)
    if (index.num_blocks, index.block_size) != (latent.num_blocks, latent.block_size):
        raise ConfigError(
            f"plan: index rows must be in {latent.num_blocks} blocks of {latent.block_size} like "
            f"the latent ones, got {index.num_blocks} of {index.block_size}."
        )


def _check_workspace(
    workspace: Workspace, config: MLAConfig, dtype: torch.dtype, device: torch.device
) -> None:
    H, P, V = config.num_heads, config.qk_nope_head_dim, config.v_head_dim
    for name, tensor, shape in (
        ("rows", workspace.rows, (config.latent_dim,)),
        ("expanded", workspace.expanded, (H * (P + V),)),
        ("keys", workspace.keys, (H, config.qk_head_dim)),
    ):
        if tensor.shape[1:] != shape:
            raise ConfigError(
                f"plan: workspace must be of this config, with {name} of {shape} each, "
                f"got {tuple(tensor.shape[1:])}. Give warmup() the same config and cache."
            )
    if workspace.rows.device != device:
        raise ConfigError(
            f"plan: workspace must be on {device} like the cache, got {workspace.rows.device}."
        )
    if workspace.rows.dtype != dtype:
        raise ConfigError(
            f"plan: workspace must be {dtype} like the queries, got {workspace.rows.dtype}. "
            "Give warmup() that dtype."
        )


def _check_batch(batch: Batch, latent: PagedCache) -> None:
    """Values are checked on the host; tensors that are on the device already are trusted."""
    if batch.slot_mapping is None:
        raise ShapeError("batch: slot_mapping must be given, only V4 does without.")
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
        if batch.block_table.device.type == "cpu" and batch.device_seq_lens is None:
            _check_agreement(batch, latent.block_size)


def _check_agreement(batch: Batch, BS: int) -> None:
    """A row is written where its own request will look for it, or not at all."""
    slots, lens = batch.slot_mapping, torch.tensor(batch.seq_lens, dtype=torch.int64)
    assert slots is not None
    if slots.numel() == 0:
        return
    if min(batch.query_lens) == max(batch.query_lens) == 1:  # plain decode, at every step
        rows, positions = torch.arange(len(lens)), lens - 1
    else:
        query_lens = torch.tensor(batch.query_lens, dtype=torch.int64)
        rows = torch.repeat_interleave(torch.arange(len(lens)), query_lens)
        # counted back from the end of the request
        positions = lens[rows] - (query_lens.cumsum(0)[rows] - torch.arange(len(rows)))
    expected = batch.block_table[rows, positions // BS].long() * BS + positions % BS
    wrong = (slots >= 0) & (slots != expected)
    if bool(wrong.any()):
        t = int(wrong.nonzero()[0])
        raise ShapeError(
            f"batch: slot_mapping must agree with block_table, which has position "
            f"{int(positions[t])} of request {int(rows[t])} in slot {int(expected[t])}, "
            f"got {int(slots[t])}."
        )


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


def _plan_decode(
    batch: Batch,
    config: MLAConfig,
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
        num_heads=config.num_heads,
    )
    true_lens = batch.device_seq_lens
    return DecodePlan(
        rows=pick_rows(requests, starts),
        block_table=pick(batch.block_table, requests),
        seq_lens=host_lens if true_lens is None else pick(true_lens, requests),
        query_start_loc=cumulative(query_lens),
        split_starts=split_bounds(host_lens, length),
        max_query_len=max(query_lens, default=0),
    )


def _plan_prefill(
    batch: Batch, requests: Sequence[int], starts: Sequence[int], BS: int, rows_at_once: int
) -> PrefillPlan:
    query_lens = [batch.query_lens[b] for b in requests]
    seq_lens = [batch.seq_lens[b] for b in requests]
    contexts = [S - n for n, S in zip(query_lens, seq_lens, strict=True)]
    table = pick(batch.block_table, requests)
    query_start_loc = cumulative(query_lens)
    bounds = query_start_loc.tolist()

    def chunk(first: int, key_starts: Sequence[int], key_lens: Sequence[int]) -> ContextChunk:
        stop = first + len(key_lens)
        return ContextChunk(
            rows=slice(bounds[first], bounds[stop]),
            query_start_loc=cumulative(query_lens[first:stop]),
            max_query_len=max(query_lens[first:stop]),
            block_table=table[first:stop],
            starts=torch.tensor(key_starts, dtype=torch.int32),
            key_start_loc=cumulative(key_lens),
            max_key_len=max(key_lens),
            num_keys=sum(key_lens),
        )

    rows = pick_rows(requests, starts)
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
