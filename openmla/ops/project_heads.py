"""project_heads: multiply each head by its own small matrix, in 16 or 32 bits or fp8.

    out[t, h] = x[t, h] @ (w[h] * its scales)

This is how queries get into latent space (w_uk) and outputs out of it (w_uv). w has x's dtype, or
is e4m3 with w_scale [H, KB, NB]: w[h] is cut into KB x NB equal blocks of K / KB rows and N / NB
columns, with one scale each. [H, 1, 1] is one scale per head; a quantised checkpoint's blocks of
128 x 128 are [H, K / 128, N / 128]. Scales are finite and above 0.

Everything may be a view. out and x are contiguous along their last dimension, and heads of x may be
one and the same (stride 0); w is contiguous along either of its last two, for w_uv is the transpose
of what a checkpoint holds. out is rounded once, from sums in float32 (float64 for float64 x) over
values that are exactly w's; a block's scale is multiplied by the sum over its rows. It has x's
dtype, or is float32 under x of 16 bits. No tokens: nothing is written. out must not overlap x.

With batch_invariant a token's bits do not depend on how many others there are, nor on which of
them it is: one order of sums on a GPU, row by row on a CPU. One head is a linear, w its weight
transposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register
from openmla.ops._values import check_positive

E4M3 = torch.float8_e4m3fn
_SPEC = "out:T H N f row, x:T H K f row, w:H K N q"


def _check(tensors: tuple[Tensor | None, ...]) -> dict[str, int]:
    out, x, w, w_scale = tensors
    assert out is not None and x is not None and w is not None
    dims = bind("project_heads", _SPEC, (out, x, w))
    dims["KB"], dims["NB"] = check_weight("project_heads", "w", w, w_scale, x)
    wide = torch.promote_types(x.dtype, torch.float32)
    if out.dtype not in (x.dtype, wide):
        raise ShapeError(
            f"project_heads: out must be {x.dtype} like x, or {wide}, got {out.dtype}."
        )
    return dims


def check_weight(
    op: str, name: str, w: Tensor, w_scale: Tensor | None, x: Tensor
) -> tuple[int, int]:
    """A weight [H, K, N] and its scales fit together and x; returns how many blocks rows and
    columns are cut into, 1 and 1 without scales."""
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
        return 1, 1
    K, N = w.shape[1:]
    bind(op, f"{name}:H K N q, w_scale:H KB NB f32", (w, w_scale))
    KB, NB = w_scale.shape[1:]
    if KB < 1 or NB < 1 or K % KB or N % NB:
        raise ShapeError(
            f"{op}: w_scale must cut {K} x {N} weights into equal blocks, got {KB} x {NB} of them."
        )
    return KB, NB


def check_weights(op: str, name: str, w: Tensor, w_scale: Tensor | None, x: Tensor) -> None:
    """The same with the scales' values, where looking at them is free: for who writes before this
    op is called. While a graph is traced the op's own check comes before any of it runs."""
    if torch.compiler.is_compiling():
        return
    check_weight(op, name, w, w_scale, x)
    if type(w_scale) is Tensor and w_scale.device.type == "cpu":
        check_positive(op, f"{name}'s scale", w_scale)


def problem(
    device: torch.device, dtype: torch.dtype, *, eight_bits: bool, block: int, K: int, N: int,
    batch_invariant: bool = False,
) -> Problem:  # fmt: skip
    """A call, as backends are asked about it: `block` rows of w share a scale, all without."""
    kinds = ("fp8",) if eight_bits else ()
    return problem_on(
        device, "project_heads", dtype=dtype, kinds=kinds, BS=block, E=K, V=N,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def _decide(*tensors: Tensor | None, batch_invariant: bool = False, backend: str) -> Decided:
    dims, x, w = _check(tensors), tensors[1], tensors[2]
    assert x is not None and w is not None
    K, N = dims["K"], dims["N"]
    eight_bits, block = w.dtype == E4M3, K // dims["KB"]
    asked = problem(
        x.device, x.dtype, eight_bits=eight_bits, block=block, K=K, N=N,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return decided(dims, asked, backend)


def _run(
    known: Decided, out: Tensor, x: Tensor, w: Tensor, w_scale: Tensor | None, *,
    batch_invariant: bool = False,
) -> None:  # fmt: skip
    refuse_grad("project_heads", [t for t in (out, x, w, w_scale) if t is not None])
    if w_scale is not None and w_scale.device.type == "cpu":
        check_positive("project_heads", "w_scale", w_scale)
    known.runner.run(out, x, w, w_scale)


def _fake(*tensors: Tensor | None, **_: object) -> None:
    _check(tensors)


_OP = register(
    "project_heads(Tensor(a!) out, Tensor x, Tensor w, Tensor? w_scale, *,"
    " bool batch_invariant=False, str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def project_heads(
    out: Tensor,  # [T, H, N], written
    x: Tensor,  # [T, H, K]
    w: Tensor,  # [H, K, N], x's dtype or e4m3
    w_scale: Tensor | None = None,  # [H, KB, NB] f32, of e4m3
    *,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> None:
    """Multiply each head by its own matrix; see the module's text for the contract."""
    _OP(out, x, w, w_scale, batch_invariant=batch_invariant, backend=backend)


def cost(num_tokens: int, *, H: int, K: int, N: int, itemsize: int, w_itemsize: int) -> Cost:
    """Weights, inputs and outputs once; scales are too few to count."""
    num_bytes = H * (K * N * w_itemsize + num_tokens * (K + N) * itemsize)
    return Cost(num_bytes, 2 * num_tokens * H * K * N)
