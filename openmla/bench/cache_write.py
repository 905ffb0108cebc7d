"""Write rows into a paged cache, for every format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.cache.format import get_format
from openmla.ops import cache_write
from openmla.ops.cache_write import cost
from openmla.testing import LATENT_FORMATS, Inputs

BS, C, R = 64, 512, 64


def check(inputs: Inputs, backend: str) -> float:
    """Bytes are either exact or wrong."""
    mine, theirs = inputs.clone(), inputs.clone()
    mine.run(cache_write, backend=backend)
    theirs.run(cache_write, backend="reference")
    same = torch.equal(mine["cache"].view(torch.uint8), theirs["cache"].view(torch.uint8))
    return 0.0 if same else float("inf")


def job(T: int, format: str, device: str) -> Job:
    slots = torch.randperm(2 * T, device=device)[:T]
    rows = torch.randn(T, C + R, device=device).bfloat16()
    layout = get_format(format)
    data = torch.zeros(-(-2 * T // BS), BS, layout.width(C + R), device=device)
    data = data.to(layout.dtype)
    tensors = {
        "cache": data,
        "kv_c": rows[:, :C],
        "k_pe": rows[:, C:],
        "slot_mapping": slots,
        "kv_scale": torch.tensor(0.1, device=device),
    }
    needed = cost(T, D=C + R, format=format, itemsize=2)
    return Job(Inputs(tensors, {"format": format}, ()), needed, check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        cache_write,
        {
            f"{size}-{format}": partial(job, T, format)
            for size, T in (("tiny-64", 64), ("v3-decode-128", 128), ("v3-prefill-8k", 8192))
            for format in LATENT_FORMATS
        },
    )


if __name__ == "__main__":
    run()
