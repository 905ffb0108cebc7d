"""Absorbed form: attention in latent space, straight from the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.types import AbsorbedWeights, Projected, Selection, rows_of
from openmla.cache import PagedCache
from openmla.ops import Segment, mqa_paged, mqa_sparse, project_heads, quantize_queries
from openmla.plan import DecodePlan, Plan, SparsePlan

# Of no more tokens, torch's CPU bmm in bf16 is faster with w_uv on the left, its rows contiguous:
# 0.24 instead of 1.07 ms for one, 0.27 instead of 1.16 for 8, but 2.3 instead of 1.7 for 64 (16
# heads, 512 to 128 columns, one thread).
FEW_TOKENS = 16


def attend_absorbed(
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    decode: DecodePlan,
    out: Tensor | None = None,  # [n, H, V]
) -> tuple[Tensor, Tensor]:  # out [n, H, V] and lse [n, H] of the rows of decode.rows
    """Queries into latent space, one mqa_paged, outputs out of it; into `out` if it is given."""
    out_latent, lse = absorbed_latent(projected, absorbed, latent, plan, decode)
    backend, fixed = plan.called_with("project_heads"), plan.batch_invariant
    return out_of_latent(out_latent, absorbed, backend, fixed=fixed, out=out), lse


def absorbed_latent(
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    decode: DecodePlan,
) -> tuple[Tensor, Tensor]:  # out_latent [n, H, C], lse [n, H]
    """The same without the last step."""
    q_nope, q_pe = rows_of(projected.q_nope, decode.rows), rows_of(projected.q_pe, decode.rows)
    q_latent, q_scale = latent_queries(q_nope, q_pe, absorbed, latent, plan)
    out_latent, lse = read_all(q_latent, latent, plan, decode, q_scale)
    return out_latent.to(q_nope.dtype), lse


def read_all(
    q_latent: Tensor,  # [n, H, D]
    latent: PagedCache,
    plan: Plan,
    decode: DecodePlan,
    q_scale: Tensor | None = None,  # [n, H], of e4m3 queries
) -> tuple[Tensor, Tensor]:  # out_latent [n, H, C], lse [n, H]
    """Requests that attend to all their keys."""
    return mqa_paged(
        q_latent,
        latent.data,
        latent.kv_scale,
        decode.block_table,
        decode.seq_lens,
        decode.query_start_loc,
        q_scale,
        format=latent.format,
        C=plan.config.kv_lora_rank,
        scale=plan.config.scale,
        causal=plan.causal,
        max_query_len=decode.max_query_len,
        run_length=plan.run_length,
        backend=plan.called_with("mqa_paged"),
    )


def attend_chosen(
    q_nope: Tensor,  # [n, H, P], the first num_absorbed sparse rows
    q_pe: Tensor,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    sparse: SparsePlan,
    selection: Selection,
    out: Tensor | None = None,  # [n, H, V]
) -> tuple[Tensor, Tensor]:  # out [n, H, V], lse [n, H]
    """The same over each token's own rows, a chunk of queries at a time."""
    backend, fixed = plan.called_with("project_heads"), plan.batch_invariant
    step = q_nope, q_pe, absorbed, latent, plan, sparse, selection
    if len(sparse.query_chunks) == 1:
        out_latent, lse = chosen_latent(*step, 0)
        return out_of_latent(out_latent, absorbed, backend, fixed=fixed, out=out), lse
    if out is None:
        shape = (sparse.num_absorbed, plan.config.num_heads, plan.config.v_head_dim)
        out = q_nope.new_empty(shape)
    lse = q_nope.new_empty(out.shape[:2], dtype=torch.promote_types(out.dtype, torch.float32))
    for number, chunk in enumerate(sparse.query_chunks):
        out_latent, lse[chunk] = chosen_latent(*step, number)
        room = out[chunk]
        some = out_of_latent(out_latent, absorbed, backend, fixed=fixed, out=room)
        if some is not room:
            room.copy_(some)
    return out, lse


def chosen_latent(
    q_nope: Tensor,  # [n, H, P], the first num_absorbed sparse rows
    q_pe: Tensor,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    sparse: SparsePlan,
    selection: Selection,
    number: int,  # of sparse.query_chunks
) -> tuple[Tensor, Tensor]:  # out_latent [n, H, C], lse [n, H] of the chunk
    """One chunk, without the last step."""
    chunk = sparse.query_chunks[number]
    q_latent, q_scale = latent_queries(q_nope[chunk], q_pe[chunk], absorbed, latent, plan)
    out_latent, lse = read_chosen(q_latent, latent, plan, sparse, selection, number, q_scale)
    return out_latent.to(q_nope.dtype), lse


