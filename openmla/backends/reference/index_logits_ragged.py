"""index_logits_ragged, reference: score all keys for all queries, then mask the ranges."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference.index_logits import score


def why_not(problem: Problem) -> str | None:
    return None


def run(
    q_idx: Tensor, w_idx: Tensor, k_idx: Tensor, k_scale: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    T, S = q_idx.shape[0], k_idx.shape[0]
    columns = torch.arange(S, device=q_idx.device)
    inside = (columns >= starts[:, None]) & (columns < ends[:, None])
    used = inside.any(0)  # other keys may hold anything
    keys = (k_idx.to(w_idx.dtype) * k_scale.to(w_idx.dtype)[:, None]).masked_fill(~used[:, None], 0)
    logits = w_idx.new_empty((T, S))
    score(logits, q_idx, w_idx, keys, starts, ends)
    return logits
