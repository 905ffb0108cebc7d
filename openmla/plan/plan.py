"""make_plan: which request runs in which form, by which backend, cut where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from openmla.backends.asked import Asked
from openmla.cache import LayerCache, PagedCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError, check_kind
from openmla.plan.batch import Batch
from openmla.plan.captured import captured_parts, check_buffers, fill
from openmla.plan.checks import (
    check_batch,
    check_cache,
    check_dtype,
    check_eight_bit_products,
    check_planned_output,
    check_planned_queries,
    check_prefill_dtype,
    check_room_for_keys,
    check_wide_queries,
    check_workspace,
)
from openmla.plan.compressed import plan_compressed
from openmla.plan.dense import plan_decode, plan_prefill
from openmla.plan.forms import choose_absorbed
from openmla.plan.problems import cache_kind, calls_of, choose, frozen, latent_of
from openmla.plan.rows import rope_offsets
from openmla.plan.sparse import choosing_requests, plan_sparse, sparse_routes
from openmla.plan.symbolic import symbolic
from openmla.plan.types import Parts, Plan, fixed_run
from openmla.plan.upload import upload
from openmla.plan.workspace import Workspace, default_workspace_tokens

FORMS = ("auto", "absorbed", "expanded", "chosen")


def make_plan(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    *,
    dtype: torch.dtype | None = None,
    backend: Asked = "auto",
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
) -> Plan:
    """Decide one step, for every layer that shares this cache geometry.

    `dtype` is the queries'; by default the cache's, or bf16 for a packed cache. `backend` is a name
    for all ops that have it, or a name per op, such as {"mha_ragged": "sdpa"}; ops that are not
    named choose. `form` "absorbed" or "expanded" forces one form on all requests; "auto" takes the
    cheaper per request. "chosen", of a model with an indexer, has every token attend, absorbed, to
    keys that are chosen for it, however few there are; make_selection() brings an engine's own
    choice, and then the cache needs no index rows.
    `workspace` comes from warmup(); without one, `workspace_tokens` (default: the rule of
    default_workspace_tokens) bounds the context rows gathered at once. `into` takes the buffers of
    plan_buffers() and fills them, so that addresses stay for graph replay; such a plan is absorbed
    only.

    `batch_invariant`: given equal inputs, a row's output, lse and chosen keys have the same bits
    alone, in any batch, at any place in it, captured or not. Keys of absorbed rows are split at
    fixed places of the row's own, contexts of expanded ones are cut every `workspace_tokens` (or
    rows of the workspace) of the request's own, and ops run by kernels that sum in one order
    whatever the batch; explain() names them. With form="absorbed" a prompt in any chunks and token
    by token gives the same bits, too. Between the expanded and the absorbed form they differ.
    MLAAttention and MLAAttentionV4 project so as well; under attach() the model's other linears are
    the caller's. docs/batch-invariance.md has what it costs.

    V4 has three kinds of layers, by compress ratio: one plan for each, from a cache of that kind.
    `beside` is another kind's plan of this batch: positions, tables and slots are taken from it.

    `compiled` is for a step inside torch.compile. Sizes are symbols there, so that one graph serves
    all lengths, and decoding calls the same ops for all: in a sparse model every absorbed token
    chooses its keys, also where it sees no more than K and takes all of them.

    `output` is one of OUTPUT_FORMATS, for attend_step(out=make_output(...)): the plan picks the op
    that ends each form in it, explain() says which. V4 has none.

    `query_dtype` "fp8": absorbed queries are quantised to e4m3 over rows of fp8 or fp8_ds_mla, with
    a scale per token and head; "fp8_static": with the cache's q_scale (docs/fp8-queries.md).
    `prefill_dtype` "fp8": expanded queries and keys are e4m3, under scales found on the device, and
    rows of an fp8 cache gathered as they are stored (docs/fp8-prefill.md). Both need SM89.
    """
    _check_kinds(batch, config, cache, compiled, batch_invariant)
    _check_into(into, compiled)
    if output is not None:
        check_planned_output(config, output)
    check_dtype("plan", dtype)
    check_planned_queries("plan", config, cache, query_dtype)
    check_prefill_dtype("plan", prefill_dtype, config, batch_invariant, into)
    asked: dict[str, Any] = {"query_dtype": query_dtype, "prefill_dtype": prefill_dtype}
    latent: Any = partial(_plan_latent, output=output, **asked)
    make = latent if config.compressor is None else plan_compressed
    plan = make(
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
        beside=beside,
        uniform=compiled,
    )
    return symbolic(plan) if compiled else plan


def _check_kinds(
    batch: Batch, config: MLAConfig, cache: LayerCache, compiled: bool, batch_invariant: bool
) -> None:
    check_kind("plan", "batch", batch, Batch)
    check_kind("plan", "config", config, MLAConfig)
    check_kind("plan", "compiled", compiled, bool)
    check_kind("plan", "batch_invariant", batch_invariant, bool)
    if not isinstance(cache, LayerCache):
        raise ConfigError(
            f"plan: cache must be the LayerCache of one layer, got {type(cache).__name__}."
        )


def _check_into(into: dict[str, Tensor] | None, compiled: bool) -> None:
    if into is not None:
        check_buffers("plan", "into", into)
    if compiled and into is not None:
        raise ConfigError("plan: compiled must not be given with into=, whose sizes never change.")


def _check_captured_form(form: str) -> None:
    if form == "expanded":
        raise ConfigError("plan: form must be auto or absorbed with into=, got 'expanded'.")


def _plan_latent(
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
    output: str | None,
    query_dtype: str | None,
    prefill_dtype: str | None,
) -> Plan:
    """make_plan for a model that caches a latent row per token."""
    latent = latent_of(cache)
    _check_options(config, form, beside)
    check_cache(config, cache, latent, form)
    check_batch(batch, latent)
    device, dtype = latent.data.device, _queries_dtype(latent, dtype, query_dtype, prefill_dtype)
    run_length = fixed_run(config.num_heads) if batch_invariant else 0
    if into is None:
        if workspace is not None:
            check_workspace(workspace, config, dtype, device)
        # which op attends to a request must not follow from how short it is, or was
        everyone, asked = uniform or batch_invariant, (query_dtype, prefill_dtype)
        routes = _routes(batch, config, latent, dtype, form, everyone, run_length, asked)
        rows = _rows_at_once(
            batch, config, latent, workspace, workspace_tokens, routes, fixed=batch_invariant
        )
        parts = _parts(
            batch, config, cache, dtype, routes, rows, uniform,
            quantized=output is not None, fixed=batch_invariant, apart=bool(prefill_dtype),
        )  # fmt: skip
    else:
        _check_captured_form(form)
        parts, values = captured_parts(batch, config, cache, dtype, into)
        routes = {"absorbed" if parts.sparse is None else "chosen": range(len(batch.query_lens))}
        form, workspace = "captured", None
    calls = calls_of(parts.decode, parts.prefill, parts.sparse, output, query_dtype, prefill_dtype)
    caches = cache_kind([latent], cache.index)
    choice = choose(config, caches, dtype, calls, run_length, frozen(backend))
    if workspace is not None:
        check_room_for_keys(workspace, choice.backends, choice.keys_apart, prefill_dtype)
    if into is None:
        parts = upload(parts, device)
    else:
        fill(into, values)
    return Plan(
        config=config,
        num_tokens=parts.slot_mapping.shape[0],
        slot_mapping=parts.slot_mapping,
        decode=parts.decode,
        prefill=parts.prefill,
        sparse=parts.sparse,
        backends=dict(choice.backends),
        requested=dict(choice.requested),
        problems=choice.problems,
        keys_apart=choice.keys_apart,
        num_blocks=latent.num_blocks,
        block_size=latent.block_size,
        padding=batch.padding if into is None else 0,
        run_length=run_length,
        output=output,
        query_dtype=query_dtype,
        prefill_dtype=prefill_dtype,
        ends=dict(choice.ends),
        causal=batch.causal,
        workspace=workspace,
        rope_offsets=parts.rope_offsets,
        query_lens=batch.query_lens,
        seq_lens=batch.seq_lens,
        bounded=batch.bounded,
        form=form,
        routes=routes,
    )


def _queries_dtype(
    latent: PagedCache,
    dtype: torch.dtype | None,
    query_dtype: str | None,
    prefill_dtype: str | None,
) -> torch.dtype:
    """As given, or by default the cache's, bf16 for a packed cache. Chips are looked at."""
    layout = latent.layout
    if dtype is None:
        dtype = torch.bfloat16 if layout.scaled or layout.packed else layout.dtype
    check_wide_queries("plan", query_dtype, dtype)
    if prefill_dtype is not None:
        check_eight_bit_products("plan", latent.data.device, dtype)
    return dtype


