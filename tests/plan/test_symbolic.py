"""make_plan(compiled=True): the same step, its integers carried by tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import PRESETS, Batch, LayerCache, MLAConfig, Plan, allocate_cache, make_plan
from openmla.errors import ConfigError
from openmla.plan import plan_buffers
from openmla.plan.symbolic import FOLLOWING
from tests.plan.groups import absorbed_of, forms_of, num_chosen, routes_of

SPARSE = PRESETS["tiny-v3.2"]  # whose K is 32


def make_batch(query_lens: list[int], seq_lens: list[int], columns: int = 5) -> Batch:
    B = len(query_lens)
    table = torch.arange(B * columns, dtype=torch.int32).view(B, columns)
    spans = [range(S - n, S) for n, S in zip(query_lens, seq_lens, strict=True)]
    slots = [16 * columns * b + position for b, span in enumerate(spans) for position in span]
    return Batch(query_lens, seq_lens, table, torch.tensor(slots, dtype=torch.int64))


def make_cache(config: MLAConfig) -> LayerCache:
    return allocate_cache(config, num_blocks=64, block_size=16)


def fields(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a plan says, however nested."""
    if isinstance(part, tuple) and not isinstance(part, slice):
        for number, each in enumerate(part):
            yield from fields(each, f"{path}[{number}]")
    elif any(isinstance(part, kind) for kind in FOLLOWING):
        for name in part.__dataclass_fields__:
            yield from fields(getattr(part, name), f"{path}.{name}")
    else:
        yield path, part


@pytest.mark.parametrize("config", [PRESETS["tiny-v3"], SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_compiled_plan_says_the_same(config: MLAConfig, form: str) -> None:
    """Where all requests are longer than K, and no integer is left that another length changes."""
    cache, batch = make_cache(config), make_batch([3, 40, 2], [60, 40, 71])
    options: dict[str, Any] = {"form": form, "workspace_tokens": 64, "dtype": torch.float32}
    plain, compiled = (
        dict(fields(make_plan(batch, config, cache, compiled=compiled, **options)))
        for compiled in (False, True)
    )
    assert plain.keys() == compiled.keys() and len(plain) > 20
    for path, value in plain.items():
        if isinstance(value, Tensor):
            assert torch.equal(compiled[path], value), path
            assert compiled[path] is not value and not compiled[path]._is_view()
        elif path == ".options":
            assert compiled[path] == replace(value, compiled=True)
        else:
            assert compiled[path] == value, path
    tensors = [value for value in compiled.values() if isinstance(value, Tensor)]
    assert len({id(tensor) for tensor in tensors}) == len(tensors)


def test_what_no_length_changes_stays_an_integer() -> None:
    """Everything else of a plan that is an integer is fixed by the config or the cache."""
    config, kept = SPARSE, set()
    for form in ("absorbed", "expanded"):
        batch = make_batch([3, 40, 2], [60, 40, 71])
        plan = make_plan(batch, config, make_cache(config), form=form, compiled=True)
        parts: list[Any] = [plan]
        while parts:
            part = parts.pop()
            if isinstance(part, tuple):
                parts += part
            elif any(isinstance(part, kind) for kind in FOLLOWING):
                parts += vars(part).values()
                kept |= {name for name, value in vars(part).items() if type(value) is int}
                assert not any(isinstance(value, slice) for value in vars(part).values())
    fixed = {"num_blocks", "block_size", "run_length", "query_bytes", "ratio", "span", "offered"}
    assert kept == fixed


def test_tokens_choose_however_short_their_context() -> None:
    """Or decoding would be another graph below K than above it."""
    cache = make_cache(SPARSE)
    routes = []
    for seq_lens in ([3, 5], [3, 70], [60, 70]):
        batch = make_batch([1, 1], seq_lens)
        plan = make_plan(batch, SPARSE, cache, dtype=torch.float32, compiled=True)
        assert plan.select is not None and forms_of(plan) == {"chosen"}
        assert num_chosen(plan) == 2 and plan.select.first_keys.numel() == 0
        assert [chunk.num_keys for chunk in plan.select.chunks] == [max(33, *seq_lens)]
        routes.append(routes_of(plan)["chosen"])
    assert routes == [[0, 1]] * 3


def test_prompts_no_longer_than_k_attend_to_all() -> None:
    """A prompt is expanded as without compiled=True: choosing all it has would cost more."""
    batch = make_batch([20, 1], [20, 9])
    plan = make_plan(batch, SPARSE, make_cache(SPARSE), form="expanded", compiled=True)
    assert plan.select is None and plan.group("expanded") is not None


def test_a_table_of_one_column_gets_a_second() -> None:
    config = PRESETS["tiny-v3"]
    batch = make_batch([1, 1], [9, 7], columns=1)
    plan = make_plan(batch, config, make_cache(config), compiled=True)
    assert absorbed_of(plan).reads[0].block_table.tolist() == [[0, 0], [1, 1]]


def test_plans_without_tokens_are_plans() -> None:
    for config in (PRESETS["tiny-v3"], SPARSE):
        for query_lens, seq_lens in (([], []), ([0, 0], [5, 40])):
            batch = make_batch(query_lens, seq_lens)
            plan = make_plan(batch, config, make_cache(config), compiled=True)
            assert isinstance(plan, Plan) and plan.num_tokens == 0


def test_compiled_plans_are_explained_and_shown() -> None:
    cache, batch = make_cache(SPARSE), make_batch([1, 40], [50, 60])
    plain = make_plan(batch, SPARSE, cache, dtype=torch.float32)
    compiled = make_plan(batch, SPARSE, cache, dtype=torch.float32, compiled=True)
    assert compiled.explain() == plain.explain() and repr(compiled) == repr(plain)
    assert plain.select is not None and repr(compiled.select) == repr(plain.select)
    assert plain.groups and repr(compiled.groups) == repr(plain.groups)


def test_buffers_are_not_for_compiled_plans() -> None:
    cache, batch = make_cache(SPARSE), make_batch([1, 1], [50, 60])
    buffers = plan_buffers(SPARSE, cache, max_requests=2, max_tokens=2, max_blocks=8)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    with pytest.raises(ConfigError, match="compiled must be False with into="):
        make_plan(batch, SPARSE, cache, into=buffers, compiled=True)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers.items())


@pytest.mark.parametrize("form", ["auto", "chosen"])
def test_requests_without_tokens_take_no_graph_of_their_own(form: str) -> None:
    """In a sparse model they stand among the others that choose, whose rows stay one slice."""
    cache = make_cache(SPARSE)
    for query_lens in ([1, 1, 1], [1, 0, 1], [0, 0, 1]):
        batch = make_batch(query_lens, [60, 40, 71])
        plan = make_plan(batch, SPARSE, cache, form=form, compiled=True)
        assert forms_of(plan) == {"chosen"} and plan.select is not None
        assert plan.select.rows == plan.groups[0].rows == slice(0, sum(query_lens))


def test_its_tensors_tell_when_they_are_written_to() -> None:
    """As those of any plan that is sent to a GPU do, also where the step runs in inference mode."""
    cache = make_cache(SPARSE)
    with torch.inference_mode():
        batch = make_batch([3, 40, 1], [60, 40, 71], columns=5)
        plan = make_plan(batch, SPARSE, cache, form="absorbed", compiled=True)
    found = [value for _, value in fields(plan) if isinstance(value, Tensor)]
    assert len(found) > 5 and not any(tensor.is_inference() for tensor in found)
