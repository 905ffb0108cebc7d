"""Decode steps of a few layers: eager, compiled by Inductor, and as one captured graph.

    python3 -m bench.compile --json compile.json
    python3 -m bench.compile --tiny               small shapes, also on a CPU, without the graph

All three run the same weights over the same caches. The time to plan a step is shown separately: an
engine makes new plans at every step. The compiled model first runs twenty steps of growing lengths,
which need one graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.plans import buffers_of, plans_of
from openmla import (
    PRESETS,
    Batch,
    BlockPool,
    CompressedPool,
    LayerCache,
    MLAAttention,
    MLAAttentionV4,
    MLAConfig,
    Plan,
    allocate_cache,
)
from openmla.bench.harness import (
    argument_parser,
    describe_machine,
    make_rows,
    relative_error,
    replayed,
    time_once,
    time_round_robin,
)
from openmla.bench.inputs import fill
from openmla.bench.output import Output
from openmla.ops._register import Cost

GROWING = 20  # steps of the compiled model before it is timed
TAKEN = 1024  # tokens per pool.take() while contexts are made
RATIOS = (0, 4, 128)  # compress ratios of V4's layers


class Shape(NamedTuple):
    """What to decode."""

    preset: str
    num_heads: int
    requests: int
    keys: int
    format: str
    index_format: str = "index_fp8"
    block_size: int = 64


SHAPES = {
    "v3": Shape("deepseek-v3", 16, 16, 8192, "bf16"),
    "v3.2": Shape("deepseek-v3.2", 16, 16, 32768, "fp8_ds_mla"),
    "v3.2 short": Shape("deepseek-v3.2", 16, 16, 1500, "fp8_ds_mla"),
    "v4": Shape("deepseek-v4-flash", 16, 16, 32768, "fp8_dsv4", block_size=256),
}
TINY = {
    "tiny v3": Shape("tiny-v3", 4, 3, 200, "fp32"),
    "tiny v3.2": Shape("tiny-v3.2", 4, 3, 200, "fp32", "index_fp32"),
    "tiny v4": Shape("tiny-v4", 4, 3, 200, "fp32", "index_fp32", 128),
}


class Model(nn.Module):
    """Attention layers on a residual stream, with nothing between them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(
        self, hidden: Tensor, positions: Tensor, caches: list[LayerCache], plans: list[Plan]
    ) -> Tensor:
        for layer, cache, plan in zip(self.layers, caches, plans, strict=True):
            hidden = hidden + layer(hidden, positions, cache, plan)
        return hidden


