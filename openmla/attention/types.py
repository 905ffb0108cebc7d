"""Types that the attention functions take and share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.cache import LayerCache
from openmla.errors import ShapeError
from openmla.plan import Plan


class Projected(NamedTuple):
    """The queries and latent rows of a step's tokens, after projections, norms and RoPE.

    With RawProjections (`raw=`), these are views of its tensors, not yet normalized and rotated.

    Attributes:
        q_nope: [T, H, P] the part of the queries without RoPE.
        q_pe: [T, H, R] the rotated part of the queries.
        kv_c: [T, C] latents, normalized.
        k_pe: [T, R] the rotated key part that all heads share.
    """

    q_nope: Tensor  # [T, H, P]
    q_pe: Tensor  # [T, H, R], rotated
    kv_c: Tensor  # [T, C], normalized
    k_pe: Tensor  # [T, R], rotated


class RawProjections(NamedTuple):
    """A step's projections before norm and RoPE, which the write applies in place.

    Views of these tensors see the result.

    Attributes:
        q: [T, H, E] queries; they are rotated, and with norm_queries normalized too.
        kv: [T, D] latent rows; they are normalized and rotated.
        norm_weight: weight of the RMSNorm over the first columns of kv.
        positions: [T] int64, rows of the table.
        table: [Q, R] float32, a RoPE table; None if nothing is rotated.
        pairing: "pairs" or "halves", as in RopeConfig.
        eps: epsilon of the RMSNorm.
        factor: multiplies the normalized latents (LongCat).
        norm_queries: whether queries are normalized, without a weight (DeepSeek V4).
    """

    q: Tensor  # [T, H, E]
    kv: Tensor  # [T, D]
    norm_weight: Tensor  # for the columns to normalize
    positions: Tensor  # [T] i64, rows of the table
    table: Tensor | None  # [Q, R] f32; None if nothing is rotated
    pairing: str
    eps: float
    factor: float = 1.0
    norm_queries: bool = False


class AbsorbedWeights(NamedTuple):
    """The weight of kv_b_proj in the three shapes that attention uses, made by absorb().

    w_uk and w_uv are views of kv_b, or of an fp8 copy. With scales they are e4m3, as described in
    ops/project_heads.py; kv_b may then be e4m3 or not.

    Attributes:
        kv_b: [H * (P + V), C] the weight, for expanding.
        w_uk: [H, P, C] maps queries to latent space.
        w_uv: [H, C, V] maps outputs out of latent space.
        linear: a callable that expands latents instead of kv_b, because it is cheaper.
        uk_scale: [H, KB, NB] float32 scales of an e4m3 w_uk.
        uv_scale: [H, KB, NB] float32 scales of an e4m3 w_uv.
    """

    kv_b: Tensor  # [H * (P + V), C]
    w_uk: Tensor  # [H, P, C]
    w_uv: Tensor  # [H, C, V]
    linear: Callable[[Tensor], Tensor] | None = None  # used instead of kv_b if it is cheaper
    uk_scale: Tensor | None = None  # [H, KB, NB] f32
    uv_scale: Tensor | None = None  # [H, KB, NB] f32

    def dense(self, dtype: torch.dtype) -> Tensor:  # [H * (P + V), C]
        """Return kv_b, decoded into a new tensor if it is e4m3."""
        if self.kv_b.dtype == dtype:
            return self.kv_b
        assert self.uk_scale is not None and self.uv_scale is not None
        H, P, C = self.w_uk.shape
        dense = self.kv_b.to(dtype)  # 16-bit dtypes hold every e4m3 value
        parts = dense.view(H, -1, C)
        for part, scale in (
            (parts[:, :P], self.uk_scale),
            (parts[:, P:], self.uv_scale.transpose(1, 2)),
        ):
            KB, NB = scale.shape[1:]
            blocks = part.unflatten(2, (NB, -1)).unflatten(1, (KB, -1))
            blocks.mul_(scale[:, :, None, :, None])
        return dense


class IndexInputs(NamedTuple):
    """The lightning indexer's queries, weights and keys of a step's tokens.

    Attributes:
        q_idx: [T, HI, DI] queries, rotated.
        w_idx: [T, HI] float32 weights per head, with all scales multiplied in.
        k_idx: [T, DI] keys, rotated; None if they are in the cache already.
    """

    q_idx: Tensor  # [T, HI, DI]
    w_idx: Tensor  # [T, HI] f32
    k_idx: Tensor | None  # [T, DI]


class PoolInputs(NamedTuple):
    """Inputs of DeepSeek V4's compressor: a step's tokens before pooling, and its weights.

    Attributes:
        kv: [T, D], or [T, 2 D] for overlapping windows.
        score: same shape as kv.
        bias: [ratio, D] or [ratio, 2 D], added to the scores by position in the window.
        norm_weight: [D] weight of the RMSNorm of entries.
    """

    kv: Tensor  # [T, D], [T, 2 D] for overlapping windows
    score: Tensor  # same as kv
    bias: Tensor  # [ratio, D], [ratio, 2 D]
    norm_weight: Tensor  # [D]


@dataclass(frozen=True)
class CompressedInputs:
    """The inputs of a DeepSeek V4 layer's attention, for attend_partial().

    The fields are the same as the arguments of attend_compressed().

    Attributes:
        q: [T, H, D] queries, rotated.
        rows: [T, D] rows of this step, rotated; None if nothing is written.
        raw: q and rows before they are normalized and rotated.
        table: [Q, R] float32, the layer's RoPE table, for layers with entries.
        pool_inputs: inputs of the compressor, for layers with entries.
        index: inputs of the indexer, where the plan selects entries.
        index_pool_inputs: inputs of the compressor of indexer keys.
        hadamard: whether indexer queries and keys are rotated by a Hadamard matrix.
    """

    q: Tensor  # [T, H, D], rotated
    rows: Tensor | None = None  # [T, D], rotated; None if nothing is written
    raw: RawProjections | None = None  # q and rows before norm and RoPE
    table: Tensor | None = None  # [Q, R] f32, the layer's RoPE table, if it has entries
    pool_inputs: PoolInputs | None = None  # if the layer has entries
    index: IndexInputs | None = None  # if the plan selects entries
    index_pool_inputs: PoolInputs | None = None
    hadamard: bool = False


class Selection(NamedTuple):
    """The selected keys of a plan's tokens, made by select_step() or make_selection().

    Layers that share a selection use the same object. It is valid for one plan only.

    Attributes:
        positions: [n, K] int32 selected keys, -1 for padding.
        lens: [num_absorbed] int32 columns that count.
        rows: [num_absorbed, K] int32 slots if the plan maps positions to slots, else positions.
        row_lens: the plan's own tensor, which identifies the plan.
    """

    # Across ranks, keys of tokens that stay in latent space are numbered locally.
    positions: Tensor
    lens: Tensor  # [num_absorbed] i32, columns that count
    rows: Tensor  # [num_absorbed, K] i32: slots if the plan maps them, else the positions
    row_lens: Tensor  # the plan's own tensor, which identifies the plan


class Step(NamedTuple):
    """Inputs shared by the groups of one layer's step: projected tokens and absorbed weights, or,
    without weights, latent queries."""

    cache: LayerCache
    plan: Plan
    projected: Projected | None = None
    weights: AbsorbedWeights | None = None
    q: Tensor | None = None  # [T, H, D]
    q_scale: Tensor | None = None  # [T, H], if q is already e4m3
    selection: Selection | None = None
    only: str = "all"  # V4: "window" or "entries" attends to one of the two


def check_alike(
    where: str, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a tensor has the dtype and device of the step's other inputs."""
    if tensor.dtype != dtype:
        raise ShapeError(
            f"{where}: {name} must be {dtype} like the other inputs, got {tensor.dtype}."
        )
    if tensor.device != device:
        raise ShapeError(f"{where}: {name} must be on {device}, got {tensor.device}.")


def rows_of(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Index some of a step's tokens: returns the tensor itself for all tokens, as in most steps.
    Under torch.compile sizes are symbols, and comparing them would specialize them."""
    if torch.compiler.is_compiling() or not isinstance(rows, slice):
        return tensor[rows]
    return tensor if rows.start == 0 and rows.stop == tensor.shape[0] else tensor[rows]


def seen_nothing(q: Tensor, width: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return out [n, H, width] and lse [n, H] of queries [n, H, ...] that see no key. `dtype` of
    out defaults to the queries' dtype."""
    dtype = q.dtype if dtype is None else dtype
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.promote_types(dtype, torch.float32))
    return q.new_zeros((*q.shape[:2], width), dtype=dtype), lse