def _check_options(config: MLAConfig, form: str, beside: Plan | None) -> None:
    if form not in FORMS:
        raise ConfigError(f"plan: form must be {', '.join(FORMS[:-1])} or chosen, got {form!r}.")
    if beside is not None:
        raise ConfigError(
            f"plan: beside must not be given for {config.model_type}: one plan serves all layers."
        )


def _routes(
    batch: Batch,
    config: MLAConfig,
    latent: PagedCache,
    dtype: torch.dtype,
    form: str,
    uniform: bool,
    run_length: int,
    asked: Sequence[str | None],
) -> Mapping[str, Sequence[int]]:
    """Which request takes which form; `uniform` absorbed ones all choose, however short."""
    absorbed = _forms(batch, config, latent, dtype, form, run_length)
    # of a part of the keys, how few it has says nothing about how many there are
    everyone = form == "chosen" or not batch.causal
    choosing = choosing_requests(batch, config, everyone=everyone)
    if config.indexer is None and all(absorbed):
        return {"absorbed": list(range(len(absorbed))), "expanded": []}
    routes: dict[str, Sequence[int]] = {"absorbed": [], "expanded": []}
    if len(choosing) < len(absorbed):
        others = [(b, taken) for b, taken in enumerate(absorbed) if b not in choosing]
        routes["absorbed"] = [b for b, taken in others if taken]
        routes["expanded"] = [b for b, taken in others if not taken]
    short: Sequence[int] = ()
    # where nobody has a token, nothing is chosen
    asking = bool(choosing) or any(batch.query_lens[b] for b in routes["absorbed"])
    if uniform and config.indexer is not None and asking:
        short, routes["absorbed"] = routes["absorbed"], []
    if choosing or short:
        chosen, masked = sparse_routes(batch, config, latent, dtype, form, choosing, asked)
        chosen = sorted((*chosen, *short))
        routes |= {"chosen": chosen, "masked": masked}
    return routes


