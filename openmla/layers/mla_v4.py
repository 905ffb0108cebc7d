"""MLAAttentionV4: DeepSeek V4's attention layer, with window, compressed entries and sink."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.attention import CompressedInputs, RawProjections, attend_compressed
from openmla.cache import LayerCache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.layers.compressor import CompressedIndexer, Compressor
from openmla.layers.linear import apply_linear
from openmla.layers.mla import check_tokens
from openmla.layers.norm import RMSNorm
from openmla.layers.rope import RopeTable
from openmla.ops import project_heads, rope
from openmla.plan import Plan


class GroupedLinear(nn.Module):
    """One projection per group of heads, with all weights stacked along rows."""

    def __init__(self, width: int, out: int, groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups * out, width), requires_grad=False)
        self.groups = groups
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, hidden: Tensor, fixed_by: str | None = None) -> Tensor:
        """Project [T, groups, width] to [T, groups * out]. `fixed_by`: from the plan."""
        weight = self.weight.view(self.groups, -1, hidden.shape[-1])
        if fixed_by is not None:
            out = hidden.new_empty((*hidden.shape[:2], weight.shape[1]))
            project_heads(out, hidden, weight.mT, batch_invariant=True, backend=fixed_by)
            return out.flatten(1)
        return torch.bmm(hidden.transpose(0, 1), weight.mT).transpose(0, 1).flatten(1)


class MLAAttentionV4(nn.Module):
    """A DeepSeek V4 attention layer for inference, with the parameter names of transformers.

    No parameter requires grad. Load weights with load_state_dict().

    Args:
        config: the model's dimensions.
        layer: number of the layer in the model. It decides the compress ratio: 0, 4 or 128. Draft
            (MTP) layers, numbered past the model's layers, have ratio 0.
        hadamard: whether the indexer rotates queries and keys by a Hadamard matrix, as the
            reference model does. Read a cache the way it was written.
        rope_table: the RopeTable of another layer, to share its memory. Layers of ratio 0 share
            one, all other layers another.

    Raises:
        ConfigError: the config has no hidden_size, or the layer number is not valid.
        UnsupportedError: the model is not DeepSeek V4, or has an attention bias.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v4"]
    layer = openmla.MLAAttentionV4(config, layer=0)
    cache = openmla.allocate_cache(
        config, num_blocks=4, block_size=256, format="fp32", max_requests=2, max_tokens=64
    )
    pool = openmla.CompressedPool(cache.geometry)
    pool.take({"a": 20})
    batch = openmla.Batch([20], [20], **pool.tables(["a"])._asdict())
    plan = openmla.make_plan(batch, config, cache)
    with torch.inference_mode():
        out = layer(torch.randn(20, config.hidden_size), torch.arange(20), cache, plan)
    assert out.shape == (20, config.hidden_size)
    ```
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        layer: int,
        hadamard: bool = True,
        rope_table: RopeTable | None = None,
    ) -> None:
        super().__init__()
        config.check_layer("MLAAttentionV4")
        compressor, q_lora_rank = config.compressor, config.q_lora_rank
        if compressor is None or q_lora_rank is None:
            raise UnsupportedError(
                f"MLAAttentionV4: {config.model_type} has no compressor. Use MLAAttention."
            )
        if config.attention_bias:
            raise UnsupportedError("MLAAttentionV4: attention_bias is not supported.")
        self.config, self.ratio = config, compressor.ratio(layer)
        self.rope = compressor.rope if self.ratio else config.rope
        if self.rope.kind not in ("default", "yarn"):
            raise UnsupportedError(
                f"MLAAttentionV4: RoPE kind {self.rope.kind!r} is not supported."
            )
        R, positions = config.qk_rope_head_dim, config.max_positions
        self.rope_table = RopeTable.shared(rope_table, self.rope, R, positions)
        hidden, H, D = config.hidden_size, config.num_heads, config.latent_dim
        G, rank = compressor.output_groups, compressor.output_lora_rank
        self.q_a_proj = nn.Linear(hidden, q_lora_rank, bias=False)
        self.q_a_norm = RMSNorm(q_lora_rank, config.latent_eps)
        self.q_b_proj = nn.Linear(q_lora_rank, H * D, bias=False)
        self.kv_proj = nn.Linear(hidden, D, bias=False)
        self.kv_norm = RMSNorm(D, config.latent_eps)
        self.o_a_proj = GroupedLinear(H * D // G, rank, G)
        self.o_b_proj = nn.Linear(G * rank, hidden, bias=False)
        self.sinks = nn.Parameter(torch.zeros(H))
        self.compressor: Compressor | None = None
        if self.ratio:
            chooses = self.ratio == INDEXED_RATIO
            self.compressor = Compressor(config, self.ratio, D, overlap=chooses)
            if chooses:
                indexer = CompressedIndexer(config, self.ratio, hadamard=hadamard)
                self.compressor.indexer = indexer
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layer computes in: that of its norms. Linears may be quantized."""
        return self.kv_norm.weight.dtype

    def forward(
        self,
        hidden: Tensor,  # [T, hidden_size]
        positions: Tensor,  # [T] i64, positions in the sequences
        cache: LayerCache,
        plan: Plan,
    ) -> Tensor:  # [T, hidden_size]
        """Project, write the caches, attend, rotate back, and project.

        Args:
            hidden: [T, hidden_size] hidden states of the plan's tokens, in the layer's dtype.
            positions: [T] int64 position of each token in its sequence.
            cache: the layer's cache, of its compress ratio.
            plan: the plan of the step for layers of this ratio.

        Returns:
            [T, hidden_size].

        Raises:
            ShapeError: a tensor has a wrong shape, dtype, device or value. Nothing is written.
            ConfigError: cache, plan and layer do not match. Nothing is written.
        """
        self._check(hidden, positions, cache, plan)
        config = self.config
        T, H = plan.num_tokens, config.num_heads
        D, R = config.latent_dim, config.qk_rope_head_dim
        table = self.rope_table.table
        fixed_by = plan.fixed_by
        q_resid = self.q_a_norm(self._times("q_a_proj", hidden, plan), fixed_by)
        q = self._times("q_b_proj", q_resid, plan).view(T, H, D)
        rows = self._times("kv_proj", hidden, plan)
        raw = RawProjections(
            q, rows, self.kv_norm.weight, positions, table, "pairs", config.latent_eps,
            norm_queries=True,
        )  # fmt: skip
        pool_inputs = index = index_pool_inputs = None
        hadamard = False
        if self.compressor is not None:
            pool_inputs = self.compressor(hidden, fixed_by)
            indexer = getattr(self.compressor, "indexer", None)
            if indexer is not None:
                index_pool_inputs, hadamard = indexer(hidden, fixed_by), indexer.hadamard
                if plan.chooses:
                    index = indexer.queries(hidden, q_resid, positions, table, plan)
        given = (table, pool_inputs, index, index_pool_inputs, hadamard)
        out = self._attend(CompressedInputs(q, rows, raw, *given), cache, plan)
        rope(
            out[:, :, D - R :],
            positions,
            table,
            pairing="pairs",
            inverse=True,
            backend=plan.backend("rope"),
        )
        groups = self.o_a_proj.groups
        grouped = self.o_a_proj(out.reshape(T, groups, H * D // groups), fixed_by)
        return self._times("o_b_proj", grouped, plan)

    def _times(self, name: str, x: Tensor, plan: Plan) -> Tensor:
        """Apply one of the layer's linears."""
        return apply_linear(getattr(self, name), x, plan, f"MLAAttentionV4: {name}")

    def _attend(self, inputs: CompressedInputs, cache: LayerCache, plan: Plan) -> Tensor:
        sink = self.sinks.float()
        assert inputs.rows is not None
        return attend_compressed(
            inputs.q,
            inputs.rows,
            cache,
            plan,
            raw=inputs.raw,
            sink=sink,
            table=inputs.table,
            pool_inputs=inputs.pool_inputs,
            index=inputs.index,
            index_pool_inputs=inputs.index_pool_inputs,
            hadamard=inputs.hadamard,
        )

    def _check(
        self,
        hidden: Tensor,
        positions: Tensor,
        cache: LayerCache,
        plan: Plan,
    ) -> None:
        weight = self.kv_norm.weight
        check_tokens("MLAAttentionV4", hidden, positions, cache, plan, self.config, weight)
        if plan.output is not None:
            raise UnsupportedError(
                f"MLAAttentionV4: output must be None in the plan, got {plan.output!r}: o_a_proj "
                "multiplies rows that are not quantized. For a projection of your own, call "
                "attend_compressed(out=...)."
            )
        shared = plan.shared
        if shared is None or plan.ratio != self.ratio or cache.ratio != self.ratio:
            raise ConfigError(
                f"MLAAttentionV4: plan and cache must have this layer's compress ratio "
                f"{self.ratio}, got {None if shared is None else plan.ratio} and {cache.ratio}. "
                "Make one plan for each ratio."
            )
        if positions.device.type != "cpu" or torch.compiler.is_compiling():
            return
        # Padding of a captured step and tokens of empty requests may have any position.
        counted = slice(int(shared.query_start_loc[-1]))
        planned, given = shared.positions[counted], positions[counted]
        if bool(((planned >= 0) & (given != planned)).any()):
            raise ShapeError(
                "MLAAttentionV4: positions must count the tokens of each sequence from 0, as the "
                f"plan does, got {int(given[given != planned][0])} instead of "
                f"{int(planned[given != planned][0])}."
            )
