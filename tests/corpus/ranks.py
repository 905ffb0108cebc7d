"""Cases over two ranks: each process runs the case and returns digests of what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openmla import (
    PRESETS,
    AbsorbedWeights,
    Batch,
    BlockPool,
    CompressedInputs,
    CompressedPool,
    IndexerConfig,
    IndexInputs,
    LayerScales,
    MLAAttention,
    MLAAttentionV4,
    MLAConfig,
    Projected,
    RawProjections,
    RopeConfig,
    RopeTable,
    absorb,
    allocate_cache,
    ops,
)
from openmla.parallel import (
    Ranks,
    attend_over_ranks,
    merge_over_ranks,
    plan_over_ranks,
    rank_buffers,
    rank_cache,
    select_over_ranks,
)
from tests.corpus.common import (
    Random,
    Results,
    Summary,
    cache_bytes,
    fill_with_nan,
    one_way,
    summarize,
)
from tests.corpus.latent import SCALES
from tests.corpus.layers import randomize
from tests.corpus.v4 import random_inputs
from tests.layers.v4 import real_config, tiny_config

RankRun = Callable[[str], Results]
K = 8


@dataclass(frozen=True)
class Spec:
    """One case of a dense model, or with `topk` of a sparse one."""

    held: Sequence[int]
    steps: Sequence[Sequence[int]]
    heads: str = "all"
    interleave: int = 1
    schedule: str = "auto"
    context: str = "auto"
    form: str = "auto"
    dtype: torch.dtype = torch.float32
    format: str = "fp32"
    kv_scale: float | LayerScales = 1.0
    wide: bool = False
    topk: int = 0
    index_format: str = "index_fp32"
    block_size: int = 4
    padding: int = 0
    captured: int = 0  # most tokens of rank_buffers()
    sink: bool = False
    raw: bool = False
    write: bool = True
    workspace_tokens: int | None = None
    backend: Any = "auto"


class World:
    """Requests whose rows both ranks know; the cache holds the positions of this rank."""

    def __init__(self, name: str, spec: Spec) -> None:
        self.spec, self.random = spec, Random(name)
        self.ranks = Ranks(dist.group.WORLD, spec.interleave, spec.heads, spec.schedule)
        H, C, P, R, V = (4, 512, 16, 64, 16) if spec.wide else (4, 32, 16, 8, 24)
        DI = 128 if "fp8" in spec.index_format else 16
        self.whole = MLAConfig.from_numbers(
            num_heads=H, kv_lora_rank=C, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V,
            scale=0.2, indexer=IndexerConfig(2, DI, spec.topk) if spec.topk else None,
        )  # fmt: skip
        self.config, self.own = _own(self.whole, self.ranks)
        self.lens = list(spec.held)
        totals = [held + sum(s[b] for s in spec.steps) for b, held in enumerate(spec.held)]
        wide = spec.block_size * self.ranks.shard.size
        self.pool = BlockPool(sum(-(-total // wide) for total in totals) + 3, wide)
        for b in reversed(range(len(totals))):  # blocks in another order than requests
            self.pool.take({b: totals[b]})
        self.cache = allocate_cache(
            self.config, num_blocks=self.pool.num_blocks, block_size=spec.block_size,
            format=spec.format, kv_scale=spec.kv_scale, index_format=spec.index_format,
        )  # fmt: skip
        if "ds_mla" not in spec.format and "fp8" not in spec.index_format:
            fill_with_nan(self.cache)
        self.rows = [self.random.normal(n, C + R, dtype=spec.dtype) for n in totals]
        self.keys = [self.random.normal(n, DI, dtype=spec.dtype) for n in totals]
        self.weight = self.random.normal(H, P + V, C, dtype=spec.dtype, gain=C**-0.5)
        self.sink = self.random.normal(H)[self.own]
        self.norm = 1 + self.random.normal(C, gain=0.2, dtype=spec.dtype)
        self.table = RopeTable(RopeConfig(theta=100.0), R, 256).table
        for b, held in enumerate(spec.held):
            self.write(b, 0, held)

    def write(self, b: int, first: int, last: int) -> None:
        latent, index = self.cache.latent, self.cache.index
        assert latent is not None
        C = self.config.kv_lora_rank
        slots = self.pool.slot_mapping([(b, first, last)])
        local = self.ranks.shard.local_slots(slots, self.spec.block_size)
        rows, keys = self.rows[b][first:last], self.keys[b][first:last]
        ops.cache_write(
            latent.data, rows[:, :C].contiguous(), rows[:, C:].contiguous(), local,
            latent.kv_scale, latent.rope_ratio, format=latent.format,
        )  # fmt: skip
        if index is not None:
            ops.cache_write(
                index.data, keys, keys[:, :0], local, index.kv_scale, format=index.format
            )

    def batch(self, query_lens: Sequence[int], padding: int) -> Batch:
        spans = [(b, S, S + n) for b, (S, n) in enumerate(zip(self.lens, query_lens, strict=True))]
        slots = [self.pool.slot_mapping([span]) for span in spans if span[1] < span[2]]
        slots.append(torch.full((padding,), -1))
        lens = [last for _, _, last in spans]
        wide = max([-(-S // self.pool.block_size) for S in lens] or [1])
        table = self.pool.block_table(range(len(lens)), num_columns=wide)[:, :wide].contiguous()
        return Batch(query_lens, lens, table, torch.cat(slots), padding=padding)

    def tokens(self, rows: list[Tensor], query_lens: Sequence[int], T: int) -> Tensor:
        parts = [each[S : S + n] for each, S, n in zip(rows, self.lens, query_lens, strict=True)]
        width = rows[0].shape[1]
        parts.append(torch.ones(T - sum(query_lens), width, dtype=self.spec.dtype))
        return torch.cat(parts)

    def projected(self, query_lens: Sequence[int], T: int) -> tuple[Projected, RawProjections]:
        config = self.whole
        P, R, C = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        q = self.random.normal(T, config.num_heads, P + R, dtype=self.spec.dtype)
        q = q[:, self.own].contiguous()
        kv = self.tokens(self.rows, query_lens, T)
        places = [torch.arange(S, S + n) for S, n in zip(self.lens, query_lens, strict=True)]
        rest = torch.zeros(T - sum(query_lens), dtype=torch.int64)
        raw = RawProjections(
            q, kv, self.norm, torch.cat([*places, rest]), self.table, "pairs", 1e-6
        )
        return Projected(q[..., :P], q[..., P:], kv[:, :C], kv[:, C:]), raw

    def absorbed(self) -> AbsorbedWeights:
        return absorb(self.weight[self.own].flatten(0, 1).contiguous(), self.config)

    def index(self, query_lens: Sequence[int], T: int) -> IndexInputs:
        assert self.config.indexer is not None
        HI, DI = self.config.indexer.num_heads, self.config.indexer.head_dim
        q_idx = self.random.normal(T, HI, DI, dtype=self.spec.dtype)
        k_idx = self.tokens(self.keys, query_lens, T)
        return IndexInputs(q_idx, self.random.normal(T, HI), k_idx)


def _own(config: MLAConfig, ranks: Ranks) -> tuple[MLAConfig, slice]:
    """This rank's config, and which of the heads are its own."""
    if ranks.heads == "all":
        return config, slice(None)
    H, rank = config.num_heads // ranks.shard.size, ranks.shard.rank
    return replace(config, num_heads=H), slice(rank * H, (rank + 1) * H)