def _rows_at_once(
    batch: Batch,
    config: MLAConfig,
    latent: PagedCache,
    workspace: Workspace | None,
    workspace_tokens: int | None,
    routes: Mapping[str, Sequence[int]],
    *,
    fixed: bool,
) -> int:
    """Context rows gathered at once, in the workspace if there is one: it has room for the step.
    `fixed`: contexts are cut there, so that how many requests there are has no say."""
    BS = latent.block_size
    rows_at_once = workspace.num_rows if workspace is not None else workspace_tokens
    if rows_at_once is None:
        B = 1 if fixed else len(batch.query_lens)
        rows_at_once = default_workspace_tokens(config, max_requests=B, block_size=BS)
    if rows_at_once < BS:
        raise ConfigError(
            f"plan: workspace_tokens must be at least one block of {BS}, got {rows_at_once}."
        )
    if workspace is not None:
        new_tokens = sum(batch.query_lens[b] for b in routes["expanded"])
        most = workspace.expanded.shape[0]
        if new_tokens > most:
            raise ConfigError(
                f"plan: a step may expand at most {most} new tokens in this workspace, "
                f"got {new_tokens}. Give warmup() a larger max_tokens, or split the step."
            )
    return rows_at_once


def _parts(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    dtype: torch.dtype,
    routes: Mapping[str, Sequence[int]],
    rows_at_once: int,
    uniform: bool,
    *,
    quantized: bool,
    fixed: bool,
    apart: bool,
) -> Parts:
    """The step's tensors, on the host but for what the batch has on the device."""
    latent = latent_of(cache)
    starts = list(accumulate(batch.query_lens, initial=0))
    decoding, prefilling, choosing = routes["absorbed"], routes["expanded"], "chosen" in routes
    decode = prefill = sparse = None
    if decoding or not (prefilling or choosing):
        decode = plan_decode(batch, decoding, starts)
    if prefilling:
        prefill = plan_prefill(
            batch, prefilling, starts, latent.block_size, rows_at_once, quantized=quantized,
            fixed=fixed, apart=apart and latent.format == "fp8",
        )  # fmt: skip
    if choosing:
        chosen = (routes["chosen"], routes["masked"])
        sparse = plan_sparse(
            batch, config, cache, dtype, chosen, starts, rows_at_once, uniform=uniform, fixed=fixed
        )
    assert batch.slot_mapping is not None  # check_batch looked
    offsets = rope_offsets(batch, config, uniform=uniform)
    return Parts(decode, prefill, sparse, batch.slot_mapping, offsets)


def _forms(
    batch: Batch, config: MLAConfig, latent: PagedCache, dtype: torch.dtype, form: str,
    run_length: int,
) -> list[bool]:  # fmt: skip
    """Per request: absorbed or not. A request without new tokens has nothing to expand, and one
    whose length only the device knows cannot be cut into chunks."""
    bounded = batch.bounded
    if form == "expanded" and bounded:
        raise ConfigError(
            f"plan: form must not be expanded with device_seq_lens that are not exact, as those of "
            f"request {min(bounded)}."
        )
    if form == "auto" and max(batch.query_lens, default=0) <= 1:  # plain decode, at every step
        return [True] * len(batch.query_lens)
    if form != "auto":
        return [form != "expanded" or n == 0 for n in batch.query_lens]
    if len(bounded) == len(batch.query_lens):
        return [True] * len(batch.query_lens)
    cheaper = choose_absorbed(
        config,
        batch.query_lens,
        batch.seq_lens,
        format=latent.format,
        itemsize=dtype.itemsize,
        device=latent.data.device.type,
        run_length=run_length,
    )
    if not bounded:
        return cheaper
    return [b in bounded or absorbed for b, absorbed in enumerate(cheaper)]
