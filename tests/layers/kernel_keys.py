"""Which kernels warmup() asks Triton for, and which random steps ask for that it did not.

    python -m tests.layers.kernel_keys dense         or sparse, v4, sparse-fp8

What Triton would compile a launch under (types, alignments, constants, options) is kept instead of
launching it. So no GPU is needed, and a change to a kernel or to how one is chosen shows here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

import openmla.backends as backends
from openmla import PRESETS, allocate_cache
from openmla.layers import warm, warm_v4
from openmla.plan import reserve
from tests.layers.v4 import layer_number, real_config

UNITS = 132  # an H200's
STEPS = 100


def keep_keys() -> set[tuple[str, str, str]]:
    """The keys of all launches from now on."""
    jit = import_module("triton.runtime.jit")
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    backend = import_module("triton.backends.nvidia.compiler").CUDABackend(target)
    keys: set[tuple[str, str, str]] = set()
    binders: dict[Any, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if self not in binders:
            made = jit.create_function_from_signature(self.signature, self.params, backend)
            binders[self] = made
        _, specialization, options = binders[self](*args, **{**kwargs, "debug": False})
        keys.add((self.fn.__name__, str(specialization), str(options)))

    jit.JITFunction.run = run
    prepare = import_module("openmla.backends.triton._prepare")
    vars(prepare)["is_watched"] = lambda kernel: True  # so that every launch comes here
    return keys


def pretend() -> None:
    """Triton's kernels on the CPU, as many multiprocessors as a GPU has, products of nothing."""
    backends.RUNS_ON.clear()
    for op, names in list(backends.BACKENDS.items()):
        backends.BACKENDS[op] = tuple(name for name in names if name != "sdpa")  # first on a CPU
        for backend in {"gluon", "triton"} & {*names}:
            import_module(f"openmla.backends.{backend}.{op}")
    there = {"multiprocessors": lambda _: UNITS, "capability": lambda _: (9, 0)}
    for name, module in list(sys.modules.items()):
        for known, answer in there.items():
            if name.startswith("openmla.") and callable(getattr(module, known, None)):
                setattr(module, known, answer)
    functional: Any = torch.nn.functional
    whole: Any = torch
    functional.linear = lambda x, w, b=None: x.new_zeros((*x.shape[:-1], w.shape[0]))
    whole.bmm = lambda a, b, **_: a.new_zeros((a.shape[0], a.shape[1], b.shape[2]))


def dense() -> Iterator[object]:
    """V3 on 8 ranks, 16 heads; up to 10 drafted tokens, long and short contexts."""
    config = replace(PRESETS["deepseek-v3"], num_heads=16)
    most, requests, dtype = 600, 16, torch.bfloat16
    cache = allocate_cache(config, num_blocks=2400, block_size=64, format="bf16")
    space = reserve(
        config, cache, max_requests=requests, max_tokens=most, workspace_tokens=4096, dtype=dtype
    )
    for shape in warm.step_shapes(config, cache, space, requests, most):
        warm.run_step(shape, config, cache, space, dtype, "auto")
    yield None
    chance = random.Random(0)
    while True:
        B, new = chance.choice([1, 2, chance.randint(1, requests)]), chance.randint(1, 10)
        before = chance.choice([0, 64, chance.randint(0, 3000), chance.randint(0, 150_000)])
        one = warm.StepShape(B, new, min(new + before, 2400 * 64), "auto")
        warm.run_step(one, config, cache, space, dtype, "auto")
        yield one


def sparse(query_dtype: str | None = None) -> Iterator[object]:
    """V3.2 with more heads than 16; nothing first, when all is warm, then steps."""
    config = replace(PRESETS["deepseek-v3.2"], num_heads=24)
    most, requests, dtype = 600, 16, torch.bfloat16
    cache = allocate_cache(
        config, num_blocks=2400, block_size=64, format="fp8_ds_mla", index_format="index_fp8"
    )
    space = reserve(
        config, cache, max_requests=requests, max_tokens=most, workspace_tokens=4096, dtype=dtype
    )
    for shape in warm.step_shapes(config, cache, space, requests, most):
        warm.run_step(shape, config, cache, space, dtype, "auto", query_dtype=query_dtype)
    yield None
    chance = random.Random(0)
    while True:
        B = chance.choice([1, 2, chance.randint(1, requests), requests])
        new = chance.choice([1, 2, 4, chance.randint(1, most // B)])
        before = chance.choice([0, 64, chance.randint(0, 3000), chance.randint(0, 150_000)])
        one = warm.StepShape(B, new, min(new + before, 2400 * 64), "auto")
        warm.run_step(one, config, cache, space, dtype, "auto", query_dtype=query_dtype)
        yield one


def v4() -> Iterator[object]:
    """V4 at its real width, a layer with an indexer."""
    config, dtype, most, requests = real_config(), torch.bfloat16, 300, 40
    assert config.indexer is not None and config.compressor is not None
    config = replace(
        config, num_heads=24, max_positions=16384,
        indexer=replace(config.indexer, num_heads=64, topk=512),
    )  # fmt: skip
    cache = allocate_cache(
        config, num_blocks=1024, block_size=256, format="fp8_dsv4", index_format="index_fp8",
        layer=layer_number(config, 4), max_requests=requests, max_tokens=8 * most,
        window_block_size=64,
    )  # fmt: skip
    assert cache.window is not None and cache.compressed is not None
    space = reserve(config, cache, max_requests=requests, max_tokens=most, dtype=dtype)
    warm_v4.run_compressed_steps(config, cache, space, requests, most, dtype, "auto")
    yield None
    layer, chance = warm_v4.empty_layer(config, cache, dtype), random.Random(0)
    assert config.compressor is not None
    span, per_block = config.compressor.window, cache.compressed.block_size * cache.ratio
    while True:
        B = chance.choice([1, 2, chance.randint(1, requests), requests])
        new = chance.choice([1, 2, 4, chance.randint(1, most // B)])
        length = min(new + chance.choice([0, 10, 200, chance.randint(0, 12_000)]), 12_000)
        columns = -(-length // per_block) + chance.choice([0, 0, chance.randint(0, 50)])
        ring = -(-min(length, new + span - 1) // 64) + chance.choice([0, 0, 1])
        if B * (-(-new // per_block) + 1) > cache.compressed.num_blocks:
            continue
        one = warm_v4.CompressedStepShape(B, new, length, columns, ring)
        warm_v4.run_compressed(one, layer, cache, space, dtype, "auto")
        yield one


def main() -> int:
    keys = keep_keys()
    pretend()
    missed = 0
    with torch.inference_mode():
        models: dict[str, Callable[[], Iterator[object]]]
        models = {"dense": dense, "sparse": sparse, "v4": v4, "sparse-fp8": partial(sparse, "fp8")}
        steps = models[sys.argv[1]]()
        next(steps)
        known = set(keys)
        assert known, "warmup asked for no kernel: is Triton refused?"
        for _ in range(STEPS):
            one = next(steps)
            for name, specialization, options in keys - known:
                print(f"{name} is new in {one}: {specialization} {options}")
                missed += 1
            known |= keys
    print(f"{len(known)} kernels after warmup and {STEPS} random steps, {missed} of them only then")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
