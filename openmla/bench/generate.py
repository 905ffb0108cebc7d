"""Decode of a whole random model: attached, attached and captured, and plain transformers.

    openmla bench generate --model v2-lite --keys 32768 --batch 8 --static

--static adds transformers with a static cache and torch.compile, as generate() runs it with
cache_implementation="static": the fastest decode without openmla.

"small" has about 0.3 B parameters, 32 heads with V3's widths; "v2-lite" is DeepSeek-V2-Lite with 8
of its 64 experts. The prompts are prefilled once, with the attached model; plain transformers gets
the same rows in its own cache. Then all decode the same next tokens in turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.bench.harness import (
    Calls,
    argument_parser,
    describe_machine,
    drop_wrong,
    make_rows,
    relative_error,
    time_round_robin,
)
from openmla.bench.output import Output
from openmla.cli.options import add_model, whole
from openmla.cli.terminal import progress
from openmla.integrations.transformers import attach, attachment_of
from openmla.ops import cache_gather
from openmla.ops._register import Cost
from openmla.plan.explanation import counted

PREFILL = 1024
# Limits on the difference of logits from transformers'. Measured: 0.016 to 0.035 in bf16 (H200, 27
# layers), 2e-6 in float32 (CPU). Losing one key of 512 changes them by 0.046: only float32 is a
# sharp test.
LIMITS = {torch.bfloat16: 0.07, torch.float32: 1e-5}


# transformers' configs: shapes that are not its defaults.
SHARED = {"eos_token_id": None, "pad_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "v2-lite": {
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "first_k_dense_replace": 1,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "max_position_embeddings": 163840,
    },
    "small": {
        "vocab_size": 8192, "hidden_size": 1536, "intermediate_size": 4096,
        "num_hidden_layers": 8, "first_k_dense_replace": 8, "num_attention_heads": 32,
        "num_key_value_heads": 32, "q_lora_rank": 1024, "max_position_embeddings": 131072,
    },
}  # fmt: skip


def make_model(name: str, device: str, dtype: torch.dtype) -> Any:
    import transformers

    family = "DeepseekV2" if name == "v2-lite" else "DeepseekV3"
    config = getattr(transformers, f"{family}Config")(**SHAPES[name], **SHARED)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    return model.eval().requires_grad_(False)


def prefill(model: Any, ids: Tensor) -> Any:
    """Prefill the attached model's cache with a prompt in chunks, with a progress bar."""
    past = None
    with progress(ids.shape[1]) as tell:
        for start in range(0, ids.shape[1], PREFILL):
            tell("prefill", start)
            chunk = ids[:, start : start + PREFILL]
            out = model(chunk, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
    return past


def plain_cache(model: Any, past: Any, B: int, S: int) -> Any:
    """The same latents of B prompts of S tokens in transformers' own cache object."""
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
        rows = torch.empty(B * S, attachment.config.latent_dim, dtype=dtype, device=device)
        bounds = torch.arange(0, B * S + 1, S, dtype=torch.int32, device=device)
        starts = torch.zeros(B, dtype=torch.int32, device=device)
        cache_gather(
            rows, latent.data, latent.kv_scale, table.to(device), starts, bounds,
            format=latent.format,
        )  # fmt: skip
        rows = rows.view(B, 1, S, -1)
        plain.update(rows[..., :C], rows[..., C:], layer)
    return plain


def compiled_step(plain: Any, filled: Any, S: int, ids: Tensor) -> Callable[[], Tensor]:
    """A decode step of transformers over a static cache with the rows of `filled`, compiled as
    generate() compiles it. Every call drops its own row again."""
    from transformers import CompileConfig, StaticCache

    cache = StaticCache(config=plain.config, max_cache_len=S + 1)
    for number, layer in enumerate(filled.layers):
        cache.update(layer.keys, layer.values, number)
    lengths = [layer.cumulative_length for layer in cache.layers]
    forward = plain.get_compiled_call(CompileConfig())
    positions = torch.full_like(ids, S)

    def step() -> Tensor:
        out = forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        torch._foreach_sub_(lengths, 1)
        logits: Tensor = out.logits
        return logits.clone()  # the next replay of a graph overwrites them

    return step


def weightless_copy(model: Any) -> Any:
    """A second model with the same parameters."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def decode_as_generate_does(model: Any) -> None:
    """Run experts as generate() does when it decodes on a GPU: one by one, without a sync."""
    if model.device.type == "cuda":
        model.set_experts_implementation("batched_mm")


def tell_memory(calls: Calls, attached: Any, output: Output) -> None:
    """Print what a step allocates besides weights and caches, and the size of its graph's pool."""
    graph = attachment_of(attached).memory().graph_bytes
    for name, call in calls.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        held = f", {(graph or 0) / 2**20:.1f} MiB in its graph's pool" if name == "captured" else ""
        output.say(f"  {name:<14} {extra / 2**20:.1f} MiB besides weights and caches{held}")


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argument_parser("generate")
    parser.add_argument(
        "--keys", type=whole(1, 2**20), nargs="+", default=[8192], metavar="N",
        help="prompt lengths in tokens (default: 8192)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=whole(1, 4096), default=1, metavar="N",
        help="number of prompts (default: %(default)s)",
    )  # fmt: skip
    add_model(parser, "random model to time, small or v2-lite (default: small)", default="small")
    parser.add_argument(
        "--static", action="store_true",
        help="also time transformers with a static cache and torch.compile",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.model not in SHAPES:
        parser.error(f"MODEL must be small or v2-lite, got {options.model!r}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    output, B = Output(options, describe_machine(device)), options.batch
    rates: dict[str, dict[int, float]] = {}
    with torch.inference_mode():
        plain = make_model(options.model, device, dtype)
        size = sum(p.numel() for p in plain.parameters()) / 1e9
        output.say(f"{size:.2f} B parameters, {dtype}")
        for S in options.keys:
            given = plain, B, S, options.rounds, output
            for name, rate in time_keys(*given, static=options.static).items():
                rates.setdefault(name, {})[S] = rate
                output.say(f"  {name:<14} {rate:.1f} tokens/s")
    output.close(tokens_per_s=rates)
    prompts = counted(B, "prompt")
    name = "DeepSeek-V2-Lite (8 of its experts)" if options.model == "v2-lite" else "A small model"
    title = f"{name}, decode of {prompts}, {size:.1f} B parameters"
    output.draw_lines(title, "tokens per second", rates)


def time_keys(
    plain: Any, B: int, S: int, rounds: int, output: Output, *, static: bool
) -> dict[str, float]:
    """Tokens per second for B prompts of S tokens each, by contender."""
    device, dtype = plain.device.type, plain.dtype
    attached = weightless_copy(plain)
    attach(attached, capture=True)
    ids = torch.randint(1, 8192, (B, S + 1), device=device)
    ours = prefill(attached, ids[:, :-1])
    theirs = plain_cache(attached, ours, B, S)
    decode_as_generate_does(plain)
    decode_as_generate_does(attached)
    positions = torch.full((B, 1), S, device=device)

    def step(past: Any, forward: Any) -> Tensor:
        out = forward(
            input_ids=ids[:, -1:], position_ids=positions, past_key_values=past, use_cache=True
        )
        past.crop(-1)
        logits: Tensor = out.logits
        return logits

    calls: Calls = {
        "openmla": lambda: step(ours, attached.forward.forward),
        "captured": lambda: step(ours, attached.forward),
        "transformers": lambda: step(theirs, plain.forward),
    }
    title = f"{counted(B, 'token')} of the whole model, each over {S} keys"
    expected = calls["transformers"]().clone()
    if static:
        calls["static"] = compiled_step(plain, theirs, S, ids[:, -1:])
    errors = {name: relative_error(call(), expected) for name, call in calls.items()}
    left_out = drop_wrong(title, calls, errors, LIMITS[dtype])
    if device == "cuda":
        tell_memory(calls, attached, output)
    with progress(rounds + 2) as tell:
        times = time_round_robin(calls, rounds, device, lambda turn: tell(title, turn))
    rows = make_rows(title, times, "transformers", None, Cost(1, 1), errors)
    output.add(title, rows, left_out)
    return {row.contender: 1e6 * B / row.median_us for row in rows}
