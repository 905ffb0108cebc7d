"""Merge two partial attentions: the rows of a prefill chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.ops import merge_states
from openmla.ops.merge_states import cost
from openmla.testing import Inputs, budget_used


def merged(inputs: Inputs, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    fresh = inputs.clone()
    fresh.run(merge_states, backend=backend)
    return fresh["out"], fresh["lse"]


def check(inputs: Inputs, backend: str) -> float:
    actual = merged(inputs, backend)
    return max(
        budget_used(actual, merged(inputs.double(), "reference"), merged(inputs, "reference"))
    )


def job(T: int, H: int, V: int, device: str) -> Job:
    tensors = {}
    for side in ("", "other_"):
        tensors[f"{side}out"] = torch.randn(T, H, V, device=device).bfloat16()
        tensors[f"{side}lse"] = torch.randn(T, H, device=device)
    return Job(Inputs(tensors, {}, tuple(tensors)), cost(T, H=H, V=V, itemsize=2), check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        merge_states,
        {
            "tiny-64x4": partial(job, 64, 4, 32),
            "v3-tp8-prefill-8k": partial(job, 8192, 16, 128),
            "v3-prefill-8k": partial(job, 8192, 128, 128),
        },
    )


if __name__ == "__main__":
    run()