def read_chosen(
    q_latent: Tensor,  # [n, H, D], the rows of a chunk
    latent: PagedCache,
    plan: Plan,
    sparse: SparsePlan,
    selection: Selection,
    number: int,  # of sparse.query_chunks
    q_scale: Tensor | None = None,  # [n, H], of e4m3 queries
) -> tuple[Tensor, Tensor]:  # out_latent [n, H, C], lse [n, H]
    """Tokens that attend to what was chosen for them."""
    chunk = sparse.query_chunks[number]
    return mqa_sparse(
        q_latent,
        sparse.query_chunk_start_locs[number],
        sparse.positions[chunk],
        Segment(
            latent.data,
            latent.kv_scale,
            latent.format,
            "slots" if plan.mapped else "positions",
            block_table=None if plan.mapped else sparse.block_table,
            rows=selection.rows[chunk],
            row_lens=selection.lens[chunk],
        ),
        q_scale=q_scale,
        C=plan.config.kv_lora_rank,
        scale=plan.config.scale,
        run_length=plan.run_length,
        backend=plan.called_with("mqa_sparse"),
    )


def latent_queries(
    q_nope: Tensor, q_pe: Tensor, absorbed: AbsorbedWeights, cache: PagedCache, plan: Plan
) -> tuple[Tensor, Tensor | None]:  # [n, H, D], and the scale of e4m3 ones
    """As the plan has them: of q_nope's dtype, or quantised."""
    backend, fixed = plan.called_with("project_heads"), plan.batch_invariant
    if plan.query_dtype is None:
        return into_latent(q_nope, q_pe, absorbed, backend, fixed=fixed), None
    if absorbed.uk_scale is not None or fixed:
        latent = q_nope.new_empty((*q_nope.shape[:2], absorbed.w_uk.shape[2]))
        project_heads(
            latent, q_nope, absorbed.w_uk, absorbed.uk_scale, batch_invariant=fixed, backend=backend
        )
    else:
        latent = torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk).transpose(0, 1)
    return in_e4m3(latent, q_pe, cache, plan)


def in_e4m3(
    latent: Tensor, q_pe: Tensor, cache: PagedCache, plan: Plan
) -> tuple[Tensor, Tensor]:  # [n, H, D], and their scale [n, H]
    """Queries quantised with a scale per token and head, or with the one of the layer's cache."""
    q_scale = cache.q_scale if plan.query_dtype == "fp8_static" else None
    return quantize_queries(latent, q_pe, q_scale, backend=plan.called_with("quantize_queries"))


def into_latent(
    q_nope: Tensor, q_pe: Tensor, absorbed: AbsorbedWeights, backend: str, *, fixed: bool = False
) -> Tensor:  # [n, H, D], as mqa_paged and mqa_sparse take them
    """By torch's product, or straight into place where weights are of eight bits or, `fixed`, bits
    do not depend on how many tokens there are."""
    if absorbed.uk_scale is not None or fixed:
        C = absorbed.w_uk.shape[2]
        q_latent = q_nope.new_empty((*q_nope.shape[:2], C + q_pe.shape[2]))
        q_latent[:, :, C:] = q_pe
        project_heads(
            q_latent[:, :, :C], q_nope, absorbed.w_uk, absorbed.uk_scale, batch_invariant=fixed,
            backend=backend,
        )  # fmt: skip
        return q_latent
    if writes_in_place(q_nope):
        C = absorbed.w_uk.shape[2]
        q_latent = q_nope.new_empty((*q_nope.shape[:2], C + q_pe.shape[2]))
        torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk, out=q_latent[:, :, :C].transpose(0, 1))
        q_latent[:, :, C:] = q_pe
        return q_latent
    into_latent = torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk)  # [H, n, C]
    return torch.cat([into_latent.transpose(0, 1), q_pe], dim=-1)


def writes_in_place(operand: Tensor) -> bool:
    """Whether torch.bmm writes into a strided view as it is: cuBLAS does. A tracer is not asked."""
    return operand.is_cuda and not torch.compiler.is_compiling()


def out_of_latent(
    out_latent: Tensor,
    absorbed: AbsorbedWeights,
    backend: str,
    *,
    fixed: bool = False,
    out: Tensor | None = None,  # [n, H, V]
) -> Tensor:
    """Each head's product by w_uv; into `out` if it is given."""
    H, V = out_latent.shape[1], absorbed.w_uv.shape[2]
    scaled = absorbed.uv_scale is not None or fixed
    if out is None and (scaled or writes_in_place(out_latent)):
        out = out_latent.new_empty((out_latent.shape[0], H, V))
    if scaled:
        assert out is not None
        project_heads(
            out,
            out_latent,
            absorbed.w_uv,
            absorbed.uv_scale,
            batch_invariant=fixed,
            backend=backend,
        )
        return out
    if out is not None and writes_in_place(out_latent):
        torch.bmm(out_latent.transpose(0, 1), absorbed.w_uv, out=out.transpose(0, 1))
        return out
    bf16_on_cpu = out_latent.dtype == torch.bfloat16 and out_latent.device.type == "cpu"
    if bf16_on_cpu and out_latent.shape[0] <= FEW_TOKENS:
        columns = out_latent.permute(1, 2, 0)  # [H, C, n]
        return torch.bmm(absorbed.w_uv.transpose(1, 2), columns).permute(2, 0, 1).contiguous()
    return torch.bmm(out_latent.transpose(0, 1), absorbed.w_uv).transpose(0, 1)
