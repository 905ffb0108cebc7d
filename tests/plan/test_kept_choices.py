"""What plans keep from step to step: backends' answers, until someone may answer otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from openmla import PRESETS, LayerCache, PagedCache, Plan, allocate_cache, make_plan
from openmla.backends import Problem
from openmla.backends.reference import mqa_paged, mqa_sparse
from openmla.cache import LayerCache as Cache
from tests.plan import dense, v4
from tests.plan.groups import absorbed_of

CONFIG = PRESETS["tiny-v3"]


class Fussy:
    """An op as the reference has it, up to so many tokens; counts who asks."""

    def __init__(self, run: Any, most: int = 10**6) -> None:
        self.run, self.most, self.asked = run, most, 0

    def why_not(self, problem: Problem) -> str | None:
        self.asked += 1
        return None if problem.tokens <= self.most else "takes few tokens"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    for op, name in tuple(openmla.backends.OTHERS):
        openmla.unregister_backend(op, name)


def make_cache(**changes: Any) -> LayerCache:
    given: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "format": "fp32", **changes}
    return allocate_cache(CONFIG, **given)


def plan(B: int = 2, cache: Cache | None = None, **options: Any) -> Plan:
    batch = dense.make_batch([1] * B, [9] * B)
    return make_plan(batch, CONFIG, make_cache() if cache is None else cache, **options)


def test_a_backend_that_comes_and_goes_is_seen_by_the_next_plan() -> None:
    before = plan().backends
    openmla.register_backend("mqa_paged", "fussy", Fussy(mqa_paged.run))
    assert plan().backends == {**before, "mqa_paged": "fussy"}
    openmla.unregister_backend("mqa_paged", "fussy")
    assert plan().backends == before


def test_v4s_plans_see_it_too() -> None:
    cache = v4.make_cache(0)
    batch = v4.make_batch(cache, [1], [9])
    before = make_plan(batch, v4.CONFIG, cache).backends
    openmla.register_backend("mqa_sparse", "fussy", Fussy(mqa_sparse.run))
    assert make_plan(batch, v4.CONFIG, cache).backends == {**before, "mqa_sparse": "fussy"}
    openmla.unregister_backend("mqa_sparse", "fussy")
    assert make_plan(batch, v4.CONFIG, cache).backends == before


def test_backends_are_asked_once_for_steps_alike() -> None:
    fussy = Fussy(mqa_paged.run)
    openmla.register_backend("mqa_paged", "fussy", fussy)
    plan()
    asked = fussy.asked
    plan()
    assert asked > 0 and fussy.asked == asked


def test_whatever_a_backend_may_look_at_is_asked_again() -> None:
    openmla.register_backend("mqa_paged", "fussy", Fussy(mqa_paged.run, most=2))
    assert plan(2).backends["mqa_paged"] == "fussy"
    assert plan(3).backends["mqa_paged"] != "fussy"
    assert plan(2, batch_invariant=True).problem("mqa_paged").run_length
    assert plan(2, dtype=torch.bfloat16).problem("mqa_paged").dtype == torch.bfloat16
    assert plan(2, make_cache(format="bf16")).problem("mqa_paged").format == "bf16"
    assert plan(2, backend={"mqa_paged": "reference"}).backends["mqa_paged"] == "reference"
    assert plan(2, backend="reference").backend("mqa_paged") == "reference"
    assert plan(2).backend("mqa_paged") == "auto"


def test_a_cache_that_lies_elsewhere_is_another() -> None:
    """Rows that are not aligned as the last plan's were."""
    assert "rows" in plan().problem("mqa_paged").aligned
    whole = torch.zeros(64 * 4 * CONFIG.latent_dim + 1)
    data = whole[1:].view(64, 4, CONFIG.latent_dim)
    odd = Cache(latent=PagedCache(data, "fp32", torch.ones(())))
    assert "rows" not in plan(cache=odd).problem("mqa_paged").aligned


def test_a_change_of_threads_is_seen() -> None:
    config, batch = PRESETS["tiny-v3.2"], dense.make_batch([1], [200])
    cache = allocate_cache(config, num_blocks=64, block_size=4, format="fp32")
    before, threads = make_plan(batch, config, cache), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        after = make_plan(batch, config, cache)
    finally:
        torch.set_num_threads(threads)
    for made, units in ((before, threads), (after, threads + 1)):
        assert made.problem("mqa_sparse").multiprocessors == units


def test_plans_do_not_share_what_can_be_changed() -> None:
    one, other = plan(), plan()
    one.backends["mqa_paged"] = "nobody"
    with pytest.raises(TypeError):
        one.calls["mqa_paged"] = one.calls["cache_write"]  # type: ignore[index]
    assert other.backends["mqa_paged"] == plan().backends["mqa_paged"] != "nobody"


def test_tables_on_the_host_are_looked_at_wherever_they_lie() -> None:
    """A table that is a part of a wider one, and slots out of order in memory."""
    batch = dense.make_batch([1, 1], [9, 20])
    wide = torch.full((2, 9), -1, dtype=torch.int32)
    wide[:, 2:7] = batch.block_table
    assert batch.slot_mapping is not None
    twice: Tensor = batch.slot_mapping.repeat_interleave(2)
    again = openmla.Batch([1, 1], [9, 20], wide[:, 2:7], twice[::2])
    made, wanted = (make_plan(each, CONFIG, make_cache()) for each in (again, batch))
    tables = [absorbed_of(each).reads[0].block_table for each in (made, wanted)]
    assert torch.equal(*tables)
    assert torch.equal(made.slot_mapping, wanted.slot_mapping)
