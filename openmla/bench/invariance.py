"""The cost of batch_invariant: an attention step by the default plan and by the invariant one.

A step is DeepSeek-V3's attention without its projections, with 16 heads (one of eight ranks) and
with 128: write the rows, project queries into latent space, attend, and project outputs out of it;
in prefill, expand the keys. On a GPU both plans are replayed from CUDA graphs. The layer's own
linears are timed separately, by torch and with a fixed order of summation. A step is WRONG and not
timed if its first request differs bitwise between running alone and in its batch, or if it differs
from the default step by more than the error of 16 bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla import PRESETS, Batch, BlockPool, LayerCache, MLAConfig, Plan, allocate_cache
from openmla.attention import Projected, attend_latent, attend_step
from openmla.attention.products import multiply
from openmla.bench.harness import (
    argument_parser,
    describe_machine,
    in_paragraphs,
    make_rows,
    relative_error,
    replayed,
    time_round_robin,
)
from openmla.bench.inputs import random_step
from openmla.bench.output import Output
from openmla.cli.options import whole
from openmla.ops._register import Cost
from openmla.plan import make_plan

HEADS = (16, 128)
REQUESTS = (1, 16, 64)
FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Sizes(NamedTuple):
    """Keys of a decoding request; new tokens of all prompts together, and the context of each."""

    preset: str
    keys: int
    prompt: int
    context: int
    block_size: int
    device: str
    dtype: torch.dtype

    def like(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype}


GPU = Sizes("deepseek-v3", 8192, 8192, 1024, 64, "cuda", torch.bfloat16)
CPU = Sizes("tiny-v3", 256, 128, 32, 16, "cpu", torch.float32)


class Step:
    """B requests of n new tokens over a context, with filled caches."""

    def __init__(self, sizes: Sizes, config: MLAConfig, B: int, n: int, context: int) -> None:
        torch.manual_seed(0)
        self.config, self.B, self.n, self.context = config, B, n, context
        self.dtype, block_size, S = sizes.dtype, sizes.block_size, context + n
        self.pool = BlockPool(B * (-(-S // block_size)), block_size)
        self.pool.take(dict.fromkeys(range(B), S))
        self.cache: LayerCache = allocate_cache(
            config, num_blocks=self.pool.num_blocks, block_size=block_size,
            format=FORMATS[sizes.dtype], device=sizes.device,
        )  # fmt: skip
        assert self.cache.latent is not None
        self.cache.latent.data.normal_()
        self.projected, self.absorbed = random_step(config, B * n, **sizes.like())

    def plan(self, requests: int, **options: Any) -> Plan:
        """A plan for the first `requests` requests."""
        S, names = self.context + self.n, list(range(requests))
        slots = self.pool.slot_mapping([(name, self.context, S) for name in names])
        table = self.pool.block_table(names)
        batch = Batch([self.n] * requests, [S] * requests, table, slots)
        return make_plan(batch, self.config, self.cache, dtype=self.dtype, **options)

    def call(self, plan: Plan) -> Callable[[], Tensor]:
        projected = Projected(*(part[: plan.num_tokens] for part in self.projected))
        return lambda: attend_step(projected, self.absorbed, self.cache, plan)

    def wrong(self) -> str:
        """Why the invariant step is wrong, "" if it is right."""
        plain, fixed = self.plan(self.B), self.plan(self.B, batch_invariant=True)
        expected, actual = self.call(plain)(), self.call(fixed)()
        error = relative_error(actual, expected)
        if not error < 16 * torch.finfo(self.dtype).eps:
            return f"{error:.1e} from the default step"
        alone = self.call(self.plan(1, batch_invariant=True))()
        return "" if torch.equal(alone, actual[: self.n]) else "other bits alone than in the batch"


def compare(
    title: str, plain: Callable[[], Any], fixed: Callable[[], Any], device: str, output: Output
) -> None:
    """Time both in turns and print a line of the table."""
    calls = {"default": replayed(plain, device), "invariant": replayed(fixed, device)}
    times = time_round_robin(calls, output.options.rounds, device)
    default, row = make_rows(title, times, "default", None, Cost(1, 1), dict.fromkeys(times, 0.0))
    cost = row.median_us / default.median_us - 1
    output.say(f"| {title} | {default.median_us:.1f} | {row.median_us:.1f} | {cost:+.0%} |")
    output.rows.append(row)


def time_steps(sizes: Sizes, output: Output) -> None:
    for H, phase, B in product(HEADS, ("decode", "prefill"), REQUESTS):
        n, context = 1, sizes.keys
        if phase == "prefill":
            n, context = max(sizes.prompt // B, 1), sizes.context
        step = Step(sizes, replace(PRESETS[sizes.preset], num_heads=H), B, n, context)
        title, wrong = f"{phase}, {H} heads, {B} x {n} over {context}", step.wrong()
        if wrong:
            output.say(f"| {title} | WRONG: {wrong} | | |")
            continue
        plain, fixed = step.plan(B), step.plan(B, batch_invariant=True)
        compare(title, step.call(plain), step.call(fixed), sizes.device, output)


def time_products(sizes: Sizes, output: Output) -> None:
    """Time q_a, q_b, kv_a and o_proj of a layer of 128 heads, one after the other."""
    config, given = PRESETS[sizes.preset], sizes.like()
    hidden, rank, H = config.hidden_size, config.q_lora_rank or config.hidden_size, config.num_heads
    shapes = (
        (rank, hidden), (H * config.qk_head_dim, rank), (config.latent_dim, hidden),
        (hidden, H * config.v_head_dim),
    )  # fmt: skip
    weights = [torch.randn(shape, **given) * shape[1] ** -0.5 for shape in shapes]
    for T in (*REQUESTS, sizes.prompt):
        inputs = [torch.randn(T, weight.shape[1], **given) for weight in weights]
        pairs = list(zip(inputs, weights, strict=True))

        def plain(pairs: list[tuple[Tensor, Tensor]] = pairs) -> list[Tensor]:
            return [x @ weight.T for x, weight in pairs]

        def fixed(pairs: list[tuple[Tensor, Tensor]] = pairs) -> list[Tensor]:
            return [multiply(x, weight, "auto") for x, weight in pairs]

        compare(f"projections, {T} tokens", plain, fixed, sizes.device, output)


def time_runs(sizes: Sizes, lengths: Sequence[int], output: Output) -> None:
    """Time mqa_paged alone, with keys split at each of these lengths."""
    output.say("\nmqa_paged, us by run length, 0: as is fastest")
    for H, B in product(HEADS, REQUESTS):
        config = replace(PRESETS[sizes.preset], num_heads=H)
        step = Step(sizes, config, B, 1, sizes.keys)
        plan = step.plan(B)
        q = torch.randn(B, H, config.latent_dim, **sizes.like())
        calls = {}
        for length in (0, *lengths):
            fixed = replace(plan, run_length=length)
            call = partial(attend_latent, q, step.cache, fixed)
            calls[str(length)] = replayed(call, sizes.device)
        times = time_round_robin(calls, output.options.rounds, sizes.device)
        found = [f"{name}: {statistics.median(t) * 1e6:.1f}" for name, t in times.items()]
        output.say(f"  {H} heads, {B} requests of {sizes.keys}: {', '.join(found)}")


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argument_parser("--batch-invariant")
    parser.description = in_paragraphs(__doc__)
    parser.add_argument(
        "--keys", type=whole(1, 2**20), metavar="N",
        help=f"context length of a decoding request (default: {GPU.keys} on a GPU, {CPU.keys} on "
        "a CPU)",
    )  # fmt: skip
    parser.add_argument(
        "--run-lengths", type=whole(1, 2**20), nargs="+", metavar="N",
        help="also time mqa_paged with keys split every N tokens (default: not timed)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    sizes = GPU if torch.cuda.is_available() else CPU
    if options.keys is not None:
        sizes = sizes._replace(keys=options.keys)
    output = Output(options, describe_machine(sizes.device))
    output.say("\n| step | default, us | invariant, us | cost |\n| --- | --- | --- | --- |")
    with torch.inference_mode():
        time_steps(sizes, output)
        time_products(sizes, output)
        if options.run_lengths:
            time_runs(sizes, options.run_lengths, output)
    output.close()
    output.draw_bars("an attention step, batch-invariant")