def run_latent(spec: Spec, name: str) -> Results:
    world, found = World(name, spec), Results()
    buffers = None
    if spec.captured:
        buffers = rank_buffers(
            world.config, world.cache, world.ranks, max_tokens=spec.captured, max_blocks=16
        )
    for number, query_lens in enumerate(spec.steps):
        padding = spec.captured - sum(query_lens) if spec.captured else spec.padding
        plan = plan_over_ranks(
            world.batch(query_lens, padding), world.config, world.cache, world.ranks,
            dtype=spec.dtype, form=spec.form, context=spec.context, into=buffers,
            workspace_tokens=spec.workspace_tokens, backend=spec.backend,
        )  # fmt: skip
        T = sum(query_lens) + padding
        selection = None
        if spec.topk:
            selection = select_over_ranks(world.index(query_lens, T), world.cache, plan)
            if selection is not None:
                found[f"{number}.chosen"] = selection.positions.clone()
                found[f"{number}.lens"] = selection.lens.clone()
        projected, raw = world.projected(query_lens, T)
        if not spec.write:
            for b, n in enumerate(query_lens):
                world.write(b, world.lens[b], world.lens[b] + n)
        found[f"{number}.out"] = attend_over_ranks(
            projected, world.absorbed(), world.cache, plan, selection=selection,
            sink=world.sink if spec.sink else None, raw=raw if spec.raw else None,
            write=spec.write,
        ).clone()  # fmt: skip
        world.lens = [S + n for S, n in zip(world.lens, query_lens, strict=True)]
    return found | cache_bytes(world.cache)


