"""quantize_queries: concatenate latent and RoPE parts of queries and quantize them to e4m3.

    x      = [latent, q_pe], [T, H, D], in float32
    scale  = max(1e-10, max |x| of the token and head) / 448, or q_scale where that is given
    q      = e4m3(x * (1 / scale)),  which stands for q * scale

e4m3() rounds to nearest even and saturates at 448; the sign of 0 is kept. The quotients are rounded
once: every backend gives the same bytes. A NaN makes the scale of its token and head NaN, and with
it all that readers see of it; with q_scale it is byte 0x7f alone. An infinity does the same to a
scale that is found, and saturates with q_scale.
mqa_paged and mqa_sparse take both results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.ops._queries import check_scale_kind
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register

_SPEC = "latent:T H C f row, q_pe:T H R f row"


def _check(latent: Tensor, q_pe: Tensor, q_scale: Tensor | None) -> dict[str, int]:
    dims = bind("quantize_queries", _SPEC, (latent, q_pe))
    if q_scale is not None:
        bind("quantize_queries", "latent:T H C, q_scale: f32", (latent, q_scale))
    return dims


def problem(device: torch.device, dtype: torch.dtype, *, D: int) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "quantize_queries", dtype=dtype, D=D)


def _decide(latent: Tensor, q_pe: Tensor, q_scale: Tensor | None, *, backend: str) -> Decided:
    dims = _check(latent, q_pe, q_scale)
    asked = problem(latent.device, latent.dtype, D=dims["C"] + dims["R"])
    return decided(dims, asked, backend)


def _run(
    known: Decided, latent: Tensor, q_pe: Tensor, q_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    refuse_grad("quantize_queries", (latent, q_pe))
    result: tuple[Tensor, Tensor] = known.runner.run(latent, q_pe, q_scale)
    return result


def _fake(
    latent: Tensor, q_pe: Tensor, q_scale: Tensor | None, *, backend: str
) -> tuple[Tensor, Tensor]:
    dims = _check(latent, q_pe, q_scale)
    T, H, D = dims["T"], dims["H"], dims["C"] + dims["R"]
    return (
        latent.new_empty((T, H, D), dtype=torch.float8_e4m3fn),
        latent.new_empty((T, H), dtype=torch.float32),
    )


_OP = register(
    "quantize_queries(Tensor latent, Tensor q_pe, Tensor? q_scale, *, str backend)"
    " -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def quantize_queries(
    latent: Tensor,  # [T, H, C]
    q_pe: Tensor,  # [T, H, R]
    q_scale: Tensor | None = None,  # [] f32
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # q [T, H, D] e4m3, scale [T, H] f32
    """Quantise queries; see the module's text for the contract."""
    check_scale_kind("quantize_queries", q_scale)
    q, scale = _OP(latent, q_pe, q_scale, backend=backend)
    return q, scale


def cost(T: int, *, H: int, D: int, itemsize: int) -> Cost:
    """Queries read once and written once, in a byte each."""
    return Cost(T * H * (D * (itemsize + 1) + 4), 3 * T * H * D)
