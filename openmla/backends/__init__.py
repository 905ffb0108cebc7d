"""Table of the backends that implement each op, best first, and backend selection."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from openmla.backends.requirements import explain_failure, missing
from openmla.errors import ConfigError, OpenMLAError, UnsupportedError
from openmla.hardware import capability

BACKENDS: dict[str, tuple[str, ...]] = {
    "cache_gather": ("triton", "reference"),
    "cache_write": ("triton", "reference"),
    "compress_kv": ("triton", "reference"),
    "index_logits": ("triton", "reference"),
    "index_logits_ragged": ("triton", "reference"),
    "index_select": ("triton", "reference"),
    "index_topk": ("triton", "reference"),
    "index_write": ("triton", "reference"),
    "latent_write": ("triton", "reference"),
    "map_slots": ("triton", "reference"),
    "merge_quantize": ("triton", "reference"),
    "merge_states": ("triton", "reference"),
    "mha_masked": ("triton", "reference"),
    "mha_ragged": ("gluon", "sdpa", "triton", "reference"),
    "mqa_paged": ("sdpa", "gluon", "triton", "reference"),
    "mqa_sparse": ("flashmla", "gluon", "triton", "reference"),
    "pack_mask": ("triton", "reference"),
    "quantize_heads": ("triton", "reference"),
    "quantize_out": ("triton", "reference"),
    "quantize_queries": ("triton", "reference"),
    "project_heads": ("triton", "reference"),
    "project_quantize": ("triton", "reference"),
    "rope": ("triton", "reference"),
}


# Implementations added by register_backend().
OTHERS: dict[tuple[str, str], Any] = {}

# Checked before import, so that other devices do not load the hundred megabytes of a backend.
RUNS_ON = {"gluon": "cuda", "triton": "cuda"}


# What is 16-byte aligned: queries; cache pages; cache rows, contiguous across pages and indexable
# in 32 bits. "tight": no gaps between the rows of a page.
ALIGNED = frozenset(("queries", "pages", "rows", "tight"))


@dataclass(frozen=True)
class Problem:
    """The properties that decide whether a backend can run an op. Equal problems get equal answers.

    For letters see docs/mla.md; a dimension that the op does not have is 0. E is the width of an
    expanded query or key head, P + R.
    """

    op: str
    device: str = "cpu"
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    dtype: torch.dtype = torch.float32
    format: str = ""
    H: int = 0
    D: int = 0
    C: int = 0
    E: int = 0
    R: int = 0  # shared key columns that are passed as a separate tensor
    V: int = 0
    BS: int = 0
    tokens: int = 0  # as returned by bucketed()
    max_query_len: int = 0  # maximum tokens of a request
    kinds: tuple[str, ...] = ()  # kinds of the segments
    aligned: frozenset[str] = ALIGNED
    head_scales: bool = False  # e4m3 queries: one scale per token and head, not one for all
    run_length: int = 0  # rows per run if fixed by the caller; 0: the backend decides
    # for ops without runs: the bits of a row must not depend on the rest of the batch
    batch_invariant: bool = False


def problem_on(device: torch.device, op: str, **fields: Any) -> Problem:
    """Make a problem for a device of this machine. `fields`: fields of Problem."""
    return Problem(op, device.type, capability(device), **fields)


def bucketed(tokens: int) -> int:
    """Return a token count for a Problem: exact in the range where kernels differ, then rounded up
    to a power of two to limit the number of distinct problems."""
    return tokens if tokens <= 1024 else 1 << (tokens - 1).bit_length()


def all_backends() -> tuple[str, ...]:
    """Return all backends of the table, in order of first occurrence, with the reference last."""
    names = dict.fromkeys(name for row in BACKENDS.values() for name in row)
    return (*(name for name in names if name != "reference"), "reference")


def load(op: str, backend: str) -> Any:
    """Return the implementation module of an op, imported at first use."""
    if (op, backend) in OTHERS:
        return OTHERS[op, backend]
    return import_module(f"openmla.backends.{backend}.{op}")


def runner(problem: Problem, backend: str) -> Any:
    """Return what runs a problem: an implementation module, or one of its kernels if it has
    several. Both have run()."""
    module = load(problem.op, choose_backend(problem, backend))
    kernel_for: Callable[[Problem], Any] | None = getattr(module, "kernel_for", None)
    return module if kernel_for is None else kernel_for(problem)


def is_replayed(problem: Problem, backend: str) -> bool:
    """Whether calls are recorded and replayed (replay.py): on GPUs, for backends whose launches all
    report themselves."""
    ours = tuple(f"{__name__}.{name}." for name in ("gluon", "triton"))
    name = getattr(load(problem.op, backend), "__name__", "")
    return problem.device == "cuda" and name.startswith(ours)


def launches(op: str, backend: str) -> int | None:
    """Return the maximum number of kernels that one op call launches; None if torch decides."""
    found: int | None = getattr(load(op, backend), "LAUNCHES", None)
    return found


def why_not(problem: Problem, backend: str) -> str | None:
    """Return why a backend cannot run a problem, or None if it can."""
    if backend not in BACKENDS[problem.op]:
        return f"has no {problem.op}"
    if RUNS_ON.get(backend, problem.device) != problem.device and not _interpreted():
        return f"runs on {RUNS_ON[backend]}, this is {problem.device}"
    reason: str | None = missing(backend)
    if reason is not None:
        return reason
    try:
        reason = _asked(problem, backend, "why_not", None)
    except Exception as error:
        explain_failure(problem.op, error)
        raise
    if reason is not None and not isinstance(reason, str):
        raise ConfigError(
            f"{problem.op}: why_not() of backend {backend!r} must return a sentence or None, got "
            f"{reason!r}."
        )
    return reason


def _asked(problem: Problem, backend: str, name: str, default: Any) -> Any:
    """Call a backend's function of this name on a problem, or return the default if it has none."""
    rule: Callable[[Problem], Any] | None = getattr(load(problem.op, backend), name, None)
    if rule is None:
        return default
    try:
        return rule(problem)
    except Exception as error:
        if (problem.op, backend) not in OTHERS or isinstance(error, OpenMLAError):
            raise
        raise ConfigError(
            f"{problem.op}: {name}() of backend {backend!r} raised {type(error).__name__}: "
            f"{error}. Fix it, or call "
            f"unregister_backend({problem.op!r}, {backend!r})."
        ) from error


