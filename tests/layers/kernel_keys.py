"""Which kernels warmup() asks Triton for, and which random steps ask for that it did not.

    python -m tests.layers.kernel_keys dense         or sparse, v4
    python -m tests.layers.kernel_keys dense-fp8     or another of MIXED

What Triton would compile a launch under (types, alignments, constants, options) is kept instead of
launching it. So no GPU is needed, and a change to a kernel or to how one is chosen shows here.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

import openmla.backends as backends
from openmla import PRESETS, Batch, MLAConfig, allocate_cache
from openmla.cache import PagedCache
from openmla.layers import warm, warm_v4
from openmla.plan import reserve
from tests.layers.v4 import layer_number, real_config

UNITS = 132  # an H200's
STEPS = 100
MOST, REQUESTS = 600, 16


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


def pretend(portable: bool) -> None:
    """Triton's kernels on the CPU, as many multiprocessors as a GPU has, products of nothing."""
    backends.RUNS_ON.clear()
    for op, names in list(backends.BACKENDS.items()):
        backends.BACKENDS[op] = tuple(name for name in names if name != "sdpa")  # first on a CPU
        for backend in {"gluon", "triton"} & {*names}:
            import_module(f"openmla.backends.{backend}.{op}")
    chip = (8, 9) if portable else (9, 0)
    there = {"multiprocessors": lambda _: UNITS, "capability": lambda _: chip}
    for name, module in list(sys.modules.items()):
        for known, answer in there.items():
            if name.startswith("openmla.") and callable(getattr(module, known, None)):
                setattr(module, known, answer)
    functional: Any = torch.nn.functional
    whole: Any = torch
    functional.linear = lambda x, w, b=None: x.new_zeros((*x.shape[:-1], w.shape[0]))
    whole.bmm = lambda a, b, **_: a.new_zeros((a.shape[0], a.shape[1], b.shape[2]))
    whole.mm = lambda a, b, out: out


