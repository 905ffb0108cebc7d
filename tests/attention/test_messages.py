"""Every error of the attention calls: where, which argument, its value, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from openmla import (
    Batch,
    CompressedInputs,
    IndexInputs,
    LayerCache,
    MLAConfig,
    PagedCache,
    RawProjections,
    absorb,
    allocate_cache,
    apply_sink,
    attend_compressed,
    attend_latent,
    attend_partial,
    attend_step,
    make_output,
    make_plan,
    make_selection,
    plan_buffers,
    select_step,
    warmup,
)
from tests.attention.known import DENSE, SPARSE, C, H, Requests, V
from tests.layers.v4 import Server, make_layer, sequence, tiny_config
from tests.parallel.v4 import inputs_of
from tests.raising import check_raises

MIXED = ([3, 1, 60, 1], [60, 17, 140, 90])  # the third is expanded where that is cheaper
SIZES: Any = {"max_requests": 4, "max_tokens": 65, "max_blocks": 60}
NUMBERS: Any = {"num_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
CHANGES = Callable[["World"], dict[str, Any]]


class World:
    """A step over requests in a cache, and what an argument can wrongly be."""

    def __init__(self, config: MLAConfig = DENSE, form: str = "auto", **options: Any) -> None:
        self.requests, self.config = Requests(*MIXED, config), config
        self.cache, self.batch = self.requests.part()
        self.form, self.options = form, {"dtype": torch.float64, **options}
        self.plan = self.planned()
        self.projected, self.absorbed = self.requests.projected, self.requests.absorbed
        self.q_latent = self.requests.q_latent
        self.out = torch.zeros(65, H, V, dtype=torch.float64)
        assert self.cache.latent is not None
        self.written = self.cache.latent.data

    def planned(self, batch: Batch | None = None, **options: Any) -> Any:
        given = {"form": self.form, **self.options, **options}
        return make_plan(batch or self.batch, self.config, self.cache, **given)

    @property
    def step(self) -> dict[str, Any]:
        names = ("projected", "absorbed", "cache", "plan")
        return {name: getattr(self, name) for name in names}

    @property
    def raw(self) -> RawProjections:
        kv, ones = torch.cat(self.projected[2:], 1), torch.ones(C)
        return RawProjections(self.requests.q, kv, ones, torch.arange(65), None, "pairs", 1e-6)

    @property
    def narrow(self) -> LayerCache:
        latent = self.cache.latent
        assert latent is not None
        return LayerCache(PagedCache(latent.data[..., 1:], "fp32", latent.kv_scale))

    def sized(self, num_blocks: int, block_size: int) -> LayerCache:
        sizes: Any = {"num_blocks": num_blocks, "block_size": block_size, "format": "fp32"}
        return allocate_cache(self.config, **sizes)

    def single(self) -> Any:
        given: Any = {"max_requests": 4, "max_tokens": 65, "dtype": torch.float32}
        space = warmup(DENSE, self.cache, **given, workspace_tokens=8)
        return self.planned(dtype=torch.float32, workspace=space)


def changed(name: str, **fields: Any) -> CHANGES:
    """One field of a tuple that the step takes, from the field as it is."""
    return lambda w: {
        name: (given := getattr(w, name))._replace(
            **{field: change(getattr(given, field)) for field, change in fields.items()}
        )
    }


BOTH: list[tuple[str, CHANGES]] = [
    ("projected must be of type Projected, got tuple", lambda w: {"projected": (*w.projected,)}),
    ("absorbed must be ", lambda w: {"absorbed": w.requests.weight}),
    ("cache must be of type LayerCache, got PagedCache", lambda w: {"cache": w.cache.latent}),
    ("plan must be of type Plan, got Batch", lambda w: {"plan": w.batch}),
    ("cache has no latent rows. Pass ", lambda w: {"cache": LayerCache()}),
    ("latent rows must be W=40 wide for 40 values ... got 39.", lambda w: {"cache": w.narrow}),
    ("q_nope must be", changed("projected", q_nope=lambda q: q[:64])),
    ("q_pe must be [T, H, R] = (65, 4, 8)", changed("projected", q_pe=lambda q: q[:, :, 1:])),
    ("q_pe must be torch.float64 ... got torch.f", changed("projected", q_pe=lambda q: q.float())),
    ("kv_c must be [T, C] = (65, 32) ... got", changed("projected", kv_c=lambda c: c[:, 1:])),
    ("k_pe must be [T, R] = (65, 8) ... got (9, 8)", changed("projected", k_pe=lambda k: k[:9])),
    ("w_uk must be [H, P, C]", lambda w: {"absorbed": w.absorbed._replace(w_uk=w.absorbed.w_uv)}),
    ("w_uv must be [H, C, V]", lambda w: {"absorbed": w.absorbed._replace(w_uv=w.absorbed.w_uk)}),
    ("kv_b must be", lambda w: {"absorbed": absorb(w.requests.weight.float(), DENSE)}),
    ("kv_b must be on cpu, got meta.", changed("absorbed", kv_b=lambda b: b.to("meta"))),
    ("q_nope must be", lambda w: {"plan": w.single()}),
    ("cache must have ... blocks of 4 tokens ... got 9 of 4", lambda w: {"cache": w.sized(9, 4)}),
    ("cache must have ... blocks of 4 tokens ... got 99 of 8", lambda w: {"cache": w.sized(99, 8)}),
    ("write must be True or False, got 0.", lambda w: {"write": 0}),
    ("raw must be None where no row is written", lambda w: {"raw": w.raw, "write": False}),
]


@pytest.mark.parametrize("attend", [attend_step, attend_partial])
@pytest.mark.parametrize(("says", "changes"), BOTH, ids=[says[:40] for says, _ in BOTH])
def test_both_attend_calls_name_the_argument(says: str, changes: CHANGES, attend: Any) -> None:
    world = World()
    check_raises(
        f"step: {says}",
        lambda: attend(**{**world.step, **changes(world)}),
        world.written,
        world.requests.q,
    )


STEP: list[tuple[str, CHANGES]] = [
    ("sink must be of type Tensor, got list", lambda w: {"sink": [0.0] * 4}),
    ("sink must be [H] = (4,), got (3,)", lambda w: {"sink": torch.zeros(3)}),
    ("sink must be of a floating dtype, got torch.int32", lambda w: {"sink": torch.zeros(4).int()}),
    ("out must be [T, H, V] = (65, 4, 24), got (64, 4, 24)", lambda w: {"out": w.out[:64]}),
    ("out must be [T, H, V] = (65, 4, 24), got (65, 96)", lambda w: {"out": w.out.flatten(1)}),
    ("out must be torch.float64 ... got torch.float32", lambda w: {"out": w.out.float()}),
    ("out must be on cpu, got meta", lambda w: {"out": w.out.to("meta")}),
    ("out must be contiguous within ", lambda w: {"out": w.out[:1].expand(65, H, V)}),
    ("out must be contiguous within ", lambda w: {"out": w.out.mT.contiguous().mT}),
    ("out must be contiguous within ", lambda w: {"out": w.requests.q.repeat(1, 1, 2)[..., :V]}),
    ("out must be a tensor, got str", lambda w: {"out": "buffer"}),
]


@pytest.mark.parametrize(("says", "changes"), STEP)
def test_attend_step_names_the_argument(says: str, changes: CHANGES) -> None:
    world = World()
    call = partial(attend_step, **{**world.step, **changes(world)})
    check_raises(f"step: {says}", call, world.written, world.out)


PARTIAL: list[tuple[str, CHANGES]] = [
    ("absorbed is missing for deepseek_v3. Pass absorb(", lambda w: {"absorbed": None}),
    ("keys must be 'all' for deepseek_v3, got 'window'. Plan each ", lambda w: {"keys": "window"}),
    ("absorbed must be None", lambda w: {"projected": CompressedInputs(w.q_latent)}),
    (
        "the plan's config (deepseek_v3) has no compressor. Call attend_step()",
        lambda w: {"projected": CompressedInputs(w.q_latent), "absorbed": None},
    ),
    ("raw must", lambda w: {"raw": w.raw, "plan": w.planned(w.requests.part([0] * 4, [2] * 4)[1])}),
]


@pytest.mark.parametrize(("says", "changes"), PARTIAL)
def test_attend_partial_names_the_argument(says: str, changes: CHANGES) -> None:
    world = World()
    call = partial(attend_partial, **{**world.step, **changes(world)})
    check_raises(f"step: {says}", call, world.written)


def fp8(**changes: Any) -> CHANGES:
    made = make_output("fp8", 65, H * V, global_scale=0.02)
    return lambda w: {"out": made._replace(**changes)}


QUANTIZED: list[tuple[str, CHANGES]] = [
    ("step: out must", fp8(format="fp8_128")),
    ("step: out must", fp8(values=torch.empty(64, 96, dtype=torch.float8_e4m3fn))),
    ("step: values must be torch.float8_e4m3fn, got torch.f", fp8(values=torch.empty(65, 96))),
    ("step: global_scale must be a float32 scalar ... got None", fp8(global_scale=None)),
    ("step: global_scale must be positive and finite, got 0", fp8(global_scale=torch.tensor(0.0))),
    ("step: scales must be None for format fp8", fp8(scales=torch.ones(65, 1))),
    ("step: out must", lambda w: {**fp8()(w), "plan": w.planned(output=None)}),
]


@pytest.mark.parametrize(("says", "changes"), QUANTIZED)
def test_wrong_output_buffers_are_named(says: str, changes: CHANGES) -> None:
    world = World(output="fp8")
    check_raises(says, partial(attend_step, **{**world.step, **changes(world)}), world.written)


LATENT: list[tuple[str, CHANGES]] = [
    ("latent: q_latent must be [T, H, C + R] = (65, ", lambda w: {"q_latent": w.q_latent[1:]}),
    ("latent: q_latent must be", lambda w: {"q_latent": w.q_latent[..., :C]}),
    ("latent: q_latent must be on cpu, got meta", lambda w: {"q_latent": w.q_latent.to("meta")}),
    ("latent: q_latent must be of type Tensor, got NoneType", lambda w: {"q_latent": None}),
    ("latent: cache must be of type LayerCache", lambda w: {"cache": w.cache.latent}),
    ("latent: cache has no latent rows. Pass", lambda w: {"cache": LayerCache()}),
    ("latent: plan must be of type Plan, got NoneType", lambda w: {"plan": None}),
    ("latent: plan has expanded requests", lambda w: {"plan": w.planned(form="expanded")}),
]


@pytest.mark.parametrize(("says", "changes"), LATENT)
def test_attend_latent_names_the_argument(says: str, changes: CHANGES) -> None:
    world = World(form="absorbed")
    usual = {"q_latent": world.q_latent, "cache": world.cache, "plan": world.plan}
    check_raises(says, partial(attend_latent, **{**usual, **changes(world)}))


def test_a_selection_is_of_one_plan() -> None:
    world = World(SPARSE, form="chosen")
    positions = world.requests.listed(world.requests.choices())
    other = make_selection(positions, world.cache, world.planned(world.requests.part()[1]))
    for says, selection in (
        ("step: selection is missing: 65 tokens ... select_step() or make_selection()", None),
        ("step: selection must be", other),
        ("step: selection must be of type Selection, got Tensor", positions),
    ):
        given = {"cache": world.cache, "plan": world.plan, "selection": selection}
        for call in (
            partial(attend_step, world.projected, world.absorbed, **given),
            partial(attend_partial, world.projected, world.absorbed, **given),
            partial(attend_latent, world.q_latent, **given),
        ):
            check_raises(says, call, world.written)


def put(world: Any, t: int, k: int, value: int) -> dict[str, Any]:
    positions = world.positions.clone()
    positions[t, k] = value
    return {"positions": positions}


SELECTION: list[tuple[str, Callable[[Any], dict[str, Any]]]] = [
    ("positions must be [T, K] = (65, 32) ... got (9", lambda w: {"positions": w.positions[:9]}),
    ("positions must be [T, K] = (65, 32)", lambda w: {"positions": w.positions[:, :9]}),
    ("positions must be torch.int32 ... got torch", lambda w: {"positions": w.positions.long()}),
    ("positions must be on cpu, got meta", lambda w: {"positions": w.positions.to("meta")}),
    ("positions must be a [T, K] int32 tensor, got NoneType", lambda w: {"positions": None}),
    ("positions must be contiguous", lambda w: {"positions": w.positions.T.contiguous().T}),
    ("positions of a token that sees 58 keys ... got 58.", lambda w: put(w, 0, 3, 58)),
    ("positions of a token that sees 58 keys ... got -2.", lambda w: put(w, 0, 3, -2)),
    ("positions must not repeat a key of a token", lambda w: put(w, 0, 3, int(w.positions[0, 4]))),
    ("lens must be [T] = (65,) for this plan, got (9,)", lambda w: {"lens": w.lens[:9]}),
    ("lens must be torch.int32 ... got torch.int64", lambda w: {"lens": w.lens.long()}),
    ("lens must be within 0..K=32, got 33..33", lambda w: {"lens": w.lens + 1}),
    ("lens must be a [T] int32 tensor, got list", lambda w: {"lens": w.lens.tolist()}),
    ("plan must be of type Plan, got NoneType", lambda w: {"plan": None}),
    ("the plan's config (deepseek_v3) has no indexer. Set", lambda w: {"plan": World().plan}),
    ("cache has neither latent nor window rows. Pass", lambda w: {"cache": LayerCache()}),
]


@pytest.mark.parametrize(("says", "changes"), SELECTION)
def test_make_selection_names_the_argument(says: str, changes: CHANGES) -> None:
    world: Any = World(SPARSE)
    world.positions = world.requests.listed(world.requests.choices())
    world.lens = torch.full((65,), 32, dtype=torch.int32)
    usual = {"positions": world.positions, "cache": world.cache, "plan": world.plan}
    check_raises(f"selection: {says}", partial(make_selection, **{**usual, **changes(world)}))


def test_select_step_names_the_argument() -> None:
    world = World(SPARSE)
    zeros = torch.zeros(65, 16, 16, dtype=torch.float64)
    index = IndexInputs(zeros, zeros[..., 0], zeros[:, 0])
    latent_only = LayerCache(latent=world.cache.latent)
    unscored = make_plan(world.batch, SPARSE, latent_only, dtype=torch.float64, form="chosen")
    assert world.cache.index is not None
    for says, given in (
        ("index must be of type IndexInputs, got tuple", ((*index,), world.cache, world.plan)),
        ("plan must be of type Plan, got NoneType", (index, world.cache, None)),
        ("the plan's config (deepseek_v3) has no indexer", (index, world.cache, World().plan)),
        ("cache has no index rows. Allocate it for ", (index, latent_only, world.plan)),
        ("the plan was made for a cache without index rows", (index, world.cache, unscored)),
        ("q_idx must be", (index._replace(q_idx=zeros[1:]), world.cache, world.plan)),
    ):
        call = partial(select_step, *given)
        check_raises(f"select: {says}", call, world.cache.index.data)


def test_apply_sink_names_the_argument() -> None:
    out, lse, sink = torch.zeros(4, H, V), torch.zeros(4, H), torch.zeros(H)
    for says, given in (
        ("lse must be [T, H] and out [T, H, V], got (4, 3) and (", (out, lse[:, 1:], sink)),
        ("lse must be [T, H] and out [T, H, V], got (4, 4) and (4, 24)", (out[0], lse, sink)),
        ("sink must be [H] = (4,), got (3,)", (out, lse, sink[1:])),
    ):
        check_raises(f"sink: {says}", partial(apply_sink, *given))


def test_attend_compressed_names_the_argument() -> None:
    layer = make_layer(tiny_config(), 4)
    server = Server(layer, {"a": sequence(90)})
    server.step([("a", 80)])
    plan = server.plan(server.batch([("a", 9)]))
    hidden, positions = server.tokens([("a", 9)])
    usual: dict[str, Any] = vars(inputs_of(layer, hidden, positions, plan, slice(None)))
    usual |= {"cache": server.cache, "plan": plan, "sink": layer.sinks.float()}
    q, width = usual["q"], layer.config.num_heads * layer.config.latent_dim
    table = layer.rope_table.table
    assert server.cache.window is not None
    for says, changes in (
        ("cache must be of type LayerCache, got NoneType", {"cache": None}),
        ("plan must be of type Plan, got NoneType", {"plan": None}),
        ("sink must be a tensor, got NoneType", {"sink": None}),
        ("cache has no window rows. Pass", {"cache": World().cache}),
        ("q must be ... for this plan, got", {"q": q[1:]}),
        ("rows must be ... for this plan, got None", {"rows": None}),
        ("pool_inputs is missing for ratio 4.", {"pool_inputs": None}),
        ("table must have a row ... got None. Pass", {"table": None}),
        ("table must have a row ... got 3. Pass", {"table": table[:3]}),
        ("q must be torch.float32 like the other inputs, got torch.float64", {"q": q.double()}),
        ("out must", {"out": make_output("fp8", 9, width, global_scale=1.0)}),
    ):
        call = partial(attend_compressed, **{**usual, **changes})
        check_raises(f"step: {says}", call, server.cache.window.data)
    quantized = server.plan(server.batch([("a", 9)]), output="fp8")
    given = {**usual, "plan": quantized, "out": make_output("fp8", 9, width, global_scale=1.0)}
    call = partial(attend_compressed, **{**given, "table": None})
    check_raises("step: table is missing: outputs are rotated back", call)
    inputs = CompressedInputs(**{name: usual[name] for name in vars(CompressedInputs(q))})
    call = partial(attend_partial, inputs, None, server.cache, plan, keys="rows")
    check_raises("step: keys must be 'all', 'window' or 'entries', got 'rows'.", call)


ELSEWHERE: list[tuple[str, Callable[[World], object]]] = [
    ("plan: batch must be of type Batch", lambda w: make_plan(None, DENSE, w.cache)),  # type: ignore[arg-type]
    ("plan: config must be of type MLAConfig", lambda w: make_plan(w.batch, None, w.cache)),  # type: ignore[arg-type]
    ("plan: compiled must be ", lambda w: w.planned(compiled=1)),
    ("plan: prefill_dtype must be 'fp8' or None", lambda w: w.planned(prefill_dtype="fp16")),
    ("plan: prefill_dtype must be 'fp8' or None, got 8.", lambda w: w.planned(prefill_dtype=8)),
    ("plan: config must have an indexer for form 'chosen'", lambda w: w.planned(form="chosen")),
    ("plan: into must be", lambda w: w.planned(into={"block_table": torch.zeros(1, 1)})),
    (
        "plan: into must be plan_buffers() of this config and cache",
        lambda w: w.planned(
            Requests([1, 2], [40, 50]).part()[1],
            into=plan_buffers(SPARSE, World(SPARSE).cache, **SIZES),
        ),
    ),
    (
        "plan_buffers: max_requests must be a positive integer, got '2'.",
        lambda w: plan_buffers(DENSE, w.cache, **{**SIZES, "max_requests": "2"}),
    ),
    (
        "plan_buffers: max_tokens must be at least max_requests=4, got 1.",
        lambda w: plan_buffers(DENSE, w.cache, **{**SIZES, "max_tokens": 1}),
    ),
    (
        "warmup: dtype must be one of ",
        lambda w: warmup(DENSE, w.cache, max_requests=1, max_tokens=1, dtype=torch.int32),
    ),
    (
        "warmup: cache must be of type LayerCache",
        lambda w: warmup(DENSE, None, max_requests=1, max_tokens=1),  # type: ignore[arg-type]
    ),
    (
        "warmup: backend 'tritton' is not known ... Did you mean 'triton'?",
        lambda w: warmup(DENSE, w.cache, max_requests=1, max_tokens=1, backend="tritton"),
    ),
    (
        "warmup: op 'mqa_page' is not known ... Did you mean 'mqa_paged'?",
        lambda w: warmup(DENSE, w.cache, max_requests=1, max_tokens=1, backend={"mqa_page": "x"}),
    ),
    ("weights: kv_b_proj's weight must be of type Tensor", lambda w: absorb([], DENSE)),  # type: ignore[arg-type]
    (
        "config: indexer must be of type IndexerConfig, got tuple",
        lambda w: MLAConfig.from_numbers(**NUMBERS, v_head_dim=24, indexer=(4, 32, 8)),  # type: ignore[arg-type]
    ),
]


@pytest.mark.parametrize(("says", "call"), ELSEWHERE)
def test_calls_around_a_step_name_the_argument(says: str, call: Callable[[World], object]) -> None:
    world = World()
    check_raises(says, lambda: call(world), world.written)


def test_batches_without_new_keys() -> None:
    table = torch.zeros(2, 9, dtype=torch.int32)
    usual: Any = {"query_lens": [3, 1], "seq_lens": [2, 5], "block_table": table, "causal": False}
    state = {"window_table": table[:, :1], "state_slots": table[:, 0].contiguous()}
    for says, changes in (
        ("slot_mapping must be None with causal=False", {"slot_mapping": torch.zeros(4).long()}),
        ("window_table must be None with causal=False", state),
        ("seq_lens[1] must not be negative, got -1", {"seq_lens": [2, -1]}),
        ("causal must be True or False, got None", {"causal": None}),
    ):
        check_raises(f"batch: {says}", partial(Batch, **{**usual, **changes}))
