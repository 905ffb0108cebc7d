"""The corpus: case ids, how each case runs, and what it is compared with."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.corpus import dense, layers, ranks, sparse, v4
from tests.corpus.common import Run, Summary, one_way, summarize
from tests.parallel.processes import Processes

RECORDED = Path(__file__).parent / "recorded.json"
RECORDED_ON_GPU = Path(__file__).parent / "recorded_h200.json"

ALONE: dict[str, Run] = {**dense.CASES, **sparse.CASES, **v4.CASES, **layers.CASES}
OVER_RANKS: list[str] = list(ranks.CASES)
PICKED = (  # how names of the cases end that also run on a GPU
    *("bf16-auto", "bf16-absorbed", "buffers-bf16", "planner-two-bf16", "-packed", "packed-auto"),
    *("-fp8-auto", "mixed-output-fp8", "chunked-output-fp8_128", "mixed-queries-fp8"),
    *("queries-fp8-packed", "chunked-prefill-fp8-fp8", "bf16-batch-invariant", "partial-bf16"),
    *("past-bf16", "decode-bf16", "several-bf16", "chunked-bf16", "short-bf16", "prompts-bf16"),
    *("beside-bf16", "fp8_dsv4", "two-layers", "expanded-batch-invariant"),
)


def on_gpu(name: str) -> Run:
    """The case with its caches and inputs on a GPU, where Triton and Gluon kernels run it."""
    case = ALONE[name]
    assert isinstance(case, partial)
    return partial(case.func, replace(case.args[0], device="cuda"))


ON_GPU: dict[str, Run] = {
    name: on_gpu(name) for name in (*dense.CASES, *sparse.CASES, *v4.CASES) if name.endswith(PICKED)
}


def run_alone(name: str) -> Summary:
    with one_way():
        return summarize(ALONE[name](name))


def run_on_gpu(name: str) -> Summary:
    with one_way():
        return summarize(ON_GPU[name](name))


def run_over_ranks(name: str, processes: Processes) -> Summary:
    return ranks.join(processes.run(ranks.run_here, name))


def load(path: Path = RECORDED) -> dict[str, Any]:
    """What record.py wrote: "probe", and "cases" by their ids."""
    recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded
