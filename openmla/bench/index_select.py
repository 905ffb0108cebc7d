"""Scores and selection in one pass, over the shapes of index_logits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from openmla.bench.harness import Job, Op
from openmla.bench.index_logits import DI, SIZES, Size
from openmla.ops import index_logits
from openmla.ops.index_select import cost
from openmla.testing import Inputs


def check(op: Op, inputs: Inputs, backend: str) -> float:
    """How far the lowest selected key scores below the right one, over a score's rounding error."""
    positions, lens = inputs.run(op, backend=backend)
    wanted, wanted_lens = inputs.double().run(op, backend="reference")
    real = torch.arange(positions.shape[1], device=lens.device) < lens[:, None]
    ordered = positions.long().masked_fill(~real, -1).sort(dim=1).values
    repeated = (ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)
    inside = (positions >= 0) & (positions < inputs["row_lens"][:, None])
    if not torch.equal(lens, wanted_lens) or repeated.any() or not torch.equal(inside, real):
        return float("inf")
    exact, peer = scored(inputs.double()), scored(inputs)
    finite = exact.isfinite()
    error = (peer[finite] - exact[finite]).abs().max()
    bound = 4 * (error + torch.finfo(torch.float32).eps * exact[finite].abs().max())
    short = lowest(exact, wanted, real) - lowest(exact, positions, real)
    return max(float(short.max() / bound), 0.0)


def scored(inputs: Inputs) -> Tensor:
    scalars = {name: inputs.scalars[name] for name in ("format", "num_keys")}
    logits: Tensor = Inputs(inputs.tensors, scalars, ()).run(index_logits, backend="reference")
    return logits


def lowest(scores: Tensor, positions: Tensor, real: Tensor) -> Tensor:
    """[T] the lowest selected score of each row."""
    chosen = scores.gather(1, positions.long().clamp_min(0))
    return chosen.masked_fill(~real, torch.inf).amin(1)


def job(size: Size, device: str) -> Job:
    inputs = size.make(device)
    needed = cost(
        (size.n,) * size.B, size.row_lens(), HI=size.HI, DI=DI, K=size.K, format=size.format
    )
    scalars = {**inputs.scalars, "K": size.K}
    return Job(Inputs(inputs.tensors, scalars, inputs.widen), needed, check)


SHAPES = {name: partial(job, size) for name, size in SIZES.items()}
