"""What the functions of this room hand to one another, and what they share."""

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
    """A step's tokens after projections, norms and rope: views of RawProjections where latent_write
    applies the last two."""

    q_nope: Tensor  # [T, H, P]
    q_pe: Tensor  # [T, H, R], rotated
    kv_c: Tensor  # [T, C], normalised
    k_pe: Tensor  # [T, R], rotated


class RawProjections(NamedTuple):
    """Projections before norm and rope: latent rows lack both, queries the rotation.

    latent_write applies them in place, so views of these tensors see the result.
    """

    q: Tensor  # [T, H, E]
    kv: Tensor  # [T, D]
    norm_weight: Tensor  # of the columns to be normalised
    positions: Tensor  # [T] i64, rows of the table
    table: Tensor | None  # [Q, R] f32; None where nothing is rotated
    pairing: str
    eps: float
    factor: float = 1.0
    norm_queries: bool = False


class AbsorbedWeights(NamedTuple):
    """kv_b_proj in the three shapes attention uses; the last two are views of the first, or of a
    copy in eight bits.

    With scales, w_uk and w_uv are e4m3 as ops/project_heads.py has it, and kv_b is, or is not.
    """

    kv_b: Tensor  # [H * (P + V), C]
    w_uk: Tensor  # [H, P, C]
    w_uv: Tensor  # [H, C, V]
    linear: Callable[[Tensor], Tensor] | None = None  # expands in kv_b's place, being cheaper
    uk_scale: Tensor | None = None  # [H, KB, NB] f32
    uv_scale: Tensor | None = None  # [H, KB, NB] f32

    def dense(self, dtype: torch.dtype) -> Tensor:  # [H * (P + V), C]
        """kv_b itself; decoded into a new tensor where it is e4m3."""
        if self.kv_b.dtype == dtype:
            return self.kv_b
        assert self.uk_scale is not None and self.uv_scale is not None
        H, P, C = self.w_uk.shape
        dense = self.kv_b.to(dtype)  # 16 bits hold every e4m3
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
    """What the lightning indexer makes of a step's tokens, rotated; scales folded into w_idx.

    `k_idx` is None where the keys are in the cache already.
    """

    q_idx: Tensor  # [T, HI, DI]
    w_idx: Tensor  # [T, HI] f32
    k_idx: Tensor | None  # [T, DI]


class PoolInputs(NamedTuple):
    """What V4's compressor makes of a step's tokens, before they are pooled, and its weights."""

    kv: Tensor  # [T, D], [T, 2 D] for overlapping windows
    score: Tensor  # the same
    bias: Tensor  # [ratio, D], [ratio, 2 D]
    norm_weight: Tensor  # [D]


@dataclass(frozen=True)
class CompressedInputs:
    """What a V4 layer hands to attend_compressed of a step's tokens, by the same names."""

    q: Tensor  # [T, H, D], rotated
    rows: Tensor | None = None  # [T, D], rotated; None where nothing is written
    raw: RawProjections | None = None  # what the two are before they are normalised and rotated
    table: Tensor | None = None  # [Q, R] f32, the layer's rope, where it has entries
    pool_inputs: PoolInputs | None = None  # where the layer has entries
    index: IndexInputs | None = None  # where the plan has tokens choose among them
    index_pool_inputs: PoolInputs | None = None
    hadamard: bool = False


class Selection(NamedTuple):
    """The keys chosen for the plan's sparse rows; layers that share a selection take the same."""

    # [n, K] i32, -1 pads; over ranks, tokens that stay in latent space have this rank's numbers
    positions: Tensor
    lens: Tensor  # [num_absorbed] i32, columns that count
    rows: Tensor  # [num_absorbed, K] i32: slots if the plan maps them, else the positions
    row_lens: Tensor  # the plan's own, which tells whose selection this is


class Step(NamedTuple):
    """What the groups of one layer's step have in common: tokens that were projected, and weights
    to absorb; or, without weights, queries that are in latent space already."""

    cache: LayerCache
    plan: Plan
    projected: Projected | None = None
    weights: AbsorbedWeights | None = None
    q: Tensor | None = None  # [T, H, D]
    q_scale: Tensor | None = None  # [T, H], where q is e4m3 already
    selection: Selection | None = None
    only: str = "all"  # V4: "window" or "entries" attends to one of the two


def check_alike(
    where: str, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a tensor can meet the others of its step."""
    if tensor.dtype != dtype:
        raise ShapeError(f"{where}: {name} must be {dtype} like the others, got {tensor.dtype}.")
    if tensor.device != device:
        raise ShapeError(f"{where}: {name} must be on {device}, got {tensor.device}.")


def rows_of(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Some of a step's tokens: the tensor itself where they are all, as in most steps. Where sizes
    are symbols they are not compared, which would fix them."""
    if torch.compiler.is_compiling() or not isinstance(rows, slice):
        return tensor[rows]
    return tensor if rows.start == 0 and rows.stop == tensor.shape[0] else tensor[rows]


def seen_nothing(q: Tensor, width: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Out [n, H, width] and lse [n, H] of queries [n, H, ...] that see no key; `dtype` is out's,
    the queries' own by default."""
    dtype = q.dtype if dtype is None else dtype
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.promote_types(dtype, torch.float32))
    return q.new_zeros((*q.shape[:2], width), dtype=dtype), lse
