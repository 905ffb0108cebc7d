"""One decode step of a whole layer, compared with transformers' module and expanded K/V caches.

Contenders, all with the same weights over the same context:
  openmla               this package: absorbed, from a paged latent cache
  transformers          its module: caches latents, expands all of them at every step
  expanded, sdpa        a cache of expanded keys and values, torch's attention
  expanded, eager       the same cache, two matrix products and a softmax
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openmla import PRESETS, Batch, BlockPool, LayerCache, MLAAttention, allocate_cache, make_plan
from openmla.attention import Projected
from openmla.bench.harness import (
    Calls,
    argument_parser,
    describe_machine,
    drop_wrong,
    make_rows,
    measure_roofs,
    relative_error,
    time_once,
    time_round_robin,
)
from openmla.bench.output import Output
from openmla.cli.options import whole
from openmla.cli.terminal import progress
from openmla.ops import latent_write
from openmla.ops._register import Cost
from openmla.ops.mqa_paged import cost as mqa_cost

BS = 64
PLAN_REQUESTS = 128


class Decode:
    """One request with S tokens of context, about to decode one more."""

    def __init__(self, S: int, device: str, dtype: torch.dtype) -> None:
        # transformers fixes the epsilon of the latent norms
        self.config = replace(PRESETS["deepseek-v2-lite"], latent_eps=1e-6)
        self.S, self.device, self.dtype = S, device, dtype
        torch.manual_seed(0)
        self.theirs, self.rotary = transformers_module(device, dtype)
        self.layer = MLAAttention(self.config).to(device, dtype)
        self.layer.load_state_dict(self.theirs.state_dict())
        self.hidden = torch.randn(1, self.config.hidden_size, device=device, dtype=dtype)
        self.positions = torch.tensor([S], device=device)
        self.pool = BlockPool(num_blocks=S // BS + 2, block_size=BS)
        self.pool.take({"r": S + 1})
        self.format = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        self.cache: LayerCache = allocate_cache(
            self.config, num_blocks=self.pool.num_blocks, block_size=BS, format=self.format,
            device=device,
        )  # fmt: skip
        batch = Batch(
            [1], [S + 1], self.pool.block_table(["r"]), self.pool.slot_mapping([("r", S, S + 1)])
        )
        self.plan = make_plan(batch, self.config, self.cache, dtype=dtype)
        self.context = self.project_context()
        self.keys, self.values = self.expand_context()

    def project_context(self) -> Projected:
        """Project random hidden states with the layer's own projections, 2048 tokens at a time."""
        hidden = torch.randn(self.S, self.config.hidden_size, device=self.device, dtype=self.dtype)
        latent = self.cache.latent
        assert latent is not None
        parts = []
        for start in range(0, self.S, 2048):
            rows = hidden[start : start + 2048]
            positions = torch.arange(start, start + len(rows), device=self.device)
            parts.append(self.projected(rows, positions))
        whole = Projected(*(torch.cat(fields) for fields in zip(*parts, strict=True)))
        slots = self.pool.slot_mapping([("r", 0, self.S)]).to(self.device)
        flat = latent.data.view(-1, self.config.latent_dim)
        flat[slots] = torch.cat([whole.kv_c, whole.k_pe], dim=1).to(latent.data.dtype)
        return whole

    def projected(self, hidden: Tensor, positions: Tensor) -> Projected:
        """Normalized and rotated, with no slot to write to."""
        latent = self.cache.latent
        assert latent is not None
        projected, raw, _ = self.layer.project(hidden, positions, self.plan)
        assert raw is not None
        nowhere = torch.full_like(positions, -1)
        latent_write(
            latent.data, raw.q, raw.kv, raw.norm_weight, raw.positions, nowhere, latent.kv_scale,
            raw.table, format=latent.format, pairing=raw.pairing, eps=raw.eps, factor=raw.factor,
        )  # fmt: skip
        return projected

    def expand(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        H, P, V = self.config.num_heads, self.config.qk_nope_head_dim, self.config.v_head_dim
        both = (kv_c @ self.layer.absorbed.kv_b.T).view(-1, H, P + V)
        k = torch.cat([both[..., :P], k_pe[:, None].expand(-1, H, -1)], dim=-1)
        return k.transpose(0, 1), both[..., P:].transpose(0, 1)  # [H, S, E], [H, S, V]

    def expand_context(self) -> tuple[Tensor, Tensor]:
        """Expanded caches with one free row at the end, contiguous per head."""
        H, E, V = self.config.num_heads, self.config.qk_head_dim, self.config.v_head_dim
        keys = torch.zeros(H, self.S + 1, E, device=self.device, dtype=self.dtype)
        values = torch.zeros(H, self.S + 1, V, device=self.device, dtype=self.dtype)
        for start in range(0, self.S, 2048):
            part = slice(start, min(start + 2048, self.S))
            keys[:, part], values[:, part] = self.expand(
                self.context.kv_c[part], self.context.k_pe[part]
            )
        return keys, values

    def openmla(self) -> Tensor:
        return self.layer(self.hidden, self.positions, self.cache, self.plan)

    def transformers(self) -> Tensor:
        past = self.latent_past()
        out: Tensor = self.theirs(
            hidden_states=self.hidden[None],
            position_embeddings=self.rotary(self.hidden[None], self.positions[None]),
            attention_mask=None,
            past_key_values=past,
        )[0][0]
        past.crop(-1)
        return out

    def latent_past(self) -> Any:
        """transformers' own cache with the context's latents, made once."""
        if not hasattr(self, "_past"):
            from transformers import DynamicCache

            self._past = DynamicCache()
            self._past.update(self.context.kv_c[None, None], self.context.k_pe[None, None], 0)
        return self._past

    def _expanded(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        projected = self.projected(self.hidden, self.positions)
        new_key, new_value = self.expand(projected.kv_c, projected.k_pe)
        self.keys[:, self.S :], self.values[:, self.S :] = new_key, new_value
        q = torch.cat([projected.q_nope, projected.q_pe], dim=-1).transpose(0, 1)  # [H, 1, E]
        out = attend(q, self.keys, self.values)
        return self.layer.o_proj(out.transpose(0, 1).reshape(1, -1))

    def expanded_sdpa(self) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], scale=self.config.scale
            )[0]

        return self._expanded(attend)

    def expanded_eager(self) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (self.config.scale * (q @ k.transpose(1, 2))).softmax(-1) @ v

        return self._expanded(attend)


