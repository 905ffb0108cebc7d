"""Quantized outputs: the op that the plan names quantizes the output of each group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.attention.absorbed import attend_cut, own_queries
from openmla.attention.expanded import attend_expanded, merge_rows, part_of
from openmla.attention.types import Step
from openmla.errors import ConfigError, ShapeError
from openmla.ops import merge_quantize, project_quantize, quantize_out
from openmla.outputs import (
    QuantizedOutput,
    check_alignment,
    check_output,
    check_output_shapes,
    check_scale_value,
)
from openmla.plan import Absorbed, Expanded, Group, KeyChunk, Plan
from openmla.plan.types import Rows


def check_quantized(out: QuantizedOutput, q: Tensor, plan: Plan) -> None:
    """Raise unless the buffers fit the plan, before anything is written."""
    if out.format != plan.output:
        raise ConfigError(
            f"step: out must have the output format of the plan, {plan.output!r}, got "
            f"{out.format!r}. Call make_plan(output={out.format!r}), or make_output() in the "
            "plan's format."
        )
    columns = plan.config.num_heads * plan.config.v_head_dim
    traced = type(out.values) is not Tensor or torch.compiler.is_compiling()
    T = (check_output_shapes if traced else check_output)("step", out, columns)
    if plan.num_tokens != T:
        raise ShapeError(f"step: out must have T={plan.num_tokens} rows, got {T}.")
    if out.values.device != q.device:
        raise ShapeError(f"step: out must be on {q.device}, got {out.values.device}.")
    if not traced:  # traced tensors have no addresses
        check_alignment("step", out.values, out.scales)
        check_scale_value("step", out.global_scale)


def attend_into(out: QuantizedOutput, step: Step, group: Group) -> None:
    """Write a group's tokens to their rows of the buffers, with an op that fuses quantization."""
    if isinstance(group.part, Absorbed):
        _project_into(out, step, group, group.part)
    elif group.part is not None:
        _merge_into(out, step, group, group.part)


def _project_into(out: QuantizedOutput, step: Step, group: Group, part: Absorbed) -> None:
    """Project out of latent space and into the buffers, cut by cut."""
    assert step.weights is not None
    own = own_queries(step, group)
    for number in range(max(len(part.cuts), 1)):
        cut = part.cuts[number] if len(part.cuts) > 1 else None
        out_latent, _ = attend_cut(step, part, own, number)
        project_quantize(
            out.values,
            out.scales,
            out_latent,
            step.weights.w_uv,
            step.weights.uv_scale,
            out.global_scale,
            **target(group.rows, cut),
            format=out.format,
            backend=step.plan.backend("project_quantize"),
        )


def _merge_into(out: QuantizedOutput, step: Step, group: Group, part: Expanded) -> None:
    """Merge rows that end in a chunk into the buffers, and other rows with merge_states."""
    plan = step.plan

    def merge(some: Tensor, lse: Tensor, one: tuple[Tensor, Tensor], chunk: KeyChunk) -> None:
        all_rows = chunk.asks[0].rows
        if chunk.continued is not None:
            merge_rows(some, lse, one, chunk.continued, all_rows, plan)
        if chunk.ended is not None:
            ended = chunk.ended
            merge_quantize(
                out.values,
                out.scales,
                some[ended],
                lse[ended],
                *part_of(one, ended, all_rows),
                out.global_scale,
                **target(group.rows, ended),
                format=out.format,
                backend=plan.backend("merge_quantize"),
            )

    some, _ = attend_expanded(step, group, merge)
    for rows in part.alone:
        quantize_into(out, some[rows], plan, target(group.rows, rows))


def target(rows: Rows, part: slice | None = None) -> dict[str, Any]:
    """Return the op arguments for the output rows of a group's tokens, or of a part of them."""
    if isinstance(rows, slice):
        return {"first_row": rows.start + (0 if part is None else part.start)}
    return {"rows": rows if part is None else rows[part]}


def quantize_into(out: QuantizedOutput, some: Tensor, plan: Plan, where: dict[str, Any]) -> None:
    """Quantize finished outputs [n, H, V] into the buffers."""
    quantize_out(
        out.values,
        out.scales,
        some,
        out.global_scale,
        **where,
        format=out.format,
        backend=plan.backend("quantize_out"),
    )


def quantize_padding(out: QuantizedOutput, q: Tensor, plan: Plan) -> None:
    """Fill padding tokens, the last of the plan, with quantized zeros."""
    H, V = plan.config.num_heads, plan.config.v_head_dim
    zeros = q.new_zeros((1, H, V)).expand(plan.padding, H, V)
    quantize_into(out, zeros, plan, {"first_row": plan.num_tokens - plan.padding})
