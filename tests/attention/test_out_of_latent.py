"""Latent outputs times w_uv: the same product whichever side the weights stand on."""

from __future__ import annotations

import pytest
import torch

from openmla.attention import absorbed as module
from openmla.attention.types import AbsorbedWeights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [0, 1, module.FEW_TOKENS, module.FEW_TOKENS + 1])
def test_few_and_many_tokens(n: int, dtype: torch.dtype, device: str) -> None:
    H, P, V, C = 3, 5, 7, 64
    generator = torch.Generator().manual_seed(n)
    kv_b = torch.randn(H * (P + V), C, generator=generator).to(device, dtype)
    per_head = kv_b.view(H, P + V, C)
    weights = AbsorbedWeights(kv_b, per_head[:, :P], per_head[:, P:].transpose(1, 2))
    latent = torch.randn(n, H, C, generator=generator).to(device, dtype)
    out = module.out_of_latent(latent, weights, "auto")
    assert out.shape == (n, H, V) and out.dtype == dtype and out.stride(-1) == 1
    exact = torch.einsum("nhc,hvc->nhv", latent.double(), per_head[:, P:].double())
    eps = torch.finfo(dtype).eps
    # sums of 64 products, float32 in either case
    atol = 16 * eps if dtype == torch.bfloat16 else 2 * C * eps
    torch.testing.assert_close(out.double(), exact, rtol=eps, atol=atol)
