"""mqa_paged, sdpa: rows by page, by view and by slot, in parts that pages do not divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from openmla.ops import mqa_paged
from openmla.testing import Inputs, PagedCase
from tests.ops.contract import check_attention

V3_ROWS: dict[str, Any] = {"C": 512, "R": 64, "H": 2}
CASES = [
    PagedCase("pages-across-parts", (1, 2), (2200, 530), BS=48),
    PagedCase("pages-across-reads", (1,), (4500,), BS=700, H=1),
    PagedCase("pages-of-more-than-a-read", (2, 1), (9000, 8700), BS=8500, H=1),
    PagedCase("parts-hidden-from-some", (300, 2), (700, 1025), H=2),
    PagedCase("one-past-a-part", (1, 1, 1), (512, 513, 1025)),
    PagedCase("merged-twice", (1,), (33000,), H=1, C=8, R=8, BS=64),
    PagedCase("fp8_ds_mla", (1, 2), (700, 33), format="fp8_ds_mla", **V3_ROWS),
    PagedCase("fp8-parts", (2,), (1100,), format="fp8", kv_scale=0.3),
    # scales behind the values of a block: pages look like rows in order at BS=72 only
    PagedCase("fp8_dsv4", (1, 2), (300, 33), format="fp8_dsv4", C=512, R=0, H=2, BS=72),
]


@pytest.fixture
def six_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_every_kind_of_page(case: PagedCase, contiguous: bool) -> None:
    """Pages with padding between them, and pages that follow one another."""
    inputs = PagedCase(**{**vars(case), "contiguous": contiguous}).make()
    check_attention(mqa_paged, inputs, "sdpa")


def test_more_parts_at_once_with_more_threads(six_threads: None) -> None:
    check_attention(mqa_paged, PagedCase("threads", (2,), (3500,), H=2).make(), "sdpa")


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "fp8"])
def test_pages_in_order_are_read_in_place(format: str) -> None:
    """Blocks of which some follow one another and some do not, in caches of one layer of several
    (pages apart) and of one alone."""
    case = PagedCase("order", (1,), (2300,), BS=16, H=3, format=format, contiguous=True)
    shuffled = case.make()
    table, cache = shuffled["block_table"], shuffled["cache"]
    used = table[0, :144].long()
    blocks = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:144]
    blocks[20:110] = torch.arange(200, 290)
    answers = []
    for layers in (1, 3):
        pages = cache.new_zeros((290, layers, *cache.shape[1:]))[:, layers - 1]
        pages.view(torch.uint8)[blocks] = cache.view(torch.uint8)[used]
        columns = torch.full_like(table, -1)
        columns[0, :144] = blocks
        tensors = {**shuffled.tensors, "cache": pages, "block_table": columns}
        answers.append(Inputs(tensors, shuffled.scalars, shuffled.widen))
    expected = shuffled.run(mqa_paged, backend="sdpa")
    for inputs in answers:
        check_attention(mqa_paged, inputs, "sdpa")
        for a, b in zip(inputs.run(mqa_paged, backend="sdpa"), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("format", ["bf16", "fp32"])
def test_a_request_alone_and_among_others(format: str) -> None:
    """The buffers that requests share hold nothing over from one to the next."""
    case = PagedCase("several", (1, 1, 2, 1), (1500, 3, 2600, 700), H=4, format=format)
    together = case.make()
    out, lse = together.run(mqa_paged, backend="sdpa")
    bounds = together["query_start_loc"].tolist()
    for b in range(4):
        rows = slice(bounds[b], bounds[b + 1])
        alone = {
            **together.tensors,
            "q_latent": together["q_latent"][rows],
            "block_table": together["block_table"][b : b + 1],
            "seq_lens": together["seq_lens"][b : b + 1],
            "query_start_loc": together["query_start_loc"][b : b + 2] - bounds[b],
        }
        one = Inputs(alone, together.scalars, together.widen).run(mqa_paged, backend="sdpa")
        assert torch.equal(one[0], out[rows]) and torch.equal(one[1], lse[rows])


def test_nan_in_a_part_stays_with_its_request() -> None:
    inputs = PagedCase("nan", (1, 1), (1300, 700), H=2, contiguous=True).make()
    out, lse = inputs.run(mqa_paged, backend="sdpa")
    inputs["cache"][int(inputs["block_table"][0, 40]), 3, 5] = torch.nan
    with_nan = inputs.run(mqa_paged, backend="sdpa")
    assert with_nan[0][0].isnan().all() and with_nan[1][0].isnan().all()
    assert torch.equal(with_nan[0][1], out[1]) and torch.equal(with_nan[1][1], lse[1])
