"""The ops a plan calls, as backends are asked about them, and the names that answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from openmla.backends import (
    BACKENDS,
    Problem,
    bucketed,
    choose_backend,
    efficiency,
    prefers_slots,
    reads_apart,
    times_forgotten,
    why_not,
)
from openmla.backends.asked import Asked, check_asked, named
from openmla.backends.requirements import warn_of_reference
from openmla.backends.segments import alignment
from openmla.cache import LayerCache, PagedCache
from openmla.cache.format import get_format
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.hardware import multiprocessors
from openmla.ops.cache_gather import problem as cache_gather_problem
from openmla.ops.cache_write import problem as cache_write_problem
from openmla.ops.index_logits import problem as index_logits_problem
from openmla.ops.index_logits import scores_dtype
from openmla.ops.index_topk import problem as index_topk_problem
from openmla.ops.index_write import problem as index_write_problem
from openmla.ops.latent_write import problem as latent_write_problem
from openmla.ops.map_slots import problem as map_slots_problem
from openmla.ops.merge_quantize import problem as merge_quantize_problem
from openmla.ops.merge_states import problem as merge_states_problem
from openmla.ops.mha_masked import problem as mha_masked_problem
from openmla.ops.mha_ragged import problem as mha_ragged_problem
from openmla.ops.mqa_paged import problem as mqa_paged_problem
from openmla.ops.mqa_sparse import problem as mqa_sparse_problem
from openmla.ops.pack_mask import problem as pack_mask_problem
from openmla.ops.project_heads import problem as project_heads_problem
from openmla.ops.project_quantize import problem as project_quantize_problem
from openmla.ops.quantize_heads import problem as quantize_heads_problem
from openmla.ops.quantize_out import problem as quantize_out_problem
from openmla.ops.quantize_queries import problem as quantize_queries_problem
from openmla.ops.rope import problem as rope_problem
from openmla.plan.rows import num_rows
from openmla.plan.types import DecodePlan, PrefillPlan, SparsePlan

FrozenAsked = str | frozenset[tuple[str, str]]
PROMPT = 4096  # tokens: how many does not matter, but that they are many


def latent_of(cache: LayerCache) -> PagedCache:
    if cache.latent is None:
        raise ConfigError("plan: cache must have latent rows, got none.")
    return cache.latent


class Choice(NamedTuple):
    """The ops a plan calls, who runs each, and who was named for it or "auto"."""

    problems: tuple[Problem, ...]
    backends: dict[str, str]
    requested: dict[str, str]
    keys_apart: bool = False  # of mha_ragged
    ends: Mapping[str, str] = {}  # of quantised outputs


class CacheKind(NamedTuple):
    """All that backends are asked about of the caches a step reads. What is chosen for one of these
    is kept: `times_forgotten` says when to ask again."""

    device: torch.device
    formats: tuple[str, ...]  # "" where a part is missing
    block_size: int
    aligned: frozenset[str]
    multiprocessors: int  # a CPU's threads may be changed
    times_forgotten: int


class Calls(NamedTuple):
    """What of a plan's parts decides which ops it calls, for how many tokens."""

    decode: tuple[int, int] | None  # tokens, and the most of one request
    route: str  # of prefill, "" if there is none
    sparse: tuple[int, bool] | None  # absorbed tokens at once, and whether others are masked
    output: str = ""  # the format that outputs are quantised to
    query_dtype: str = ""  # "fp8" or "fp8_static": what absorbed queries are quantised to
    eight_bits: bool = False  # expanded heads are e4m3


def cache_kind(read: Sequence[PagedCache], *others: PagedCache | None) -> CacheKind:
    """`read`: what attention reads, the layer's own rows first."""
    device = read[0].data.device
    return CacheKind(
        device,
        tuple(["" if part is None else part.format for part in (*read, *others)]),
        read[0].block_size,
        alignment([part.data for part in read]) | {"queries"},
        multiprocessors(device),
        times_forgotten(),
    )


def requested(backend: Asked) -> dict[str, str]:
    """Per op, the backend that was named for it, or "auto"."""
    check_asked("plan", backend)
    return {op: named(op, backend) for op in BACKENDS}


