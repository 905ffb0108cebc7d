"""apply_sink: a logit per head that joins the softmax and has no value, after all keys are in."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.errors import ShapeError


def apply_sink(
    out: Tensor,  # [T, H, V]
    lse: Tensor,  # [T, H] f32, of the very keys that out is over
    sink: Tensor,  # [H] f32
) -> Tensor:  # [T, H, V]
    """What the sink leaves: out times sigmoid(lse - sink). Once, after the last merge of parts.

    A token that sees nothing stays 0, whatever its sink.
    """
    if out.dim() != 3 or lse.shape != out.shape[:2]:
        raise ShapeError(
            f"sink: lse must be [T, H] of out [T, H, V], got {tuple(lse.shape)} of "
            f"{tuple(out.shape)}."
        )
    if sink.shape != out.shape[1:2]:
        raise ShapeError(
            f"sink: sink must be [H] with {tuple(out.shape[1:2])}, got {tuple(sink.shape)}."
        )
    kept = (lse - sink.to(lse.dtype)).sigmoid().masked_fill(lse == -torch.inf, 0)
    return (out * kept[..., None]).to(out.dtype)
