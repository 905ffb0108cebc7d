"""Describes the ops that a plan calls, and chooses their backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch

from openmla.backends import (
    Problem,
    bucketed,
    choose_backend,
    efficiency,
    prefers_slots,
    preparer,
    reads_apart,
    times_forgotten,
    why_not,
)
from openmla.backends.choice import BackendChoice, backend_for, check_backend_choice
from openmla.backends.requirements import warn_of_reference
from openmla.backends.segments import alignment
from openmla.cache import LayerCache, PagedCache
from openmla.cache.format import get_format
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.hardware import multiprocessors
from openmla.ops.cache_gather import problem as cache_gather_problem
from openmla.ops.cache_write import problem as cache_write_problem
from openmla.ops.compress_kv import problem as compress_kv_problem
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
from openmla.plan.options import FrozenChoice, PlanOptions, thawed
from openmla.plan.rows import num_rows
from openmla.plan.types import Call, Expanded, Group, Keys, Select

PROMPT = 4096  # tokens: any large number


def latent_of(cache: LayerCache) -> PagedCache:
    if cache.latent is None:
        raise ConfigError(
            "plan: cache has no latent rows. Call allocate_cache() with the config of the plan."
        )
    return cache.latent


# Their kernels depend on the tokens of a call and on the alignment of a layer's rows, so each call
# chooses its backend unless one is named. The plan holds the choice for its largest call.
CHOSEN_PER_CALL = frozenset(("mqa_paged", "mqa_sparse", "project_heads", "project_quantize"))


class Choice(NamedTuple):
    """The ops of a plan, and for each form the op that quantizes its outputs, if any."""

    calls: Mapping[str, Call]
    ends: Mapping[str, str]
    preparing: tuple[Callable[[object], None], ...]  # prepare_step() of backends that have one


class CacheKind(NamedTuple):
    """Everything about the caches of a step that backends depend on. Choices are kept per value;
    `times_forgotten` says when to choose again."""

    device: torch.device
    formats: tuple[str, ...]  # "" where a part is missing
    block_size: int
    aligned: frozenset[str]
    multiprocessors: int  # the number of CPU threads can change
    times_forgotten: int


class Needs(NamedTuple):
    """What determines which ops a plan calls, and for how many tokens."""

    # of each absorbed group: its kinds of keys, tokens in a call, the most of one request, heads
    reads: tuple[tuple[tuple[str, ...], int, int, int], ...]
    routes: frozenset[str]  # of expanded groups
    scores: bool  # whether index keys are scored
    merges: bool = False  # whether results of ranks are merged with replicated keys
    output: str = ""  # the format that outputs are quantized to
    query_dtype: str = ""  # "fp8" or "fp8_static": what absorbed queries are quantized to
    prefill_dtype: str = ""  # "fp8": expanded heads are e4m3


def cache_kind(read: Sequence[PagedCache], *others: PagedCache | None) -> CacheKind:
    """`read`: the caches that attention reads, the layer's own rows first."""
    device = read[0].data.device
    return CacheKind(
        device,
        tuple(["" if part is None else part.format for part in (*read, *others)]),
        read[0].block_size,
        alignment([part.data for part in read]) | {"queries"},
        multiprocessors(device),
        times_forgotten(),
    )


def chosen(problems: Sequence[Problem], backend: BackendChoice) -> dict[str, str]:
    """The backend of each op; warn if the reference runs on a GPU because a package is missing."""
    check_backend_choice("plan", backend)
    asked = {problem.op: backend_for(problem.op, backend) for problem in problems}
    backends = {problem.op: choose_backend(problem, asked[problem.op]) for problem in problems}
    if any(name == "reference" and asked[op] == "auto" for op, name in backends.items()):
        warn_of_reference("plan", problems[0].device)
    return backends


def choose_backends(
    problems: Sequence[Problem], backend: BackendChoice
) -> tuple[tuple[Problem, ...], dict[str, str]]:
    """The backend of each op. A backend that attends to listed rows gets positions if it supports
    them and does not prefer slots, which saves the mapping."""
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
    config: MLAConfig, device: torch.device, dtype: torch.dtype, backend: BackendChoice
) -> bool:
    """Whether prefill passes keys in two parts, so that whole keys are never stored."""
    E, R, V = config.qk_head_dim, config.qk_rope_head_dim, config.v_head_dim
    problem = mha_ragged_problem(device, dtype, E=E, R=R, V=V)
    return reads_apart(problem, chosen([problem], backend)["mha_ragged"])


