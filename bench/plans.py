"""Host time of a step's Batch and plans, and how many torch operations they take.

    python3 -m bench.plans
    python3 -m bench.plans --device cuda
    python3 -m bench.plans --device meta        on a CPU, as if there were a device to upload to

Microseconds, medians of 200 after a warm-up. `captured` is make_plan(into=), the update of a step
that a graph replays. V4 has one plan per compress ratio, the second and third made with beside= the
first; its rows show each plan, and all three.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openmla import (
    PRESETS,
    Batch,
    CompressedPool,
    LayerCache,
    MLAConfig,
    Plan,
    allocate_cache,
    make_plan,
    plan_buffers,
)
from openmla.bench.harness import describe_machine, time_once

KEYS, DRAFTS, PROMPT = 8192, 4, 2048
WARM, ROUNDS = 30, 200
FORMATS = {"deepseek-v3": "bf16", "deepseek-v3.2": "fp8_ds_mla", "deepseek-v4-flash": "fp8_dsv4"}
RATIOS = (4, 0, 128)  # compress ratios of V4's layers
TARGETS = {("deepseek-v3", 1): 150, ("deepseek-v3", 64): 300}  # us for make_plan; otherwise:
SPARSE_TARGET = 400


class Operations(TorchDispatchMode):
    """Counts the torch operations called inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Step(NamedTuple):
    """Requests to plan for, and new tokens of each."""

    preset: str
    what: str
    query_lens: list[int]

    @property
    def config(self) -> MLAConfig:
        return PRESETS[self.preset]


class Case(NamedTuple):
    """One row of the table: how to make a batch, its plan, and its plan for a graph."""

    step: Step
    layers: str
    batch: Callable[[], Batch]
    plan: Callable[[], object]
    captured: Callable[[], object] | None


def steps() -> Iterator[Step]:
    for preset in FORMATS:
        for B in (1, 64):
            yield Step(preset, "decode", [1] * B)
            yield Step(preset, f"{DRAFTS} drafts", [1 + DRAFTS] * B)
            yield Step(preset, "prompt chunk", [1] * (B - 1) + [PROMPT])


def lengths(B: int) -> list[int]:
    """Distinct lengths of the requests, including this step's tokens."""
    return [KEYS - 7 * b for b in range(B)]


