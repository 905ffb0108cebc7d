"""Decoding of e4m3 heads, for the references of ops that attend to them."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 256.0  # scale of probs before rounding: a power of two, so that 1 is exact

Scales = tuple[Tensor, Tensor, Tensor]


def decoded(
    q: Tensor, k: Tensor, v: Tensor, key_start_loc: Tensor, scales: Scales | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v times their scales, in float32, without key rows past the last request;
    return them unchanged without scales."""
    if scales is None:
        return q, k, v
    q_scale, k_scale, v_scale = scales
    lens = key_start_loc.diff()
    k_scale, v_scale = (each.repeat_interleave(lens, dim=0) for each in (k_scale, v_scale))
    used = len(k_scale)
    return (
        q.float() * q_scale[:, :, None],
        k[:used].float() * k_scale[:, :, None],
        v[:used].float() * v_scale[:, :, None],
    )


def rounded_weights(logits: Tensor) -> Tensor:
    """Softmax of logits [..., S] whose numerators are scaled by LARGEST and rounded to e4m3."""
    largest = logits.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    rounded = ((logits - largest).exp() * LARGEST).to(E4M3).float()
    return rounded / rounded.sum(-1, keepdim=True)
