"""warmup(): every kind of step runs and writes nothing; after it nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import PRESETS, LayerCache, MLAConfig, allocate_cache, make_plan, warmup
from openmla.layers.warm import Kind, kinds_of_steps, run_step
from openmla.plan import Plan

TINY = PRESETS["tiny-v3.2"]
assert TINY.indexer is not None
SPARSE = replace(TINY, indexer=replace(TINY.indexer, topk=24))
CONFIGS = [PRESETS["tiny-v3"], SPARSE, PRESETS["tiny-glm"]]


def cache_of(config: MLAConfig, device: str, num_blocks: int = 40) -> LayerCache:
    return allocate_cache(
        config, num_blocks=num_blocks, block_size=4, format="fp32", index_format="index_fp32",
        device=device,
    )  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_steps_of_every_kind_write_nothing(
    config: MLAConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(config, device)
    kept = [part.data.clone() for part in cache.parts]
    sizes: dict[str, Any] = {"max_requests": 3, "max_tokens": 20}
    space = warmup(config, cache, workspace_tokens=28, dtype=torch.float32, **sizes)
    plans: list[Plan] = []

    def remember(*args: Any, **kwargs: Any) -> Plan:
        plans.append(make_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr("openmla.layers.warm.make_plan", remember)
    for kind in kinds_of_steps(config, cache, space, *sizes.values()):
        run_step(kind, config, cache, space, torch.float32, "auto")
    for part, before in zip(cache.parts, kept, strict=True):
        assert torch.equal(part.data.view(torch.uint8), before.view(torch.uint8))
    runs = {plan.decode.split_starts.shape[1] for plan in plans if plan.decode is not None}
    routes = {plan.prefill.route for plan in plans if plan.prefill is not None}
    assert runs
    if config.indexer is None:
        assert routes == {"new", "one-shot", "chunked"}
    else:
        sparse = [plan.sparse for plan in plans if plan.sparse is not None]
        assert any(step.num_absorbed for step in sparse) and any(step.masked for step in sparse)


def test_a_kind_is_a_batch_of_equals() -> None:
    cache, config = cache_of(CONFIGS[0], "cpu"), CONFIGS[0]
    space = warmup(config, cache, max_requests=2, max_tokens=8, dtype=torch.float32)
    kinds = list(kinds_of_steps(config, cache, space, 2, 8))
    assert Kind(1, 1, 1, "absorbed") in kinds and Kind(2, 1, 160, "absorbed") in kinds
    assert Kind(1, 8, 8, "expanded") in kinds and Kind(1, 8, 160, "expanded") in kinds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is nothing to compile")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_nothing_is_compiled_after_it_on_cuda(config: MLAConfig) -> None:
    """Nor is memory asked of the driver: requests of other numbers and lengths, steps of any."""
    from triton import knobs

    cache = cache_of(config, "cuda", num_blocks=200)
    space = warmup(
        config, cache, max_requests=9, max_tokens=40, workspace_tokens=64, dtype=torch.float32
    )
    compiled: list[Any] = []
    knobs.compilation.listener = lambda src, **_: compiled.append((src.name, src.attrs))
    segments = torch.cuda.memory_stats()["segment.all.allocated"]
    try:
        for B, new, length in ((1, 1, 7), (3, 1, 100), (9, 1, 333), (7, 2, 90), (1, 33, 61)):
            for form in ("absorbed", "expanded"):
                kind = Kind(B, new, length, form)
                run_step(kind, config, cache, space, torch.float32, "auto")
    finally:
        knobs.compilation.listener = None
    assert not compiled
    assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