def frozen(backend: Asked) -> FrozenAsked:
    """What was asked for, as part of a key."""
    check_asked("plan", backend)
    return backend if isinstance(backend, str) else frozenset(backend.items())


def thawed(backend: FrozenAsked) -> Asked:
    return backend if isinstance(backend, str) else dict(backend)


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


@lru_cache(maxsize=4096)
def choose(
    config: MLAConfig,
    kind: CacheKind,
    dtype: torch.dtype,
    calls: Calls,
    run_length: int,
    backend: FrozenAsked,
) -> Choice:
    """The ops of a plan and who runs them: most steps ask what an earlier one did."""
    problems = find_problems(config, kind, dtype, calls, run_length)
    ends: Mapping[str, str] = {}
    if calls.output:
        fuses = run_length == 0  # project_quantize picks tiles by the number of tokens
        ends, ending = find_ends(config, kind.device, dtype, calls, thawed(backend), fuses=fuses)
        problems = (*problems, *ending)
    problems, backends = choose_backends(problems, thawed(backend))
    apart = any(
        problem.op == "mha_ragged" and reads_apart(problem, backends[problem.op])
        for problem in problems
    )
    return Choice(problems, backends, requested(thawed(backend)), apart, ends)


def calls_of(
    decode: DecodePlan | None,
    prefill: PrefillPlan | None,
    sparse: SparsePlan | None,
    output: str | None = None,
    query_dtype: str | None = None,
    prefill_dtype: str | None = None,
) -> Calls:
    return Calls(
        None
        if decode is None
        else (bucketed(num_rows(decode.rows)), bucketed(decode.max_query_len)),
        "" if prefill is None else prefill.route,
        None if sparse is None else (bucketed(_at_once(sparse)), bool(sparse.masked)),
        output or "",
        query_dtype or "",
        prefill_dtype is not None,
    )


def _at_once(sparse: SparsePlan) -> int:
    return max((chunk.stop - chunk.start for chunk in sparse.query_chunks), default=0)


