"""A language model of native layers throughout, whose every product is by fixed tiles or rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from openmla import PRESETS, Batch, BlockPool, MLAAttention, allocate_cache, make_plan
from openmla.attention.products import multiply
from openmla.layers.norm import RMSNorm


class TinyModel:
    """Embeddings, then attention and a gated product per layer, then logits of all tokens."""

    VOCAB = 61

    def __init__(self, kind: str, num_layers: int = 2) -> None:
        config = PRESETS["tiny-v3" if kind == "dense" else "tiny-v3.2"]
        self.config = replace(config, num_layers=num_layers)
        torch.manual_seed(0)
        hidden = config.hidden_size
        self.embedding = torch.randn(self.VOCAB, hidden)
        self.norm = RMSNorm(hidden, 1e-6)
        self.layers = [MLAAttention(self.config, layer=i) for i in range(num_layers)]
        for layer in self.layers:
            for parameter in layer.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        self.gates = [torch.randn(2 * hidden, hidden) * hidden**-0.5 for _ in self.layers]

    def logits(self, prompts: list[list[int]]) -> list[Tensor]:
        """Of each prompt's tokens, all in one step."""
        names, lens = list(range(len(prompts))), [len(prompt) for prompt in prompts]
        pool = BlockPool(64 * len(prompts), 4)
        pool.take(dict(zip(names, lens, strict=True)))
        caches = [
            allocate_cache(
                self.config, num_blocks=pool.num_blocks, block_size=4, format="fp32",
                index_format="index_fp32", layer=i,
            )
            for i in range(len(self.layers))
        ]  # fmt: skip
        slots = pool.slot_mapping([(name, 0, n) for name, n in zip(names, lens, strict=True)])
        batch = Batch(lens, lens, pool.block_table(names), slots)
        plan = make_plan(batch, self.config, caches[0], dtype=torch.float32, batch_invariant=True)
        by = plan.fixed_by
        assert by is not None
        positions = torch.cat([torch.arange(n) for n in lens])
        x = self.embedding[torch.tensor([token for prompt in prompts for token in prompt])]
        for layer, cache, gate in zip(self.layers, caches, self.gates, strict=True):
            x = x + layer(self.norm(x, by), positions, cache, plan)
            up, down = multiply(self.norm(x, by), gate, by).chunk(2, dim=-1)
            x = x + up.relu() * down
        return list(multiply(self.norm(x, by), self.embedding, by).split(lens))
