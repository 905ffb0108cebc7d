"""Plan and its parts: what a step will do, complete when made and then frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from openmla.backends import BACKENDS, Problem, why_not
from openmla.config import MLAConfig
from openmla.plan.workspace import Workspace

Rows = slice | Tensor  # of the step's tokens: a slice, or indices [n] i64


@dataclass(frozen=True)
class DecodePlan:
    """Requests in absorbed form, packed: arguments of one mqa_paged call."""

    rows: Rows
    block_table: Tensor  # [B, M] i32
    seq_lens: Tensor  # [B] i32
    query_start_loc: Tensor  # [B+1] i32
    split_starts: Tensor  # [B, X+1] i32
    max_query_len: int


@dataclass(frozen=True)
class ContextChunk:
    """Context rows that fit the workspace, and the neighbouring requests that attend to them."""

    rows: slice  # of the packed prefill rows
    query_start_loc: Tensor  # [B+1] i32
    max_query_len: int
    block_table: Tensor  # [B, M] i32
    starts: Tensor  # [B] i32
    key_start_loc: Tensor  # [B+1] i32
    max_key_len: int
    num_keys: int


@dataclass(frozen=True)
class PrefillPlan:
    """Requests in expanded form, packed.

    `route` is "new" (nobody has context), "one-shot" (context and new rows fit the workspace: one
    causal call over `whole`, whose rows `new_rows` are this step's) or "chunked" (the new rows
    causally, then each chunk, merged).
    """

    rows: Rows
    route: str
    query_start_loc: Tensor  # [B+1] i32
    max_query_len: int
    whole: ContextChunk | None = None
    new_rows: Tensor | None = None  # [T] i64
    chunks: tuple[ContextChunk, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One step, complete when made. Integers change only when a launch shape does."""

    config: MLAConfig
    num_tokens: int
    slot_mapping: Tensor  # [T] i64
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    backends: Mapping[str, str]
    problems: tuple[Problem, ...]
    workspace: Workspace | None = None
    long_context: Tensor | None = None  # [T] i64: 1 where longrope takes its long factors

    def explain(self) -> str:
        """What runs where, and why not something better: one line per op."""
        lines = []
        if self.decode is not None:
            B, X = self.decode.split_starts.shape
            lines.append(
                f"absorbed  {B} requests, up to {self.decode.max_query_len} queries each, "
                f"keys in up to {X - 1} runs"
            )
        if self.prefill is not None:
            chunks = f", {len(self.prefill.chunks)} context chunks" if self.prefill.chunks else ""
            lines.append(
                f"expanded  {self.prefill.query_start_loc.shape[0] - 1} requests, "
                f"up to {self.prefill.max_query_len} queries each, {self.prefill.route}{chunks}"
            )
        for problem in self.problems:
            chosen = self.backends[problem.op]
            better = BACKENDS[problem.op][: BACKENDS[problem.op].index(chosen)]
            lost = "; ".join(f"not {name}: {why_not(problem, name)}" for name in better)
            lines.append(f"{problem.op:<12} {chosen}" + (f" ({lost})" if lost else ""))
        return "\n".join(lines)
