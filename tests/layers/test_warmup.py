"""warmup(): every kind of step runs and writes nothing; after it nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import (
    PRESETS,
    ConfigError,
    IndexerConfig,
    LayerCache,
    MLAAttention,
    MLAConfig,
    allocate_cache,
    make_plan,
    warmup,
)
from openmla.backends.replay import active
from openmla.layers.sweep import Sweep, run_sweeps, sizes_up_to
from openmla.layers.warm import StepShape, run_step, run_steps, step_sweeps
from openmla.layers.warm_v4 import (
    CompressedStepShape,
    compressed_sweeps,
    empty_layer,
    run_compressed,
    run_compressed_steps,
)
from openmla.plan import Plan
from tests.layers.kernel_keys import Uneven
from tests.layers.v4 import (
    LENGTH,
    RATIOS,
    TOPK,
    Server,
    layer_number,
    make_layer,
    real_config,
    sequence,
    tiny_config,
)
from tests.plan.groups import expanded_of, masked_chunks, num_chosen

TINY = PRESETS["tiny-v3.2"]
assert TINY.indexer is not None
SPARSE = replace(TINY, indexer=replace(TINY.indexer, topk=24))
CONFIGS = [PRESETS["tiny-v3"], SPARSE, PRESETS["tiny-glm"]]


def cache_of(config: MLAConfig, device: str, num_blocks: int = 40) -> LayerCache:
    return allocate_cache(
        config, num_blocks=num_blocks, block_size=4, format="fp32", index_format="index_fp32",
        device=device,
    )  # fmt: skip


def v4_cache(ratio: int, device: str) -> LayerCache:
    config = tiny_config()
    return allocate_cache(
        config, num_blocks=16, block_size=128, format="fp32", index_format="index_fp32",
        layer=layer_number(config, ratio), max_requests=3, max_tokens=20, window_block_size=16,
        device=device,
    )  # fmt: skip


def marked(cache: LayerCache) -> list[torch.Tensor]:
    """Bytes that no step of zeros would write, in every part; a copy of them."""
    for part in cache.parts:
        part.data.view(torch.uint8).fill_(1)
    return [part.data.view(torch.uint8).clone() for part in cache.parts]


@contextmanager
def compilations() -> Iterator[list[Any]]:
    from triton import knobs

    compiled: list[Any] = []
    knobs.compilation.listener = lambda src, **_: compiled.append((src.name, src.attrs))
    try:
        yield compiled
    finally:
        knobs.compilation.listener = None


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_steps_of_every_kind_write_nothing(
    config: MLAConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(config, device)
    kept = marked(cache)
    sizes: dict[str, Any] = {"max_requests": 3, "max_tokens": 20}
    output: str | None = "fp8" if config.indexer is None else "nvfp4"
    space = warmup(config, cache, workspace_tokens=28, dtype=torch.float32, output=output, **sizes)
    plans: list[Plan] = []

    def remember(*args: Any, **kwargs: Any) -> Plan:
        plans.append(make_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr("openmla.layers.warm.make_plan", remember)
    given: dict[str, Any] = {"dtype": torch.float32, "backend": "auto"}
    run_steps(config, cache, space, *sizes.values(), output=output, **given)
    weights = MLAAttention(config, absorbed_format="fp8").to(device).absorbed
    shape = StepShape(2, 1, 9, "absorbed")
    run_step(shape, config, cache, space, torch.float32, "auto", output, weights)
    for part, before in zip(cache.parts, kept, strict=True):
        assert torch.equal(part.data.view(torch.uint8), before)
    routes = {expanded_of(plan).route for plan in plans if plan.group("expanded") is not None}
    assert any(plan.group("absorbed") is not None for plan in plans)
    if config.indexer is None:
        assert routes == {"new", "one-shot", "chunked"}
    else:
        assert any(num_chosen(plan) for plan in plans) and any(map(masked_chunks, plans))


@pytest.mark.parametrize("ratio", RATIOS)
def test_steps_of_v4_write_nothing(
    ratio: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cache = tiny_config(), v4_cache(ratio, device)
    kept = marked(cache)
    space = warmup(config, cache, max_requests=3, max_tokens=20, dtype=torch.float32)
    plans: list[Plan] = []

    def remember(*args: Any, **kwargs: Any) -> Plan:
        plans.append(make_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr("openmla.layers.warm_v4.make_plan", remember)
    with torch.inference_mode():
        run_compressed_steps(config, cache, space, 3, 20, torch.float32, "auto")
    for part, before in zip(cache.parts, kept, strict=True):
        assert torch.equal(part.data.view(torch.uint8), before)
    steps = [plan.shared for plan in plans if plan.shared is not None]
    assert len(steps) == len(plans)
    assert {len(step.positions) for step in steps} >= {1, 16, 20}
    assert {step.state_slots.shape[0] for step in steps} == {1, 3}
    assert all(bool((step.positions < 0).all() & (step.state_slots < 0).all()) for step in steps)
    assert {plan.chooses for plan in plans} == ({True, False} if ratio == 4 else {False})
    tables = {step.block_table.shape[1] for step in steps}
    assert (len(tables) > 1) == (ratio > 0)


def shapes_of(sweeps: Iterable[Sweep]) -> set[Any]:
    return {sweep.step(size) for sweep in sweeps for size in sweep.sizes} - {None}


def test_kinds_of_v4() -> None:
    """Beside what is asked for by number: no more requests than there are states, no longer ones
    than there are blocks."""
    config = tiny_config()
    for ratio in RATIOS:
        shapes = shapes_of(compressed_sweeps(config, v4_cache(ratio, "cpu"), 9, 20))
        assert max(shape.new for shape in shapes) == 20
        assert max(shape.requests for shape in shapes) == (3 if ratio else 9)
        lengths = {shape.length for shape in shapes if (shape.requests, shape.new) == (1, 1)}
        choosing = {1 + 4 * (TOPK + 1)} if ratio == 4 else set()
        assert lengths == {1, 1 + 32, 1024, *choosing}
        rings = {shape.ring for shape in shapes if shape[:3] == (1, 1, 33)}
        assert rings == {2, 5}


class Asking:
    """Stands for steps of a size: each asks for the kernel of its range, begun by a threshold."""

    def __init__(self, *thresholds: int) -> None:
        self.thresholds, self.sizes = thresholds, list[int]()

    def run(self, size: int) -> None:
        self.sizes.append(size)
        observer = active()
        assert observer is not None and observer.kernels is not None
        observer.kernels.add(sum(size >= each for each in self.thresholds))


@pytest.mark.parametrize("thresholds", [(), (17,), (2, 3, 100), (1000,), (65, 90, 700)])
def test_a_sweep_finds_every_kernel_in_few_steps(thresholds: tuple[int, ...]) -> None:
    asking = Asking(*thresholds)
    run_sweeps([Sweep(int, sizes_up_to(1000))], asking.run, torch.device("cpu"), None)
    found = {sum(size >= each for each in thresholds) for size in asking.sizes}
    assert found == set(range(len(thresholds) + 1))
    assert asking.sizes[0] == 1000 and len(asking.sizes) == len({*asking.sizes})
    assert len(asking.sizes) <= 4 + 8 * len(thresholds)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"query_dtype": "int8"}, "warmup: query_dtype must be None, 'fp8' or 'fp8_static', got"),
        ({"query_dtype": "fp8"}, "warmup: query_dtype must be None for a cache of fp32, got"),
        ({"prefill_dtype": "bf16"}, "warmup: prefill_dtype must be 'fp8' or None, got 'bf16'."),
    ],
)
def test_what_plans_would_refuse(asked: dict[str, Any], message: str, device: str) -> None:
    with pytest.raises(ConfigError) as error:
        warmup(CONFIGS[0], cache_of(CONFIGS[0], device), max_requests=1, max_tokens=1, **asked)
    assert message in str(error.value)


def test_a_kind_is_a_batch_of_equals() -> None:
    cache, config = cache_of(CONFIGS[0], "cpu"), CONFIGS[0]
    space = warmup(config, cache, max_requests=2, max_tokens=8, dtype=torch.float32)
    shapes = shapes_of(step_sweeps(config, cache, space, 2, 8))
    assert {StepShape(1, 1, 1, "absorbed"), StepShape(2, 1, 160, "absorbed")} <= shapes
    assert {StepShape(1, 8, 8, "expanded"), StepShape(1, 8, 160, "expanded")} <= shapes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is nothing to compile")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_nothing_is_compiled_after_it_on_cuda(config: MLAConfig) -> None:
    """Nor is memory asked of the driver: requests of other numbers and lengths, steps of any."""
    cache = cache_of(config, "cuda", num_blocks=200)
    space = warmup(
        config, cache, max_requests=9, max_tokens=40, workspace_tokens=64, dtype=torch.float32
    )
    segments = torch.cuda.memory_stats()["segment.all.allocated"]
    with compilations() as compiled:
        for B, new, length in ((1, 1, 7), (3, 1, 100), (9, 1, 333), (7, 2, 90), (1, 33, 61)):
            for form in ("absorbed", "expanded"):
                shape = StepShape(B, new, length, form)
                run_step(shape, config, cache, space, torch.float32, "auto")
    assert not compiled
    assert torch.cuda.memory_stats()["segment.all.allocated"] == segments


def widened(config: MLAConfig) -> MLAConfig:
    wide = PRESETS["deepseek-v3.2"]
    indexer = config.indexer
    if indexer is not None and wide.indexer is not None:
        indexer = replace(indexer, head_dim=wide.indexer.head_dim)
    return replace(
        config, num_heads=6, kv_lora_rank=wide.kv_lora_rank, v_head_dim=wide.v_head_dim,
        qk_nope_head_dim=wide.qk_nope_head_dim, qk_rope_head_dim=wide.qk_rope_head_dim,
        indexer=indexer,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is nothing to compile")
@pytest.mark.parametrize("format", ["fp8", "fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.model_type)
def test_nothing_is_compiled_for_fp8_after_it_on_cuda(config: MLAConfig, format: str) -> None:
    """Queries of decode and prefill in e4m3; heads of no power of two, at real widths."""
    config = widened(config)
    formats: dict[str, Any] = {"format": format, "index_format": "index_fp32"}
    scale: dict[str, Any] = {"kv_scale": 0.5} if format == "fp8" else {}
    cache = allocate_cache(config, num_blocks=200, block_size=16, device="cuda", **formats, **scale)
    asked: dict[str, Any] = {"prefill_dtype": "fp8"}
    if format != "bf16":
        asked["query_dtype"] = "fp8"
    sizes: dict[str, Any] = {"max_requests": 9, "max_tokens": 40, "workspace_tokens": 64}
    space = warmup(config, cache, **sizes, **asked)
    with compilations() as compiled:
        for B, new, length in ((1, 1, 7), (3, 1, 100), (9, 1, 333), (7, 2, 90), (1, 33, 61)):
            for form in ("absorbed", "expanded"):
                shape = StepShape(B, new, length, form)
                run_step(shape, config, cache, space, torch.bfloat16, "auto", **asked)
        mixed: Any = Uneven([1, 17, 2, 20], [1, 300, 66, 20])
        run_step(mixed, config, cache, space, torch.bfloat16, "auto", **asked)
    assert not compiled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is nothing to compile")
def test_nothing_is_compiled_for_eight_bits_after_it_on_cuda() -> None:
    config = CONFIGS[0]
    weights = MLAAttention(config, absorbed_format="fp8").to("cuda").absorbed
    cache = cache_of(config, "cuda", num_blocks=200)
    sizes: dict[str, Any] = {"max_requests": 9, "max_tokens": 40, "workspace_tokens": 64}
    space = warmup(config, cache, **sizes, dtype=torch.float32, absorbed=weights)
    with compilations() as compiled:
        for B, new, length in ((1, 1, 7), (3, 1, 100), (9, 1, 333), (7, 2, 90), (1, 33, 61)):
            for form in ("absorbed", "expanded"):
                shape = StepShape(B, new, length, form)
                run_step(shape, config, cache, space, torch.float32, "auto", None, weights)
    assert not compiled


# requests: how many tokens each brings; three at different lengths, then a fourth and fifth
SERVED: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 1),),
    ((0, 1), (1, 5), (2, 61)),
    ((0, 1), (1, 1), (2, 1)),
    ((0, 2), (1, 2), (2, 2)),
    ((2, 3), (0, 4)),
    ((0, 13), (1, 7), (2, 8)),
    ((3, 150),),
    ((3, 90), (0, 1)),
    ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1)),
    ((4, 255),),
    ((0, 40), (1, 40), (2, 40), (4, 30)),
    ((4, 8), (1, 1)),
)


def serve_after_warmup(ratio: int, device: str, *, real: bool) -> tuple[list[Any], Server]:
    """What is compiled after it: by empty steps of other sizes, then by a layer that serves."""
    config, dtype = tiny_config(), torch.float32
    formats: dict[str, Any] = {"format": "fp32", "index_format": "index_fp32"}
    if real:  # kernels of V4's own rows; more heads than those of few heads take
        config, dtype = real_config(), torch.bfloat16
        assert config.indexer is not None
        indexer = replace(config.indexer, num_heads=64, topk=32)
        config = replace(config, num_heads=64, indexer=indexer)
        formats = {"format": "fp8_dsv4", "index_format": "index_fp8"}
    layer = make_layer(config, ratio).to(dtype)
    hidden = {b: sequence(LENGTH, seed=b).to(dtype) for b in range(5)}
    server = Server(layer, hidden, device=device, dtype=dtype, **formats)
    space = warmup(config, server.cache, max_requests=5, max_tokens=LENGTH, dtype=dtype)
    with compilations() as compiled, torch.inference_mode():
        zeros, cuda = empty_layer(config, server.cache, dtype), device == "cuda"
        segments = torch.cuda.memory_stats()["segment.all.allocated"] if cuda else 0
        for B, new, length in ((1, 1, 7), (3, 1, 700), (5, 1, 333), (5, 2, 90), (1, 33, 61)):
            for columns, ring in ((-(-length // 128), 11), (11, 13)):
                shape = CompressedStepShape(B, new, length, columns, ring)
                run_compressed(shape, zeros, server.cache, space, dtype, "auto")
        if cuda and not real:  # wider rows may lie on either side of what torch takes for small
            assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
        for wanted in SERVED:
            server.step(wanted, workspace=space)
    return compiled, server


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is nothing to compile")
@pytest.mark.parametrize("real", [False, True], ids=["tiny", "real"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_nothing_is_compiled_for_v4_after_it_on_cuda(ratio: int, real: bool) -> None:
    compiled, server = serve_after_warmup(ratio, "cuda", real=real)
    assert not compiled
    assert all(bool(out.isfinite().all()) for out in server.outputs.values())


@pytest.mark.parametrize("own_indexer", [False, True])
def test_an_engines_config_is_warmed(own_indexer: bool, device: str) -> None:
    """From numbers: no rope is made up, and where the engine chooses there are no index rows."""
    indexer = IndexerConfig(16, 16, 8) if own_indexer else None
    config = MLAConfig.from_numbers(
        num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        indexer=indexer,
    )  # fmt: skip
    cache = LayerCache(latent=cache_of(config, device).latent)
    before = marked(cache)
    workspace = warmup(config, cache, max_requests=2, max_tokens=9, dtype=torch.float32)
    run_steps(config, cache, workspace, 2, 9, dtype=torch.float32, backend="auto")
    after = [part.data.view(torch.uint8) for part in cache.parts]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
