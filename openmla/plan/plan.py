"""make_plan: the form, the backends and the chunks of each request of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from openmla.backends.choice import BackendChoice
from openmla.cache import LayerCache, PagedCache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError
from openmla.plan.across import (
    absorbed_across,
    context_batch,
    contexts_of,
    gathering_is_cheaper,
    has_room_to_gather,
    masked_across,
    new_group,
    reserve_brought,
    token_batch,
    with_context,
    with_gathered,
    with_schedules,
)
from openmla.plan.across_v4 import plan_compressed_across
from openmla.plan.batch import Batch
from openmla.plan.captured import captured_parts, fill
from openmla.plan.checks import (
    check_batch,
    check_buffers,
    check_cache,
    check_dtype,
    check_eight_bit_products,
    check_kinds,
    check_planned_output,
    check_planned_queries,
    check_ranks,
    check_room_for_keys,
    check_wide_queries,
    check_window,
    check_workspace,
)
from openmla.plan.compressed import plan_compressed
from openmla.plan.compressed_checks import (
    check_beside,
    check_caches,
    check_compressed_batch,
    check_room_for_selection,
)
from openmla.plan.expanded import expanded_group, masked_group
from openmla.plan.groups import (
    Roles,
    absorbed_group,
    absorbed_roles,
    chunks_of,
    query_bytes,
    query_chunks,
    row_lens,
    select_parts,
    select_roles,
    window_group,
    window_roles,
)
from openmla.plan.options import Combination, PlanOptions, check_combination, frozen
from openmla.plan.problems import Choice, cache_kind, choose, latent_of, needs_of
from openmla.plan.routes import Routes, find_routes
from openmla.plan.rows import pick_rows, rope_offsets, some
from openmla.plan.symbolic import symbolic
from openmla.plan.types import Across, Group, Parts, Plan, ScoreChunk, Select, fixed_run, remade
from openmla.plan.upload import upload_parts
from openmla.plan.workspace import Workspace, default_workspace_tokens
from openmla.ranks import Ranks
from openmla.ranks.agree import agreeing
from openmla.ranks.ranks import with_all_heads


def make_plan(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    *,
    dtype: torch.dtype | None = None,
    backend: BackendChoice = "auto",
    form: str = "auto",
    workspace: Workspace | None = None,
    workspace_tokens: int | None = None,
    batch_invariant: bool = False,
    into: dict[str, Tensor] | None = None,
    beside: Plan | None = None,
    compiled: bool = False,
    output: str | None = None,
    query_dtype: str | None = None,
    prefill_dtype: str | None = None,
    ranks: Ranks | None = None,
    context: str = "auto",
) -> Plan:
    """Plan one step for all layers that have a cache of this geometry.

    A plan is decided from host integers and then frozen. Run it with attend_step() or a layer.
    print(plan.explain()) shows what runs where, and why. DeepSeek V4 has three kinds of layers, by
    compress ratio: make one plan for each, with a cache of that kind.

    Args:
        batch: the requests of the step.
        config: the model's dimensions.
        cache: the cache of any of these layers.
        dtype: dtype of the queries. Defaults to the dtype of the cache, or to bf16 if it is fp8 or
            packed.
        backend: "auto", a backend name for all ops that it implements, or a name per op, such as
            {"mha_ragged": "sdpa"}. Ops that are not named use "auto".
        form: "auto" uses the cheaper form for each request. "absorbed" and "expanded" force one
            form on all requests. "chosen", for models with an indexer, makes every token attend to
            selected keys, however few keys there are; with make_selection() the selection can be
            your own, and the cache needs no index rows.
        workspace: the result of warmup().
        workspace_tokens: without a workspace, the most context rows to gather at once. Defaults to
            the rule of openmla.plan.default_workspace_tokens().
        batch_invariant: make the output, lse and selected keys of a row bitwise equal in any batch,
            at any place in it, captured or not, given equal inputs. Keys are split and contexts are
            cut at fixed places of the request, and ops use kernels that sum in one order. With
            form="absorbed", a prompt in any chunks and token by token has equal bits too. The
            expanded and the absorbed form differ. MLAAttention and MLAAttentionV4 project
            batch-invariantly; under attach() the model's other linears do not. See
            docs/batch-invariance.md for the cost.
        into: buffers of plan_buffers() to fill, so that addresses stay the same for CUDA graph
            replay. Such a plan is absorbed only.
        beside: DeepSeek V4: the plan of this batch for another compress ratio. Positions, tables
            and slots are reused.
        compiled: plan for a step inside torch.compile. Sizes become symbols, so that one graph
            serves all lengths. In a sparse model every absorbed token then selects keys, even one
            that sees at most topk keys and selects all of them.
        output: a key of openmla.OUTPUT_FORMATS, for attend_step(out=make_output(...)).
        query_dtype: "fp8" quantizes absorbed queries to e4m3 with a scale per token and head, over
            fp8 and fp8_ds_mla caches. "fp8_static" uses the cache's q_scale
            (docs/fp8-queries.md). GPUs need SM89 or newer.
        prefill_dtype: "fp8" quantizes expanded queries and keys to e4m3, with scales found on the
            device, and gathers rows of an fp8 cache as stored (docs/fp8-prefill.md). GPUs need SM89
            or newer.
        ranks: the ranks that share the cache. Every rank plans the same batch, with global lengths,
            and with tables and slots of blocks that hold block_size * W tokens, of which each rank
            stores block_size (docs/context-parallel.md).
        context: over ranks, how to attend to the earlier keys of expanded tokens, and to DeepSeek
            V4's entries. "place" leaves them on their ranks, "gather" gathers them from all ranks,
            and "auto" uses the cheaper of the two.

    Returns:
        A frozen Plan, for this step only.

    Raises:
        ShapeError: the batch's tables, slots or lengths do not fit the cache.
        ConfigError: options contradict each other, the model or the cache.
        UnsupportedError: a named backend cannot run an op; the message says why.

    ```python
    import openmla

    config = openmla.PRESETS["tiny-v3"]
    cache = openmla.allocate_cache(config, num_blocks=8, block_size=16, format="bf16")
    pool = openmla.BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 20, "b": 33})
    batch = openmla.Batch(
        query_lens=[20, 1],
        seq_lens=[20, 33],
        block_table=pool.block_table(["a", "b"]),
        slot_mapping=pool.slot_mapping([("a", 0, 20), ("b", 32, 33)]),
    )
    plan = openmla.make_plan(batch, config, cache)
    print(plan.explain())
    ```
    """
    given = dtype, backend, form, workspace_tokens, batch_invariant, compiled, output, query_dtype
    resources = workspace, into, beside, ranks
    arguments = (batch, config, cache, (*given, prefill_dtype, context), *resources)
    if ranks is None:
        plan = _make(*arguments, {})
    else:
        fields: dict[str, Any] = {}
        with agreeing(fields, ranks, cache):
            plan = _make(*arguments, fields)
    return symbolic(plan) if compiled else plan


def _make(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    given: tuple[Any, ...],  # as PlanOptions has them
    workspace: Workspace | None,
    into: Roles | None,
    beside: Plan | None,
    ranks: Ranks | None,
    fields: dict[str, Any],  # what ranks compare, filled here
) -> Plan:
    """Checks, parts, backends, tensors to the device."""
    dtype, backend, *others = given
    check_kinds(batch, config, cache, given, workspace, ranks)
    if into is not None:
        check_buffers("plan", "into", into)
    v4, rows = config.compressor is not None, cache.latent or cache.window
    if dtype is None and rows is not None:
        dtype = queries_dtype(rows, None)
    options = PlanOptions(dtype, frozen(backend), *others)
    if ranks is not None:
        fields |= _fields(batch, config, cache, ranks, options, workspace, into)
    flags = into is not None, beside is not None, ranks is not None
    check_combination("plan", Combination(options, config, *flags))
    if options.output is not None:
        check_planned_output(config, options.output)
    check_dtype("plan", given[0])
    if options.query_dtype is not None:
        check_planned_queries("plan", config, cache, options.query_dtype)
    rows = check_caches(config, cache) if v4 else latent_of(cache)
    device, size, wide = rows.data.device, 1, config
    if ranks is not None:
        size, wide = check_ranks(batch, rows, ranks, v4=v4), with_all_heads(config, ranks)
    run_length = fixed_run(wide.num_heads) if options.batch_invariant else 0
    read, values = [rows], {}  # type: list[PagedCache], Roles
    if v4:
        sharded = ranks is not None and cache.ratio == INDEXED_RATIO
        num_tokens = batch.num_tokens if into is None else into["slot_mapping"].shape[0]
        check_room_for_selection(config, cache, workspace, num_tokens)
        if beside is not None:
            check_beside(beside, batch, config, cache, num_tokens)
        again, blocks = beside is not None, size if sharded else 1
        check_compressed_batch(batch, config, cache, rows, again=again, ranks=blocks)
        read += [] if cache.compressed is None else [cache.compressed]
        if sharded:
            assert ranks is not None
            parts, values = plan_compressed_across(
                batch, config, cache, rows, ranks, dtype, options.context, into,
                fixed=options.uniform,
            )  # fmt: skip
        else:
            known = None if beside is None else beside.shared
            parts, values = plan_compressed(
                batch, config, cache, rows, known, into,
                uniform=options.compiled, listed=options.batch_invariant,
            )  # fmt: skip
    else:
        check_cache(config, cache, rows, options.form)
        check_batch(batch, rows, size, config.window)
        check_window(batch, config)
        check_wide_queries("plan", options.query_dtype, dtype)
        if options.prefill_dtype is not None:
            check_eight_bit_products("plan", device, dtype)
        if into is not None:
            parts, values = captured_parts(batch, config, cache, dtype, into, ranks)
            workspace = None
        else:
            if workspace is not None:
                check_workspace(workspace, config, dtype, device)
            parts = _plan_latent(batch, config, cache, options, workspace, ranks, run_length)
    if ranks is not None:
        fixed = options.batch_invariant
        groups = with_schedules(parts.groups, config, ranks, dtype, fixed=fixed)
        parts = parts._replace(groups=groups)
    needs = needs_of(parts.groups, parts.select, config, wide, options)
    choice = choose(
        config, cache_kind(read, cache.index), dtype, needs, run_length, options.backend
    )
    if workspace is not None and not v4:
        check_room_for_keys(workspace, choice.calls, options.prefill_dtype)
    if into is None:
        parts = upload_parts(parts, device)
    else:
        fill(into, values)
    return assemble(
        parts, choice, config, cache, options, ranks=ranks, causal=batch.causal,
        workspace=workspace, padding=0 if v4 or into is not None else batch.padding,
        run_length=run_length, captured=into is not None, query_lens=batch.query_lens,
        seq_lens=batch.seq_lens, bounded=batch.bounded,
    ).prepare()  # fmt: skip


def assemble(
    parts: Parts,
    choice: Choice,
    config: MLAConfig,
    cache: LayerCache,
    options: PlanOptions,
    **more: Any,
) -> Plan:
    """The plan of parts that are on the device, and of those who run its ops."""
    rows, groups = cache.latent or cache.window, parts.groups
    assert rows is not None
    if choice.ends:  # what ranks merge is quantized afterwards
        ends = [
            choice.ends[each.form] if each.across is None else "quantize_out" for each in groups
        ]
        groups = tuple(remade(each, {"end": end}) for each, end in zip(groups, ends, strict=True))
    return Plan(
        config=config,
        options=options,
        num_tokens=parts.slot_mapping.shape[0],
        slot_mapping=parts.slot_mapping,
        groups=groups,
        calls=choice.calls,
        preparing=choice.preparing,
        select=parts.select,
        pool=parts.pool,
        bring=parts.bring,
        rope_offsets=parts.rope_offsets,
        ratio=cache.ratio,
        geometry=cache.geometry,
        shared=parts.shared,
        num_blocks=rows.num_blocks,
        block_size=rows.block_size,
        **more,
    )


def _fields(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    options: PlanOptions,
    workspace: Workspace | None,
    into: Roles | None,
) -> dict[str, Any]:
    """What must be the same on every rank. Rows of a workspace decide how many collectives there
    are, and buffers how large they are."""
    sizes = None if into is None else {name: tuple(each.shape) for name, each in into.items()}
    backend = options.backend
    named = backend if isinstance(backend, str) else sorted(backend)  # sets have no order
    asked = {**vars(options), "backend": named}
    parts = ((part.format, part.num_blocks, part.block_size) for part in cache.parts)
    return {
        "config": config,
        "cache": [cache.ratio, *parts],
        "ranks": (ranks.shard.size, ranks.interleave, ranks.heads, ranks.schedule),
        "query_lens": batch.query_lens,
        "seq_lens": (batch.seq_lens, sorted(batch.bounded)) if batch.bounded else batch.seq_lens,
        "padding": batch.padding,
        "block_table": batch.block_table,
        "slot_mapping": batch.slot_mapping,
        "window_table": batch.window_table,
        "state_slots": batch.state_slots,
        "options": (asked, None if workspace is None else workspace.num_rows, sizes),
    }


def _plan_latent(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    options: PlanOptions,
    workspace: Workspace | None,
    ranks: Ranks | None,
    run_length: int,
) -> Parts:
    """The groups of a model that caches a latent row per token, on the host but for what the batch
    has on the device."""
    latent, dtype, fixed = latent_of(cache), options.dtype, options.batch_invariant
    assert dtype is not None and batch.slot_mapping is not None  # _make looked
    BS, starts = latent.block_size, list(accumulate(batch.query_lens, initial=0))
    wide = BS if ranks is None else BS * ranks.shard.size
    # over ranks all keys are gathered for a mask, unless context="place" or a small workspace
    fits = workspace is None or workspace.num_rows >= wide
    masks = ranks is None or options.context == "gather" or (options.context == "auto" and fits)
    routes = find_routes(batch, config, latent, options, run_length, masks=masks, ranks=ranks)
    if ranks is not None:
        routes = {
            form: [b for b in requests if batch.query_lens[b]] for form, requests in routes.items()
        }
    at_once = _rows_at_once(batch, config, latent, workspace, options, routes)
    absorbed, expanded = routes["absorbed"], routes["expanded"]
    chosen, masked = routes.get("chosen", ()), routes.get("masked", ())
    ends: dict[str, Any] = {"quantized": options.output is not None, "fixed": fixed}
    groups, select, slots = [], None, batch.slot_mapping
    if absorbed or not (expanded or chosen or masked):
        if ranks is not None:
            groups.append(absorbed_across(batch, absorbed, starts, ranks.shard))
        else:
            rows, query_lens = pick_rows(absorbed, starts), some(batch.query_lens, absorbed)
            if config.window:
                cuts = query_chunks(sum(query_lens), config, dtype.itemsize)
                roles = window_roles(batch, absorbed, cuts)
                group = window_group(roles, rows, config.window, cuts, absorbed)
            else:
                roles, longest = absorbed_roles(batch, absorbed), max(query_lens, default=0)
                group = absorbed_group(roles, rows, longest, absorbed, causal=batch.causal)
            groups.append(group)
    if expanded and ranks is not None:
        group = _expand_over_ranks(
            batch, config, latent, options, workspace, ranks, expanded, starts
        )
        groups.append(group)
    elif expanded:
        apart = options.prefill_dtype is not None and latent.format == "fp8"
        groups.append(expanded_group(batch, expanded, starts, BS, at_once, apart=apart, **ends))
    if chosen or masked:
        if ranks is None:
            select, own = plan_select(batch, config, cache, options, chosen, masked, starts)
        else:
            select, own = _select_over_ranks(
                batch, config, cache, options, ranks, chosen, masked, starts
            )
        groups += [] if own is None else [own]
    if masked:
        first = sum(some(batch.query_lens, chosen))
        given = batch, masked, starts, BS
        if ranks is None:
            groups.append(masked_group(*given, at_once, first=first, fixed=fixed))
        else:
            has_room_to_gather(workspace, options.context, wide)
            most = _most_rows(config, latent, workspace, options, len(masked))
            groups.append(masked_across(*given, ranks, most, first=first, fixed=fixed))
            sizes = len(masked), most, workspace, latent.data.device, dtype, BS
            reserve_brought(config, ranks, *sizes)
    if ranks is not None:
        slots = ranks.shard.local_slots(slots, BS)
    offsets = rope_offsets(batch, config, uniform=options.compiled)
    return Parts(tuple(groups), select, None, slots, offsets)


def _expand_over_ranks(
    batch: Batch,
    config: MLAConfig,
    latent: PagedCache,
    options: PlanOptions,
    workspace: Workspace | None,
    ranks: Ranks,
    requests: Sequence[int],
    starts: Sequence[int],
) -> Group:
    """New rows among themselves, then what was cached before: in place, or gathered."""
    BS, dtype, fixed = latent.block_size, options.dtype, options.batch_invariant
    assert dtype is not None
    group = new_group(batch, requests, starts, BS)
    later = [b for b in requests if batch.seq_lens[b] > batch.query_lens[b]]
    if not later:
        return group
    dense = replace(config, indexer=None)
    gathers = options.context == "gather"
    fits = has_room_to_gather(workspace, options.context, BS * ranks.shard.size)
    if options.context == "auto" and fits and not fixed:
        lens = some(batch.query_lens, later), contexts_of(batch, later)
        gathers = gathering_is_cheaper(*lens, dense, latent, ranks, dtype)
    if gathers:
        most = _most_rows(config, latent, workspace, options, len(requests))
        device, cuts = latent.data.device, {"quantized": options.output is not None, "fixed": fixed}
        group = with_gathered(group, batch, latent, ranks, most, **cuts)
        reserve_brought(config, ranks, len(requests), most, workspace, device, dtype, BS)
        return group
    keys = context_batch(batch, later, ranks.shard)
    everyone, own_starts = range(len(later)), list(accumulate(keys.query_lens, initial=0))
    routes: Routes = {"absorbed": list(everyone), "expanded": []}
    if ranks.heads == "all":
        run_length = fixed_run(config.num_heads) if fixed else 0
        routes = find_routes(keys, dense, latent, options, run_length)
    absorbed, expanded, groups = routes["absorbed"], routes["expanded"], []
    if absorbed:
        longest, rows = max(some(keys.query_lens, absorbed)), pick_rows(absorbed, own_starts)
        roles = absorbed_roles(keys, absorbed)
        groups.append(absorbed_group(roles, rows, longest, absorbed, causal=False))
    if expanded:
        most = _most_rows(config, latent, workspace, options, len(later))
        groups.append(expanded_group(keys, expanded, own_starts, BS, most, fixed=fixed))
    query_lens = some(batch.query_lens, requests)
    return with_context(group, later, starts, query_lens, tuple(groups))


def _select_over_ranks(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    options: PlanOptions,
    ranks: Ranks,
    chosen: Sequence[int],
    masked: Sequence[int],
    starts: Sequence[int],
) -> tuple[Select, Group | None]:
    """Tokens that select among all ranks' keys. Of those that stay in latent space, each rank
    attends to the selected keys that it holds."""
    assert config.indexer is not None
    requests = [*chosen, *masked]
    own = token_batch(batch, requests, ranks.shard)
    first, n = sum(some(batch.query_lens, chosen)), own.num_tokens
    split = range(first), range(first, n), range(n + 1)
    wide = with_all_heads(config, ranks)
    select, group = plan_select(own, wide, cache, options, *split)
    most = ranks.shard.most_local(max(some(batch.seq_lens, requests)))
    offered = config.indexer.topk if options.compiled else min(config.indexer.topk, most)
    BS = latent_of(cache).block_size
    here = {"offered": offered, "shard": ranks.shard, "block_size": BS}
    select = remade(select, {"rows": pick_rows(requests, starts), **here})
    if group is None:
        return select, None
    rows = pick_rows(chosen, starts)
    across = Across(rows, (group,))
    return select, Group("chosen", rows, None, group.selected, requests=chosen, across=across)


def plan_select(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    options: PlanOptions,
    chosen: Sequence[int],
    masked: Sequence[int],
    starts: Sequence[int],
) -> tuple[Select, Group | None]:
    """Requests whose tokens select their keys, in latent space or masked. A compiled step scores
    all rows, also where there is nothing to select from."""
    assert config.indexer is not None and options.dtype is not None
    K, requests = config.indexer.topk, [*chosen, *masked]
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    lens = row_lens(query_lens, seq_lens, batch.causal)
    num_absorbed = sum(query_lens[: len(chosen)])
    held = 0
    chunks: tuple[ScoreChunk, ...] = ()
    if cache.index is not None:  # else the caller selects
        held = query_bytes(config, cache.index)
        longest = max(some(batch.read_lens, requests), default=0)
        chunks = chunks_of(lens, longest, held, K + 1 if options.compiled else 0)
    cuts = query_chunks(num_absorbed, config, options.dtype.itemsize)
    roles = select_roles(batch, K, requests, num_absorbed, lens, chunks, cuts)
    rows = pick_rows(requests, starts)
    own = pick_rows(chosen, starts) if masked else rows
    return select_parts(roles, rows, own, lens.shape[0], num_absorbed, chunks, cuts, held, chosen)


def queries_dtype(rows: PagedCache, dtype: torch.dtype | None) -> torch.dtype:
    """As given, or by default the cache's, bf16 for a packed cache."""
    if dtype is not None:
        return dtype
    layout = rows.layout
    return torch.bfloat16 if layout.scaled or layout.packed else layout.dtype