Wanted = Sequence[tuple[str, int]]
STEPS_V4: tuple[Wanted, ...] = (
    (("a", 150), ("b", 2)),
    (("a", 1), ("b", 1), ("c", 7)),
    (("c", 60), ("a", 3), ("b", 4)),
    (("a", 1), ("c", 1), ("b", 1)),
)
STEPS_LAYER: tuple[Wanted, ...] = (
    (("a", 30), ("b", 1)),
    (("a", 1), ("b", 2), ("c", 17)),
    (("b", 20), ("a", 3)),
    (("c", 1), ("b", 1), ("a", 1)),
)


@dataclass(frozen=True)
class Compressed:
    """One case of V4, by random inputs or through the layer."""

    ratio: int
    heads: str = "all"
    interleave: int = 1  # or the block size, for layers with entries
    schedule: str = "auto"
    context: str = "auto"
    layer: bool = False
    captured_from: int | None = None
    padding: int = 0
    packed: bool = False
    raw: bool = False
    steps: Sequence[Wanted] = STEPS_V4


def run_compressed(spec: Compressed, name: str) -> Results:
    random, found = Random(name), Results()
    ranks = Ranks(dist.group.WORLD, spec.interleave, spec.heads, spec.schedule)
    whole = real_config() if spec.packed else tiny_config()
    config, own = _own(whole, ranks)
    assert whole.compressor is not None
    number = whole.compressor.ratios.index(spec.ratio)
    dtype = torch.bfloat16 if spec.packed else torch.float32
    sizes: dict[str, Any] = {
        "num_blocks": 6, "layer": number, "max_requests": 4, "max_tokens": 200,
        "window_block_size": 16, "rollback": 8,
        "format": "fp8_dsv4" if spec.packed else "fp32",
        "index_format": "index_fp8" if spec.packed else "index_fp32",
    }  # fmt: skip
    cache = rank_cache(config, ranks, block_size=128, **sizes)
    fill_with_nan(cache)
    one = allocate_cache(whole, block_size=128 * ranks.shard.size, **sizes)
    assert one.geometry is not None
    pool = CompressedPool(one.geometry)
    layer = None
    if spec.layer:
        layer = MLAAttentionV4(whole, layer=number)
        randomize(layer, random)
        layer.to(dtype)
    sink = random.normal(whole.num_heads)[own]
    buffers = None
    if spec.captured_from is not None:
        buffers = rank_buffers(config, cache, ranks, max_tokens=12, max_blocks=3, max_requests=3)
    for count, wanted in enumerate(spec.steps):
        into = buffers if count >= (spec.captured_from or 0) else None
        columns = 0 if into is None else into["window_table"].shape[1]
        batch = _taken(pool, wanted, columns)
        T = batch.num_tokens
        padding = 12 - T if into is not None else spec.padding
        batch, T = replace(batch, padding=padding), T + padding
        plan = plan_over_ranks(
            batch, config, cache, ranks, dtype=dtype, context=spec.context, into=into
        )
        places = [torch.arange(pool.seq_len(n) - new, pool.seq_len(n)) for n, new in wanted]
        positions = torch.cat([*places, torch.zeros(padding, dtype=torch.int64)])
        if layer is not None:
            hidden = random.normal(T, whole.hidden_size, dtype=dtype)
            found[f"{count}.out"] = layer(hidden, positions, cache, plan).clone()
            continue
        inputs = random_inputs(random, whole, spec.ratio, positions, dtype, raw=spec.raw)
        out = attend_over_ranks(_some_heads(inputs, own), None, cache, plan, sink=sink)
        found[f"{count}.out"] = out.clone()
    return found | cache_bytes(cache)