def gathering_problem(
    config: MLAConfig, kind: CacheKind, dtype: torch.dtype, tokens: int, run_length: int = 0
) -> Problem:
    """mqa_sparse over the chosen rows of so many tokens."""
    return mqa_sparse_problem(
        kind.device, dtype, kind.formats[:1], ("slots",), H=config.num_heads, D=config.latent_dim,
        C=config.kv_lora_rank, tokens=tokens, aligned=kind.aligned, run_length=run_length,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def sparse_efficiencies(
    config: MLAConfig, kind: CacheKind, queries: torch.dtype, heads: torch.dtype
) -> tuple[float, float]:
    """What prompts reach: rows gathered by absorbed queries, and all keys computed and masked, by
    kernels for what these are."""
    gathering = gathering_problem(config, kind, queries, PROMPT)
    E, V = config.qk_head_dim, config.v_head_dim
    masking = mha_masked_problem(kind.device, heads, E=E, V=V)
    gathered, masked = (efficiency(p, choose_backend(p, "auto")) for p in (gathering, masking))
    return gathered, masked


def find_problems(
    config: MLAConfig, kind: CacheKind, dtype: torch.dtype, calls: Calls, run_length: int
) -> tuple[Problem, ...]:
    """The ops this plan calls, as the backends are asked about them."""
    device, (format, index_format) = kind.device, kind.formats
    D, C, alone = config.latent_dim, config.kv_lora_rank, run_length > 0
    E, V = config.qk_head_dim, config.v_head_dim
    queries = torch.float8_e4m3fn if calls.query_dtype else dtype  # of absorbed rows
    heads = torch.float8_e4m3fn if calls.eight_bits else dtype
    rows = torch.float8_e4m3fn if calls.eight_bits and format == "fp8" else dtype
    problems = [
        latent_write_problem(device, dtype, format, D=D, E=E),
        cache_write_problem(device, dtype, format),
    ]
    if config.rope.kind != "none":
        problems.append(rope_problem(device, dtype))
    if calls.decode is not None:
        tokens, max_query_len = calls.decode
        problems.append(
            mqa_paged_problem(
                device, queries, format, H=config.num_heads, D=D, C=C, BS=kind.block_size,
                tokens=tokens, max_query_len=max_query_len, run_length=run_length,
                aligned=kind.aligned,
            )
        )  # fmt: skip
    if calls.route:
        R = 0 if calls.eight_bits else config.qk_rope_head_dim
        problems.append(mha_ragged_problem(device, heads, E=E, R=R, V=V, batch_invariant=alone))
        if calls.route != "new":
            problems.append(cache_gather_problem(device, rows, format))
        if calls.route in ("chunked", "context"):
            problems.append(merge_states_problem(device, dtype))
    if calls.eight_bits and (calls.route or (calls.sparse is not None and calls.sparse[1])):
        problems.append(quantize_heads_problem(device, dtype))
    if index_format and config.indexer is not None:
        problems.append(index_write_problem(device, dtype, index_format))
    if calls.sparse is not None:
        tokens, masked = calls.sparse
        if index_format:
            problems += scoring_problems(config, device, index_format, dtype, alone)
        if tokens:
            problems.append(map_slots_problem(device))
            problems.append(gathering_problem(config, kind, queries, tokens, run_length))
        if masked:
            problems.append(pack_mask_problem(device))
            problems.append(mha_masked_problem(device, heads, E=E, V=V, batch_invariant=alone))
            problems.append(cache_gather_problem(device, rows, format))
            problems.append(merge_states_problem(device, dtype))
    if queries != dtype and (calls.decode is not None or (calls.sparse and calls.sparse[0])):
        problems.append(quantize_queries_problem(device, dtype, D=D))
    if alone:  # else torch multiplies
        P = config.qk_nope_head_dim
        problems.append(
            project_heads_problem(
                device, dtype, eight_bits=False, block=P, K=P, N=C, batch_invariant=True
            )
        )
    return tuple({problem.op: problem for problem in problems}.values())


def find_ends(
    config: MLAConfig, device: torch.device, dtype: torch.dtype, calls: Calls, backend: Asked, *,
    fuses: bool = True,
) -> tuple[dict[str, str], list[Problem]]:  # fmt: skip
    """The op that quantises each form's outputs, by form, and these ops as backends are asked.

    Absorbed tokens end in one op with the product by w_uv, unless only the reference has it for
    these shapes on a GPU, or nothing `fuses`; a prefill that merges ends in the last merge. What
    comes out otherwise, or is gated before o_proj, is quantised by itself.
    """
    output, C, V = calls.output, config.kv_lora_rank, config.v_head_dim
    ends = dict.fromkeys(("absorbed", "expanded", "chosen", "masked"), "quantize_out")
    problems = [quantize_out_problem(device, dtype, output)]
    if config.head_gate:
        return ends, problems
    if fuses and (calls.decode is not None or (calls.sparse is not None and calls.sparse[0])):
        projecting = project_quantize_problem(
            device, dtype, output, eight_bits=False, block=C, C=C, V=V
        )
        asked = named(projecting.op, backend)
        fused = choose_backend(projecting, asked) != "reference" or device.type != "cuda"
        if fused or asked != "auto":
            ends |= dict.fromkeys(("absorbed", "chosen"), projecting.op)
            problems.append(projecting)
    if calls.route in ("chunked", "context"):
        ends["expanded"] = "merge_quantize"
        problems.append(merge_quantize_problem(device, dtype, output))
    return ends, problems


def scoring_problems(
    config: MLAConfig, device: torch.device, index_format: str, dtype: torch.dtype,
    batch_invariant: bool = False,
) -> list[Problem]:  # fmt: skip
    """The lightning indexer's scores and the choice by them."""
    assert config.indexer is not None  # make_plan looked
    HI, DI = config.indexer.num_heads, config.indexer.head_dim
    queries = get_format(index_format).query_dtype(dtype, DI)
    return [
        index_logits_problem(
            device, queries, index_format, HI=HI, DI=DI, batch_invariant=batch_invariant
        ),
        index_topk_problem(device, scores_dtype(queries)),
    ]
