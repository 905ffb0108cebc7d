"""One cached attention of DeepSeek-V2-Lite's shape, in every cache format for it, against float64.

A prompt's latent rows are written to a paged cache; then one new token attends to all of them.
"""

from __future__ import annotations

import torch

import openmla
from openmla.cache import latent_formats
from openmla.ops import cache_write, mqa_paged

PROMPT, BLOCK_SIZE = 2000, 64


def main() -> None:
    config = openmla.PRESETS["deepseek-v2-lite"]
    H, C, R, D = config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim, config.latent_dim
    torch.manual_seed(0)
    rows = torch.randn(PROMPT, D)  # normalized latents and rotated keys have unit size
    query = torch.randn(1, H, D) / (config.scale * D**0.5)  # logits of unit size

    # the exact result: float64 softmax over the rows before any rounding
    logits = config.scale * (query.double()[0] @ rows.double().T)
    truth = logits.softmax(-1) @ rows.double()[:, :C]

    expanded = H * (config.qk_head_dim + config.v_head_dim) * 2
    print(f"\nlatent attention over {PROMPT} cached tokens, {H} heads, rows of {C} + {R}")
    print(f"  {'format':<18}{'bytes/token':>12}{'of expanded K/V':>17}{'error':>10}")
    for name in latent_formats(config):
        layout = openmla.FORMATS[name]
        pool = openmla.BlockPool(num_blocks=40, block_size=BLOCK_SIZE)
        pool.take({"prompt": PROMPT})
        cache = openmla.allocate_cache(
            config,
            num_blocks=pool.num_blocks,
            block_size=BLOCK_SIZE,
            format=name,
            kv_scale=0.01 if layout.scaled else 1.0,
        ).latent
        assert cache is not None
        slots = pool.slot_mapping([("prompt", 0, PROMPT)])
        cache_write(cache.data, rows[:, :C], rows[:, C:], slots, cache.kv_scale, format=name)
        out, _ = mqa_paged(
            query,
            cache.data,
            cache.kv_scale,
            pool.block_table(["prompt"]),
            seq_lens=torch.tensor([PROMPT], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            format=name,
            C=C,
            scale=config.scale,
            causal=True,
            max_query_len=1,
        )
        error = (out[0].double() - truth).norm() / truth.norm()
        size = layout.row_bytes(D)
        print(f"  {name:<18}{size:>12}{size / expanded:>16.1%}{error:>11.1e}")
    print(f"  error: relative, against float64 before any rounding; expanded: {expanded} bytes")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
