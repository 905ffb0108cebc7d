"""quantize_queries: concatenate latent and RoPE parts of queries and quantize them to e4m3.

    x      = [latent, q_pe], [T, H, D], in float32
    scale  = max(1e-10, max |x| of the token and head) / 448, or q_scale if given
    q      = e4m3(x * (1 / scale)),  which represents q * scale

e4m3() rounds to nearest even and saturates at 448; the sign of 0 is kept. The quotients are rounded
once, so every backend writes the same bytes. A NaN makes the scale of its token and head NaN, so
all their values are NaN when read; with q_scale, only its own byte is 0x7f. An infinity does the
same to a computed scale, and saturates with q_scale.
mqa_paged and mqa_sparse accept both results.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.ops._declare import op
from openmla.ops._register import Cost


def fake(latent: Tensor, T: int, H: int, C: int, R: int) -> tuple[Tensor, Tensor]:
    return (
        latent.new_empty((T, H, C + R), dtype=torch.float8_e4m3fn),
        latent.new_empty((T, H), dtype=torch.float32),
    )


def problem(device: torch.device, dtype: torch.dtype, *, D: int) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "quantize_queries", dtype=dtype, D=D)


def problem_of(latent: Tensor, C: int, R: int) -> Problem:
    return problem(latent.device, latent.dtype, D=C + R)


@op(problem=problem_of, fake=fake, no_grad=["latent", "q_pe"])
def quantize_queries(
    latent: Annotated[Tensor, "[T, H, C] float row"],
    q_pe: Annotated[Tensor, "[T, H, R] float row"],
    q_scale: Annotated[Tensor | None, "[] f32"] = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # q [T, H, D] e4m3, scale [T, H] f32
    """Quantize queries; see the module docstring for the contract.

    Args:
        latent: queries in latent space.
        q_pe: their rotated RoPE columns.
        q_scale: a given scale for all queries.
        backend: "auto", or the name of a backend.

    Returns:
        Queries [T, H, D] e4m3, and their scales [T, H] float32.

    Raises:
        ShapeError: an argument does not fit the contract.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call, or latent or q_pe requires grad while grad
            mode is on.

    ```python
    import torch
    from openmla.ops import quantize_queries

    latent, q_pe = torch.randn(3, 2, 8), torch.randn(3, 2, 4)  # 3 tokens, 2 heads
    q, scale = quantize_queries(latent, q_pe)
    print(q.shape, scale.shape)  # [3, 2, 12] and [3, 2]
    ```
    """


def cost(T: int, *, H: int, D: int, itemsize: int) -> Cost:
    """Queries read once and written once, at one byte per value."""
    return Cost(T * H * (D * (itemsize + 1) + 4), 3 * T * H * D)
