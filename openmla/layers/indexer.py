"""Indexer: parameters of the lightning indexer, and its queries, weights and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.attention import IndexInputs
from openmla.cache import PagedCache
from openmla.config import MLAConfig
from openmla.errors import UnsupportedError
from openmla.layers.linear import apply_linear, wide_linear
from openmla.layers.log_scale import LogScale
from openmla.ops import index_write, rope
from openmla.plan import Plan


class Indexer(nn.Module):
    """Scores keys with a few narrow heads. Parameter names match checkpoints.

    `hadamard` rotates queries and keys by an orthonormal Hadamard matrix, which changes no product
    but spreads outliers before fp8 rounds them. Read a cache with the same setting that wrote it.
    """

    def __init__(self, config: MLAConfig, *, hadamard: bool = False) -> None:
        super().__init__()
        config.check_layer("Indexer")
        indexer = config.indexer
        if indexer is None:
            raise UnsupportedError(f"Indexer: {config.model_type} has no indexer.")
        if config.rope.kind not in ("default", "yarn") and config.qk_rope_head_dim:
            raise UnsupportedError(f"Indexer: RoPE kind {config.rope.kind!r} is not supported.")
        self.config, self.indexer = config, indexer
        HI, DI = indexer.num_heads, indexer.head_dim
        if hadamard and DI & (DI - 1):
            raise UnsupportedError(
                f"Indexer: hadamard needs a head_dim of a power of two, got {DI}."
            )
        self.hadamard = hadamard
        width = config.hidden_size if indexer.own_query else config.q_lora_rank
        assert width is not None  # the config checks it
        self.q_input_norm = nn.LayerNorm(width, eps=1e-6) if indexer.own_query else None
        self.wq_b = nn.Linear(width, HI * DI, bias=False)
        self.softmax_scaling = LogScale(HI) if config.log_scale else None
        self.wk = nn.Linear(config.hidden_size, DI, bias=False)
        self.k_norm = nn.LayerNorm(DI, eps=indexer.norm_eps)
        self.weights_proj = nn.Linear(config.hidden_size, HI, bias=False)
        self.requires_grad_(False)

    def forward(
        self,
        hidden: Tensor,  # [T, hidden_size]
        q_resid: Tensor | None,  # [T, q_lora_rank], the normalized low-rank query, if used
        positions: Tensor,  # [T] i64
        table: Tensor | None,  # [num_positions, R] f32, the layer's RoPE table, if it has RoPE
        keys: PagedCache,
        plan: Plan,
    ) -> IndexInputs:
        """Return queries and weights of the tokens, and write their keys to the cache. The write
        comes last, so that nothing is written if an earlier op fails."""
        config, indexer = self.config, self.indexer
        HI, DI, R = indexer.num_heads, indexer.head_dim, config.qk_rope_head_dim
        start = 0 if indexer.rope_side == "first" else DI - R
        if self.q_input_norm is not None:
            q_resid = self.q_input_norm(hidden)
        assert q_resid is not None
        q_idx = apply_linear(self.wq_b, q_resid, plan, "Indexer: wq_b").view(-1, HI, DI)
        if self.softmax_scaling is not None:
            q_idx = self.softmax_scaling(q_idx, positions)
        if table is None:  # keys are then turned by an angle of 0
            table = torch.eye(1, 2, dtype=torch.float32, device=hidden.device)
            positions = torch.zeros_like(positions)
        else:
            rope(
                q_idx[:, :, start : start + R],
                positions,
                table,
                pairing=indexer.pairing,
                backend=plan.backend("rope"),
            )
        if self.hadamard:
            q_idx = hadamard_transform(q_idx)
        # Few outputs, so float32 is free.
        weights = wide_linear(hidden, self.weights_proj.weight, plan.fixed_by)
        w_idx = weights * (DI**-0.5 * HI**-0.5)
        index_write(
            keys.data,
            apply_linear(self.wk, hidden, plan, "Indexer: wk"),
            self.k_norm.weight,
            self.k_norm.bias,
            positions,
            table,
            plan.slot_mapping,
            format=keys.format,
            eps=indexer.norm_eps,
            pairing=indexer.pairing,
            rope_start=start,
            hadamard=self.hadamard,
            backend=plan.backend("index_write"),
        )
        return IndexInputs(q_idx, w_idx, None)


def hadamard_transform(x: Tensor) -> Tensor:  # [..., n], n a power of two
    """Apply the orthonormal Hadamard transform to the last dimension, in float32."""
    n = x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    width = 1
    while width < n:
        pairs = wide.unflatten(-1, (n // (2 * width), 2, width))
        first, second = pairs.unbind(-2)
        wide = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        width *= 2
    return (wide * n**-0.5).to(x.dtype)
