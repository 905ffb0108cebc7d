"""One case of a dense or sparse model: requests with random rows, steps over one layer's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openmla import (
    AbsorbedWeights,
    Batch,
    BlockPool,
    DecodePlanner,
    IndexerConfig,
    IndexInputs,
    LayerScales,
    MLAConfig,
    Plan,
    Projected,
    QuantizedOutput,
    RawProjections,
    RopeConfig,
    RopeTable,
    Selection,
    absorb,
    allocate_cache,
    apply_sink,
    attend_latent,
    attend_partial,
    attend_step,
    decode_output,
    make_output,
    make_plan,
    make_selection,
    ops,
    plan_buffers,
    select_step,
    slice_buffers,
    warmup,
)
from tests.corpus.common import Random, Results, cache_bytes, fill_with_nan

SHAPES: dict[str, tuple[int, int, int, int, int]] = {  # H, C, P, R, V
    "tiny": (4, 32, 16, 8, 24),
    "odd": (3, 24, 12, 4, 20),
    "five": (5, 16, 8, 8, 8),
    "wide": (2, 512, 32, 64, 64),  # rows of the packed formats; 128 output columns
    "grouped": (4, 32, 16, 8, 32),  # 128 output columns
}
WIDTHS = {"index_fp8": 128, "index_fp8_exact": 128}  # of indexer keys, otherwise 16
SCALES = LayerScales(0.2, 0.05, q=0.05, k_pe=0.2)  # k_pe is stored divided by 4


@dataclass(frozen=True)
class Spec:
    """One case. `held` are the context lengths, `steps` the new tokens of each request per step."""

    held: Sequence[int]
    steps: Sequence[Sequence[int]]
    shape: str = "tiny"
    dtype: torch.dtype = torch.float32
    format: str = "fp32"
    kv_scale: float | LayerScales = 1.0
    block_size: int = 4
    topk: int = 0  # of a sparse model
    index_format: str = "index_fp32"
    padding: int = 0
    unknown: Sequence[int] = ()  # requests whose length only the device knows
    slack: int = 0  # how far above their length the bound of those is
    workspace_tokens: int | None = None  # rows of a workspace from warmup()
    into: tuple[int, int] | None = None  # max_requests and max_tokens of buffers
    slices: Sequence[tuple[int, int]] = ()  # the same of each step, cut from those
    planner: int = 0  # most tokens of a DecodePlanner
    call: str = "step"  # or "partial", "latent", "parts"
    selection: str = "indexer"  # or "given", "lens"
    layers: int = 1  # that share a selection
    sink: bool = False
    write: bool = True
    out: str = ""  # "given" or "strided"
    raw: bool = False
    layout: str = "row"  # of quantized outputs
    plan: dict[str, Any] = field(default_factory=dict)  # options of make_plan
    device: str = "cpu"


class World:
    """Requests whose rows are known in advance, in a pool whose blocks are in no order."""

    def __init__(self, name: str, spec: Spec) -> None:
        self.spec, self.random = spec, Random(name, spec.device)
        H, C, P, R, V = SHAPES[spec.shape]
        DI = WIDTHS.get(spec.index_format, 16)
        self.config = MLAConfig.from_numbers(
            num_heads=H, kv_lora_rank=C, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V,
            indexer=IndexerConfig(2, DI, spec.topk) if spec.topk else None,
        )  # fmt: skip
        self.lens = list(spec.held)
        totals = [
            held + sum(step[b] for step in spec.steps) + spec.slack
            for b, held in enumerate(spec.held)
        ]
        BS = spec.block_size
        self.columns = max((-(-total // BS) for total in totals), default=1)
        self.pool = BlockPool(sum(-(-total // BS) for total in totals) + 3, BS)
        shuffled = self.random.order(self.pool.num_blocks).tolist()
        self.pool.take(dict.fromkeys(shuffled, 1))
        for number in self.random.order(self.pool.num_blocks).tolist():
            self.pool.free(number)
        self.pool.take({b: total for b, total in enumerate(totals) if total})
        self.totals = totals
        self.caches = [
            allocate_cache(
                self.config, num_blocks=self.pool.num_blocks, block_size=BS, format=spec.format,
                kv_scale=spec.kv_scale, index_format=spec.index_format, device=spec.device,
            )
            for _ in range(spec.layers)
        ]  # fmt: skip
        self.rows = [self.random.normal(total, C + R, dtype=spec.dtype) for total in totals]
        self.keys = [self.random.normal(total, DI, dtype=spec.dtype) for total in totals]
        self.weights = [self._absorbed() for _ in range(spec.layers)]
        for cache in self.caches:
            if "ds_mla" not in spec.format and "fp8" not in spec.index_format:
                fill_with_nan(cache)
        for b, held in enumerate(spec.held):
            self.write(b, 0, held, keys=True)
        rope = RopeConfig(kind="default", theta=100.0)
        self.table = RopeTable(rope, R, 256).table.to(spec.device)
        self.norm = 1 + self.random.normal(C, gain=0.2, dtype=spec.dtype)
        self.sink = self.random.normal(H)

    def _absorbed(self) -> AbsorbedWeights:
        H, C, P, _, V = SHAPES[self.spec.shape]
        weight = self.random.normal(H * (P + V), C, dtype=self.spec.dtype, gain=C**-0.5)
        return absorb(weight, self.config)

    def slots(self, b: int, first: int, last: int) -> Tensor:
        return self.pool.slot_mapping([(b, first, last)]).to(self.spec.device)

    def write(self, b: int, first: int, last: int, *, keys: bool = False) -> None:
        """Rows of a request straight into the caches."""
        if first == last:
            return
        C, slots = self.config.kv_lora_rank, self.slots(b, first, last)
        for cache in self.caches:
            latent = cache.latent
            assert latent is not None
            rows = self.rows[b][first:last]
            ops.cache_write(
                latent.data, rows[:, :C].contiguous(), rows[:, C:].contiguous(), slots,
                latent.kv_scale, latent.rope_ratio, format=latent.format,
            )  # fmt: skip
            if cache.index is not None and keys:
                mine = self.keys[b][first:last]
                ops.cache_write(
                    cache.index.data, mine, mine[:, :0], slots, cache.index.kv_scale,
                    format=cache.index.format,
                )  # fmt: skip

    def batch(self, query_lens: Sequence[int]) -> Batch:
        spec = self.spec
        lens = [S + n for S, n in zip(self.lens, query_lens, strict=True)]
        slots = [self.slots(*span) for span in self.spans(query_lens) if span[1] < span[2]]
        slots.append(torch.full((spec.padding,), -1, device=spec.device))
        wide = max((-(-S // spec.block_size) for S in lens), default=0)
        table = self.table_of(self.columns if spec.unknown else max(wide, 1))
        more: dict[str, Any] = {}
        bounds = list(lens)
        if spec.unknown:
            more["device_seq_lens"] = torch.tensor(lens, dtype=torch.int32).to(spec.device)
            if len(spec.unknown) < len(lens):
                more["exact"] = [b not in spec.unknown for b in range(len(lens))]
            for b in spec.unknown:
                bounds[b] += spec.slack
        return Batch(query_lens, bounds, table, torch.cat(slots), padding=spec.padding, **more)

    def table_of(self, columns: int) -> Tensor:
        names = [b for b, total in enumerate(self.totals) if total]
        whole = torch.full((len(self.totals), self.columns), -1, dtype=torch.int32)
        if names:
            held = self.pool.block_table(names, num_columns=self.columns)
            whole[torch.tensor(names)] = held
        return whole[:, :columns].contiguous()

    def spans(self, query_lens: Sequence[int]) -> list[tuple[int, int, int]]:
        return [(b, S, S + n) for b, (S, n) in enumerate(zip(self.lens, query_lens, strict=True))]

    def projected(self, query_lens: Sequence[int], T: int) -> tuple[Projected, RawProjections]:
        """Queries are random, new rows those of the requests; the rest of T tokens is NaN."""
        config, spec = self.config, self.spec
        C, P, R = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        q = self.random.normal(T, config.num_heads, P + R, dtype=spec.dtype)
        parts = [self.rows[b][first:last] for b, first, last in self.spans(query_lens)]
        n = sum(query_lens)
        parts.append(torch.full((T - n, C + R), torch.nan, dtype=spec.dtype).to(spec.device))
        kv = torch.cat(parts)
        places = [torch.arange(first, last) for _, first, last in self.spans(query_lens)]
        positions = torch.cat([*places, torch.zeros(T - n, dtype=torch.int64)]).to(spec.device)
        raw = RawProjections(q, kv, self.norm, positions, self.table, "pairs", 1e-6)
        return Projected(q[..., :P], q[..., P:], kv[:, :C], kv[:, C:]), raw

    def index(self, query_lens: Sequence[int], T: int) -> IndexInputs:
        assert self.config.indexer is not None
        HI, DI = self.config.indexer.num_heads, self.config.indexer.head_dim
        parts = [self.keys[b][first:last] for b, first, last in self.spans(query_lens)]
        parts.append(self.random.normal(T - sum(query_lens), DI, dtype=self.spec.dtype))
        wide = torch.promote_types(self.spec.dtype, torch.float32)
        q_idx = self.random.normal(T, HI, DI, dtype=self.spec.dtype)
        return IndexInputs(q_idx, self.random.normal(T, HI).to(wide), torch.cat(parts))

    def choice(self, query_lens: Sequence[int], T: int) -> tuple[Tensor, Tensor]:
        """An engine's own choice: [T, K] positions in no order, and how many of them count."""
        assert self.config.indexer is not None
        K = self.config.indexer.topk
        chosen, lens = torch.full((T, K), -1, dtype=torch.int32), torch.zeros(T, dtype=torch.int32)
        places = [p for _, first, last in self.spans(query_lens) for p in range(first, last)]
        for t, p in enumerate(places):
            count = min(p + 1, K) if t % 3 else min(p + 1, K // 2)
            chosen[t, :count] = self.random.some_of(p + 1, count).int()
            lens[t] = count
        return chosen.to(self.spec.device), lens.to(self.spec.device)

    def advance(self, query_lens: Sequence[int]) -> None:
        self.lens = [S + n for S, n in zip(self.lens, query_lens, strict=True)]


def run_latent(name: str, spec: Spec) -> Results:
    """All steps of a case; what they return, and the caches after the last one."""
    world, found = World(name, spec), Results()
    options = dict(spec.plan)
    if spec.workspace_tokens is not None:
        kept = ("backend", "output", "query_dtype", "prefill_dtype", "batch_invariant")
        options["workspace"] = warmup(
            world.config, world.caches[0], max_requests=max(len(spec.held), 1), max_tokens=256,
            workspace_tokens=spec.workspace_tokens, dtype=spec.dtype,
            **{key: value for key, value in options.items() if key in kept},
        )  # fmt: skip
    plans = Plans(world, options)
    for number, query_lens in enumerate(spec.steps):
        plan = plans.make(number, query_lens)
        for key, value in _attend(world, plan, query_lens, options).items():
            found[f"{number}.{key}"] = value
        world.advance(query_lens)
    for number, cache in enumerate(world.caches):
        found |= cache_bytes(cache, f"cache{number}")
    return found


class Plans:
    """Makes each step's plan: anew, over buffers, or by a DecodePlanner over engine tensors."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self.world, self.options = world, {"dtype": world.spec.dtype, **options}
        spec, cache = world.spec, world.caches[0]
        self.buffers: dict[str, Tensor] | None = None
        if spec.into is not None:
            requests, tokens = spec.into
            self.buffers = plan_buffers(
                world.config, cache, max_requests=requests, max_tokens=tokens,
                max_blocks=world.columns,
            )  # fmt: skip
        if spec.planner:
            self.planner = DecodePlanner(
                world.config, cache, max_tokens=spec.planner, **self.options
            )
            n, device = spec.planner, spec.device
            self.table = torch.zeros(n, world.columns, dtype=torch.int32, device=device)
            self.seq_lens = torch.zeros(n, dtype=torch.int32, device=device)
            self.starts = torch.zeros(n + 1, dtype=torch.int32, device=device)
            self.slots = torch.full((n,), -1, dtype=torch.int64, device=device)

    def make(self, number: int, query_lens: Sequence[int]) -> Plan:
        world, spec = self.world, self.world.spec
        if spec.planner:
            return self._planned(query_lens)
        batch, into = world.batch(query_lens), self.buffers
        if into is not None and spec.slices:
            requests, tokens = spec.slices[number]
            into = slice_buffers(into, max_requests=requests, max_tokens=tokens)
        return make_plan(batch, world.config, world.caches[0], **self.options, into=into)

    def _planned(self, query_lens: Sequence[int]) -> Plan:
        """Requests without tokens come last and pad the step."""
        world = self.world
        width, B = max(query_lens), len(query_lens)
        live = sum(1 for n in query_lens if n)
        assert all(n == width for n in query_lens[:live])
        self.table.zero_()
        self.seq_lens.zero_()
        self.slots.fill_(-1)
        self.table[:live] = world.table_of(world.columns)[:live].clamp_min(0)
        for b in range(live):
            self.seq_lens[b] = world.lens[b] + width
            new = world.slots(b, world.lens[b], world.lens[b] + width)
            self.slots[b * width : (b + 1) * width] = new
        starts = [min(b, live) * width for b in range(B + 1)]
        self.starts[: B + 1] = torch.tensor(starts, dtype=torch.int32)
        return self.planner.plan(
            block_table=self.table, seq_lens=self.seq_lens, query_start_loc=self.starts,
            slot_mapping=self.slots, num_requests=B, num_tokens=B * width,
        )  # fmt: skip


def _attend(
    world: World, plan: Plan, query_lens: Sequence[int], options: dict[str, Any]
) -> Results:
    spec, T, found = world.spec, plan.num_tokens, Results()
    selection = None
    if spec.topk:
        selection = _select(world, plan, query_lens, found)
    for number, (cache, weights) in enumerate(zip(world.caches, world.weights, strict=True)):
        projected, raw = world.projected(query_lens, T)
        tag = f"{number}." if spec.layers > 1 else ""
        if not spec.write or spec.call == "latent":
            for b, first, last in world.spans(query_lens):
                world.write(b, first, last)
        if spec.call == "latent":
            q = world.random.normal(T, world.config.num_heads, world.config.latent_dim)
            out, lse = attend_latent(q.to(spec.dtype), cache, plan, selection=selection)
            found |= {f"{tag}out": out, f"{tag}lse": lse}
        elif spec.call == "partial":
            out, lse = attend_partial(
                projected, weights, cache, plan, selection=selection, write=spec.write,
                raw=raw if spec.raw else None,
            )  # fmt: skip
            found |= {f"{tag}out": out.clone(), f"{tag}lse": lse.clone()}
            if spec.sink:
                found[f"{tag}sunk"] = apply_sink(out, lse, world.sink)
        elif spec.call == "parts":
            found |= _in_parts(world, query_lens, projected, weights, options)
        else:
            found |= _whole(world, plan, projected, weights, cache, selection, raw, tag)
    return found


def _whole(
    world: World,
    plan: Plan,
    projected: Projected,
    weights: AbsorbedWeights,
    cache: Any,
    selection: Selection | None,
    raw: RawProjections,
    tag: str,
) -> Results:
    spec, T = world.spec, plan.num_tokens
    H, V = world.config.num_heads, world.config.v_head_dim
    out: Tensor | QuantizedOutput | None = None
    format = spec.plan.get("output")
    if format is not None:
        scale = {"fp8": 0.01, "nvfp4": 300.0}.get(format)
        out = make_output(
            format, T, H * V, global_scale=scale, layout=spec.layout, device=spec.device
        )
    elif spec.out == "given":
        out = torch.full((T, H, V), torch.nan, dtype=spec.dtype, device=spec.device)
    elif spec.out == "strided":
        wide = torch.full((T, H * V + 9), torch.nan, dtype=spec.dtype, device=spec.device)
        out = wide[:, : H * V].view(T, H, V)
    result = attend_step(
        projected, weights, cache, plan, selection=selection, write=spec.write, out=out,
        sink=world.sink if spec.sink else None, raw=raw if spec.raw else None,
    )  # fmt: skip
    if not isinstance(result, QuantizedOutput):
        return {f"{tag}out": result}
    found = {f"{tag}values": result.values, f"{tag}decoded": decode_output(result)}
    if result.scales is not None:
        found[f"{tag}scales"] = result.scales.contiguous()
    return found


def _select(
    world: World, plan: Plan, query_lens: Sequence[int], found: Results
) -> Selection | None:
    """By the indexer or the engine; layers that share it have the same."""
    spec, T, cache = world.spec, plan.num_tokens, world.caches[0]
    if spec.selection == "indexer":
        selection = select_step(world.index(query_lens, T), cache, plan)
    else:
        chosen, lens = world.choice(query_lens, T)
        given = {"lens": lens} if spec.selection == "lens" else {}
        selection = make_selection(chosen, cache, plan, **given)
    if selection is None:
        found["chosen"] = torch.zeros(0, dtype=torch.int32)
    else:
        found["chosen"], found["lens"] = selection.positions.clone(), selection.lens.clone()
    return selection


def _in_parts(
    world: World,
    query_lens: Sequence[int],
    projected: Projected,
    weights: AbsorbedWeights,
    options: dict[str, Any],
) -> Results:
    """The first two blocks of each request as a part of their own, which every token sees whole."""
    spec, cache, found = world.spec, world.caches[0], Results()
    first = 2 * spec.block_size
    batch = world.batch(query_lens)
    table = batch.block_table
    seen = [first if n else 0 for n in query_lens]
    context = Batch(query_lens, seen, table[:, :2].contiguous(), causal=False)
    rest = [S - first for S in batch.seq_lens]
    assert min(S - n for S, n in zip(rest, query_lens, strict=True)) >= 0
    own = Batch(query_lens, rest, table[:, 2:].contiguous(), batch.slot_mapping)
    states = []
    for name, part in (("own", own), ("context", context)):
        plan = make_plan(part, world.config, cache, dtype=spec.dtype, **options)
        out, lse = attend_partial(projected, weights, cache, plan)
        found |= {f"{name}.out": out.clone(), f"{name}.lse": lse.clone()}
        states.append((out.contiguous(), lse.contiguous()))
    (out, lse), other = states
    ops.merge_states(out, lse, *other)
    return found | {"merged": out, "lse": lse, "sunk": apply_sink(out, lse, world.sink)}
