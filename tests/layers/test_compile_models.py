"""Models inside torch.compile: layers one after another in one graph, and what that graph keeps."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from openmla import (
    PRESETS,
    LayerCache,
    MLAAttention,
    MLAAttentionV4,
    Plan,
    make_plan,
)
from tests.layers import v4
from tests.layers.compiling import Compiled
from tests.layers.serving import Server, relative_error, sequence

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
CLOSE = 1e-5
DENSE, SPARSE, SHARED, V4 = "tiny-v3", "tiny-v3.2", "tiny-glm-5.2", "v4"
FAMILIES = (DENSE, SPARSE, SHARED, V4)
WRITES = {"cache_write", "compress_kv", "index_write", "latent_write"}
READS = {"cache_gather", "index_logits", "mqa_paged", "mqa_sparse"}
STEPS = [[("a", 40), ("b", 50), ("c", 3)]]
STEPS += [[("a", 1), ("b", 1)]] * 4 + [[("c", 1), ("b", 1), ("a", 1)]] * 4


class Model(nn.Module):
    """Attention layers on a residual stream; a selection goes from layer to layer."""

    def __init__(self, layers: Sequence[MLAAttention | MLAAttentionV4]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)
        self.config = layers[0].config

    def forward(
        self, hidden: Tensor, positions: Tensor, caches: list[LayerCache], plans: list[Plan]
    ) -> Tensor:
        selection = None
        for layer, cache, plan in zip(self.layers, caches, plans, strict=True):
            if isinstance(layer, MLAAttentionV4):
                out = layer(hidden, positions, cache, plan)
            else:
                out, selection = layer.attend(hidden, positions, cache, plan, selection)
            hidden = hidden + out
        return hidden


def make_model(family: str) -> Model:
    torch.manual_seed(0)
    if family == V4:
        return Model([v4.make_layer(v4.tiny_config(), ratio) for ratio in v4.RATIOS])
    config = PRESETS[family]
    if family == SHARED:
        assert config.indexer is not None
        shared = replace(config.indexer, shared=(False, True))
        config = replace(config, num_layers=2, indexer=shared)
    return Model([MLAAttention(config, layer=number) for number in range(2)])


class Run:
    """A model and what it keeps between steps."""

    def __init__(
        self, model: Model, device: str, dtype: torch.dtype = torch.float32, **formats: Any
    ) -> None:
        self.model, self.dtype = model.to(device, dtype), dtype
        hidden = {name: sequence(100, seed).to(dtype) for seed, name in enumerate("abc")}
        self.is_v4 = isinstance(model.layers[0], MLAAttentionV4)
        make: Any = v4.Server if self.is_v4 else Server
        servers = [make(layer, hidden, device=device, **formats) for layer in model.layers]
        self.server, self.caches = servers[0], [server.cache for server in servers]
        self.outputs: list[Tensor] = []

    def step(self, forward: Any, wanted: list[tuple[str, int]], *, compiled: bool) -> None:
        server, config = self.server, self.model.config
        starts = {name: server.pool.seq_len(name) for name, _ in wanted}
        batch = server.batch(wanted)
        plans: list[Plan] = []
        for cache in self.caches:
            if plans and not self.is_v4:
                plans.append(plans[0])
                continue
            beside = plans[0] if plans else None
            plans.append(
                make_plan(batch, config, cache, dtype=self.dtype, beside=beside, compiled=compiled)
            )
        spans = [(name, starts[name], starts[name] + n) for name, n in wanted]
        hidden = torch.cat([server.sequences[name][start:stop] for name, start, stop in spans])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        self.outputs.append(forward(hidden, positions.to(hidden.device), self.caches, plans))


def compare(family: str, backend: Any, device: str) -> int:
    """Graphs that the steps took; each gave what it gives eagerly, and left the same rows."""
    model = make_model(family)
    eager, run, compiled = Run(model, device), Run(model, device), Compiled(model, backend)
    for number, step in enumerate(STEPS):
        eager.step(model, step, compiled=False)
        run.step(compiled if number else model, step, compiled=number > 0)
        assert relative_error(run.outputs[-1], eager.outputs[-1]) < CLOSE
    for one, other in zip(run.caches, eager.caches, strict=True):
        for part, wanted in zip(one.parts, other.parts, strict=True):
            both = [each.data.nan_to_num(0.5) for each in (part, wanted)]
            assert relative_error(*both) < CLOSE
    return compiled.graphs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_computes_the_same(family: str) -> None:
    """Blocks are NaN until they are written: a read before its write would show."""
    assert compare(family, "inductor", "cpu") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="of a GPU's kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_computes_the_same_on_a_gpu(family: str) -> None:
    assert compare(family, "inductor", "cuda") == 1


REAL: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"format": "bf16", "block_size": 64},
    "deepseek-v3.2": {"format": "fp8_ds_mla", "index_format": "index_fp8", "block_size": 64},
    V4: {"format": "fp8_dsv4", "index_format": "index_fp8"},
}


def make_real_model(family: str) -> Model:
    """Rows, heads and indexer keys as models have them, in bf16 over packed caches; else small."""
    if family == V4:
        return Model([v4.make_layer(v4.real_config(), ratio) for ratio in v4.RATIOS])
    config = replace(
        PRESETS[family], hidden_size=64, num_layers=2, num_heads=16, q_lora_rank=32,
        max_positions=1024,
    )  # fmt: skip
    if config.indexer is not None:
        config = replace(config, indexer=replace(config.indexer, num_heads=16, topk=32))
    torch.manual_seed(0)
    return Model([MLAAttention(config, layer=number) for number in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("family", REAL)
def test_inductor_is_no_less_exact_than_eager(family: str, device: str) -> None:
    """It rounds elsewhere, so it is compared with what float32 gives; eager steps are too."""
    if device == "cpu" and shutil.which("c++") is None:
        pytest.skip("Inductor needs a C++ compiler on a CPU")
    formats = {**REAL[family], "format": "fp32", "index_format": "index_fp32"}
    exact = Run(make_real_model(family), device, **formats)
    model = make_real_model(family)
    runs = [Run(model, device, torch.bfloat16, **REAL[family]) for _ in range(2)]
    compiled = Compiled(model, "inductor")
    for number, step in enumerate(STEPS):
        exact.step(exact.model, step, compiled=False)
        runs[0].step(model, step, compiled=False)
        runs[1].step(compiled if number else model, step, compiled=number > 0)
    wanted = torch.cat(exact.outputs[1:])
    eager, ours = (relative_error(torch.cat(run.outputs[1:]).float(), wanted) for run in runs)
    assert compiled.graphs == 1
    assert ours < 1.5 * eager < 0.15


def check_reads(graph: fx.GraphModule) -> int:
    """Reads of caches in a graph, all of them of what the graph has written before."""
    reads = 0
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name.removeprefix("openmla::") not in READS:
            continue
        for part, value in zip(schema.arguments, node.args, strict=False):
            if part.name in ("cache", "cache_2") and value is not None:
                reads += 1
                assert written_before(value) & WRITES, node
    return reads


def written_before(node: fx.Node) -> set[str]:
    """The ops that wrote what a node is made of."""
    found, seen, ahead = set(), set(), [node]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        ahead += node.all_input_nodes
        if node.target is torch.ops.higher_order.auto_functionalized_v2:
            op: Any = node.args[0]
            found.add(op.name().removeprefix("openmla::").removesuffix(".default"))
    return found


@pytest.mark.parametrize(
    "family", [DENSE, SPARSE, pytest.param(SHARED, marks=pytest.mark.slow), V4]
)
def test_a_model_is_one_graph(family: str, device: str) -> None:
    """In which every cache that an op reads is the result of a write, not the graph's input: in no
    order that a compiler may choose is it read first."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
    assert compare(family, backend, device) == len(graphs) == 1
    assert check_reads(graphs[0]) == {DENSE: 2, SPARSE: 4, SHARED: 3, V4: 6}[family]
