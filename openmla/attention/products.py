"""Batch-invariant matrix products: project_heads, which sums in a fixed order.

torch's own products use different kernels for different numbers of rows. A linear layer is
project_heads with one head, and a row sum is a product with ones, so no other op is needed.
"""

from __future__ import annotations

from torch import Tensor

from openmla.ops import project_heads


def multiply(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K], as in torch.nn.Linear
    backend: str,
    out: Tensor | None = None,  # [T, N], x's dtype or float32
) -> Tensor:  # [T, N]
    """Return x @ weight.T, each row computed independently."""
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    project_heads(out[:, None], x[:, None], weight.T[None], batch_invariant=True, backend=backend)
    return out


def mean_square(x: Tensor, fixed_by: str | None) -> Tensor:  # [..., 1]
    """Mean square over the last dimension, in float32 or wider. On CPUs torch sums each row
    independently; on GPUs how it splits a row depends on the number of rows."""
    squares = x.square()
    if fixed_by is None or x.device.type == "cpu":
        return squares.mean(-1, keepdim=True)
    ones = x.new_ones((1, x.shape[-1]))
    sums = multiply(squares.reshape(-1, x.shape[-1]), ones, fixed_by)
    return sums.view(*x.shape[:-1], 1) / x.shape[-1]


def rms_normed(hidden: Tensor, eps: float, fixed_by: str | None = None) -> Tensor:
    """RMS-normalize over the last dimension in float32, rounding once. `fixed_by`: the backend of
    project_heads if results must be batch-invariant."""
    wide = hidden.float() if hidden.dtype.itemsize < 4 else hidden
    mean = mean_square(wide, fixed_by)
    return (wide * (mean + eps).rsqrt()).to(hidden.dtype)