def transformers_module(device: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    """DeepSeek-V2-Lite's attention as transformers has it, with random weights."""
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Attention,
        DeepseekV2RotaryEmbedding,
    )

    preset = PRESETS["deepseek-v2-lite"]
    config = DeepseekV2Config(
        hidden_size=preset.hidden_size,
        num_attention_heads=preset.num_heads,
        q_lora_rank=None,
        max_position_embeddings=preset.max_positions,
        rope_scaling={
            "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        },
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module = DeepseekV2Attention(config, layer_idx=0).eval().requires_grad_(False)
    return module.to(device, dtype), DeepseekV2RotaryEmbedding(config).to(device)


def plan_time(device: str, rounds: int) -> float:
    """Microseconds of host time for Batch and make_plan with 128 decoding requests."""
    config, S = PRESETS["deepseek-v3"], 1000
    pool = BlockPool(PLAN_REQUESTS * 20, BS)
    lens = [S + b for b in range(PLAN_REQUESTS)]
    pool.take(dict(enumerate(lens)))
    cache = allocate_cache(config, num_blocks=pool.num_blocks, block_size=BS, device=device)
    table = pool.block_table(range(PLAN_REQUESTS))
    slots = pool.slot_mapping([(b, n - 1, n) for b, n in enumerate(lens)])

    def plan() -> None:
        make_plan(Batch([1] * PLAN_REQUESTS, lens, table, slots), config, cache)

    return statistics.median(time_once(plan, "cpu") for _ in range(10 * rounds)) * 1e6


def cache_bytes() -> list[str]:
    """Bytes per token and layer: latent rows against expanded keys and values, in 16 bits."""
    lines = []
    for name in ("deepseek-v2-lite", "deepseek-v3"):
        config = PRESETS[name]
        latent = 2 * config.latent_dim
        expanded = 2 * config.num_heads * (config.qk_head_dim + config.v_head_dim)
        lines.append(
            f"  {name:<18} latent {latent} bytes per token and layer, as in transformers; "
            f"expanded {expanded}, {expanded / latent:.1f}x"
        )
    return lines


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argument_parser("step")
    parser.add_argument(
        "--keys", type=whole(1, 2**20), nargs="+", default=[16384], metavar="N",
        help="context lengths in tokens (default: 16384)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    output, roofs = Output(options, describe_machine(device)), measure_roofs(device)
    output.say("\n".join(["cache", *cache_bytes()]))
    planning = plan_time(device, options.rounds)
    output.say(
        f"plan\n  Batch and make_plan for {PLAN_REQUESTS} decoding requests: {planning:.0f} us"
    )
    points: dict[str, dict[int, float]] = {}
    with torch.inference_mode(), progress(len(options.keys)) as tell:
        for number, keys in enumerate(options.keys):
            tell(f"a layer over {keys} keys", number)
            for name, us in time_keys(keys, options.rounds, device, dtype, roofs, output).items():
                points.setdefault(name, {})[keys] = us
    output.close(plan_us=planning)
    unit, scale = "us", 1.0
    if max(us for values in points.values() for us in values.values()) > 1e3:
        unit, scale = "ms", 1e-3
    points = {name: {S: us * scale for S, us in values.items()} for name, values in points.items()}
    output.draw_lines("One decode step of a DeepSeek-V2-Lite layer", f"{unit} per token", points)


def time_keys(
    keys: int, rounds: int, device: str, dtype: torch.dtype, roofs: Cost, output: Output
) -> dict[str, float]:
    """Microseconds of a step over that many keys, by contender."""
    decode = Decode(keys, device, dtype)
    title = f"V2-Lite layer, one token over {keys} keys, {dtype}"
    calls: Calls = {
        "openmla": decode.openmla,
        "transformers": decode.transformers,
        "expanded, sdpa": decode.expanded_sdpa,
        "expanded, eager": decode.expanded_eager,
    }
    expected = decode.transformers().clone()
    errors = {name: relative_error(call(), expected) for name, call in calls.items()}
    left_out = drop_wrong(title, calls, errors, 100 * torch.finfo(dtype).eps)
    times = time_round_robin(calls, rounds, device)
    config = decode.config
    needed: Cost = mqa_cost(
        [1], [keys + 1], H=config.num_heads, D=config.latent_dim, C=config.kv_lora_rank,
        format=decode.format, itemsize=dtype.itemsize, causal=True,
    )  # fmt: skip
    rows = make_rows(title, times, "transformers", needed, roofs, errors)
    output.add(title, rows, left_out)
    return {row.contender: row.median_us for row in rows}