@lru_cache(maxsize=4096)
def choose(
    config: MLAConfig,
    kind: CacheKind,
    dtype: torch.dtype,
    needs: Needs,
    run_length: int,
    backend: FrozenChoice,
) -> Choice:
    """The ops of a plan and their backends, usually found by an earlier step."""
    problems = find_problems(config, kind, dtype, needs, run_length)
    ends: Mapping[str, str] = {}
    if needs.output:
        fuses = run_length == 0  # project_quantize picks tiles by the number of tokens
        ends, ending = find_ends(config, kind.device, dtype, needs, thawed(backend), fuses=fuses)
        problems = (*problems, *ending)
    problems, backends = choose_backends(problems, thawed(backend))
    calls = {problem.op: _call(problem, backends[problem.op], backend) for problem in problems}
    preparing = (preparer(op, call.backend) for op, call in calls.items())
    return Choice(MappingProxyType(calls), ends, tuple(each for each in preparing if each))


def _call(problem: Problem, chosen: str, backend: FrozenChoice) -> Call:
    op = problem.op
    passed = backend_for(op, thawed(backend)) if op in CHOSEN_PER_CALL else chosen
    return Call(problem, chosen, passed, reads_apart(problem, chosen))


def needs_of(
    groups: Sequence[Group],
    select: Select | None,
    config: MLAConfig,
    wide: MLAConfig,  # with the heads that attend over ranks
    options: PlanOptions,
) -> Needs:
    reads, routes, merges = [], set(), False
    found = [(group.part, group.rows, config.num_heads) for group in groups]
    for group in groups:
        if group.across is not None:
            inner = group.across.groups
            found += [(each.part, each.rows, wide.num_heads) for each in inner]
            merges = merges or group.part is not None
    for part, rows, heads in found:
        if isinstance(part, Expanded):
            routes.add(part.route)
        elif part is not None:
            tokens = max(num_rows(cut) for cut in part.cuts or (rows,))
            kinds = tuple([_kind(keys) for keys in part.reads])
            reads.append((kinds, bucketed(tokens), bucketed(part.max_query_len), heads))
    scores = select is not None and len(select.chunks) > 0
    asked = options.output or "", options.query_dtype or "", options.prefill_dtype or ""
    return Needs(tuple(reads), frozenset(routes), scores, merges, *asked)


def _kind(keys: Keys) -> str:
    """The problem of mqa_sparse. Selected entries are listed by position; for selected latent rows
    the backend decides (choose_backends)."""
    return "positions" if keys.kind == "listed" and keys.part != "latent" else keys.kind


