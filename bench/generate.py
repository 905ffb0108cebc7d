"""Decode of a whole random DeepSeek-V3-shaped model: attached against plain transformers.

About 0.3 B parameters, 32 heads with V3's widths. The prompt is prefilled once, attached; plain
transformers gets the same latents in its own cache. Then both decode the same next token in turns.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.harness import (
    argument_parser,
    describe_machine,
    measure_roofs,
    save,
    tabulate,
    time_round_robin,
)
from openmla.integrations.transformers import attach, attachment_of
from openmla.ops import cache_gather

PREFILL = 1024


def make_model(device: str, dtype: torch.dtype) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=8192,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=8,
        first_k_dense_replace=8,
        num_attention_heads=32,
        num_key_value_heads=32,
        q_lora_rank=1024,
        max_position_embeddings=131072,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    return model.to(device, dtype)


def prefill(model: Any, ids: Tensor) -> Any:
    """The attached model's cache of a prompt, made in chunks with a line of progress."""
    past = None
    for start in range(0, ids.shape[1], PREFILL):
        chunk = ids[:, start : start + PREFILL]
        past = model(chunk, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values
        done = start + chunk.shape[1]
        print(f"\rprefill {done} of {ids.shape[1]} tokens", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return past


def plain_cache(model: Any, past: Any, num_tokens: int) -> Any:
    """The same latents in transformers' own cache object."""
    from transformers import DynamicCache

    attachment = attachment_of(model)
    C = attachment.config.kv_lora_rank
    plain = DynamicCache()
    session = past.layers[0].session
    table = attachment.pools[0].block_table(session.requests)
    for layer, cache in attachment.caches.items():
        latent = cache.latent
        assert latent is not None
        dtype = next(model.parameters()).dtype
        device = latent.data.device
        rows = torch.empty(num_tokens, attachment.config.latent_dim, dtype=dtype, device=device)
        bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        starts = torch.zeros(1, dtype=torch.int32, device=device)
        cache_gather(
            rows,
            latent.data,
            latent.kv_scale,
            table.to(device),
            starts,
            bounds,
            format=latent.format,
        )
        plain.update(rows[None, None, :, :C], rows[None, None, :, C:], layer)
    return plain


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argument_parser("generate")
    parser.add_argument("--keys", type=int, default=8192)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    machine, roofs = describe_machine(device), measure_roofs(device)
    print(machine)
    with torch.inference_mode():
        attached = make_model(device, dtype)
        plain = copy.deepcopy(attached)
        attach(attached)
        print(f"{sum(p.numel() for p in plain.parameters()) / 1e9:.2f} B parameters, {dtype}")
        ids = torch.randint(1, 8192, (1, options.keys + 1), device=device)
        ours = prefill(attached, ids[:, :-1])
        theirs = plain_cache(attached, ours, options.keys)

        def step(model: Any, past: Any) -> Tensor:
            logits: Tensor = model(ids[:, -1:], past_key_values=past, use_cache=True).logits
            past.crop(-1)
            return logits

        calls: dict[str, Callable[[], Tensor]] = {
            "openmla": lambda: step(attached, ours),
            "transformers": lambda: step(plain, theirs),
        }
        expected = calls["transformers"]().double()
        error = float((calls["openmla"]().double() - expected).norm() / expected.norm())
        limit = 100 * torch.finfo(dtype).eps
        if error > limit:
            print(f"  openmla WRONG: {error:.1e} from transformers, at most {limit:.1e}")
            del calls["openmla"]
        times = time_round_robin(calls, options.rounds, device)
    title = f"one token of the whole model over {options.keys} keys"
    errors = {"openmla": error, "transformers": 0.0}
    rows = tabulate(title, times, "transformers", None, roofs, errors)
    save(options.json, machine, rows)


if __name__ == "__main__":
    run()