def slower(problem: Problem, backend: str) -> str | None:
    """Return the measured reason why another backend is faster for a problem, or None."""
    reason: str | None = _asked(problem, backend, "slower", None)
    return reason


def kernel_of(problem: Problem, backend: str) -> str:
    """Return the kernel that a backend runs a problem with; "" if it has only one."""
    named: str = _asked(problem, backend, "kernel_of", "")
    return named


def efficiency(problem: Problem, backend: str) -> float:
    """Return the fraction of peak matmul throughput that a backend reaches on long inputs."""
    found: float = _asked(problem, backend, "efficiency", 1.0)
    return found


def prefers_slots(problem: Problem, backend: str) -> bool:
    """Whether a backend that accepts positions is faster with slots, despite the mapping launch."""
    found: bool = _asked(problem, backend, "prefers_slots", False)
    return found


def reads_apart(problem: Problem, backend: str) -> bool:
    """Whether a backend reads the shared key columns separately, without a copy of whole keys."""
    found: bool = problem.R > 0 and _asked(problem, backend, "reads_apart", False)
    return found


def preparer(op: str, backend: str) -> Callable[[Any], None] | None:
    """Return the backend's prepare_step, if any. Its exceptions name the op and backend."""
    prepare: Callable[[Any], None] | None = getattr(load(op, backend), "prepare_step", None)
    if prepare is None:
        return None

    def prepared(plan: Any) -> None:
        try:
            prepare(plan)
        except Exception as error:
            if isinstance(error, OpenMLAError):
                raise
            raise ConfigError(
                f"{op}: prepare_step() of backend {backend!r} raised "
                f"{type(error).__name__}: {error}. Fix it, or call "
                f"unregister_backend({op!r}, {backend!r})."
            ) from error

    return prepared


def _interpreted() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on CPU tensors."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def choose_backend(problem: Problem, backend: str = "auto") -> str:
    """Return the backend that runs a problem: the named one, or with "auto" the first that can and
    is not slower than another, else the first that can.

    There is no fallback: a named backend that cannot run the problem raises UnsupportedError.
    """
    return _choose(problem, backend, BACKENDS[problem.op])


# Cached decisions of op calls, keyed by all that they depend on.
_decisions: dict[Any, Any] = {}


def decisions() -> dict[Any, Any]:
    """Return the valid decisions. Get the dictionary before making a decision and store it there,
    because decisions may be forgotten meanwhile."""
    return _decisions


_times_forgotten = 0


def forget_choices() -> None:
    """Clear cached choices, because the backends have changed."""
    global _decisions, _times_forgotten
    _times_forgotten += 1
    _choose.cache_clear()
    _decisions = {}


def times_forgotten() -> int:
    """Return a counter for the keys of caches that depend on choices. It changes when choices are
    forgotten, so a result computed meanwhile is not reused."""
    return _times_forgotten


@lru_cache(maxsize=4096)
def _choose(problem: Problem, backend: str, row: tuple[str, ...]) -> str:
    """Choose a backend from a row of the table. The row is part of the cache key, so a result
    computed while the table changes is cached for its own row."""
    if backend != "auto" and backend not in all_backends():
        raise ConfigError(
            f"{problem.op}: backend {backend!r} is not known. "
            f"Known: auto, {', '.join(all_backends())}."
        )
    reasons, able = {}, []
    for name in row if backend == "auto" else (backend,):
        reason = why_not(problem, name)
        if reason is not None:
            reasons[name] = reason
        elif backend != "auto" or slower(problem, name) is None:
            return name
        else:
            able.append(name)
    if able:
        return able[0]
    others = {name: why_not(problem, name) or "can" for name in row}
    lines = [f"  {name:<10} {reason}" for name, reason in {**reasons, **others}.items()]
    what = "no backend can run" if backend == "auto" else f"backend {backend!r} cannot run"
    raise UnsupportedError(f"{problem.op}: {what} this problem:\n" + "\n".join(lines))
