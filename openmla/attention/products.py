"""Products by weights whose bits must not depend on the batch: project_heads, in one order of sums.

torch's own products take other kernels for other numbers of rows. One head of project_heads is a
linear, and a row of ones sums a row's columns: nothing here needs another op.
"""

from __future__ import annotations

from torch import Tensor

from openmla.ops import project_heads


def multiply(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K], as a linear has it
    backend: str,
    out: Tensor | None = None,  # [T, N], x's dtype or float32
) -> Tensor:  # [T, N]
    """x @ weight.T, each row by itself."""
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    project_heads(out[:, None], x[:, None], weight.T[None], batch_invariant=True, backend=backend)
    return out


def mean_square(x: Tensor, fixed_by: str | None) -> Tensor:  # [..., 1]
    """Of the last dimension of float32, or wider. On CPUs torch sums each row by itself; on GPUs
    how it cuts a row depends on how many there are."""
    squares = x.square()
    if fixed_by is None or x.device.type == "cpu":
        return squares.mean(-1, keepdim=True)
    ones = x.new_ones((1, x.shape[-1]))
    sums = multiply(squares.reshape(-1, x.shape[-1]), ones, fixed_by)
    return sums.view(*x.shape[:-1], 1) / x.shape[-1]


def rms_normed(hidden: Tensor, eps: float, fixed_by: str | None = None) -> Tensor:
    """Normalised over the last dimension in float32, rounded once; `fixed_by` the backend of
    project_heads where a row's bits are its own."""
    wide = hidden.float() if hidden.dtype.itemsize < 4 else hidden
    mean = mean_square(wide, fixed_by)
    return (wide * (mean + eps).rsqrt()).to(hidden.dtype)
