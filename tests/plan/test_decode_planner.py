"""DecodePlanner: plans over an engine's own tensors attend as make_plan()'s of the same step do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from openmla import Batch, ConfigError, DecodePlanner, ShapeError, make_plan
from openmla.plan import groups
from tests.plan.captured import tensors_of
from tests.plan.groups import absorbed_of

BLOCKS, BLOCK_SIZE, COLUMNS, REQUESTS, WIDTH = 40, 4, 8, 5, 3
H, P, R, C, V = 3, 8, 4, 16, 8


class Engine:
    """A cache with random rows, and tensors at fixed addresses that each step writes to."""

    def __init__(self, device: str, topk: int | None, **options: Any) -> None:
        torch.manual_seed(0)
        indexer = None if topk is None else openmla.IndexerConfig(2, 8, topk)
        self.config = openmla.MLAConfig.from_numbers(
            num_heads=H, kv_lora_rank=C, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V,
            indexer=indexer,
        )  # fmt: skip
        self.cache = openmla.allocate_cache(
            self.config, num_blocks=BLOCKS, block_size=BLOCK_SIZE, format="fp32",
            index_format="index_fp32", device=device,
        )  # fmt: skip
        for part in self.cache.parts:
            part.data.copy_(torch.randn(part.data.shape))
        self.device, self.options = device, options
        integer: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.block_table = torch.zeros(REQUESTS, COLUMNS, **integer)
        self.seq_lens = torch.zeros(REQUESTS, **integer)
        self.query_start_loc = torch.zeros(REQUESTS + 1, **integer)
        self.slot_mapping = torch.full((REQUESTS * WIDTH,), -1, device=device)
        self.planner = DecodePlanner(
            self.config, self.cache, max_tokens=REQUESTS * WIDTH, **options
        )

    def update(self, lens: list[int], width: int, requests: int) -> Batch:
        """Write a step of these requests, padded to so many; returns it as make_plan() takes it."""
        self.block_table.zero_()
        self.seq_lens.zero_()
        self.slot_mapping.fill_(-1)
        starts = [min(b, len(lens)) * width for b in range(requests + 1)]
        self.query_start_loc[: requests + 1] = torch.tensor(starts, dtype=torch.int32)
        for b, length in enumerate(lens):
            self.block_table[b] = torch.randperm(BLOCKS)[:COLUMNS].int()
            self.seq_lens[b] = length
        return Batch(
            query_lens=[width] * len(lens),
            seq_lens=lens,
            block_table=self.block_table[: len(lens)].clone(),
            slot_mapping=self.slot_mapping[: len(lens) * width].clone(),
        )

    def plan(self, width: int, requests: int) -> openmla.Plan:
        return self.planner.plan(
            block_table=self.block_table[:requests],
            seq_lens=self.seq_lens[:requests],
            query_start_loc=self.query_start_loc[: requests + 1],
            slot_mapping=self.slot_mapping[: requests * width],
        )

    def attend(self, plan: openmla.Plan, q: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        T = plan.num_tokens
        selection = None
        if self.config.indexer is not None:
            inputs = openmla.IndexInputs(index[:T], index[:T, :, 0].abs(), None)
            selection = openmla.select_step(inputs, self.cache, plan)
        return openmla.attend_latent(q[:T], self.cache, plan, selection=selection)


@pytest.mark.parametrize("topk", [None, 5, 100])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_step_attends_as_one_of_make_plan(device: str, topk: int | None, width: int) -> None:
    """Full, padded, and with fewer keys than K; the plan of a size is the same object each time."""
    engine, plans = Engine(device, topk), dict[int, openmla.Plan]()
    steps = [([30, 9, 4, 17, 32], 5), ([3, 31], 5), ([32, 3, 7], 3), ([5, 6, 7, 8, 9], 5)]
    for lens, requests in steps:
        batch = engine.update(lens, width, requests)
        plan = engine.plan(width, requests)
        assert plans.setdefault(requests, plan) is plan
        q = torch.randn(requests * width, H, C + R, device=device)
        index = torch.randn(requests * width, 2, 8, device=device)
        out, lse = engine.attend(plan, q, index)
        form = "absorbed" if topk is None else "chosen"
        usual = make_plan(batch, engine.config, engine.cache, form=form)
        expected, expected_lse = engine.attend(usual, q, index)
        n = len(lens) * width
        torch.testing.assert_close(out[:n], expected)
        torch.testing.assert_close(lse[:n], expected_lse)
        assert not out[n:].any() and (lse[n:] == -torch.inf).all()


@pytest.mark.parametrize("topk", [None, 5])
def test_a_plan_reads_nothing_that_a_later_step_replaces(device: str, topk: int | None) -> None:
    """A captured graph replays with the engine's new values once plan() was called."""
    engine = Engine(device, topk)
    engine.update([9, 20], 1, 3)
    plan = engine.plan(1, 3)
    addresses = [tensor.data_ptr() for tensor in tensors_of((plan.groups, plan.select))]
    assert len(addresses) == (3 if topk is None else 9)
    batch = engine.update([31, 3, 8], 1, 3)
    engine.plan(2, 2)  # another size in between
    assert engine.plan(1, 3) is plan
    assert [t.data_ptr() for t in tensors_of((plan.groups, plan.select))] == addresses
    q, index = torch.randn(3, H, C + R, device=device), torch.randn(3, 2, 8, device=device)
    form = "absorbed" if topk is None else "chosen"
    usual = make_plan(batch, engine.config, engine.cache, form=form)
    torch.testing.assert_close(engine.attend(plan, q, index), engine.attend(usual, q, index))