def _rows_at_once(
    batch: Batch,
    config: MLAConfig,
    latent: PagedCache,
    workspace: Workspace | None,
    options: PlanOptions,
    routes: Routes,
) -> int:
    """Context rows gathered at once, in the workspace if there is one: it has room for the step."""
    BS = latent.block_size
    # contexts are cut there: how many requests there are must have no say in it
    B = 1 if options.batch_invariant else len(batch.query_lens)
    rows_at_once = _most_rows(config, latent, workspace, options, B)
    if rows_at_once < BS:
        raise ConfigError(
            f"plan: workspace_tokens must be at least 1 block of {BS} rows, got {rows_at_once}."
        )
    if workspace is not None:
        new_tokens = sum(batch.query_lens[b] for b in routes["expanded"])
        most = workspace.expanded.shape[0]
        if new_tokens > most:
            raise ConfigError(
                f"plan: the workspace has room to expand {most} new tokens, got {new_tokens}. Call "
                "warmup() with a larger max_tokens, or split the step."
            )
    return rows_at_once


def _most_rows(
    config: MLAConfig,
    latent: PagedCache,
    workspace: Workspace | None,
    options: PlanOptions,
    num_requests: int,
) -> int:
    rows = workspace.num_rows if workspace is not None else options.workspace_tokens
    if rows is not None:
        return rows
    if options.batch_invariant:
        num_requests = 1
    sizes = {"max_requests": num_requests, "block_size": latent.block_size}
    return default_workspace_tokens(config, **sizes)
