"""A layer's linears: called, or for batch-invariant plans multiplied in a fixed order of sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.attention.products import multiply
from openmla.errors import UnsupportedError
from openmla.layers.weights import is_plain
from openmla.plan import Plan


def apply_linear(linear: nn.Module, x: Tensor, plan: Plan, name: str) -> Tensor:  # [T, N]
    """Return linear(x) of [T, K]. `name` is used in error messages."""
    if plan.fixed_by is None:
        result: Tensor = linear(x)
        return result
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    if hooked or not is_plain(linear):
        raise UnsupportedError(
            f"{name} must be a plain linear without hooks for a batch-invariant plan, got "
            f"{type(linear).__name__}. Plan with batch_invariant=False."
        )
    weight, bias = linear._parameters["weight"], linear._parameters.get("bias")
    assert weight is not None
    product = multiply(rows_of(x), weight, plan.fixed_by)
    return product if bias is None else product + bias


def wide_linear(hidden: Tensor, weight: Tensor, fixed_by: str | None = None) -> Tensor:
    """Return hidden @ weight.T in float32, where products of 16-bit numbers are exact. `fixed_by`:
    from the plan."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if fixed_by is not None:
        out = hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=wide)
        if weight.dtype != hidden.dtype:
            hidden, weight = hidden.to(wide), weight.to(wide)
        return multiply(rows_of(hidden), weight, fixed_by, out=out)
    if hidden.device.type == "cuda" and hidden.dtype == weight.dtype != wide:
        return torch.mm(hidden, weight.T, out_dtype=wide)
    return nn.functional.linear(hidden.to(wide), weight.to(wide))


def rows_of(x: Tensor) -> Tensor:
    """Make each row contiguous, as project_heads requires."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
