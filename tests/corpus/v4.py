"""Cases of V4's attention fed with random inputs, all kinds of layers over the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmla import (
    Batch,
    CompressedInputs,
    CompressedPool,
    IndexInputs,
    LayerCache,
    MLAConfig,
    Plan,
    PoolInputs,
    RawProjections,
    RopeTable,
    Workspace,
    allocate_cache,
    apply_sink,
    attend_compressed,
    attend_latent,
    attend_partial,
    make_plan,
    make_selection,
    ops,
    plan_buffers,
    slice_buffers,
    warmup,
)
from tests.corpus.common import Random, Results, Run, cache_bytes, fill_with_nan
from tests.layers.v4 import real_config, tiny_config

Wanted = Sequence[tuple[str, int]]
PROMPTS: tuple[Wanted, ...] = (
    (("a", 150), ("b", 2)),  # ratio 4: 37 entries, K = 8; ratio 128: one entry
    (("a", 1), ("b", 1), ("c", 7)),
    (("c", 140), ("a", 3), ("b", 4)),  # a chunk of a prompt beside draft tokens
    (("a", 1), ("c", 1), ("b", 1)),
    (("b", 100), ("a", 0), ("c", 2)),
)
SHORT: tuple[Wanted, ...] = (
    (("a", 20), ("b", 2)),
    (("a", 1), ("b", 1), ("c", 1)),
    (("b", 9), ("a", 0), ("c", 3)),
)
DECODE: tuple[Wanted, ...] = (
    (("a", 140), ("b", 30), ("c", 3)),
    (("a", 1), ("b", 1), ("c", 1)),
    (("a", 2), ("b", 3)),
    (("c", 1), ("a", 0), ("b", 1)),
    (),
)


@dataclass(frozen=True)
class Spec:
    """One case; the first step is planned anew where buffers are used."""

    steps: Sequence[Wanted]
    ratios: Sequence[int] = (0, 4, 128)
    beside: bool = False
    real: bool = False
    dtype: torch.dtype = torch.float32
    format: str = "fp32"
    index_format: str = "index_fp32"
    kv_scale: float = 1.0
    padding: int = 0
    captured_from: int | None = None
    slices: Sequence[tuple[int, int]] = ()
    unknown: str = ""  # requests whose length only the device knows, from the second step on
    slack: int = 0
    workspace: bool = False
    raw: bool = False
    hadamard: bool = False
    out: str = ""
    call: str = "compressed"  # or "partial", "latent", "selection"
    plan: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"


class World:
    """Caches of several ratios and one pool."""

    def __init__(self, name: str, spec: Spec) -> None:
        self.spec, self.random = spec, Random(name, spec.device)
        self.config: MLAConfig = real_config() if spec.real else tiny_config()
        assert self.config.compressor is not None
        self.caches = {ratio: self._cache(ratio) for ratio in spec.ratios}
        geometry = self.caches[spec.ratios[0]].geometry
        assert geometry is not None
        self.pool = CompressedPool(geometry)
        self.sink = self.random.normal(self.config.num_heads)

    def _cache(self, ratio: int) -> LayerCache:
        assert self.config.compressor is not None
        spec = self.spec
        cache = allocate_cache(
            self.config, num_blocks=9, block_size=128, format=spec.format,
            kv_scale=spec.kv_scale, index_format=spec.index_format,
            layer=self.config.compressor.ratios.index(ratio), max_requests=4, max_tokens=200,
            window_block_size=16, rollback=8, device=spec.device,
        )  # fmt: skip
        fill_with_nan(cache)
        return cache

    def batch(self, wanted: Wanted, columns: int, unknown: bool) -> Batch:
        spec = self.spec
        slack = dict.fromkeys(spec.unknown, spec.slack) if unknown else {}
        copies = self.pool.take({name: n + slack.get(name, 0) for name, n in wanted if n})
        for cache in self.caches.values():
            cache.copy_blocks(*copies)
        names = [name for name, _ in wanted]
        tables = self.pool.tables(names, window_columns=columns)
        bounds = [self.pool.seq_len(name) for name in names]
        more: dict[str, Any] = {}
        if unknown:
            lens = [S - slack.get(n, 0) for n, S in zip(names, bounds, strict=True)]
            more["device_seq_lens"] = torch.tensor(lens, dtype=torch.int32).to(spec.device)
            if not set(names) <= set(spec.unknown):
                more["exact"] = [name not in spec.unknown for name in names]
            for name, length in zip(names, lens, strict=True):
                self.pool.truncate(name, length)
        return Batch(
            query_lens=[n for _, n in wanted], seq_lens=bounds, block_table=tables.block_table,
            window_table=tables.window_table, state_slots=tables.state_slots,
            padding=spec.padding, **more,
        )  # fmt: skip

    def inputs(self, ratio: int, positions: Tensor) -> CompressedInputs:
        """Random queries, rows and pool inputs of T tokens."""
        return random_inputs(
            self.random, self.config, ratio, positions, self.spec.dtype, raw=self.spec.raw,
            hadamard=self.spec.hadamard,
        )  # fmt: skip

    def positions(self, wanted: Wanted, T: int) -> Tensor:
        places = []
        for name, n in wanted:
            end = self.pool.seq_len(name)
            places.append(torch.arange(end - n, end))
        rest = T - sum(n for _, n in wanted)
        return torch.cat([*places, torch.zeros(rest, dtype=torch.int64)])


def random_inputs(
    random: Random,
    config: MLAConfig,
    ratio: int,
    positions: Tensor,
    dtype: torch.dtype,
    *,
    raw: bool = False,
    hadamard: bool = False,
) -> CompressedInputs:
    indexer, compressor = config.indexer, config.compressor
    assert indexer is not None and compressor is not None
    T, H, D = len(positions), config.num_heads, config.latent_dim
    rope = compressor.rope if ratio else config.rope
    table = RopeTable(rope, config.qk_rope_head_dim, config.max_positions).table.to(random.device)
    positions = positions.to(random.device)
    q, rows = random.normal(T, H, D, dtype=dtype), random.normal(T, D, dtype=dtype)
    unfinished = None
    if raw:
        norm = 1 + random.normal(D, gain=0.2, dtype=dtype)
        unfinished = RawProjections(
            q, rows, norm, positions, table, "pairs", 1e-6, norm_queries=True
        )
    if not ratio:
        return CompressedInputs(q, rows, unfinished)

    def pool_inputs(width: int) -> PoolInputs:
        wide = 2 * width if ratio == 4 else width
        kv, score = (random.normal(T, wide, dtype=dtype) for _ in range(2))
        weights = random.normal(ratio, wide), 1 + random.normal(width, gain=0.2)
        return PoolInputs(kv, score, *(weight.to(dtype) for weight in weights))

    pooled = pool_inputs(D)
    if ratio != 4:
        return CompressedInputs(q, rows, unfinished, table, pooled)
    HI, DI = indexer.num_heads, indexer.head_dim
    index = IndexInputs(random.normal(T, HI, DI, dtype=dtype), random.normal(T, HI), None)
    return CompressedInputs(q, rows, unfinished, table, pooled, index, pool_inputs(DI), hadamard)


def run_compressed(name: str, spec: Spec) -> Results:
    world, found = World(name, spec), Results()
    buffers: dict[int, dict[str, Tensor]] = {}
    if spec.captured_from is not None:
        for ratio, cache in world.caches.items():
            first = next(iter(buffers.values()), None) if spec.beside else None
            buffers[ratio] = plan_buffers(
                world.config, cache, max_requests=4, max_tokens=16, max_blocks=3, beside=first
            )
    spaces: dict[int, Workspace] = {}
    if spec.workspace:
        for ratio, cache in world.caches.items():
            spaces[ratio] = warmup(
                world.config, cache, max_requests=4, max_tokens=200, dtype=spec.dtype
            )
    for number, wanted in enumerate(spec.steps):
        captured = spec.captured_from is not None and number >= spec.captured_from
        columns = 0
        if captured:
            columns = buffers[spec.ratios[0]]["window_table"].shape[1]
        batch = world.batch(wanted, columns, bool(spec.unknown) and number > 0)
        first_plan: Plan | None = None
        for ratio, cache in world.caches.items():
            more = dict(spec.plan)
            if captured:
                into = buffers[ratio]
                if spec.slices:
                    requests, tokens = spec.slices[number]
                    into = slice_buffers(into, max_requests=requests, max_tokens=tokens)
                more["into"] = into
            if spec.workspace:
                more["workspace"] = spaces[ratio]
            if spec.beside and first_plan is not None:
                more["beside"] = first_plan
            plan = make_plan(batch, world.config, cache, dtype=spec.dtype, **more)
            first_plan = first_plan or plan
            inputs = world.inputs(ratio, world.positions(wanted, plan.num_tokens))
            for key, value in _attend(world, cache, plan, inputs, ratio, wanted).items():
                found[f"{number}.{ratio}.{key}"] = value.clone()
    for ratio, cache in world.caches.items():
        found |= cache_bytes(cache, f"cache.{ratio}")
    return found


def _attend(
    world: World,
    cache: LayerCache,
    plan: Plan,
    inputs: CompressedInputs,
    ratio: int,
    wanted: Wanted,
) -> Results:
    spec = world.spec
    if spec.call == "compressed":
        assert inputs.rows is not None
        out = None
        T, H, D = inputs.q.shape
        if spec.out == "strided":
            wide = torch.full((T, H * D + 3), torch.nan, dtype=spec.dtype, device=spec.device)
            out = wide[:, : H * D].view(T, H, D)
        return {
            "out": attend_compressed(
                inputs.q, inputs.rows, cache, plan, sink=world.sink, raw=inputs.raw,
                table=inputs.table, pool_inputs=inputs.pool_inputs, index=inputs.index,
                index_pool_inputs=inputs.index_pool_inputs, hadamard=inputs.hadamard, out=out,
            )
        }  # fmt: skip
    given: dict[str, Any] = {}
    found = Results()
    if spec.call == "selection":
        selection = None
        if ratio == 4:
            selection = make_selection(_entries(world, plan.num_tokens, wanted), cache, plan)
        if selection is not None:
            given["selection"] = selection
        inputs = replace(inputs, index=None)
    out, lse = attend_partial(inputs, None, cache, plan, keys="all", **given)
    found |= {"out": out.clone(), "lse": lse.clone(), "sunk": apply_sink(out, lse, world.sink)}
    if spec.call == "partial":
        again = replace(inputs, raw=None)
        states = []
        for keys in ("window", "entries"):
            part = attend_partial(again, None, cache, plan, keys=keys, write=False)
            found |= {f"{keys}.out": part[0].clone(), f"{keys}.lse": part[1].clone()}
            states.append([tensor.contiguous() for tensor in part])
        (out, lse), other = states
        ops.merge_states(out, lse, *other)
        found |= {"merged.out": out, "merged.lse": lse}
    if spec.call == "selection":
        out, lse = attend_latent(inputs.q, cache, plan, **given)
        found |= {"latent.out": out, "latent.lse": lse}
    return found


def _entries(world: World, T: int, wanted: Wanted) -> Tensor:
    """[T, K]: some of the entries each token sees, in no order."""
    assert world.config.indexer is not None
    chosen = torch.full((T, world.config.indexer.topk), -1, dtype=torch.int32)
    places = world.positions(wanted, T)[: sum(n for _, n in wanted)].tolist()
    for t, p in enumerate(places):
        seen = (p + 1) // 4
        count = min(seen, world.config.indexer.topk - t % 3)
        chosen[t, :count] = world.random.some_of(seen, count).int()
    return chosen.to(world.spec.device)


def _run(spec: Spec, name: str) -> Results:
    return run_compressed(name, spec)


CASES: dict[str, Run] = {}


def _add(kind: str, steps: Sequence[Wanted] = PROMPTS, **fields: Any) -> None:
    name = f"v4-{kind}"
    assert name not in CASES, name
    CASES[name] = partial(_run, Spec(steps, **fields))


BF16: dict[str, Any] = {
    "dtype": torch.bfloat16, "format": "bf16", "index_format": "index_bf16",
}  # fmt: skip
PACKED: dict[str, Any] = {
    "real": True, "dtype": torch.bfloat16, "format": "fp8_dsv4", "index_format": "index_fp8",
}  # fmt: skip
for _name, _steps in {"prompts": PROMPTS, "short": SHORT, "decode": DECODE}.items():
    _add(f"{_name}", _steps)
    _add(f"{_name}-beside", _steps, beside=True)
    _add(f"{_name}-bf16", _steps, **BF16)
    _add(f"{_name}-batch-invariant", _steps, plan={"batch_invariant": True})
    _add(f"{_name}-compiled", _steps, plan={"compiled": True})
    _add(f"{_name}-padded", _steps, padding=3, beside=True)
    _add(f"{_name}-raw", _steps, raw=True)
    _add(f"{_name}-partial", _steps, call="partial")
    _add(f"{_name}-selection", _steps, call="selection")
    _add(f"{_name}-workspace", _steps, workspace=True)
    _add(f"{_name}-out-strided", _steps, out="strided")
    _add(f"{_name}-fp8_dsv4", _steps, **PACKED)
for _ratio in (0, 4, 128):
    _add(f"fp8-{_ratio}", ratios=(_ratio,), format="fp8", kv_scale=0.03, dtype=torch.bfloat16)
    _add(f"reference-{_ratio}", DECODE, ratios=(_ratio,), plan={"backend": "reference"})
    _add(f"captured-{_ratio}", DECODE, ratios=(_ratio,), captured_from=1)
    _add(f"absorbed-{_ratio}", SHORT, ratios=(_ratio,), plan={"form": "absorbed"})
_add("captured-beside", DECODE, captured_from=1, beside=True)
_add("captured-beside-bf16", DECODE, captured_from=1, beside=True, **BF16)
_add("captured-beside-sliced", DECODE, captured_from=1, beside=True,
     slices=[(1, 1), (4, 16), (3, 12), (3, 12), (1, 4)])  # fmt: skip
_add("captured-batch-invariant", DECODE, captured_from=1, plan={"batch_invariant": True})
_add("captured-partial", DECODE, captured_from=1, call="partial")
_add("captured-selection", DECODE, captured_from=1, call="selection")
_add("captured-device-lengths", DECODE[:4], captured_from=1, unknown="abc", slack=3)
_add("device-lengths", DECODE[:4], unknown="abc", slack=3)
_add("device-lengths-beside", DECODE[:4], unknown="abc", slack=3, beside=True)
_add("device-lengths-some-exact", DECODE[:4], unknown="ac", slack=3, padding=2)
_add("device-lengths-compiled", DECODE[:4], unknown="abc", slack=3, plan={"compiled": True})
_add("hadamard", ratios=(4,), hadamard=True)
_add("keys-fp8", real=True, index_format="index_fp8", hadamard=True)
_add("other-order-beside", ratios=(4, 128, 0), beside=True)
_add("partial-bf16", call="partial", **BF16)
_add("partial-fp8_dsv4", call="partial", **PACKED)
