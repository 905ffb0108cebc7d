"""Steps of vLLM's scheduler through the plugin's builder and layers, against plain attention.

vLLM's types are stood in for (vllm_stand_ins.py); `make test-vllm` runs the real engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from tests.integrations import vllm_stand_ins as stand_ins
from tests.integrations.vllm_layers import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    Engine,
    H,
    P,
    R,
    SparseEngine,
    V,
)


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_ins.install(monkeypatch)
        yield


STEPS: Sequence[dict[str, int]] = (
    {"a": 5, "b": 40},  # prompts
    {"a": 1, "b": 7, "c": 20},  # one decodes, one goes on with its prompt, one begins
    {"a": 1, "b": 1, "c": 1},
    {"c": 1},
)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps(device: str, dtype: torch.dtype, interleaved: bool) -> None:
    engine = Engine(device, dtype=dtype, interleaved=interleaved)
    for wanted in STEPS:
        engine.step(wanted)
    other = engine.memory[:, 1] if interleaved else engine.memory[1]
    assert not other.any()  # another layer's pages


@pytest.mark.parametrize("kv", ["fp8", "fp8_ds_mla"])
def test_quantised_caches(device: str, kv: str) -> None:
    """Bytes are the format's: what vLLM reads of them, it can read."""
    engine = Engine(device, kv=kv, C=512, rope=64, dtype=torch.bfloat16)
    for wanted in STEPS:
        engine.step(wanted)
    layout, layer = openmla.FORMATS[kv], engine.layers[0]
    data = layer.kv_cache.view(layout.dtype)
    slots = torch.tensor(engine.blocks["a"][:1], device=device) * BLOCK_SIZE
    row = layout.read(data, slots, layer._k_scale.to(device), torch.float32, 576)
    torch.testing.assert_close(row[0], engine.rows["a"][0].float(), rtol=0.08, atol=0.06)
    if kv == "fp8_ds_mla":
        assert layer.kv_cache.shape[-1] == 656