def test_rows_in_several_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scores and queries of all rows do not fit at once."""
    monkeypatch.setattr(groups, "LOGITS_BYTES", 4 * 4 * COLUMNS * BLOCK_SIZE)
    monkeypatch.setattr(groups, "LATENT_BYTES", 5 * 4 * H * (3 * C + R))
    engine = Engine(device, 5)
    for lens in ([30, 9, 4, 17, 32], [8, 6]):
        batch = engine.update(lens, 3, 5)
        plan = engine.plan(3, 5)
        assert plan.select is not None
        assert len(plan.select.chunks) == 4 and len(absorbed_of(plan, "chosen").cuts) == 4
        q, index = torch.randn(15, H, C + R, device=device), torch.randn(15, 2, 8, device=device)
        out, lse = engine.attend(plan, q, index)
        usual = make_plan(batch, engine.config, engine.cache, form="chosen")
        n = 3 * len(lens)
        torch.testing.assert_close((out[:n], lse[:n]), engine.attend(usual, q, index))


@pytest.mark.parametrize("topk", [None, 5])
def test_a_batch_invariant_plan_gives_make_plans_bits(device: str, topk: int | None) -> None:
    engine = Engine(device, topk, batch_invariant=True)
    batch = engine.update([30, 9], 2, 4)
    q, index = torch.randn(8, H, C + R, device=device), torch.randn(8, 2, 8, device=device)
    out, lse = engine.attend(engine.plan(2, 4), q, index)
    form = "absorbed" if topk is None else "chosen"
    usual = make_plan(batch, engine.config, engine.cache, form=form, batch_invariant=True)
    expected = engine.attend(usual, q, index)
    assert torch.equal(out[:4], expected[0]) and torch.equal(lse[:4], expected[1])


def test_steps_are_planned_without_looking_at_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a tensor's values nor one object per request."""
    engine = Engine("cpu", None)
    engine.update([9, 20, 5], 1, 3)
    first = engine.plan(1, 3)

    def forbidden(*args: Any, **given: Any) -> Any:
        raise AssertionError("a later step of the same size makes nothing")

    monkeypatch.setattr(DecodePlanner, "_make", forbidden)
    monkeypatch.setattr(Tensor, "tolist", forbidden)
    assert engine.plan(1, 3) is first


@pytest.mark.parametrize("topk", [None, 5])
def test_the_first_rows_of_larger_tensors(device: str, topk: int | None) -> None:
    """A step of `num_requests` is planned as over slices of the tensors."""
    engine = Engine(device, topk)
    for lens, width, requests in (([9, 20], 1, 3), ([31, 8], 3, 2)):
        engine.update(lens, width, requests)
        whole = engine.planner.plan(
            block_table=engine.block_table,
            seq_lens=engine.seq_lens,
            query_start_loc=engine.query_start_loc,
            slot_mapping=engine.slot_mapping,
            num_requests=requests,
            num_tokens=requests * width,
        )
        q = torch.randn(requests * width, H, C + R, device=device)
        index = torch.randn(requests * width, 2, 8, device=device)
        sliced = engine.attend(engine.plan(width, requests), q, index)
        torch.testing.assert_close(engine.attend(whole, q, index), sliced)


def test_the_oldest_plans_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an engine that makes its tensors anew at every step."""
    monkeypatch.setattr("openmla.plan.decode.MOST_PLANS", 2)
    engine = Engine("cpu", 5)
    kept = []
    for _ in range(4):
        engine.block_table = engine.block_table.clone()
        engine.update([9, 20], 1, 2)
        kept.append(engine.plan(1, 2))
    assert len(engine.planner._plans) == 2


def test_update_names_a_tensor_that_does_not_fit() -> None:
    engine = Engine("cpu", None)
    engine.update([9], 1, 1)
    for name, wrong in (
        ("seq_lens", engine.seq_lens[:1].long()),
        ("block_table", engine.block_table[0]),
        ("query_start_loc", engine.query_start_loc[2:3]),
        ("slot_mapping", engine.slot_mapping[:1].int()),
    ):
        given: dict[str, Any] = {
            "block_table": engine.block_table[:1],
            "seq_lens": engine.seq_lens[:1],
            "query_start_loc": engine.query_start_loc[:2],
            "slot_mapping": engine.slot_mapping[:1],
        } | {name: wrong}
        with pytest.raises(ShapeError, match=f"decode_planner: {name} must be"):
            engine.planner.plan(**given)
    with pytest.raises(ShapeError, match="same number of tokens"):
        engine.planner.plan(
            block_table=engine.block_table[:2], seq_lens=engine.seq_lens[:2],
            query_start_loc=engine.query_start_loc[:3], slot_mapping=engine.slot_mapping[:3],
        )  # fmt: skip
    with pytest.raises(ShapeError, match=r"block_table must be \[9, 8\]"):
        engine.planner.plan(
            block_table=engine.block_table, seq_lens=engine.seq_lens.repeat(2),
            query_start_loc=engine.query_start_loc, slot_mapping=engine.slot_mapping,
            num_requests=9, num_tokens=9,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="max_tokens must be a positive integer, got 0"):
        DecodePlanner(engine.config, engine.cache, max_tokens=0)
    v4 = openmla.PRESETS["tiny-v4"]
    with pytest.raises(
        ConfigError, match=r"DeepSeek V4 models are not supported. Call make_plan\(into="
    ):
        DecodePlanner(v4, engine.cache, max_tokens=4)
    long = openmla.PRESETS["tiny-minicpm3"]
    with pytest.raises(ConfigError, match="longrope models are not supported"):
        DecodePlanner(long, engine.cache, max_tokens=4)
