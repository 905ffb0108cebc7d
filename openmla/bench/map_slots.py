"""Map positions to slots: one rank and eight, columns kept in place or moved to the front."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.ops import map_slots
from openmla.ops.map_slots import cost
from openmla.testing import Inputs, start_loc

BS = 64

# requests, tokens of each, K, keys of each, ranks
SHAPES = {
    "tiny-decode-b4-k64": (4, 1, 64, 1000, 1),
    "tiny-cp2-decode-b4-k64": (4, 1, 64, 1000, 2),
    "v32-decode-b64-s64k": (64, 1, 2048, 65536, 1),
    "v32-cp8-decode-b64-s64k": (64, 1, 2048, 65536, 8),
    "v32-verify2-b32-s64k": (32, 2, 2048, 65536, 1),
    "v32-prefill-8k": (1, 8192, 2048, 8192, 1),
}


def check(inputs: Inputs, backend: str) -> float:
    """Integers are either exact or wrong."""
    mine = inputs.run(map_slots, backend=backend)
    theirs = inputs.run(map_slots, backend="reference")
    same = all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    return 0.0 if same else float("inf")


def job(B: int, n: int, K: int, S: int, cp_size: int, device: str) -> Job:
    generator = torch.Generator(device).manual_seed(0)
    M = -(-S // (BS * cp_size))
    order = torch.randperm(B * M, generator=generator, device=device)
    picked = torch.randint(-1, S, (B * n, K), generator=generator, device=device)
    tensors = {
        "positions": picked.int(),
        "block_table": order.int().view(B, M),
        "query_start_loc": start_loc((n,) * B, device),
    }
    scalars = {
        "BS": BS,
        "num_blocks": B * M,
        "cp_size": cp_size,
        "cp_rank": cp_size - 1,
        "compact": cp_size > 1,
    }
    return Job(Inputs(tensors, scalars, ()), cost(B * n, K=K), check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(arguments, map_slots, {name: partial(job, *shape) for name, shape in SHAPES.items()})


if __name__ == "__main__":
    run()
