"""slice_buffers(): smaller sets of plan buffers in the memory of the largest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import ConfigError, make_plan, plan_buffers, slice_buffers
from openmla.plan import groups
from openmla.plan.rows import pick
from tests.plan import v4
from tests.plan.captured import KINDS, make_step, tensors_of

SIZES = ((1, 1), (1, 2), (2, 4), (3, 5), (4, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("requests", "tokens"), SIZES)
def test_slices_are_the_buffers_of_a_smaller_graph(
    kind: str | int, requests: int, tokens: int
) -> None:
    """In shape as plan_buffers() makes them, at the addresses of the whole."""
    _, config, cache, whole = make_step(kind, [1], [5])
    part = slice_buffers(whole, max_requests=requests, max_tokens=tokens)
    sizes: Any = {"max_requests": requests, "max_tokens": tokens, "max_blocks": 6}
    own = plan_buffers(config, cache, **sizes)
    assert part.keys() == own.keys()
    for name, tensor in part.items():
        same = tensor.shape == own[name].shape
        assert same or name == "window_table"  # as wide as the largest graph's rings
        assert tensor.data_ptr() == whole[name].data_ptr() and tensor.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_plans_over_slices_are_as_over_buffers_of_their_own(kind: str | int) -> None:
    """Whatever graphs of other sizes left in the memory; and they touch no more than their own."""
    full, config, cache, whole = make_step(kind, [2, 2, 2, 2], [23, 8, 12, 16])
    batch, _, _, _ = make_step(kind, [1, 2], [9, 20])
    make_plan(full, config, cache, into=whole)
    before = {name: tensor.clone() for name, tensor in whole.items()}
    part = slice_buffers(whole, max_requests=3, max_tokens=6)
    plan = make_plan(batch, config, cache, into=part)
    own = {name: tensor.clone() for name, tensor in part.items()}
    for name, tensor in own.items():
        if name not in ("row_starts", "first_keys", "ratio"):
            tensor.fill_(-7)
    alone = make_plan(batch, config, cache, into=own)
    pairs = list(zip(tensors_of(plan), tensors_of(alone), strict=True))
    assert pairs and all(torch.equal(one, other) for one, other in pairs)
    assert plan.num_tokens == 6 and plan.calls == alone.calls
    for name, tensor in whole.items():
        rows = part[name].shape[0] if tensor.dim() else 0
        assert not tensor.dim() or torch.equal(tensor[rows:], before[name][rows:])


def test_v4s_kinds_share_slices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one kind filled is not copied onto itself for the next."""
    sizes: Any = {"max_requests": 4, "max_tokens": 8, "max_blocks": 6}
    caches = {ratio: v4.make_cache(ratio) for ratio in (0, 4, 128)}
    whole: dict[int, dict[str, Tensor]] = {}
    for ratio, cache in caches.items():
        whole[ratio] = plan_buffers(v4.CONFIG, cache, **sizes, beside=whole.get(0))
    parts = {r: slice_buffers(each, max_requests=2, max_tokens=4) for r, each in whole.items()}
    columns = parts[0]["window_table"].shape[1]
    batch = v4.make_batch(caches[0], [1, 2], [9, 130], window_columns=columns)
    first = make_plan(batch, v4.CONFIG, caches[0], into=parts[0])
    copied: list[str] = []
    names = {tensor.data_ptr(): name for name, tensor in parts[4].items()}
    whole_copy = Tensor.copy_

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append(names.get(self.data_ptr(), ""))
        return whole_copy(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "copy_", counted)
    plan = make_plan(batch, v4.CONFIG, caches[4], into=parts[4], beside=first)
    assert plan.shared is not None and first.shared is not None
    assert plan.shared.positions.data_ptr() == first.shared.positions.data_ptr()
    assert {"row_lens", "topk_lens"} <= set(copied)
    assert not {"positions", "block_table", "window_table", "state_slots"} & set(copied)


def test_chunks_of_scores_are_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows cannot be scored at once, a smaller graph uses the first chunks."""
    _, config, cache, _ = make_step("tiny-v3.2", [1], [5])
    assert cache.index is not None
    three_rows = 3 * (24 * 4 + groups.query_bytes(config, cache.index))
    monkeypatch.setattr(groups, "LOGITS_BYTES", three_rows)
    batch, _, _, whole = make_step("tiny-v3.2", [1, 2], [9, 20])
    part = slice_buffers(whole, max_requests=2, max_tokens=4)
    plan = make_plan(batch, config, cache, into=part)
    assert plan.select is not None
    assert [chunk.rows.stop for chunk in plan.select.chunks] == [3, 4]
    assert [loc.tolist() for loc in plan.select.start_locs] == [[0, 1, 3], [0, 0, 0]]
    assert plan.select.start_locs[1].data_ptr() == whole["score_start_locs.1"].data_ptr()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((5, 8), "max_requests must be in 1..4, the size of these buffers, got 5."),
        ((0, 8), "max_requests must be in 1..4, the size of these buffers, got 0."),
        ((True, 8), "max_requests must be in 1..4, the size of these buffers, got True."),
        ((2.0, 8), "max_requests must be in 1..4, the size of these buffers, got 2.0."),
        ((4, 9), "max_tokens must be in 1..8, the size of these buffers, got 9."),
        ((4, 3), "max_tokens must be at least max_requests=4, got 3."),
    ],
)
def test_bad_sizes(sizes: tuple[Any, Any], message: str) -> None:
    *_, whole = make_step("tiny-v3", [1], [5])
    with pytest.raises(ConfigError) as error:
        slice_buffers(whole, max_requests=sizes[0], max_tokens=sizes[1])
    assert str(error.value) == f"slice_buffers: {message}"
    wrong: Any
    for wrong in (None, {}, [whole]):
        with pytest.raises(ConfigError, match=r"buffers must be .* plan_buffers\(\), got"):
            slice_buffers(wrong, max_requests=1, max_tokens=1)


def test_a_step_too_large_for_its_slice_is_refused() -> None:
    batch, config, cache, whole = make_step("tiny-v3", [1, 2], [9, 20])
    before = {name: tensor.clone() for name, tensor in whole.items()}
    for requests, tokens, said in (
        (1, 8, "the number of requests"),
        (2, 2, "the number of tokens"),
    ):
        part = slice_buffers(whole, max_requests=requests, max_tokens=tokens)
        with pytest.raises(ConfigError, match=f"plan: {said}"):
            make_plan(batch, config, cache, into=part)
    assert all(torch.equal(before[name], whole[name]) for name in whole)


@pytest.mark.parametrize("columns", [8, 7])
def test_rows_of_neighbours_are_not_copied(device: str, columns: int) -> None:
    """On a GPU only where they are aligned like the whole: kernels are compiled for that."""
    table = torch.arange(6 * columns, dtype=torch.int32, device=device).view(6, columns)
    for requests in ([1, 2, 3], [4, 5], [5], [0, 1, 2, 3, 4, 5], [1, 3], []):
        picked = pick(table, requests)
        assert torch.equal(picked, table[torch.tensor(requests, dtype=torch.int64, device=device)])
        if device == "cuda":
            assert picked.data_ptr() % 16 == 0
    shared = pick(table, [2, 3]).untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
    assert shared == (device == "cpu" or columns == 8)