@pytest.mark.parametrize("query_dtype", ["fp8", "fp8_static"])
@pytest.mark.parametrize("kv", ["fp8", "fp8_ds_mla"])
def test_queries_and_prompts_in_fp8(
    device: str, kv: str, query_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where --additional-config asks for them, also of a step that is captured."""
    asked = {"openmla": {"query_dtype": query_dtype, "prefill_dtype": "fp8"}}
    sizes: dict[str, Any] = {"C": 512, "rope": 64, "dtype": torch.bfloat16}
    engine = Engine(device, kv=kv, **sizes, additional_config=asked)
    plans = []
    planned = openmla.make_plan

    def remember(*args: Any, **given: Any) -> openmla.Plan:
        plans.append(planned(*args, **given))
        return plans[-1]

    def near(wanted: dict[str, int], q: Tensor, rows: Tensor, out: Tensor) -> None:
        at = 0
        for name, n in wanted.items():
            engine.rows[name] = torch.cat([engine.rows.get(name, rows[:0]), rows[at : at + n]])
            exact = engine.plain(q[at : at + n], engine.rows[name])
            error = (out[at : at + n].double() - exact).norm() / exact.norm()
            assert error < 0.15
            at += n

    monkeypatch.setattr(openmla, "make_plan", remember)
    monkeypatch.setattr(engine, "check", near)
    for wanted in STEPS:
        engine.step(wanted)
    assert any("quantize_heads" in plan.backends for plan in plans)
    absorbed = [plan for plan in plans if plan.group("absorbed") is not None]
    assert absorbed and all("quantize_queries" in plan.backends for plan in absorbed)
    bf16 = Engine(device, **sizes, additional_config=asked)
    with pytest.raises(openmla.ConfigError, match="query_dtype must be None for a cache of bf16"):
        bf16.step({"a": 1})


def test_prompts_of_vllm_are_not_ours(device: str) -> None:
    asked = {"openmla": {"prefill_dtype": "fp8"}}
    with pytest.raises(ValueError, match="not supported with decode context parallelism"):
        Engine(device, additional_config=asked, ranks=2)


def test_padded_requests_and_tokens(device: str) -> None:
    """Nothing is read or written for them, whatever lengths they had before."""
    engine = Engine(device)
    engine.step({"a": 30, "b": 3})
    before = engine.memory[0, 0].clone()
    engine.step({"a": 1, "b": 1}, requests=4, tokens=4)
    engine.step({"b": 1}, requests=8, tokens=8)
    assert torch.equal(engine.memory[0, 0], before)  # the null block


def test_single_tokens_padded_as_if_they_had_drafts(device: str) -> None:
    """Two requests of one token in a step of four: the last two tokens belong to nobody."""
    engine = Engine(device, drafts=1)
    engine.step({"a": 30, "b": 3})
    engine.step({"a": 1, "b": 1}, requests=2, tokens=4)
    assert engine.builder.latest is not None and engine.builder.latest.plan is not None
    assert tuple(engine.builder.latest.plan.query_lens) == (1, 1)


def test_drafts_whose_number_the_device_knows(device: str) -> None:
    """The host's lengths are upper bounds then."""
    engine = Engine(device, drafts=2)
    engine.step({"a": 20, "b": 9})
    wanted = {"a": 3, "b": 3}
    common = engine.common(wanted, 2, 6)
    common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound + 2
    metadata = engine.builder.build(0, common)
    q, rows = engine.inputs(6)
    out = torch.zeros(6, H * V, device=device)
    engine.attend(metadata, q, rows, out)
    engine.check(wanted, q, rows, out)


def test_a_draft_model_is_a_token_ahead_of_the_hosts_lengths(device: str) -> None:
    """It reads what the target model has just sampled, prompts and accepted drafts alike."""
    engine = Engine(device, drafts=2, method="draft_model")
    context = engine.config.compilation_config.static_forward_context
    for name in "01":
        context[f"draft_model.{name}"] = context.pop(name)
    names = list(context)
    engine.builder = type(engine.builder)(None, names, engine.config, torch.device(device))
    for wanted in ({"a": 20}, {"a": 9, "b": 6, "c": 3}):
        n = sum(wanted.values())
        common = engine.common(wanted, len(wanted), n)
        common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound - 1
        metadata = engine.builder.build(0, common)
        q, rows = engine.inputs(n)
        out = torch.zeros(n, H * V, device=device)
        engine.attend(metadata, q, rows, out)
        engine.check(wanted, q, rows, out)


def test_runner_v1_needs_the_backend_of_drafts() -> None:
    Engine("cpu", drafts=1)
    Engine("cpu", drafts=1, runner_v2=False, draft_backend="CUSTOM")
    assert stand_ins.WARNINGS == []
    Engine("cpu", drafts=1, runner_v2=False)
    assert len(stand_ins.WARNINGS) == 1 and '"attention_backend": "CUSTOM"' in stand_ins.WARNINGS[0]


def test_two_layers_share_a_plan(device: str) -> None:
    engine = Engine(device)
    common = engine.common({"a": 6}, 1, 6)
    metadata = engine.builder.build(0, common)
    q, rows = engine.inputs(6)
    first, second = torch.zeros(2, 6, H * V, device=device)
    engine.attend(metadata, q, rows, first)
    engine.attend(metadata, q, rows, second, layer=1)
    assert torch.equal(first, second) and torch.equal(engine.memory[0], engine.memory[1])


def test_weights_are_views_where_vllm_has_one(device: str) -> None:
    engine = Engine(device)
    layer = engine.layers[0]
    assert layer.impl.weights.kv_b.data_ptr() == layer.W_UK_T.data_ptr()
    layer.W_UK_T, layer.W_UV = layer.W_UK_T.clone(), layer.W_UV.clone()  # decoded apart
    layer.impl.process_weights_after_loading(torch.float32)
    for name in ("w_uk", "w_uv"):
        assert torch.equal(getattr(layer.impl.weights, name), getattr(engine, name))
    engine.step({"a": 9})
    engine.step({"a": 1})


def test_context_parallel_decode(device: str) -> None:
    """Each rank attends to its keys; merged by lse they are the whole."""
    whole = Engine(device)
    whole.step({"a": 37, "b": 5})
    rows = {name: kept.clone() for name, kept in whole.rows.items()}
    q, new = whole.inputs(2)
    q_latent = torch.cat([torch.einsum("thp,hpc->thc", q[..., :P], whole.w_uk), q[..., P:]], -1)
    parts = []
    for rank in (0, 1):
        engine = Engine(device, ranks=2, heads=H // 2)  # heads of both ranks are gathered
        assert engine.layers[0].impl.can_return_lse_for_decode
        common = engine.common(dict.fromkeys(rows, 40), 2, 80)
        lens = []
        for b, name in enumerate(rows):
            mine = torch.cat([rows[name], new[b : b + 1]])[rank::2]  # interleaved
            lens.append(len(mine))
            for place, row in enumerate(mine):
                block = engine.blocks[name][place // BLOCK_SIZE]
                engine.memory[0, block, place % BLOCK_SIZE] = row
        starts = torch.tensor([0, 1, 2], dtype=torch.int32)
        common.query_start_loc_cpu, common.query_start_loc = starts, starts.to(device)
        common.num_actual_tokens, common.max_seq_len = 2, 19
        common.dcp_local_seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        metadata = engine.builder.build(0, common)
        nope, pe = q_latent.split([engine.C, R], -1)
        asked = (nope, pe) if rank else q_latent
        impl = engine.layers[0].impl
        parts.append(impl.forward_mqa(asked, engine.layers[0].kv_cache, metadata, None))
        impl.forward_mha(None, None, None, None, metadata, None, None)
        assert impl.handed_up == "forward_mha"  # vLLM gathers the ranks' context for prompts
        impl.do_kv_cache_update(None, None, None, None, "auto", None)
        assert impl.handed_up == "do_kv_cache_update"
    out, lse = parts[0]
    openmla.ops.merge_states(out, lse, *parts[1])
    attended = torch.einsum("thc,hcv->thv", out, whole.w_uv).flatten(1)
    for b, name in enumerate(rows):
        expected = whole.plain(q[b : b + 1], torch.cat([rows[name], new[b : b + 1]]))
        torch.testing.assert_close(attended[b : b + 1].double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is recorded elsewhere")
@pytest.mark.parametrize("drafts", [0, 1])
def test_graphs_of_many_sizes_over_one_set_of_buffers(drafts: int) -> None:
    """As vLLM captures them, largest first, and replays them with fewer requests."""
    engine = Engine("cuda", drafts=drafts, dtype=torch.bfloat16)
    width = 1 + drafts
    engine.step({"a": 19, "b": 33, "c": 4})
    graphs: dict[int, Any] = {}
    addresses: dict[int, int] = {}
    sizes = (4, 2, 1)
    q, rows = engine.inputs(max(sizes) * width)
    out = torch.zeros(len(q), H * V, device="cuda", dtype=engine.dtype)
    for size in sizes:
        tokens = size * width
        common = engine.common({}, size, tokens)
        for starts in (common.query_start_loc, common.query_start_loc_cpu):
            starts.copy_(torch.arange(size + 1, dtype=torch.int32) * width)
        common.seq_lens.fill_(MAX_BLOCKS * BLOCK_SIZE)
        common.seq_lens_cpu_upper_bound.fill_(MAX_BLOCKS * BLOCK_SIZE)
        metadata = engine.builder.build_for_cudagraph_capture(common)
        assert metadata.plan is not None
        addresses[size] = metadata.plan.slot_mapping.data_ptr()
        some = (metadata, q[:tokens], rows[:tokens], out[:tokens])
        engine.attend(*some)  # compiles
        torch.cuda.synchronize()
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size]):
            engine.attend(*some)
    for wanted, size in (
        (["a", "b", "c"], 4),
        (["b"], 1),
        (["a", "c"], 2),
        (["c"], 4),
    ):
        asked = dict.fromkeys(wanted, width)
        common = engine.common(asked, size, size * width)
        metadata = engine.builder.build(0, common)
        assert metadata.plan is not None
        assert metadata.plan.slot_mapping.data_ptr() == addresses[size]
        new_q, new_rows = engine.inputs(size * width)
        q[: size * width], rows[: size * width] = new_q, new_rows
        graphs[size].replay()
        engine.check(asked, new_q, new_rows, out[: size * width])


def test_sparse_models_choose_by_our_indexer(device: str) -> None:
    from openmla.integrations.vllm import indexer

    engine = SparseEngine(device)
    module = engine.indexer
    assert isinstance(module, indexer.OpenMLAIndexer) and engine.layers[0].impl.is_sparse
    assert not hasattr(module.indexer_op, "made_by_vllm")
    assert indexer.SELECT in engine.config.compilation_config.splitting_ops
    keys_builder = module.k_cache.get_attn_backend().get_builder_cls()
    assert keys_builder(None, [], engine.config, None).build(0) is None
    for n in (70, 1):
        metadata = engine.builder.build(0, engine.common({"a": n}, 1, n))
        hidden, low = torch.randn(n, 48, device=device), torch.randn(n, 24, device=device)
        q, rows = engine.inputs(n)
        out = torch.zeros(n, H * V, device=device)
        engine.forward(metadata, hidden, low, q, rows, out)
        assert metadata.selection is not None
        engine.check_last(hidden, low, q, rows, out)
    stand_ins.CONTEXT[0] = SimpleNamespace(attn_metadata=None)  # vLLM measures memory
    module(hidden, low, None, lambda positions, q, k: (q, k))


def test_layers_that_take_what_another_chose(device: str) -> None:
    """vLLM has a builder of their own for these, which must know the step of those that choose."""
    engine = SparseEngine(device)
    engine.layers[1].use_sparse = True
    where = torch.device(device)
    taker = type(engine.builder)(None, ["1"], engine.config, where)
    common = engine.common({"a": 70}, 1, 70)
    metadata = engine.builder.build(0, common)
    assert taker.build(0, common) is metadata
    hidden, low = torch.randn(70, 48, device=device), torch.randn(70, 24, device=device)
    q, rows = engine.inputs(70)
    out, taken = torch.zeros(2, 70, H * V, device=device)
    engine.forward(metadata, hidden, low, q, rows, out)
    engine.attend(metadata, q, rows, taken, layer=1)  # of the same rows and weights
    torch.testing.assert_close(taken, out)
    del engine.config.compilation_config.static_forward_context["0"]  # another stage's
    with pytest.raises(ValueError, match="must have an indexer"):
        type(engine.builder)(None, ["1"], engine.config, where)


def test_an_unknown_index_format_is_refused() -> None:
    from openmla.integrations.vllm import models

    config = stand_ins.config(additional_config={"openmla": {"index_format": "bf16"}})
    stand_ins.CONFIG[0] = config
    with pytest.raises(openmla.ConfigError, match="'bf16' is not known for index rows"):
        models.DeepseekV32ForCausalLM(vllm_config=config)


def test_layers_that_share_a_choice_take_its_step(device: str) -> None:
    """vLLM has them in a group of their own, planned after those that choose."""
    engine = SparseEngine(device)
    engine.layers[1].use_sparse = True
    sharing = type(engine.builder)(None, ["1"], engine.config, torch.device(device))
    common = engine.common({"a": 50}, 1, 50)
    metadata = engine.builder.build(0, common)
    assert sharing.build(0, common) is metadata
    assert sharing.build(0, replace(common)) is metadata  # as each group of layers gets one
    with pytest.raises(ValueError, match="in the same step as those that select, and after them"):
        sharing.build(0, engine.common({"a": 50}, 1, 50))
    with pytest.raises(ValueError, match="in the same blocks, got another block_table_tensor"):
        sharing.build(0, replace(common, block_table_tensor=common.block_table_tensor.clone()))
    del engine.config.compilation_config.static_forward_context["0"]
    with pytest.raises(ValueError, match="must have an indexer, got none"):
        type(engine.builder)(None, ["1"], engine.config, torch.device(device))


def test_a_graph_is_captured_without_a_threshold(device: str) -> None:
    """vLLM's builder compares queries with one, which is set with context parallelism only."""
    engine = Engine(device, drafts=1)
    common = engine.common({"a": 2, "b": 2}, 2, 4)
    metadata = engine.builder.build_for_cudagraph_capture(common)
    assert metadata.plan is not None and metadata.plan.num_tokens == 4
    assert engine.builder.reorder_batch_threshold is None
    with pytest.raises(TypeError):  # what the real one does
        stand_ins.MLACommonMetadataBuilder.build_for_cudagraph_capture(engine.builder, common)


def test_decode_steps_of_a_size_share_a_plan(device: str) -> None:
    engine = Engine(device, drafts=1)
    engine.step({"a": 20, "b": 9})
    steps = [{"a": 1, "b": 1}, {"b": 1, "a": 1}, {"a": 1}, {"a": 2, "b": 2}, {"b": 2}]
    plans = []
    for wanted in steps:
        width = next(iter(wanted.values()))
        engine.step(wanted, requests=2, tokens=2 * width)
        assert engine.builder.latest is not None
        plans.append(engine.builder.latest.plan)
    assert plans[0] is plans[1] is plans[2] and plans[3] is plans[4] is not plans[0]
    latest = engine.builder.build(0, engine.common({"a": 1, "b": 2}, 2, 3))
    assert latest.plan not in plans  # requests that differ are planned one by one


def test_attention_and_selection_are_breaks_of_a_graph(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever vLLM made of its own op. A replay repeats the arguments of the capture."""
    monkeypatch.setattr(stand_ins.ENVS, "VLLM_USE_BREAKABLE_CUDAGRAPH", True)
    engine = SparseEngine(device)
    hidden, low = torch.randn(80, 48, device=device), torch.randn(80, 24, device=device)
    q, rows = engine.inputs(80)
    out = torch.zeros(80, H * V, device=device)
    metadata = engine.builder.build(0, engine.common({"a": 70}, 1, 70))
    engine.forward(metadata, hidden, low, q, rows, out, captured=True)
    assert stand_ins.BREAKS == ["_select", "run"]
    engine.check_last(*(tensor[:70] for tensor in (hidden, low, q, rows, out)))
    assert not out[70:].any()


def test_batch_invariance_is_passed_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs as envs

    from openmla.integrations.vllm.backend import OpenMLABackend
    from openmla.integrations.vllm.indexer import IndexBackend

    assert OpenMLABackend.supports_batch_invariance() and IndexBackend.supports_batch_invariance()
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    engine = Engine(device)
    for wanted in STEPS:
        engine.step(wanted)
        assert engine.builder.latest is not None and engine.builder.latest.plan is not None
        plan = engine.builder.latest.plan
        assert plan.batch_invariant
        assert plan.group("expanded") is None  # whatever its chunks, the same bits


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_batch_invariant_prompts_have_the_same_bits_in_any_chunks(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cached prefix or another token budget would cut them."""
    import vllm.envs as envs

    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    found = []
    for chunks in ((70,), (40, 30), (1, 64, 5), (69, 1)):
        engine = SparseEngine(device) if kind == "sparse" else Engine(device)
        torch.manual_seed(1)
        hidden, low = torch.randn(70, 48, device=device), torch.randn(70, 24, device=device)
        q, rows = engine.inputs(70)
        out, at = torch.zeros(70, H * V, device=device), 0
        for n in chunks:
            metadata = engine.builder.build(0, engine.common({"a": n}, 1, n))
            mine = slice(at, at + n)
            if isinstance(engine, SparseEngine):
                engine.forward(metadata, hidden[mine], low[mine], q[mine], rows[mine], out[mine])
            else:
                engine.attend(metadata, q[mine], rows[mine], out[mine])
            at += n
            engine.rows["a"] = rows[:at]
        found.append(out)
    for other in found[1:]:
        # on a CPU torch's products by the indexer's weights differ in the last bit with the tokens
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-6)
    if kind == "dense":
        assert all(torch.equal(other, found[0]) for other in found[1:])


def test_outputs_are_quantized_where_vllm_gives_a_scale(device: str) -> None:
    """By the op that ends the step, into vLLM's buffer."""
    for engine in (Engine(device), SparseEngine(device)):
        for wanted in ({"a": 40}, {"a": 1}):
            n = wanted["a"]
            metadata = engine.builder.build(0, engine.common(wanted, 1, n))
            q, rows = engine.inputs(n)
            plain = torch.zeros(n, H * V, device=device)
            fp8 = torch.zeros(n, H * V, device=device, dtype=torch.float8_e4m3fn)
            scale = torch.tensor([0.02], device=device)
            if isinstance(engine, SparseEngine):
                given = torch.randn(n, 48, device=device), torch.randn(n, 24, device=device)
                engine.forward(metadata, *given, q, rows, plain)
            else:
                engine.attend(metadata, q, rows, plain)
            engine.attend(metadata, q, rows, fp8, output_scale=scale)
            assert metadata.quantized_plan is not None
            assert metadata.quantized_plan.output == "fp8"
            torch.testing.assert_close(
                fp8.float() * scale, plain, rtol=0.07, atol=0.07 * float(plain.abs().max())
            )
            engine.rows["a"] = torch.cat([engine.rows.get("a", rows[:0]), rows])


def test_vllm_profiles_what_a_step_takes(device: str) -> None:
    """Rows of expanded keys and values that its layer allocates in the profiling run."""
    for engine in (Engine(device), SparseEngine(device)):
        layer = engine.layers[0]
        layer.impl.process_weights_after_loading(torch.float32)
        row = H * (P + V) * 4
        profiled = (layer._chunked_prefill_workspace_size or 0) * row
        chunk = 8 * 128  # context rows at a time: eight of the longest
        assert profiled >= chunk * (row + 4 * (engine.C + R)) + 128 * H * 8
        if layer.use_sparse:
            assert profiled >= 256 << 20  # of scores


def test_kernels_are_compiled_once_per_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr(openmla, "warmup", lambda *args, **given: warmed.append(given))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    engine = Engine("cpu", warm=True)
    engine.builder.device = SimpleNamespace(type="cuda")
    for _ in range(2):
        engine.step({"a": 3})
    assert len(warmed) == 1 and warmed[0]["max_requests"] == 8 and warmed[0]["max_tokens"] == 128
    assert any("compiled its attention kernels" in line for line in stand_ins.INFOS)
    for layer in engine.layers:  # vLLM's real cache, after the one it measured graphs with
        layer.kv_cache = layer.kv_cache.clone()
    engine.step({"a": 1})
    assert len(warmed) == 2


@pytest.mark.parametrize("asked", [{}, {"openmla": {"fp8_per_tensor": True}}])
def test_fp8_of_a_sparse_model_is_packed(asked: dict[str, Any]) -> None:
    from openmla.integrations.vllm import models

    config = stand_ins.config(cache_dtype="fp8", additional_config=asked)
    stand_ins.CONFIG[0] = config
    models.DeepseekV32ForCausalLM(vllm_config=config)
    assert config.cache_config.cache_dtype == ("fp8" if asked else "fp8_ds_mla")
    assert len(stand_ins.INFOS) == (0 if asked else 1)


def test_vllm_takes_openmla_for_prefill_too() -> None:
    """Or it looks for one of its own, and has none for float32; with context parallelism its own
    runs."""
    from openmla.integrations.vllm.prefill import OpenMLAPrefill

    engine = Engine("cpu")
    chosen = engine.config.attention_config.mla_prefill_backend
    assert chosen is stand_ins.MLAPrefillBackendEnum.CUSTOM
    assert chosen.get_path().endswith("prefill.OpenMLAPrefill")
    assert torch.float32 in OpenMLAPrefill.supported_dtypes
    assert OpenMLAPrefill().supports_quant_output(stand_ins.FP8_OUTPUT)
    assert not OpenMLAPrefill().supports_quant_output("nvfp4")
    with pytest.raises(NotImplementedError, match="attends in OpenMLAImpl"):
        OpenMLAPrefill().run_prefill_new_tokens()
    ranks = Engine("cpu", ranks=2)
    assert ranks.config.attention_config.mla_prefill_backend is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is recorded elsewhere")
def test_a_graph_of_a_sparse_model() -> None:
    engine = SparseEngine("cuda")
    metadata = engine.builder.build(0, engine.common({"a": 70}, 1, 70))
    hidden, low = torch.randn(70, 48, device="cuda"), torch.randn(70, 24, device="cuda")
    q, rows = engine.inputs(70)
    out = torch.zeros(70, H * V, device="cuda")
    engine.forward(metadata, hidden, low, q, rows, out)
    engine.check_last(hidden, low, q, rows, out)
    common = engine.common({}, 2, 2)
    metadata = engine.builder.build_for_cudagraph_capture(common)
    step = (hidden[:2], low[:2], q[:2], rows[:2], out[:2])
    engine.forward(metadata, *step)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.forward(metadata, *step)
    for _ in range(3):
        engine.builder.build(0, engine.common({"a": 1}, 2, 2))
        for tensor in step[:4]:
            tensor.copy_(torch.randn(tensor.shape))
        graph.replay()
        engine.check_last(*(tensor[:1] for tensor in step))
        assert not out[1].any()
