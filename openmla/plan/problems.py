"""The ops a plan calls, as backends are asked about them, and the names that answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from openmla.backends import BACKENDS, Problem, efficiency, prefers_slots, select, why_not
from openmla.backends.requirements import warn_of_reference
from openmla.backends.segments import alignment, sparse_problem
from openmla.cache import LayerCache, PagedCache
from openmla.config import IndexerConfig, MLAConfig
from openmla.errors import ConfigError
from openmla.hardware import capability
from openmla.plan.types import DecodePlan, PrefillPlan, SparsePlan

PROMPT = 4096  # tokens: how many does not matter, but that they are many


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
    problems: Sequence[Problem], backend: str
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


def gathering_problem(
    config: MLAConfig, latent: PagedCache, dtype: torch.dtype, tokens: int, run_length: int = 0
) -> Problem:
    """mqa_sparse over the chosen rows of so many tokens."""
    return sparse_problem(
        latent.data.device, dtype, [latent.format], ("slots",), H=config.num_heads,
        D=config.latent_dim, C=config.kv_lora_rank, tokens=tokens,
        aligned=alignment([latent.data]) | {"queries"}, run_length=run_length,
    )  # fmt: skip


def sparse_efficiencies(
    config: MLAConfig, latent: PagedCache, dtype: torch.dtype
) -> tuple[float, float]:
    """What prompts reach: rows gathered, and all keys computed and masked."""
    gathering = gathering_problem(config, latent, dtype, PROMPT)
    masking = latent_problem("mha_masked", config, latent, dtype)
    gathered, masked = (efficiency(p, select(p, "auto")) for p in (gathering, masking))
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
    indexed = ("index_write", "index_logits", "index_topk")
    problems = []
    for op in ops:
        if op in indexed and config.indexer is not None:
            device = latent.data.device
            problems.append(index_problem(op, config.indexer, cache, dtype, device))
        elif op == "mqa_sparse" and sparse is not None:
            tokens = max((turn.stop - turn.start for turn in sparse.turns), default=0)
            problems.append(gathering_problem(config, latent, dtype, tokens, run_length))
        else:
            problems.append(latent_problem(op, config, latent, dtype))
    return tuple(problems)


def latent_problem(op: str, config: MLAConfig, latent: PagedCache, dtype: torch.dtype) -> Problem:
    return Problem(
        op=op,
        device=latent.data.device.type,
        capability=capability(latent.data.device),
        dtype=dtype,
        format=latent.format,
        H=config.num_heads,
        D=config.qk_rope_head_dim if op == "rope" else config.latent_dim,
        C=config.kv_lora_rank,
        E=config.qk_head_dim,
        V=config.v_head_dim,
    )


def index_problem(
    op: str, indexer: IndexerConfig, cache: LayerCache, dtype: torch.dtype, device: torch.device
) -> Problem:
    index = cache.index
    assert index is not None  # make_plan looked
    if op == "index_topk":  # of scores, wherever they come from
        where = capability(device)
        return Problem(op, device.type, where, dtype=torch.float32)
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
    )
