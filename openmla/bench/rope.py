"""Rotate query heads in place, with both pairings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.ops import rope
from openmla.ops.rope import cost
from openmla.testing import Inputs, out_budget


def rotated(inputs: Inputs, backend: str) -> torch.Tensor:
    fresh = inputs.clone()
    fresh.run(rope, backend=backend)
    return fresh["x"]


def check(inputs: Inputs, backend: str) -> float:
    actual = rotated(inputs, backend)
    return out_budget(actual, rotated(inputs.double(), "reference"), rotated(inputs, "reference"))


def job(T: int, H: int, pairing: str, device: str) -> Job:
    R = 64
    angles = torch.outer(torch.arange(4096.0), 10000.0 ** (-torch.arange(0, R, 2) / R))
    tensors = {
        "x": torch.randn(T, H, 192, device=device).bfloat16()[:, :, 128:],
        "positions": torch.randint(0, 4096, (T,), device=device),
        "table": torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
    }
    scalars = {"pairing": pairing, "inverse": False}
    return Job(Inputs(tensors, scalars, ("x",)), cost(T, H=H, R=R, itemsize=2), check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        rope,
        {
            f"{size}-{pairing}": partial(job, T, H, pairing)
            for size, T, H in (
                ("tiny-64x4", 64, 4),
                ("v3-decode-64", 64, 128),
                ("v3-prefill-8k", 8192, 128),
            )
            for pairing in ("pairs", "halves")
        },
    )


if __name__ == "__main__":
    run()
