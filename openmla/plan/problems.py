"""The ops a plan calls, as backends are asked about them, and the names that answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from openmla.backends import (
    BACKENDS,
    Problem,
    choose_backend,
    efficiency,
    prefers_slots,
    reads_apart,
    why_not,
)
from openmla.backends.asked import Asked, check_asked, named
from openmla.backends.requirements import warn_of_reference
from openmla.backends.segments import alignment
from openmla.cache import LayerCache, PagedCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.ops.cache_gather import problem as cache_gather_problem
from openmla.ops.cache_write import problem as cache_write_problem
from openmla.ops.index_logits import problem as index_logits_problem
from openmla.ops.index_logits import scores_dtype
from openmla.ops.index_topk import problem as index_topk_problem
from openmla.ops.index_write import problem as index_write_problem
from openmla.ops.latent_write import problem as latent_write_problem
from openmla.ops.map_slots import problem as map_slots_problem
from openmla.ops.merge_states import problem as merge_states_problem
from openmla.ops.mha_masked import problem as mha_masked_problem
from openmla.ops.mha_ragged import problem as mha_ragged_problem
from openmla.ops.mqa_paged import problem as mqa_paged_problem
from openmla.ops.mqa_sparse import problem as mqa_sparse_problem
from openmla.ops.pack_mask import problem as pack_mask_problem
from openmla.ops.rope import problem as rope_problem
from openmla.plan.rows import num_rows
from openmla.plan.types import DecodePlan, PrefillPlan, SparsePlan

PROMPT = 4096  # tokens: how many does not matter, but that they are many


def latent_of(cache: LayerCache) -> PagedCache:
    if cache.latent is None:
        raise ConfigError("plan: cache must have latent rows, got none.")
    return cache.latent


def requested(backend: Asked) -> dict[str, str]:
    """Per op, the backend that was named for it, or "auto"."""
    check_asked("plan", backend)
    return {op: named(op, backend) for op in BACKENDS}


def chosen(problems: Sequence[Problem], backend: Asked) -> dict[str, str]:
    """Who runs each op; if it is the reference on a GPU for want of a package, that is said."""
    asked = requested(backend)
    backends = {problem.op: choose_backend(problem, asked[problem.op]) for problem in problems}
    if any(name == "reference" and asked[op] == "auto" for op, name in backends.items()):
        warn_of_reference("plan", problems[0].device)
    return backends


def choose_backends(
    problems: Sequence[Problem], backend: Asked
) -> tuple[tuple[Problem, ...], dict[str, str]]:
    """Who runs each op. Whoever attends to listed rows is given positions where it takes them and
    does not prefer slots: nothing maps them then."""
    backends = chosen(problems, backend)
    if "map_slots" not in backends:
        return tuple(problems), backends
    attending = next(problem for problem in problems if problem.op == "mqa_sparse")
    listed = replace(attending, kinds=("positions",))
    name = backends["mqa_sparse"]
    if why_not(listed, name) is not None or prefers_slots(listed, name):
        return tuple(problems), backends
    del backends["map_slots"]
    kept = (problem for problem in problems if problem.op != "map_slots")
    return tuple(listed if problem is attending else problem for problem in kept), backends


def reads_keys_apart(
    config: MLAConfig, device: torch.device, dtype: torch.dtype, backend: Asked
) -> bool:
    """Whether prefill hands over keys in two parts, so that nothing holds whole ones."""
    E, R, V = config.qk_head_dim, config.qk_rope_head_dim, config.v_head_dim
    problem = mha_ragged_problem(device, dtype, E=E, R=R, V=V)
    return reads_apart(problem, chosen([problem], backend)["mha_ragged"])


def gathering_problem(
    config: MLAConfig, latent: PagedCache, dtype: torch.dtype, tokens: int, run_length: int = 0
) -> Problem:
    """mqa_sparse over the chosen rows of so many tokens."""
    return mqa_sparse_problem(
        latent.data.device, dtype, [latent.format], ("slots",), H=config.num_heads,
        D=config.latent_dim, C=config.kv_lora_rank, tokens=tokens,
        aligned=alignment([latent.data]) | {"queries"}, run_length=run_length,
    )  # fmt: skip


def sparse_efficiencies(
    config: MLAConfig, latent: PagedCache, dtype: torch.dtype
) -> tuple[float, float]:
    """What prompts reach: rows gathered, and all keys computed and masked."""
    gathering = gathering_problem(config, latent, dtype, PROMPT)
    E, V = config.qk_head_dim, config.v_head_dim
    masking = mha_masked_problem(latent.data.device, dtype, E=E, V=V)
    gathered, masked = (efficiency(p, choose_backend(p, "auto")) for p in (gathering, masking))
    return gathered, masked


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
    device, format = latent.data.device, latent.format
    D, C = config.latent_dim, config.kv_lora_rank
    E, V = config.qk_head_dim, config.v_head_dim
    problems = [
        latent_write_problem(device, dtype, format, D=D, E=E),
        cache_write_problem(device, dtype, format),
    ]
    if config.rope.kind != "none":
        problems.append(rope_problem(device, dtype))
    if decode is not None:
        problems.append(
            mqa_paged_problem(
                device, dtype, format, H=config.num_heads, D=D, C=C, BS=latent.block_size,
                tokens=num_rows(decode.rows), max_query_len=decode.max_query_len,
                run_length=run_length,
                aligned=alignment([latent.data]) | {"queries"},
            )
        )  # fmt: skip
    if prefill is not None:
        R = config.qk_rope_head_dim
        problems.append(mha_ragged_problem(device, dtype, E=E, R=R, V=V))
        if prefill.route != "new":
            problems.append(cache_gather_problem(device, dtype, format))
        if prefill.route in ("chunked", "context"):
            problems.append(merge_states_problem(device, dtype))
    if cache.index is not None and config.indexer is not None:
        problems.append(index_write_problem(device, dtype, cache.index.format))
    if sparse is not None:
        if cache.index is not None:
            problems += scoring_problems(config, cache, dtype)
        if sparse.num_absorbed:
            tokens = max((chunk.stop - chunk.start for chunk in sparse.query_chunks), default=0)
            problems.append(map_slots_problem(device))
            problems.append(gathering_problem(config, latent, dtype, tokens, run_length))
        if sparse.masked:
            problems.append(pack_mask_problem(device))
            problems.append(mha_masked_problem(device, dtype, E=E, V=V))
            problems.append(cache_gather_problem(device, dtype, format))
            problems.append(merge_states_problem(device, dtype))
    return tuple({problem.op: problem for problem in problems}.values())


def scoring_problems(config: MLAConfig, cache: LayerCache, dtype: torch.dtype) -> list[Problem]:
    """The lightning indexer's scores and the choice by them."""
    indexer, index = config.indexer, cache.index
    assert indexer is not None and index is not None  # make_plan looked
    HI, DI, device = indexer.num_heads, indexer.head_dim, index.data.device
    queries = index.layout.query_dtype(dtype, DI)
    return [
        index_logits_problem(device, queries, index.format, HI=HI, DI=DI),
        index_topk_problem(device, scores_dtype(queries)),
    ]