def _some_heads(inputs: CompressedInputs, own: slice) -> CompressedInputs:
    q = inputs.q[:, own].contiguous()
    raw = None if inputs.raw is None else inputs.raw._replace(q=q)
    return replace(inputs, q=q, raw=raw)


def _taken(pool: CompressedPool, wanted: Wanted, columns: int) -> Batch:
    pool.take(dict(wanted))
    names = [name for name, _ in wanted]
    tables = pool.tables(names, window_columns=columns)
    return Batch(
        query_lens=[n for _, n in wanted],
        seq_lens=[pool.seq_len(name) for name in names],
        block_table=tables.block_table,
        window_table=tables.window_table,
        state_slots=tables.state_slots,
    )


def run_layer(
    preset: str,
    form: str,
    interleave: int,
    padding: int,
    absorbed_format: str | None,
    name: str,
) -> Results:
    """MLAAttention with a rank plan; two layers where the second shares the choice."""
    config, random, found = replace(PRESETS[preset], max_positions=256), Random(name), Results()
    numbers = [0]
    if config.rope.kind == "longrope":  # steps cross this length
        config = replace(config, rope=replace(config.rope, original_positions=24))
    if config.indexer is not None:
        config = replace(config, indexer=replace(config.indexer, topk=K))
        assert config.indexer is not None
        if any(config.indexer.shared):
            numbers = [config.indexer.shared.index(shares) for shares in (False, True)]
    ranks = Ranks(dist.group.WORLD, interleave)
    pool = BlockPool(40, 4 * ranks.shard.size)
    layers, caches = [], []
    for number in numbers:
        layer = MLAAttention(config, layer=number, absorbed_format=absorbed_format)
        randomize(layer, random)
        layer.refresh_weights()
        layers.append(layer)
        cache = allocate_cache(
            config, num_blocks=40, block_size=4, format="fp32", index_format="index_fp32",
            layer=number,
        )  # fmt: skip
        fill_with_nan(cache)
        caches.append(cache)
    for count, wanted in enumerate(STEPS_LAYER):
        before = {key: pool.seq_len(key) for key, _ in wanted}
        pool.take(dict(wanted))
        spans = [(key, before[key], before[key] + n) for key, n in wanted]
        slots = [pool.slot_mapping(spans), torch.full((padding,), -1)]
        batch = Batch(
            [n for _, n in wanted], [last for _, _, last in spans],
            pool.block_table([key for key, _ in wanted]), torch.cat(slots), padding=padding,
        )  # fmt: skip
        context = "auto" if config.indexer is None else "place"
        given = batch, config, caches[0], ranks
        plan = plan_over_ranks(*given, dtype=torch.float32, form=form, context=context)
        x = random.normal(batch.num_tokens, config.hidden_size)
        places = [torch.arange(first, last) for _, first, last in spans]
        positions = torch.cat([*places, torch.zeros(padding, dtype=torch.int64)])
        selection = None
        for number, layer, cache in zip(numbers, layers, caches, strict=True):
            x, selection = layer.attend(x, positions, cache, plan, selection)
            found[f"{count}.layer{number}"] = x.clone()
    for number, cache in zip(numbers, caches, strict=True):
        found |= cache_bytes(cache, f"cache{number}")
    return found


