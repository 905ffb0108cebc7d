"""The ops a plan calls, as backends are asked about them, and the names that answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from openmla.backends import BACKENDS, Problem, select, why_not
from openmla.backends.requirements import warn_of_reference
from openmla.cache import LayerCache, PagedCache
from openmla.config import IndexerConfig, MLAConfig
from openmla.errors import ConfigError
from openmla.hardware import capability
from openmla.plan.types import DecodePlan, PrefillPlan, SparsePlan

FEW_TOKENS = 256  # not measured: where attention takes ten times as long as mapping
DECODED_ONCE = ("fp8_ds_mla",)  # many tokens' rows, from positions: see backends/triton/_decoded.py


def latent_of(cache: LayerCache) -> PagedCache:
    if cache.latent is None:
        raise ConfigError("plan: cache must have latent rows, got none.")
    return cache.latent


def named(op: str, backend: str) -> str:
    """A backend named for the whole plan serves the ops it has; the others choose freely."""
    return backend if backend in BACKENDS[op] or backend == "auto" else _known(backend)


def _known(backend: str) -> str:
    names = {name for row in BACKENDS.values() for name in row}
    if backend not in names:
        raise ConfigError(
            f"plan: backend {backend!r} is not known. Known: auto, {', '.join(sorted(names))}."
        )
    return "auto"


def chosen(problems: Sequence[Problem], backend: str) -> dict[str, str]:
    """Who runs each op; if it is the reference on a GPU for want of a package, that is said."""
    backends = {problem.op: select(problem, named(problem.op, backend)) for problem in problems}
    if backend == "auto" and "reference" in backends.values():
        warn_of_reference("plan", problems[0].device)
    return backends


def choose_backends(
    problems: Sequence[Problem], backend: str, num_chosen: int
) -> tuple[tuple[Problem, ...], dict[str, str]]:
    """Who runs each op. Where few tokens attend to listed rows and the one that does it takes
    positions as well as slots, it is given positions: nothing maps them. With many tokens a launch
    does not count, and slots are cheaper to read, unless rows are decoded once for all tokens."""
    backends = chosen(problems, backend)
    if "map_slots" not in backends:
        return tuple(problems), backends
    attending = next(problem for problem in problems if problem.op == "mqa_sparse")
    if num_chosen > FEW_TOKENS and attending.format not in DECODED_ONCE:
        return tuple(problems), backends
    listed = replace(attending, kinds=("positions",))
    if why_not(listed, backends["mqa_sparse"]) is not None:
        return tuple(problems), backends
    del backends["map_slots"]
    kept = (problem for problem in problems if problem.op != "map_slots")
    return tuple(listed if problem is attending else problem for problem in kept), backends


def find_problems(
    config: MLAConfig,
    cache: LayerCache,
    dtype: torch.dtype,
    decode: DecodePlan | None,
    prefill: PrefillPlan | None,
    sparse: SparsePlan | None,
    run_length: int,
) -> tuple[Problem, ...]:
    """The ops this plan calls, as the backends are asked about them."""
    latent = latent_of(cache)
    ops = ["latent_write", "cache_write"]
    ops += ["rope"] if config.rope.kind != "none" else []
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
        index_problem(op, indexer, cache, dtype, device)
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
            run_length=run_length if op == "mqa_sparse" else 0,
            max_query_len=decode.max_query_len if op == "mqa_paged" and decode else 0,
        )
        for op in ops
    )


def index_problem(
    op: str, indexer: IndexerConfig, cache: LayerCache, dtype: torch.dtype, device: torch.device
) -> Problem:
    index = cache.index
    assert index is not None  # make_plan looked
    if op == "index_topk":  # of scores, wherever they come from
        where = capability(device)
        return Problem(op, device.type, where, dtype=torch.float32, K=indexer.topk)
    if op == "index_logits":
        dtype = index.layout.query_dtype(dtype, indexer.head_dim)
    return Problem(
        op=op,
        device=device.type,
        capability=capability(device),
        dtype=dtype,
        format=index.format,
        H=indexer.num_heads if op == "index_logits" else 0,
        D=indexer.head_dim,
        BS=index.block_size,
    )