class Decode:
    """Requests of about `keys` tokens each, about to decode one more; new tokens are not kept."""

    def __init__(self, shape: Shape, num_layers: int, device: str) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.held: Any = None
        self.dtype = torch.float32 if shape.format == "fp32" else torch.bfloat16
        self.config = config = _config(shape, num_layers)
        make: Any = MLAAttention if config.compressor is None else MLAAttentionV4
        with torch.device(device):
            layers = [make(config, layer=number) for number in range(config.num_layers)]
        self.model = Model(layers).to(device, self.dtype)
        B, S, BS = shape.requests, shape.keys, shape.block_size
        num_blocks = B * ((S + GROWING) // BS + 2)
        self.caches = [
            allocate_cache(
                config, num_blocks=num_blocks, block_size=BS, format=shape.format,
                index_format=shape.index_format, layer=number, max_requests=B,
                max_tokens=B * TAKEN, device=device,
            )
            for number in range(config.num_layers)
        ]  # fmt: skip
        for cache in self.caches:
            _fill(cache, config)
        geometry = self.caches[0].geometry
        self.pool: Any = BlockPool(num_blocks, BS) if geometry is None else CompressedPool(geometry)
        self.lens = [S - 7 * b for b in range(B)]
        for b, length in enumerate(self.lens):
            for start in range(0, length, TAKEN):
                self._take(b, min(TAKEN, length - start))
        self.grow()

    def _take(self, request: int, num_tokens: int) -> None:
        self.pool.take({request: num_tokens})  # no block is shared or copied

    def grow(self) -> None:
        """Add one token to every request, and make the model's input for it."""
        for b in range(self.shape.requests):
            self._take(b, 1)
            self.lens[b] = self.pool.seq_len(b)
        ends = torch.tensor(self.lens) - 1
        self.positions = ends.to(self.device)
        width = self.config.hidden_size
        self.hidden = torch.randn(len(ends), width, device=self.device, dtype=self.dtype)
        for tokens in (self.hidden, self.positions):
            torch._dynamo.maybe_mark_dynamic(tokens, 0)

    def batch(self, window_columns: int = 0) -> Batch:
        names, ones = range(self.shape.requests), [1] * self.shape.requests
        if isinstance(self.pool, CompressedPool):
            tables = self.pool.tables(names, window_columns=window_columns)
            return Batch(ones, self.lens, **tables._asdict())
        slots = self.pool.slot_mapping([(b, n - 1, n) for b, n in enumerate(self.lens)])
        return Batch(ones, self.lens, self.pool.block_table(names), slots)

    def plans(self, batch: Batch, buffers: Any = None, **options: Any) -> list[Plan]:
        """A plan per layer; layers of one kind share it."""
        given = batch, self.config, self.caches, buffers
        made = plans_of(*given, dtype=self.dtype, **options)
        return [made[cache.ratio] for cache in self.caches]

    def run(self, model: Callable[..., Tensor], plans: list[Plan]) -> Tensor:
        return model(self.hidden, self.positions, self.caches, plans)

    def captured(self) -> tuple[Callable[[], None], Tensor]:
        """A graph of the step over buffers, and the tensor with its result."""
        B, M = self.shape.requests, self.shape.keys // self.shape.block_size + 2
        buffers = buffers_of(self.config, self.caches, max_requests=B, max_tokens=B, max_blocks=M)
        rings = next(iter(buffers.values())).get("window_table")
        batch = self.batch(0 if rings is None else rings.shape[1])
        plans = self.plans(batch, buffers)
        self.held = buffers, plans  # the graph reads them but does not keep them alive

        def step() -> None:
            self.out = self.run(self.model, plans)

        replay = replayed(step)
        replay()
        return replay, self.out


def _config(shape: Shape, num_layers: int) -> MLAConfig:
    config = replace(PRESETS[shape.preset], num_heads=shape.num_heads)
    if config.compressor is None:
        return replace(config, num_layers=num_layers)
    compressor = replace(config.compressor, ratios=RATIOS, output_groups=1)
    return replace(config, num_layers=len(RATIOS), compressor=compressor)


def _fill(cache: LayerCache, config: MLAConfig) -> None:
    """Fill a cache with random rows."""
    for part in cache.parts:
        if part is cache.index:
            assert config.indexer is not None
            fill(part.data, part.format, config.indexer.head_dim)
        elif part is not cache.state:
            fill(part.data, part.format, config.latent_dim)


def measure(name: str, shape: Shape, num_layers: int, device: str, output: Output) -> None:
    decode = Decode(shape, num_layers, device)
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs, **options)

    torch.compiler.reset()
    compiled = torch.compile(decode.model, fullgraph=True, backend=counted)
    start = time.perf_counter()
    for step in range(GROWING):
        decode.run(compiled, decode.plans(decode.batch(), compiled=True))
        if step == 0:
            built = time.perf_counter() - start
        decode.grow()
    batch = decode.batch()
    plain, symbolic = decode.plans(batch), decode.plans(batch, compiled=True)
    calls = {
        "eager": lambda: decode.run(decode.model, plain),
        "compiled": lambda: decode.run(compiled, symbolic),
    }
    outs = {what: call().clone() for what, call in calls.items()}
    if device == "cuda":
        calls["captured"], outs["captured"] = decode.captured()  # type: ignore[assignment]
        outs["captured"] = outs["captured"].clone()
    errors = {what: relative_error(out, outs["eager"]) for what, out in outs.items()}
    times = time_round_robin(calls, output.options.rounds, device)
    S, layers = shape.keys, len(decode.caches)
    title = f"{name}: {layers} layers, {shape.requests} requests of {S} keys, {shape.format}"
    output.add(title, make_rows(title, times, "eager", None, Cost(1, 1), errors))
    output.say(f"  graphs of {GROWING} lengths: {len(graphs)}, the first in {built:.0f} s")
    took = []
    for compiled_plans in (False, True):  # the minimum: host time before a step
        planned = partial(decode.plans, batch, compiled=compiled_plans)
        took.append(1e6 * min(time_once(planned, "cpu") for _ in range(30)))
    output.say(f"  plans for one step: {took[0]:.0f} us, compiled=True {took[1]:.0f} us")


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argument_parser("compile")
    parser.prog = "bench.compile"
    parser.add_argument("shapes", nargs="*", help=f"{', '.join(SHAPES)} (default: all)")
    parser.add_argument("--tiny", action="store_true", help="use small shapes")
    parser.add_argument("--layers", type=int, default=4, help="number of layers; V4 has three")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = TINY if options.tiny else SHAPES
    unknown = [name for name in options.shapes if name not in shapes]
    if unknown:
        parser.error(f"unknown shape {unknown[0]!r}; known: {', '.join(shapes)}")
    output = Output(options, describe_machine(device))
    with torch.inference_mode():
        for name in options.shapes or shapes:
            measure(name, shapes[name], options.layers, device, output)
    output.close()


if __name__ == "__main__":
    run()