def run_merge(heads: str, schedule: str, dtype: torch.dtype, name: str) -> Results:
    random, rank = Random(name), dist.get_rank()
    outs = [random.normal(7, 4, 24, dtype=dtype) for _ in range(2)]
    lses = [random.normal(7, 4) for _ in range(2)]
    lses[0][2], lses[1][3] = -torch.inf, -torch.inf
    for lse in lses:
        lse[5] = -torch.inf
    merged = merge_over_ranks(
        outs[rank], lses[rank], dist.group.WORLD, heads=heads, schedule=schedule
    )
    return dict(zip(("out", "lse"), merged, strict=True))


CASES: dict[str, RankRun] = {}
DENSE: dict[str, dict[str, Any]] = {
    "decode": {"held": [37, 16, 9], "steps": [[1, 1, 1], [1, 1, 1]]},
    "several": {"held": [30, 17, 2], "steps": [[3, 2, 4]]},
    "mixed": {"held": [50, 1, 13, 70], "steps": [[1, 12, 1, 40], [2, 0, 5, 1]], "padding": 2},
    "chunked": {
        "held": [60, 33, 90], "steps": [[20, 12, 9]], "form": "expanded", "workspace_tokens": 16,
    },
}  # fmt: skip


def _add(kind: str, *parts: dict[str, Any], **more: Any) -> None:
    fields: dict[str, Any] = {}
    for part in (*parts, more):
        fields |= part
    name = f"ranks-{kind}"
    assert name not in CASES, name
    CASES[name] = partial(run_latent, Spec(**fields))


def _add_dense() -> None:
    for heads in ("all", "own"):
        for interleave in (1, 4):
            for phase in DENSE:
                _add(f"dense-{phase}-{heads}-{interleave}", DENSE[phase], heads=heads,
                     interleave=interleave)  # fmt: skip
        for schedule in ("gather", "exchange"):
            _add(f"dense-mixed-{heads}-{schedule}", DENSE["mixed"], heads=heads,
                 schedule=schedule, form="absorbed", sink=True)  # fmt: skip
            _add(f"dense-captured-{heads}-{schedule}", heads=heads, schedule=schedule,
                 held=[37, 16, 1], steps=[[1, 1, 1], [3, 0, 1], [2, 1, 1]], captured=5)  # fmt: skip
        for context in ("place", "gather"):
            for phase in ("chunked", "mixed"):
                _add(f"dense-{phase}-{heads}-context-{context}", DENSE[phase], heads=heads,
                     context=context, form="expanded", sink=phase == "mixed")  # fmt: skip
            _add(f"dense-chunked-{heads}-context-{context}-fp8", DENSE["chunked"], heads=heads,
                 context=context, format="fp8", kv_scale=SCALES, dtype=torch.bfloat16)  # fmt: skip
        _add(f"dense-mixed-{heads}-bf16", DENSE["mixed"], heads=heads, format="bf16",
             dtype=torch.bfloat16)  # fmt: skip
        _add(f"dense-mixed-{heads}-fp8", DENSE["mixed"], heads=heads, format="fp8", kv_scale=0.05,
             dtype=torch.bfloat16, interleave=2)  # fmt: skip
        _add(f"dense-mixed-{heads}-packed", DENSE["mixed"], heads=heads, format="fp8_ds_mla",
             wide=True, dtype=torch.bfloat16)  # fmt: skip
    _add("dense-mixed-raw", DENSE["mixed"], raw=True)
    _add("dense-mixed-written-before", DENSE["mixed"], write=False)
    _add("dense-mixed-reference", DENSE["mixed"], backend="reference", block_size=8, interleave=8)