class Uneven(NamedTuple):
    """Requests as they come: prompts, continued ones and decoding side by side."""

    query_lens: list[int]
    seq_lens: list[int]
    form: str = "auto"

    def batch(self, latent: PagedCache, ranks: int = 1) -> Batch:
        B, columns = len(self.seq_lens), -(-max(self.seq_lens) // (latent.block_size * ranks))
        table = (torch.arange(columns, dtype=torch.int32) % latent.num_blocks).expand(B, -1)
        slots = torch.full((sum(self.query_lens),), -1, dtype=torch.int64)
        return Batch(self.query_lens, self.seq_lens, table.contiguous(), slots)


def steps_after_warmup(
    config: MLAConfig, formats: dict[str, Any], next_shape: Callable[[random.Random], Any],
    **asked: Any,
) -> Iterator[object]:  # fmt: skip
    """Nothing first, when all is warm, then steps."""
    dtype = torch.bfloat16
    cache = allocate_cache(config, num_blocks=2400, block_size=64, **formats)
    sizes: dict[str, Any] = {"max_requests": REQUESTS, "max_tokens": MOST}
    space = reserve(
        config, cache, **sizes, workspace_tokens=4096, dtype=dtype,
        prefill_dtype=asked.get("prefill_dtype"),
    )  # fmt: skip
    warm.run_steps(config, cache, space, REQUESTS, MOST, dtype=dtype, backend="auto", **asked)
    yield None
    chance = random.Random(0)
    while True:
        one = next_shape(chance)
        warm.run_step(one, config, cache, space, dtype, "auto", **asked)
        yield one


def drafts(chance: random.Random) -> warm.StepShape:
    """Up to 10 drafted tokens, long and short contexts."""
    B, new = chance.choice([1, 2, chance.randint(1, REQUESTS)]), chance.randint(1, 10)
    before = chance.choice([0, 64, chance.randint(0, 3000), chance.randint(0, 150_000)])
    return warm.StepShape(B, new, min(new + before, 2400 * 64), "auto")


def prompts(chance: random.Random) -> warm.StepShape:
    """Any number of tokens, too."""
    B = chance.choice([1, 2, chance.randint(1, REQUESTS), REQUESTS])
    new = chance.choice([1, 2, 4, chance.randint(1, MOST // B)])
    before = chance.choice([0, 64, chance.randint(0, 3000), chance.randint(0, 150_000)])
    return warm.StepShape(B, new, min(new + before, 2400 * 64), "auto")


def mixed(chance: random.Random) -> Uneven:
    """Requests that differ, in any order: prompts, continued ones and decoding."""
    B = chance.randint(1, REQUESTS)
    news = [chance.choice([1, 1, 2, chance.randint(1, MOST // B)]) for _ in range(B)]
    before = [chance.choice([0, 0, 64, chance.randint(0, 9000)]) for _ in range(B)]
    lens = [n + context for n, context in zip(news, before, strict=True)]
    return Uneven(news, lens, chance.choice(["auto", "auto", "expanded"]))


def dense() -> Iterator[object]:
    """V3 on 8 ranks, 16 heads."""
    config = replace(PRESETS["deepseek-v3"], num_heads=16)
    return steps_after_warmup(config, {"format": "bf16"}, drafts)


def sparse() -> Iterator[object]:
    """V3.2 with more heads than 16."""
    config = replace(PRESETS["deepseek-v3.2"], num_heads=24)
    formats = {"format": "fp8_ds_mla", "index_format": "index_fp8"}
    return steps_after_warmup(config, formats, prompts)


# Mixed batches: model, heads, format, what is asked for.
MIXED = {
    "dense-fp8": ("deepseek-v3", 16, "fp8", ("query_dtype", "prefill_dtype")),
    "dense-many": ("deepseek-v3", 64, "fp8", ("query_dtype", "prefill_dtype")),
    "dense-odd": ("deepseek-v3", 5, "fp8", ("query_dtype", "prefill_dtype")),
    "dense-packed": ("deepseek-v3", 16, "fp8_ds_mla", ("query_dtype", "prefill_dtype")),
    "dense-bf16": ("deepseek-v3", 16, "bf16", ("prefill_dtype",)),
    "portable-bf16": ("deepseek-v3", 20, "bf16", ()),
    "portable-fp8": ("deepseek-v3.2", 20, "fp8", ("query_dtype", "prefill_dtype")),
    "sparse-fp8": ("deepseek-v3.2", 16, "fp8", ("query_dtype", "prefill_dtype")),
    "sparse-packed": ("deepseek-v3.2", 64, "fp8_ds_mla", ("query_dtype", "prefill_dtype")),
}


def mixed_steps(name: str) -> Iterator[object]:
    preset, heads, format, asked = MIXED[name]
    config = replace(PRESETS[preset], num_heads=heads)
    formats: dict[str, Any] = {"format": format}
    if format == "fp8":
        formats["kv_scale"] = 0.5
    if config.indexer is not None:
        formats["index_format"] = "index_fp8"
    return steps_after_warmup(config, formats, mixed, **dict.fromkeys(asked, "fp8"))


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


PLAIN = {"dense": dense, "sparse": sparse, "v4": v4}


def check(model: str) -> int:
    keys = keep_keys()
    pretend(model.startswith("portable"))
    missed = 0
    with torch.inference_mode():
        steps = mixed_steps(model) if model in MIXED else PLAIN[model]()
        next(steps)
        known = set(keys)
        assert known, "warmup asked for no kernel: is Triton refused?"
        for _ in range(STEPS):
            one = next(steps)
            for name, specialization, options in keys - known:
                print(f"{name} is new in {one}: {specialization} {options}")
                missed += 1
            known |= keys
    print(f"{model}: {len(known)} kernels after warmup, {missed} new in {STEPS} random steps")
    return int(missed > 0)


def check_in_a_child(model: str) -> int:
    """Nothing that one model leaves behind is seen by the next; imports are shared."""
    child = os.fork()
    if not child:
        failed = 1
        try:
            failed = check(model)
        finally:
            sys.stdout.flush()
            os._exit(failed)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(max(map(check_in_a_child, sys.argv[1:])))
