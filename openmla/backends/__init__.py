"""Which backends implement which op, best first, and how one is chosen: a table and a walk."""

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
    "mqa_paged": ("sdpa", "flashmla", "gluon", "triton", "reference"),
    "mqa_sparse": ("flashmla", "gluon", "triton", "reference"),
    "pack_mask": ("triton", "reference"),
    "quantize_heads": ("triton", "reference"),
    "quantize_out": ("triton", "reference"),
    "quantize_queries": ("triton", "reference"),
    "project_heads": ("triton", "reference"),
    "project_quantize": ("triton", "reference"),
    "rope": ("triton", "reference"),
}


# Implementations of others that joined the table: register_backend().
OTHERS: dict[tuple[str, str], Any] = {}

# Checked before import, so that other devices never load a backend's hundred megabytes.
RUNS_ON = {"gluon": "cuda", "triton": "cuda"}


# What is 16-byte aligned: queries; cache pages; cache rows, contiguous across pages and indexable
# in 32 bits. "tight": nothing is between the rows of a page.
ALIGNED = frozenset(("queries", "pages", "rows", "tight"))


@dataclass(frozen=True)
class Problem:
    """What decides whether a backend can run an op; the same problem gives the same answer.

    Letters are the alphabet's; 0 where a dimension does not belong to the op. E is the width of
    an expanded query or key head, P + R.
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
    R: int = 0  # of the keys' columns, those that all heads share and that come by themselves
    V: int = 0
    BS: int = 0
    tokens: int = 0  # as bucketed() has it
    max_query_len: int = 0  # tokens of a request, at most
    kinds: tuple[str, ...] = ()  # of the segments
    aligned: frozenset[str] = ALIGNED
    head_scales: bool = False  # of e4m3 queries: one per token and head, not one for all
    run_length: int = 0  # rows per run where the caller fixes it; 0: the backend decides
    # of ops without runs: a row's bits must not depend on what else is in the call
    batch_invariant: bool = False


def problem_on(device: torch.device, op: str, **fields: Any) -> Problem:
    """A problem on a device of this machine; `fields` are Problem's."""
    return Problem(op, device.type, capability(device), **fields)


def bucketed(tokens: int) -> int:
    """A token count as problems carry it: exact where kernels differ by it, then rounded up to a
    power of two, so that distinct problems stay few."""
    return tokens if tokens <= 1024 else 1 << (tokens - 1).bit_length()


def all_backends() -> tuple[str, ...]:
    """Every backend named in the table, in order of first mention, the reference last."""
    names = dict.fromkeys(name for row in BACKENDS.values() for name in row)
    return (*(name for name in names if name != "reference"), "reference")


def load(op: str, backend: str) -> Any:
    """The implementation file of an op; it is imported when first asked for."""
    if (op, backend) in OTHERS:
        return OTHERS[op, backend]
    return import_module(f"openmla.backends.{backend}.{op}")


def runner(problem: Problem, backend: str) -> Any:
    """What runs a problem: an implementation file, or where that has several kernels one of them;
    both have run()."""
    module = load(problem.op, choose_backend(problem, backend))
    kernel_for: Callable[[Problem], Any] | None = getattr(module, "kernel_for", None)
    return module if kernel_for is None else kernel_for(problem)


def is_replayed(problem: Problem, backend: str) -> bool:
    """Whether calls are watched and repeated (replay.py): on GPUs, of those backends that launch
    nothing but what reports itself."""
    ours = tuple(f"{__name__}.{name}." for name in ("gluon", "triton"))
    name = getattr(load(problem.op, backend), "__name__", "")
    return problem.device == "cuda" and name.startswith(ours)


def launches(op: str, backend: str) -> int | None:
    """Most kernels one call of an op launches; None where torch decides."""
    found: int | None = getattr(load(op, backend), "LAUNCHES", None)
    return found


def why_not(problem: Problem, backend: str) -> str | None:
    """Why a backend cannot run a problem, or None if it can."""
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
    """What a backend's function of this name says of a problem; the default where it has none."""
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
    """Why another backend is faster where both can run a problem, as measured; None if none is."""
    reason: str | None = _asked(problem, backend, "slower", None)
    return reason


def kernel_of(problem: Problem, backend: str) -> str:
    """The kernel that a backend runs a problem with; "" where it has one."""
    named: str = _asked(problem, backend, "kernel_of", "")
    return named


def efficiency(problem: Problem, backend: str) -> float:
    """The fraction of peak matmul throughput that a backend reaches on long inputs."""
    found: float = _asked(problem, backend, "efficiency", 1.0)
    return found


def prefers_slots(problem: Problem, backend: str) -> bool:
    """Whether a backend that takes positions is better off with slots, mapped by a launch."""
    found: bool = _asked(problem, backend, "prefers_slots", False)
    return found


def reads_apart(problem: Problem, backend: str) -> bool:
    """Whether a backend reads the shared columns of keys by themselves, without a copy of all."""
    found: bool = problem.R > 0 and _asked(problem, backend, "reads_apart", False)
    return found


def preparer(op: str, backend: str) -> Callable[[Any], None] | None:
    """The backend's prepare_step, if it has one. An exception in it names the op and backend."""
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
    """The backend that runs a problem: the named one, or with "auto" the first that can and is not
    slower than another, else the first that can.

    Nothing falls back: a named backend that cannot run the problem raises UnsupportedError.
    """
    return _choose(problem, backend, BACKENDS[problem.op])


# What was decided about calls, by everything that decides it; who runs an op keeps it here.
_decisions: dict[Any, Any] = {}


def decisions() -> dict[Any, Any]:
    """Those that still hold. One that was begun before they were forgotten belongs into the
    dictionary it was begun with."""
    return _decisions


_times_forgotten = 0


def forget_choices() -> None:
    """Ask again at the next call: what backends can do has changed."""
    global _decisions, _times_forgotten
    _times_forgotten += 1
    _choose.cache_clear()
    _decisions = {}


def times_forgotten() -> int:
    """Part of the key of whatever is kept because choices were: it is another one afterwards, also
    for an answer that was on its way."""
    return _times_forgotten


@lru_cache(maxsize=4096)
def _choose(problem: Problem, backend: str, row: tuple[str, ...]) -> str:
    """choose_backend by a row of the table: an answer that comes when the row is another already is
    kept for the row it is of."""
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
