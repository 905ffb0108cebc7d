"""Arguments of the wrong class get a sentence, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from openmla import (
    MLAConfig,
    OpenMLAError,
    absorb,
    attend_latent,
    attend_partial,
    attend_step,
    make_plan,
    make_selection,
    plan_buffers,
    warmup,
)
from openmla.attention import IndexInputs, attend_compressed, select_step
from tests.attention.known import DENSE, SPARSE, Requests, latent_bits

NUMBERS: Any = {"num_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
SIZES: Any = {"max_requests": 2, "max_tokens": 4, "max_blocks": 16}


def refused(cache: Any, match: str, call: Callable[[], object]) -> None:
    before = latent_bits(cache)
    with pytest.raises(OpenMLAError, match=f"^{match}"):
        call()
    assert torch.equal(latent_bits(cache), before)


@pytest.mark.parametrize("attend", [attend_step, attend_partial])
def test_steps(attend: Any) -> None:
    requests = Requests([1, 2], [40, 50], SPARSE)
    cache, batch = requests.part()
    plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype, form="chosen")
    projected, absorbed = requests.projected, requests.absorbed
    positions = requests.listed(requests.choices())
    for match, given in (
        ("step: projected must be of type Projected", (tuple(projected), absorbed, cache, plan)),
        ("step: absorbed must be ", (projected, requests.weight, cache, plan)),
        ("step: cache must be of type LayerCache", (projected, absorbed, cache.latent, plan)),
        ("step: plan must be of type Plan", (projected, absorbed, cache, batch)),
    ):
        refused(cache, match, lambda given=given: attend(*given))  # type: ignore[misc]
    given = projected, absorbed, cache, plan
    refused(
        cache,
        "step: selection must be of type Selection, got Tensor",
        lambda: attend(*given, selection=positions),
    )
    selection = make_selection(positions, cache, plan)
    if attend is attend_step:
        for sink in ([0.0] * 4, torch.zeros(4, dtype=torch.int32), torch.zeros(3)):
            refused(
                cache,
                "step: sink must be ",
                lambda sink=sink: attend(*given, selection=selection, sink=sink),  # type: ignore[misc]
            )


def test_what_stands_around_a_step() -> None:
    requests = Requests([1, 2], [40, 50])
    cache, batch = requests.part()
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, form="absorbed")
    q_latent, wrong = requests.q_latent, Requests([1], [40], SPARSE).part()[0]
    of_others, plain = plan_buffers(SPARSE, wrong, **SIZES), {"block_table": torch.zeros(1, 1)}
    calls: dict[str, Callable[[], object]] = {
        "latent: q_latent must be of type Tensor": lambda: attend_latent([], cache, plan),  # type: ignore[arg-type]
        "latent: cache must be ": lambda: attend_latent(q_latent, cache.latent, plan),  # type: ignore[arg-type]
        "latent: plan must be ": lambda: attend_latent(q_latent, cache, None),  # type: ignore[arg-type]
        "selection: plan must be ": lambda: make_selection(q_latent, cache, None),  # type: ignore[arg-type]
        "plan: batch must be ": lambda: make_plan(None, DENSE, cache),  # type: ignore[arg-type]
        "plan: config must be ": lambda: make_plan(batch, None, cache),  # type: ignore[arg-type]
        "plan: compiled must be ": lambda: make_plan(batch, DENSE, cache, compiled=1),  # type: ignore[arg-type]
        "plan: into must be the buffers": lambda: make_plan(batch, DENSE, cache, into=plain),
        "plan: into must be plan_buffers[(][)] of this config and cache": lambda: make_plan(
            batch, DENSE, cache, into=of_others
        ),
        "plan_buffers: max_requests must be a positive": lambda: plan_buffers(
            DENSE, cache, **{**SIZES, "max_requests": "2"}
        ),
        "plan_buffers: max_tokens must be at least max_requests=2": lambda: plan_buffers(
            DENSE, cache, **{**SIZES, "max_tokens": 1}
        ),
        "warmup: dtype must be one of ": lambda: warmup(
            DENSE, cache, max_requests=1, max_tokens=1, dtype=torch.int32
        ),
        "warmup: cache must be of type LayerCache": lambda: warmup(
            DENSE,
            None,  # type: ignore[arg-type]
            max_requests=1,
            max_tokens=1,
        ),
        "select: plan must be of type Plan, got NoneType": lambda: select_step(
            IndexInputs(q_latent, q_latent, None),
            cache,
            None,  # type: ignore[arg-type]
        ),
        "step: plan must be of type Plan, got NoneType": lambda: attend_compressed(
            q_latent,
            q_latent,
            cache,
            None,  # type: ignore[arg-type]
            sink=q_latent,
        ),
        "warmup: backend 'tritton' is not known.*'triton'": lambda: warmup(
            DENSE, cache, max_requests=1, max_tokens=1, backend="tritton"
        ),
        "warmup: op 'mqa_page' is not known.*'mqa_paged'": lambda: warmup(
            DENSE, cache, max_requests=1, max_tokens=1, backend={"mqa_page": "triton"}
        ),
        "weights: kv_b_proj's weight must be ": lambda: absorb([], DENSE),  # type: ignore[arg-type]
        "config: indexer must be of type IndexerConfig": lambda: MLAConfig.from_numbers(
            **NUMBERS,
            v_head_dim=24,
            indexer=(4, 32, 8),  # type: ignore[arg-type]
        ),
    }
    for match, call in calls.items():
        refused(cache, match, call)