def gathering_problem(
    config: MLAConfig, kind: CacheKind, dtype: torch.dtype, tokens: int, run_length: int = 0,
    num_heads: int | None = None,
) -> Problem:  # fmt: skip
    """The problem of mqa_sparse over the selected rows of that many tokens."""
    H = config.num_heads if num_heads is None else num_heads
    return mqa_sparse_problem(
        kind.device, dtype, kind.formats[:1], ("slots",), H=H, D=config.latent_dim,
        C=config.kv_lora_rank, tokens=tokens, aligned=kind.aligned, run_length=run_length,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def sparse_efficiencies(
    config: MLAConfig, kind: CacheKind, queries: torch.dtype, heads: torch.dtype
) -> tuple[float, float]:
    """The fraction of peak that prefill reaches on each route: absorbed queries that gather rows,
    and all keys expanded and masked."""
    gathering = gathering_problem(config, kind, queries, PROMPT)
    E, V = config.qk_head_dim, config.v_head_dim
    masking = mha_masked_problem(kind.device, heads, E=E, V=V)
    gathered, masked = (efficiency(p, choose_backend(p, "auto")) for p in (gathering, masking))
    return gathered, masked


def find_problems(
    config: MLAConfig, kind: CacheKind, dtype: torch.dtype, needs: Needs, run_length: int
) -> tuple[Problem, ...]:
    """The problems of the ops that this plan calls."""
    device, (*read, index_format) = kind.device, kind.formats
    format, alone = read[0], run_length > 0
    D, C = config.latent_dim, config.kv_lora_rank
    E, V, R = config.qk_head_dim, config.v_head_dim, config.qk_rope_head_dim
    v4, eight_bits = config.compressor is not None, bool(needs.prefill_dtype)
    queries = torch.float8_e4m3fn if needs.query_dtype else dtype  # of absorbed tokens
    heads = torch.float8_e4m3fn if eight_bits else dtype
    rows = torch.float8_e4m3fn if eight_bits and format == "fp8" else dtype
    gathering = [cache_gather_problem(device, rows, format)] if needs.routes - {"new"} else []
    merging = [merge_states_problem(device, dtype)] if needs.routes - {"new", "one-shot"} else []
    problems = [
        latent_write_problem(device, dtype, format, D=D, E=D if v4 else E),
        cache_write_problem(device, dtype, format),
    ]
    if config.rope.kind != "none":
        problems.append(rope_problem(device, dtype))
    if len(read) > 1:  # tokens are pooled into entries
        wide = torch.promote_types(dtype, torch.float32)  # the Compressor's projection
        problems.append(compress_kv_problem(device, wide, read[1], D=D, batch_invariant=alone))
    for kinds, tokens, max_query_len, H in needs.reads:
        if kinds == ("paged",):
            problems.append(
                mqa_paged_problem(
                    device, queries, format, H=H, D=D, C=C, BS=kind.block_size, tokens=tokens,
                    max_query_len=max_query_len, run_length=run_length, aligned=kind.aligned,
                )
            )  # fmt: skip
    if needs.merges:
        problems.append(merge_states_problem(device, dtype))
    if needs.routes - {"masked"}:
        shared = 0 if eight_bits else R
        problems.append(
            mha_ragged_problem(device, heads, E=E, R=shared, V=V, batch_invariant=alone)
        )
        problems += gathering + merging
    if eight_bits and needs.routes:
        problems.append(quantize_heads_problem(device, dtype))
    if index_format and not v4 and config.indexer is not None:
        problems.append(index_write_problem(device, dtype, index_format))
    if needs.scores:
        problems += scoring_problems(config, device, index_format, dtype, alone)
    for kinds, tokens, _, H in needs.reads:
        if kinds == ("listed",):
            problems.append(map_slots_problem(device))
            problems.append(gathering_problem(config, kind, queries, tokens, run_length, H))
        elif kinds != ("paged",):
            problems.append(
                mqa_sparse_problem(
                    device, queries, read, kinds, H=H, D=D, C=C, tokens=tokens,
                    aligned=kind.aligned, run_length=run_length,
                )
            )  # fmt: skip
    if "masked" in needs.routes:
        problems.append(pack_mask_problem(device))
        problems.append(mha_masked_problem(device, heads, E=E, V=V, batch_invariant=alone))
        problems += gathering + merging
    if queries != dtype and needs.reads:
        problems.append(quantize_queries_problem(device, dtype, D=D))
    if alone and not v4:  # otherwise torch multiplies
        P = config.qk_nope_head_dim
        problems.append(
            project_heads_problem(
                device, dtype, eight_bits=False, block=P, K=P, N=C, batch_invariant=True
            )
        )
    return tuple({problem.op: problem for problem in problems}.values())


def find_ends(
    config: MLAConfig, device: torch.device, dtype: torch.dtype, needs: Needs,
    backend: BackendChoice, *, fuses: bool = True,
) -> tuple[dict[str, str], list[Problem]]:  # fmt: skip
    """The op that quantizes each form's outputs, by form, and the problems of these ops.

    For absorbed tokens, one op multiplies by w_uv and quantizes, unless only the reference has it
    for these shapes on a GPU, or nothing `fuses`. A prefill with merges quantizes in the last one.
    All other outputs, and outputs that are gated before o_proj, take a quantizing op of their own.
    """
    output, C, V = needs.output, config.kv_lora_rank, config.v_head_dim
    ends = dict.fromkeys(("absorbed", "expanded", "chosen", "masked"), "quantize_out")
    problems = [quantize_out_problem(device, dtype, output)]
    if config.output_gate or config.compressor is not None:  # inverse RoPE, then quantization
        return ends, problems
    if fuses and needs.reads:
        projecting = project_quantize_problem(
            device, dtype, output, eight_bits=False, block=C, C=C, V=V
        )
        asked = backend_for(projecting.op, backend)
        fused = choose_backend(projecting, asked) != "reference" or device.type != "cuda"
        if fused or asked != "auto":
            ends |= dict.fromkeys(("absorbed", "chosen"), projecting.op)
            problems.append(projecting)
    if needs.routes & {"chunked", "context"}:
        ends["expanded"] = "merge_quantize"
        problems.append(merge_quantize_problem(device, dtype, output))
    return ends, problems


def scoring_problems(
    config: MLAConfig, device: torch.device, index_format: str, dtype: torch.dtype,
    batch_invariant: bool = False,
) -> list[Problem]:  # fmt: skip
    """The problems of the lightning indexer's scores and of the top-k selection."""
    assert config.indexer is not None  # make_plan() checked it
    HI, DI = config.indexer.num_heads, config.indexer.head_dim
    queries = get_format(index_format).query_dtype(dtype, DI)
    return [
        index_logits_problem(
            device, queries, index_format, HI=HI, DI=DI, batch_invariant=batch_invariant
        ),
        index_topk_problem(device, scores_dtype(queries)),
    ]
