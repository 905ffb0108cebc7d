"""project_heads: multiply each head by its own small matrix, in 16 or 32 bits or fp8.

    out[t, h] = x[t, h] @ (w[h] * its scales)

It projects queries into latent space (w_uk) and outputs out of it (w_uv). w has x's dtype, or is
e4m3 with w_scale [H, KB, NB]: w[h] is split into KB x NB equal blocks of K / KB rows and N / NB
columns, with one scale each. [H, 1, 1] is one scale per head; the 128 x 128 blocks of a quantized
checkpoint are [H, K / 128, N / 128]. Scales are finite and above 0.

All tensors may be views. out and x are contiguous along their last dimension, and x may repeat one
head (stride 0); w is contiguous along either of its last two, because w_uv is the transpose of what
a checkpoint stores. out is rounded once, from sums in float32 (float64 for float64 x) over the
exact values of w; a block's scale is multiplied by the sum over its rows. out has x's dtype, or is
float32 for 16-bit x. With no tokens, nothing is written. out must not overlap x.

With batch_invariant, a token's bits depend neither on the number of tokens nor on its place among
them: a GPU uses one order of summation, a CPU computes row by row. With one head, the op is a
linear layer and w its transposed weight.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost
from openmla.ops._shapes import bind
from openmla.ops._values import check_positive

E4M3 = torch.float8_e4m3fn


def check(op: str, out: Tensor, x: Tensor, w: Tensor, w_scale: Tensor | None) -> None:
    check_weight(op, "w", w, w_scale, x)
    wide = torch.promote_types(x.dtype, torch.float32)
    if out.dtype not in (x.dtype, wide):
        raise ShapeError(f"{op}: out must be {x.dtype} like x, or {wide}, got {out.dtype}.")


def check_weight(op: str, name: str, w: Tensor, w_scale: Tensor | None, x: Tensor) -> None:
    """Check that a weight [H, K, N] matches its scales and x."""
    if w.dtype not in (x.dtype, E4M3):
        raise ShapeError(f"{op}: {name} must be {x.dtype} or {E4M3}, got {w.dtype}.")
    if 1 not in w.stride()[1:]:
        raise ShapeError(
            f"{op}: {name} must be contiguous along one of its last two dimensions, "
            f"got strides {w.stride()}."
        )
    if (w_scale is None) != (w.dtype != E4M3):
        must, got = ("be given", "none") if w_scale is None else ("not be given", "one")
        raise ShapeError(f"{op}: w_scale must {must} for {w.dtype} weights, got {got}.")
    if w_scale is None:
        return
    bind(op, {name: "[H, K, N]", "w_scale": "[H, KB, NB] f32"}, (w, w_scale))
    (K, N), (KB, NB) = w.shape[1:], w_scale.shape[1:]
    if KB < 1 or NB < 1 or K % KB or N % NB:
        raise ShapeError(
            f"{op}: w_scale must cut {K} x {N} weights into equal blocks, got {KB} x {NB} of them."
        )


def check_weights(op: str, name: str, w: Tensor, w_scale: Tensor | None, x: Tensor) -> None:
    """Also check the values of scales on the CPU, for callers that write before they call this op.
    While a graph is traced, the op's own check runs before any part of the graph."""
    if torch.compiler.is_compiling():
        return
    check_weight(op, name, w, w_scale, x)
    if type(w_scale) is Tensor and w_scale.device.type == "cpu":
        check_positive(op, f"{name}'s scale", w_scale)


def check_scales(op: str, w_scale: Tensor | None) -> None:
    if w_scale is not None:
        check_positive(op, "w_scale", w_scale)


def rows_per_scale(w: Tensor, w_scale: Tensor | None) -> int:
    return w.shape[1] // (1 if w_scale is None else w_scale.shape[1])


def problem(
    device: torch.device, dtype: torch.dtype, *, eight_bits: bool, block: int, K: int, N: int,
    batch_invariant: bool = False,
) -> Problem:  # fmt: skip
    """Describe a call to the backends; `block` rows of w share a scale (all if there is none)."""
    kinds = ("fp8",) if eight_bits else ()
    return problem_on(
        device, "project_heads", dtype=dtype, kinds=kinds, BS=block, E=K, V=N,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def problem_of(x: Tensor, w: Tensor, w_scale: Tensor | None, batch_invariant: bool) -> Problem:
    return problem(
        x.device, x.dtype, eight_bits=w.dtype == E4M3, block=rows_per_scale(w, w_scale),
        K=w.shape[1], N=w.shape[2], batch_invariant=batch_invariant,
    )  # fmt: skip


@op(
    problem=problem_of,
    check=check,
    check_values=check_scales,
    mutates_args=["out"],
    no_grad=["out", "x", "w", "w_scale"],
    optional=["batch_invariant"],
)
def project_heads(
    out: Annotated[Tensor, "[T, H, N] float row"],
    x: Annotated[Tensor, "[T, H, K] float row"],
    w: Annotated[Tensor, "[H, K, N] float|e4m3"],
    w_scale: Tensor | None = None,  # [H, KB, NB] f32
    *,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> None:
    """Multiply each head by its own matrix; see the module docstring for the contract.

    Args:
        out: products, written in place.
        x: heads to multiply.
        w: a matrix per head, of x's dtype or e4m3.
        w_scale: scales of blocks of e4m3 weights.
        batch_invariant: make the bits of a token independent of the other tokens.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call, or out, x, w or w_scale requires grad while
            grad mode is on.

    ```python
    import torch
    from openmla.ops import project_heads

    x, w = torch.randn(3, 2, 4), torch.randn(2, 4, 5)  # 3 tokens, 2 heads
    out = torch.empty(3, 2, 5)
    project_heads(out, x, w)
    print((out - torch.einsum("thk,hkn->thn", x, w)).abs().max())  # close to 0
    ```
    """


def cost(num_tokens: int, *, H: int, K: int, N: int, itemsize: int, w_itemsize: int) -> Cost:
    """Weights, inputs and outputs once; scales are too few to count."""
    num_bytes = H * (K * N * w_itemsize + num_tokens * (K + N) * itemsize)
    return Cost(num_bytes, 2 * num_tokens * H * K * N)