def latent_case(step: Step, device: str) -> Case:
    """One plan for all layers. Contexts share their blocks, which keeps caches small."""
    BS, B = 64, len(step.query_lens)
    M = KEYS // BS
    own = -(-PROMPT // BS) + 1  # a request's own columns
    cache = allocate_cache(
        step.config, num_blocks=M + B * own, block_size=BS, format=FORMATS[step.preset],
        device=device,
    )  # fmt: skip
    table = torch.full((B, M), -1, dtype=torch.int32)
    slots, lens = [], lengths(B)
    for b, (n, S) in enumerate(zip(step.query_lens, lens, strict=True)):
        used = -(-S // BS)
        table[b, : used - own] = torch.arange(used - own)
        table[b, used - own : used] = M + b * own + torch.arange(own)
        span = torch.arange(S - n, S)
        slots.append(table[b, span // BS].long() * BS + span % BS)
    make = partial(Batch, step.query_lens, lens, table, torch.cat(slots))
    batch, into = make(), None
    if len(set(step.query_lens)) == 1 and step.query_lens[0] <= 1 + DRAFTS:
        T = sum(step.query_lens)
        into = plan_buffers(step.config, cache, max_requests=B, max_tokens=T, max_blocks=M)
    captured = partial(make_plan, batch, step.config, cache, into=into) if into else None
    return Case(step, "all layers", make, partial(make_plan, batch, step.config, cache), captured)


def cases(step: Step, device: str) -> Iterator[Case]:
    if step.config.compressor is None:
        yield latent_case(step, device)
    else:
        yield from compressed_cases(step, device)


def compressed_cases(step: Step, device: str) -> Iterator[Case]:
    """One plan per compress ratio."""
    config, B = step.config, len(step.query_lens)
    assert config.compressor is not None
    longest = max(step.query_lens)
    caches = [
        allocate_cache(
            config, num_blocks=B * (KEYS // 256 + 1), block_size=256, format=FORMATS[step.preset],
            layer=config.compressor.ratios.index(ratio), max_requests=B,
            max_tokens=B * (1 + DRAFTS) + PROMPT, device=device,
        )
        for ratio in RATIOS if ratio in config.compressor.ratios
    ]  # fmt: skip
    captures = longest <= 1 + DRAFTS
    sizes = {"max_requests": B, "max_tokens": sum(step.query_lens), "max_blocks": KEYS // 256}
    buffers = buffers_of(config, caches, **sizes) if captures else None
    columns = buffers[caches[0].ratio]["window_table"].shape[1] if buffers else 0
    tables = _tables(caches[0], step, columns)
    make = partial(Batch, step.query_lens, lengths(B), **tables)
    batch = make()
    for number, cache in enumerate(caches):
        others = caches[0] if number else None
        beside = None if others is None else make_plan(batch, config, others)
        layers = f"ratio {cache.ratio}{', beside' if number else ''}"
        plan = partial(make_plan, batch, config, cache, beside=beside)
        yield Case(step, layers, make, plan, None)
    captured = partial(plans_of, batch, config, caches, buffers) if buffers else None
    yield Case(step, "all ratios", make, partial(plans_of, batch, config, caches), captured)


def plans_of(
    batch: Batch, config: MLAConfig, caches: Sequence[LayerCache],
    buffers: dict[int, dict[str, Tensor]] | None = None, **options: Any,
) -> dict[int, Plan]:  # fmt: skip
    """A plan per compress ratio; later ones are made beside the first."""
    made: dict[int, Plan] = {}
    for cache in caches:
        if cache.ratio not in made:
            into = None if buffers is None else buffers[cache.ratio]
            beside = next(iter(made.values()), None)
            made[cache.ratio] = make_plan(batch, config, cache, beside=beside, into=into, **options)
    return made


def buffers_of(
    config: MLAConfig, caches: Sequence[LayerCache], **sizes: int
) -> dict[int, dict[str, Tensor]]:
    """Buffers for plans_of()."""
    made: dict[int, dict[str, Tensor]] = {}
    for cache in caches:
        if cache.ratio not in made:
            beside = next(iter(made.values()), None)
            made[cache.ratio] = plan_buffers(config, cache, beside=beside, **sizes)
    return made


def _tables(cache: LayerCache, step: Step, columns: int) -> dict[str, Any]:
    assert cache.geometry is not None
    pool = CompressedPool(cache.geometry)
    for b, (n, S) in enumerate(zip(step.query_lens, lengths(len(step.query_lens)), strict=True)):
        while pool.seq_len(b) < S - n:
            pool.take({b: min(1024, S - n - pool.seq_len(b))})
    pool.take(dict(enumerate(step.query_lens)))
    return pool.tables(range(len(step.query_lens)), window_columns=columns)._asdict()


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call, without waiting for what it launches."""
    times = [time_once(call, "cpu") for _ in range(WARM + ROUNDS)]
    return statistics.median(times[WARM:]) * 1e6


def operations(call: Callable[[], object]) -> int:
    call()  # fills caches
    with Operations() as counted:
        call()
    return counted.count


def measure(case: Case) -> dict[str, Any]:
    step, B = case.step, len(case.step.query_lens)
    row: dict[str, Any] = {"model": step.preset, "step": step.what, "layers": case.layers, "B": B}
    row["batch_us"] = host_us(case.batch)
    row["plan_us"], row["plan_ops"] = host_us(case.plan), operations(case.plan)
    if case.captured is not None:
        row["captured_us"] = host_us(case.captured)
        row["captured_ops"] = operations(case.captured)
    if step.what == "decode":
        row["target_us"] = TARGETS.get((step.preset, B), SPARSE_TARGET)
    return row


def show(row: dict[str, Any]) -> None:
    took = "".join(f"{row[name]:>10.0f}" for name in ("batch_us", "plan_us", "plan_ops"))
    names = ("captured_us", "captured_ops", "target_us")
    rest = "".join(f"{row[name]:>10.0f}" if name in row else f"{'-':>10}" for name in names)
    what = f"{row['model'].removeprefix('deepseek-')}, {row['step']}, {row['layers']}"
    print(f"{what:<42}{row['B']:>4}{took}{rest}")


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.plans", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of: {', '.join(FORMATS)}; default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.models if name not in FORMATS]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; known: {', '.join(FORMATS)}")
    print(describe_machine("cuda" if options.device.startswith("cuda") else "cpu"))
    names = ("batch us", "plan us", "ops", "captured", "ops", "target")
    print(f"{'case':<42}{'B':>4}" + "".join(f"{name:>10}" for name in names))
    rows = []
    for step in steps():
        if options.models and step.preset not in options.models:
            continue
        for case in cases(step, options.device):
            rows.append(measure(case))
            show(rows[-1])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    run()