def _add_sparse() -> None:
    base: dict[str, Any] = {"topk": K}
    for heads in ("all", "own"):
        for interleave in (1, 4):
            for phase in ("decode", "several", "mixed"):
                _add(f"sparse-{phase}-{heads}-{interleave}", base, DENSE[phase], heads=heads,
                     interleave=interleave, context="place")  # fmt: skip
            _add(f"sparse-masked-{heads}-{interleave}", base, DENSE["mixed"], heads=heads,
                 interleave=interleave, form="expanded", workspace_tokens=16)  # fmt: skip
        _add(f"sparse-mixed-{heads}-absorbed", base, DENSE["mixed"], heads=heads, form="absorbed",
             sink=True)  # fmt: skip
        _add(f"sparse-under-{heads}", base, held=[2, 3], steps=[[3, 1]], heads=heads)
        _add(f"sparse-captured-{heads}", base, held=[37, 5, 20], heads=heads,
             steps=[[1, 1, 2], [4, 0, 1], [1, 1, 1]], captured=5)  # fmt: skip
        for kind, context in (("mixed", "place"), ("masked", "gather")):
            _add(f"sparse-{kind}-{heads}-packed", base, DENSE["mixed"], heads=heads,
                 format="fp8_ds_mla", index_format="index_fp8", wide=True, context=context,
                 dtype=torch.bfloat16)  # fmt: skip
        for schedule in ("gather", "exchange"):
            _add(f"sparse-several-{heads}-{schedule}", base, DENSE["several"], heads=heads,
                 schedule=schedule)  # fmt: skip


def _add_others() -> None:
    kinds: dict[str, Compressed] = {}
    for ratio in (4, 128):
        for heads in ("all", "own"):
            kinds[f"{ratio}-{heads}"] = Compressed(ratio, heads)
            kinds[f"{ratio}-{heads}-captured"] = Compressed(ratio, heads, captured_from=3)
        kinds[f"{ratio}-layer"] = Compressed(ratio, layer=True)
        kinds[f"{ratio}-padded"] = Compressed(ratio, padding=3)
        kinds[f"{ratio}-packed"] = Compressed(ratio, packed=True)
        kinds[f"{ratio}-raw"] = Compressed(ratio, raw=True)
    kinds["0-all"], kinds["0-layer"] = Compressed(0), Compressed(0, layer=True)
    for context in ("place", "gather"):
        for heads in ("all", "own"):
            kinds[f"4-{heads}-context-{context}"] = Compressed(4, heads, context=context)
        kinds[f"4-layer-context-{context}"] = Compressed(4, layer=True, context=context, padding=1)
    for schedule in ("gather", "exchange"):
        for heads in ("all", "own"):
            kinds[f"4-{heads}-{schedule}"] = Compressed(
                4, heads, schedule=schedule, context="place", interleave=128
            )
    for name, spec in kinds.items():
        CASES[f"ranks-v4-{name}"] = partial(run_compressed, spec)
    for preset in ("tiny-v3", "tiny-v3.2", "tiny-glm-5.2", "tiny-minicpm3"):
        forms = ("auto", "absorbed", "expanded") if preset == "tiny-v3" else ("auto", "absorbed")
        for form in forms:
            CASES[f"ranks-layer-{preset}-{form}"] = partial(run_layer, preset, form, 2, 0, None)
        CASES[f"ranks-layer-{preset}-padded"] = partial(run_layer, preset, "auto", 1, 2, None)
    CASES["ranks-layer-fp8-weights"] = partial(run_layer, "tiny-v3", "auto", 4, 0, "fp8")
    for heads in ("all", "own"):
        for schedule in ("gather", "exchange", "auto"):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"ranks-merge-{heads}-{schedule}-{str(dtype).removeprefix('torch.')}"
                CASES[name] = partial(run_merge, heads, schedule, dtype)


for _make in (_add_dense, _add_sparse, _add_others):
    _make()


def run_here(rank: int, name: str) -> Summary:
    """One rank's side of a case, called in its process."""
    with one_way():
        return summarize(CASES[name](name))


def join(answers: Sequence[Summary]) -> Summary:
    """What all ranks returned, as one summary."""
    return {
        f"rank{rank}.{key}": value
        for rank, answer in enumerate(answers)
        for key, value in answer.items()
    }
