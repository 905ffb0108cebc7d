"""A layer's decode step on a CPU: openmla's, and vLLM's own if it is installed, in turn.

    python3 -m bench.cpu_decode                    16 heads, 1 and 8 requests of 8192 keys
    python3 -m bench.cpu_decode --heads 8 128 --threads 1

Blocks of 16 tokens, in random order. A step writes the new rows, projects the queries into latent
space, attends and projects the outputs out of it; vLLM's step is what its CPU_MLA backend calls for
that. Other programs may run between two calls, so only the ratio is meaningful.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from openmla import (
    PRESETS,
    Batch,
    MLAConfig,
    Projected,
    allocate_cache,
    attend_step,
    make_plan,
)
from openmla.bench.harness import (
    argument_parser,
    describe_machine,
    make_rows,
    relative_error,
    time_round_robin,
)
from openmla.bench.output import Output
from openmla.layers.weights import absorb
from openmla.ops._register import Cost

BLOCK = 16  # the only size that vLLM's op supports
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Decode:
    """Requests of `keys` tokens each, the last of them from this step."""

    def __init__(self, config: MLAConfig, requests: int, keys: int, format: str) -> None:
        torch.manual_seed(0)
        self.config, self.dtype = config, DTYPES[format]
        H, P, R = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        C, V = config.kv_lora_rank, config.v_head_dim
        M = -(-keys // BLOCK)
        self.cache = allocate_cache(
            config, num_blocks=requests * M, block_size=BLOCK, format=format
        )
        assert self.cache.latent is not None
        self.rows = self.cache.latent.data
        self.rows.copy_(torch.randn(self.rows.shape))
        self.table = torch.randperm(requests * M).view(requests, M).int()
        self.lens = torch.full((requests,), keys, dtype=torch.int32)
        self.slots = self.table[:, -1].long() * BLOCK + (keys - 1) % BLOCK
        q = torch.randn(requests, H, P + R).to(self.dtype)
        new = torch.randn(requests, C + R).to(self.dtype)
        self.projected = Projected(*q.split([P, R], -1), *new.split([C, R], -1))
        weight = torch.randn(H * (P + V), C) * C**-0.5
        self.weights = absorb(weight.to(self.dtype), config)
        self.out = torch.empty(requests, H, V, dtype=self.dtype)

    def openmla(self, backend: str) -> Callable[[], Tensor]:
        lens = self.lens.tolist()
        batch = Batch([1] * len(lens), lens, self.table, self.slots)
        plan = make_plan(
            batch, self.config, self.cache, dtype=self.dtype, backend={"mqa_paged": backend},
            form="absorbed",
        )  # fmt: skip
        return partial(attend_step, self.projected, self.weights, self.cache, plan, out=self.out)

    def vllm(self) -> Tensor:
        C = self.config.kv_lora_rank
        q_nope, q_pe, kv_c, k_pe = self.projected
        flat = self.rows.view(-1, self.rows.shape[-1])
        if bool((self.slots >= 0).all()):
            flat[self.slots, :C], flat[self.slots, C:] = kv_c, k_pe
        into = torch.bmm(q_nope.transpose(0, 1), self.weights.w_uk)
        q = torch.cat((into.transpose(0, 1), q_pe), -1)
        latent = torch.zeros(*q.shape[:2], C, dtype=q.dtype)
        torch.ops._C.mla_decode_kvcache(
            latent, q, self.rows, self.config.scale, self.table, self.lens
        )
        torch.bmm(latent.transpose(0, 1), self.weights.w_uv, out=self.out.transpose(0, 1))
        return self.out


def measure(decode: Decode, title: str, output: Output) -> None:
    calls = {"openmla": decode.openmla("auto"), "its reference": decode.openmla("reference")}
    if importlib.util.find_spec("vllm") is not None:
        importlib.import_module("vllm._C")
        calls["vllm"] = decode.vllm
    outs = {name: call().clone() for name, call in calls.items()}
    errors = {name: relative_error(out, outs["its reference"]) for name, out in outs.items()}
    baseline = "vllm" if "vllm" in calls else "its reference"
    times = time_round_robin(calls, output.options.rounds, "cpu")
    output.add(title, make_rows(title, times, baseline, None, Cost(1, 1), errors))


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argument_parser("cpu_decode")
    parser.prog = "bench.cpu_decode"
    parser.add_argument("--heads", type=int, nargs="+", default=[16])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--formats", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    output = Output(options, describe_machine("cpu"))
    with torch.inference_mode():
        for H in options.heads:
            config = replace(PRESETS["deepseek-v2-lite"], num_heads=H)
            for format in options.formats:
                for B in options.requests:
                    title = f"{B} requests of {options.keys} keys, {H} heads, {format}"
                    measure(Decode(config, B, options.keys, format), title, output)
    output.close()


if __name__ == "__main__":
    run()
