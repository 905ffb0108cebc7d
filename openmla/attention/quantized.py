"""The end of a step whose outputs are quantised: each form's by the op that the plan names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.attention.absorbed import (
    absorbed_latent,
    attend_absorbed,
    attend_chosen,
    chosen_latent,
)
from openmla.attention.expanded import attend_expanded, merge_rows, part_of
from openmla.attention.masked import attend_masked
from openmla.attention.types import AbsorbedWeights, Projected, Selection
from openmla.cache import PagedCache
from openmla.errors import ConfigError, ShapeError
from openmla.ops import merge_quantize, project_quantize, quantize_out
from openmla.outputs import (
    QuantizedOutput,
    check_alignment,
    check_output,
    check_output_shapes,
    check_scale_value,
)
from openmla.plan import ContextChunk, DecodePlan, Plan, PrefillPlan, SparsePlan
from openmla.plan.types import Rows


def check_quantized(out: QuantizedOutput, q: Tensor, plan: Plan) -> None:
    """Buffers are those of the plan; looked at before anything is written."""
    if out.format != plan.output:
        raise ConfigError(
            f"step: out must be in the format that the plan was made for, output={plan.output!r}, "
            f"got {out.format!r}."
        )
    columns = plan.config.num_heads * plan.config.v_head_dim
    traced = type(out.values) is not Tensor or torch.compiler.is_compiling()
    T = (check_output_shapes if traced else check_output)("step", out, columns)
    if plan.num_tokens != T:
        raise ShapeError(f"step: out must have T={plan.num_tokens} rows, got {T}.")
    if out.values.device != q.device:
        raise ShapeError(f"step: out must be on {q.device}, got {out.values.device}.")
    if not traced:  # or they have no addresses
        check_alignment("step", out.values, out.scales)
        check_scale_value("step", out.global_scale)


def attend_quantized(
    out: QuantizedOutput,
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    selection: Selection | None,
) -> None:
    """Each form's tokens into their rows of the buffers, padding too."""
    if plan.decode is not None:
        _decode(out, projected, absorbed, latent, plan, plan.decode)
    if plan.prefill is not None:
        _prefill(out, projected, absorbed, latent, plan, plan.prefill)
    if plan.sparse is not None:
        assert selection is not None
        _sparse(out, projected, absorbed, latent, plan, plan.sparse, selection)
    if plan.padding:
        end_padding(out, projected.q_nope, plan)


def _decode(
    out: QuantizedOutput,
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    decode: DecodePlan,
) -> None:
    if plan.ends["absorbed"] == "project_quantize":
        out_latent, _ = absorbed_latent(projected, absorbed, latent, plan, decode)
        _end_absorbed(out, out_latent, absorbed, plan, target(decode.rows))
    else:
        some, _ = attend_absorbed(projected, absorbed, latent, plan, decode)
        end_plainly(out, some, plan, target(decode.rows))


def _prefill(
    out: QuantizedOutput,
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    prefill: PrefillPlan,
) -> None:
    """Rows whose last chunk this is are merged into the buffers, others as ever."""
    if plan.ends["expanded"] != "merge_quantize":
        some, _ = attend_expanded(projected, absorbed, latent, plan, prefill)
        end_plainly(out, some, plan, target(prefill.rows))
        return

    def merge(some: Tensor, lse: Tensor, part: tuple[Tensor, Tensor], chunk: ContextChunk) -> None:
        if chunk.continued is not None:
            merge_rows(some, lse, part, chunk.continued, chunk.rows, plan)
        ended = chunk.ended
        if ended is not None:
            sides = some[ended], lse[ended], *part_of(part, ended, chunk.rows)
            _end_merged(out, sides, plan, target(prefill.rows, ended))

    some, _ = attend_expanded(projected, absorbed, latent, plan, prefill, merge)
    for rows in prefill.alone:
        end_plainly(out, some[rows], plan, target(prefill.rows, rows))


def _sparse(
    out: QuantizedOutput,
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    sparse: SparsePlan,
    selection: Selection,
) -> None:
    """Absorbed rows first, then masked ones, as the plan packed them."""
    q_nope, q_pe = projected.q_nope[sparse.rows], projected.q_pe[sparse.rows]
    n = sparse.num_absorbed
    if n and plan.ends["chosen"] == "project_quantize":
        for number, chunk in enumerate(sparse.query_chunks):
            out_latent, _ = chosen_latent(
                q_nope[:n], q_pe[:n], absorbed, latent, plan, sparse, selection, number
            )
            _end_absorbed(out, out_latent, absorbed, plan, target(sparse.rows, chunk))
    elif n:
        some, _ = attend_chosen(q_nope[:n], q_pe[:n], absorbed, latent, plan, sparse, selection)
        end_plainly(out, some, plan, target(sparse.rows, slice(0, n)))
    if sparse.masked:
        q = torch.cat([q_nope[n:], q_pe[n:]], dim=-1)
        some, _ = attend_masked(q, projected, absorbed, latent, plan, sparse, selection)
        end_plainly(out, some, plan, target(sparse.rows, slice(n, sparse.num_rows)))


def target(rows: Rows, part: slice | None = None) -> dict[str, Any]:
    """Where a form's packed tokens go, or a part of them, as the ops are told."""
    if isinstance(rows, slice):
        return {"first_row": rows.start + (0 if part is None else part.start)}
    return {"rows": rows if part is None else rows[part]}


def _end_absorbed(
    out: QuantizedOutput,
    out_latent: Tensor,  # [n, H, C]
    absorbed: AbsorbedWeights,
    plan: Plan,
    where: dict[str, Any],
) -> None:
    """Out of latent space and into the buffers."""
    project_quantize(
        out.values,
        out.scales,
        out_latent,
        absorbed.w_uv,
        absorbed.uv_scale,
        out.global_scale,
        **where,
        format=out.format,
        backend=plan.called_with("project_quantize"),
    )


def _end_merged(
    out: QuantizedOutput,
    sides: tuple[Tensor, Tensor, Tensor, Tensor],
    plan: Plan,
    where: dict[str, Any],
) -> None:
    """The last merge of some tokens."""
    merge_quantize(
        out.values,
        out.scales,
        *sides,
        out.global_scale,
        **where,
        format=out.format,
        backend=plan.backends["merge_quantize"],
    )


def end_plainly(out: QuantizedOutput, some: Tensor, plan: Plan, where: dict[str, Any]) -> None:
    """Outputs [n, H, V] that are finished."""
    quantize_out(
        out.values,
        out.scales,
        some,
        out.global_scale,
        **where,
        format=out.format,
        backend=plan.backends["quantize_out"],
    )


def end_padding(out: QuantizedOutput, q: Tensor, plan: Plan) -> None:
    """Tokens of no request, the plan's last: what 0 is in this format."""
    H, V = plan.config.num_heads, plan.config.v_head_dim
    zeros = q.new_zeros((1, H, V)).expand(plan.padding, H, V)
    end_plainly(out, zeros, plan, {"first_row": plan.num_tokens - plan.padding})
