"""Compressor: pools V4 tokens into entries; also the indexer that selects entries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.attention import IndexInputs, PoolInputs
from openmla.config import MLAConfig
from openmla.errors import UnsupportedError
from openmla.layers.indexer import hadamard_transform
from openmla.layers.linear import apply_linear, wide_linear
from openmla.layers.norm import RMSNorm
from openmla.ops import rope
from openmla.plan import Plan


class Compressor(nn.Module):
    """Projects tokens to the values to pool and to the pooling scores, per channel.

    `overlap` doubles both: the first half of a token's channels is for the next window's entry.
    """

    def __init__(self, config: MLAConfig, ratio: int, D: int, *, overlap: bool) -> None:
        super().__init__()
        width = 2 * D if overlap else D
        self.kv_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(ratio, width))
        self.kv_norm = RMSNorm(D, config.latent_eps)
        self.requires_grad_(False)

    def forward(
        self,
        hidden: Tensor,  # [T, hidden_size]
        fixed_by: str | None = None,  # plan.fixed_by
    ) -> PoolInputs:
        """Multiply inputs of the model's dtype in float32: pooling is sensitive to rounding."""
        kv = wide_linear(hidden, self.kv_proj.weight, fixed_by)
        score = wide_linear(hidden, self.gate_proj.weight, fixed_by)
        return PoolInputs(kv, score, self.position_bias, self.kv_norm.weight)


class Scorer(nn.Module):
    """Projects tokens to a weight per indexer head."""

    def __init__(self, config: MLAConfig, num_heads: int) -> None:
        super().__init__()
        self.weights_proj = nn.Linear(config.hidden_size, num_heads, bias=False)


class CompressedIndexer(Compressor):
    """Scores entries with a few narrow heads, over keys made by a separate compressor.

    `hadamard` rotates queries and keys by an orthonormal Hadamard matrix, which changes no product
    but spreads outliers before fp8 rounds them, as the reference model does.
    """

    def __init__(self, config: MLAConfig, ratio: int, *, hadamard: bool) -> None:
        indexer, q_lora_rank = config.indexer, config.q_lora_rank
        assert indexer is not None and q_lora_rank is not None
        HI, DI = indexer.num_heads, indexer.head_dim
        if hadamard and DI & (DI - 1):
            raise UnsupportedError(
                f"Indexer: hadamard needs a head_dim of a power of two, got {DI}."
            )
        super().__init__(config, ratio, DI, overlap=True)
        self.config, self.indexer, self.hadamard = config, indexer, hadamard
        self.q_b_proj = nn.Linear(q_lora_rank, HI * DI, bias=False)
        self.scorer = Scorer(config, HI)
        self.requires_grad_(False)

    def queries(
        self, hidden: Tensor, q_resid: Tensor, positions: Tensor, table: Tensor, plan: Plan
    ) -> IndexInputs:
        """Return queries and weights of a step's tokens; forward() returns the pooling inputs."""
        HI, DI, R = self.indexer.num_heads, self.indexer.head_dim, self.config.qk_rope_head_dim
        q_idx = apply_linear(self.q_b_proj, q_resid, plan, "Indexer: q_b_proj").view(-1, HI, DI)
        rope(q_idx[:, :, DI - R :], positions, table, pairing="pairs", backend=plan.backend("rope"))
        if self.hadamard:
            q_idx = hadamard_transform(q_idx)
        weights = wide_linear(hidden, self.scorer.weights_proj.weight, plan.fixed_by)
        return IndexInputs(q_idx, weights * (DI**-0.5 * HI**-0.5), None)
