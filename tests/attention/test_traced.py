"""The engine's calls under torch.compile, whole graphs: the same answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla import (
    AbsorbedWeights,
    Projected,
    attend_latent,
    attend_partial,
    attend_step,
    make_plan,
    make_selection,
)
from tests.attention.known import DENSE, SPARSE, H, Requests, V

MIXED = ([3, 1, 60, 1], [60, 17, 140, 90])


def compiled(function: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_parts_and_buffers(device: str) -> None:
    requests = Requests(*MIXED, device=device)
    cache, batch = requests.part()
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype)

    def run(projected: Projected, absorbed: AbsorbedWeights, out: Tensor) -> tuple[Tensor, Tensor]:
        part = attend_partial(projected, absorbed, cache, plan)
        attend_step(projected, absorbed, cache, plan, out=out, write=False)
        return part

    out = torch.full((65, H, V), torch.nan, dtype=requests.dtype, device=device)
    part = compiled(run)(requests.projected, requests.absorbed, out)
    requests.close((*part, out), (*requests.truth(), requests.truth()[0]))


def test_chosen_positions(device: str) -> None:
    requests = Requests(*MIXED, SPARSE, device)
    cache, batch = requests.part(written=True, latent_only=True)
    plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype, form="chosen")
    chosen = requests.choices()

    def run(q_latent: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        selection = make_selection(positions, cache, plan)
        return attend_latent(q_latent, cache, plan, selection=selection)

    out, lse = compiled(run)(requests.q_latent, requests.listed(chosen))
    requests.close((requests.out_of_latent(out), lse), requests.truth(chosen))
