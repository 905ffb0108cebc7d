"""mqa_paged: every backend against float64, the reference against plain loops, bad input."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from openmla.errors import ConfigError, ShapeError
from openmla.ops import mqa_paged
from openmla.ops.mqa_paged import cost
from openmla.testing import Inputs, PagedCase, assert_within_budget, poisoned_memory
from tests.ops.contract import (
    GLUON,
    TRITON,
    backends,
    broken,
    check_attention,
    put,
    run_or_skip,
    slow_interpreted,
)
from tests.ops.declared import check_declaration
from tests.ops.mqa_paged_cases import V3_CASES

BASE = PagedCase("decode", query_lens=(1, 1, 1), seq_lens=(33, 7, 70))
CASES = [
    BASE,
    PagedCase("empty-request", (1, 0, 0, 2), (5, 0, 9, 2)),
    PagedCase("nothing", (), ()),
    PagedCase("one-key", (1, 1), (1, 1), H=1),
    PagedCase("one-past-a-block", (1, 1), (17, 33)),
    PagedCase("last-block-full", (1, 2), (16, 48)),
    PagedCase("17-heads", (1, 3), (40, 21), H=17),
    PagedCase("multi-token", (4, 1, 7), (64, 20, 7)),
    PagedCase("not-causal", (4, 3), (50, 3), causal=False),
    PagedCase("not-causal-few-keys", (4, 3, 2, 9), (2, 0, 40, 1), causal=False),
    PagedCase("not-causal-fixed", (4, 3, 2), (2, 0, 40), causal=False, run_length=16),
    PagedCase("graph-padding", (1, 2), (30, 9), padding=5),
    PagedCase("block-1", (2, 1), (19, 4), BS=1),
    PagedCase("block-128", (1, 1), (130, 127), BS=128),
    PagedCase("fixed-runs", (1, 2, 1), (90, 33, 1), run_length=32),
    PagedCase("one-fixed-run", (1, 1), (3, 20), run_length=64),
    PagedCase("v3-widths", (1, 2), (130, 65), H=8, C=512, R=64, BS=64),
    PagedCase("mistral4-widths", (1, 2), (130, 65), H=4, C=256, R=64, BS=64),
    PagedCase("minicpm3-widths", (1, 2), (70, 65), H=5, C=256, R=32, BS=64),
    PagedCase("axk2-widths", (2,), (70,), H=3, C=128, R=32),
    PagedCase("v4-widths", (2,), (70,), H=3, C=512, R=0),
    PagedCase("fp32", (1, 2), (33, 70), format="fp32", dtype=torch.float32),
    PagedCase("fp16", (1, 2), (33, 70), format="fp16", dtype=torch.float16),
    PagedCase("fp8", (1, 2), (33, 70), format="fp8", kv_scale=0.037),
    PagedCase("fp8-fp16-queries", (1, 2), (33, 70), format="fp8", dtype=torch.float16),
    PagedCase("bf16-queries-fp32-cache", (1, 2), (33, 70), format="fp32"),
    PagedCase("fp32-queries-bf16-cache", (1, 2), (33, 70), dtype=torch.float32),
    PagedCase("long-verify", (3, 1), (1100, 513), H=2, BS=16),
    PagedCase("short-prefill", (600,), (1300,), H=3, BS=64),
    PagedCase("very-long", (1,), (20000,), H=2, BS=64, format="fp32", dtype=torch.float32),
    PagedCase("long", (1,), (3000,), H=2, BS=64),
]
LOOPED = [case for case in CASES if max(case.seq_lens, default=0) < 500]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mqa_paged"))
@pytest.mark.parametrize(
    "case",
    slow_interpreted(CASES + V3_CASES, ["short-prefill", "very-long", *map(str, V3_CASES[1:])]),
    ids=str,
)
def test_contract(case: PagedCase, backend: str, device: str) -> None:
    check_attention(mqa_paged, case.make(device), backend)


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_reference_equals_loops(case: PagedCase) -> None:
    """The meaning, once more and independently: Python floats, one key at a time."""
    inputs = replace(case, H=min(case.H, 2)).make().double()
    out, lse = inputs.run(mqa_paged, backend="reference")
    scale, C = inputs.scalars["scale"], inputs.scalars["C"]
    bounds = inputs["query_start_loc"].tolist()
    decoded = inputs["cache"].double() * (inputs["kv_scale"] if case.format == "fp8" else 1)
    for b, (n, S) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for i in range(n):
            t = bounds[b] + i
            seen = S - n + i + 1 if case.causal else S
            keys = [
                decoded[int(inputs["block_table"][b, j // case.BS]), j % case.BS]
                for j in range(seen)
            ]
            if not keys:
                assert not out[t].any() and (lse[t] == -torch.inf).all()
            for h in range(out.shape[1] if keys else 0):
                query = inputs["q_latent"][t, h]
                logits = [scale * float(torch.dot(query, key)) for key in keys]
                largest = max(logits)
                total = sum(math.exp(logit - largest) for logit in logits)
                expected = largest + math.log(total)
                assert math.isclose(lse[t, h], expected, rel_tol=1e-12, abs_tol=1e-12)
                row = sum(
                    math.exp(logit - expected) * key[:C]
                    for logit, key in zip(logits, keys, strict=True)
                )
                torch.testing.assert_close(out[t, h], row, rtol=1e-11, atol=1e-12)
    assert (out[bounds[-1] :] == 0).all() and (lse[bounds[-1] :] == -torch.inf).all()


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long queries are taken a few at a time; the result does not change."""
    inputs = PagedCase("chunks", (7, 5), (40, 5)).make()
    expected = inputs.run(mqa_paged, backend="reference")
    monkeypatch.setattr("openmla.backends.reference.mqa_paged.LOGITS", 3 * 4 * 40)
    for actual, whole in zip(inputs.run(mqa_paged, backend="reference"), expected, strict=True):
        torch.testing.assert_close(actual, whole)


@pytest.mark.parametrize("backend", backends("mqa_paged"))
def test_invariance(backend: str, device: str) -> None:
    """Other blocks, other splits, other neighbours: the same answer."""
    case = PagedCase("invariance", (2, 1, 3), (70, 33, 9))
    first = case.make(device)
    expected = run_or_skip(mqa_paged, first, backend)
    exact = first.double().run(mqa_paged, backend="reference")

    order = torch.randperm(first["cache"].shape[0], generator=torch.Generator().manual_seed(1))
    moved = first.clone()
    moved["cache"].view(torch.int16)[order.to(device)] = first["cache"].view(torch.int16)
    table = moved["block_table"]
    real = (table >= 0) & (table < len(order))
    table[real] = order.to(device, torch.int32)[table[real].long()]
    assert_within_budget(moved.run(mqa_paged, backend=backend), exact, expected)

    fixed = Inputs(first.tensors, {**first.scalars, "run_length": 16}, first.widen)
    assert_within_budget(fixed.run(mqa_paged, backend=backend), exact, expected)

    swapped = dict(first.tensors)
    rows = torch.tensor([3, 4, 5, 2, 0, 1], device=device)
    requests = torch.tensor([2, 1, 0], device=device)
    swapped["q_latent"] = first["q_latent"][rows]
    for name in ("block_table", "seq_lens"):
        swapped[name] = first[name][requests]
    swapped["query_start_loc"] = torch.tensor([0, 3, 4, 6], dtype=torch.int32, device=device)
    out, lse = Inputs(swapped, first.scalars, first.widen).run(mqa_paged, backend=backend)
    restored = out.clone(), lse.clone()
    restored[0][rows], restored[1][rows] = out, lse
    assert_within_budget(restored, exact, expected)


@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_sdpa_bits_depend_on_the_row_alone(format: str) -> None:
    """Neighbouring blocks are views and scattered ones are gathered: the same bits either way."""
    case = PagedCase("placed", (2, 1), (1700, 900), BS=64, format=format, contiguous=True)
    scattered = case.make()
    table = scattered["block_table"]
    tensors = dict(scattered.tensors)
    used = [table[0, :27].long(), table[1, :15].long()]
    tensors["cache"] = scattered["cache"][torch.cat(used)].clone()
    neighbours = torch.full_like(table, -1)
    neighbours[0, :27], neighbours[1, :15] = torch.arange(27), torch.arange(27, 42)
    tensors["block_table"] = neighbours
    placed = Inputs(tensors, scattered.scalars, scattered.widen)
    for a, b in zip(
        placed.run(mqa_paged, backend="sdpa"), scattered.run(mqa_paged, backend="sdpa"), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", backends("mqa_paged"))
def test_offsets_beyond_int32(backend: str, device: str) -> None:
    """Rows past element 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, D = 60_000, 64, 576
    with poisoned_memory(False):
        cache = torch.empty((N, BS, D), dtype=torch.float8_e4m3fn, device=device)
    assert cache.numel() > 2**31
    case = PagedCase("far", (1,), (100,), H=2, C=512, R=64, BS=BS, format="fp8")
    near = case.make(device)
    raw = near["cache"].view(torch.uint8)
    far_table = torch.tensor([[N - 1, N - 2]], dtype=torch.int32, device=device)
    for column in range(2):
        block = int(near["block_table"][0, column])
        cache.view(torch.uint8)[N - 1 - column] = raw[block]
    near_out = run_or_skip(mqa_paged, near, backend)
    far = Inputs(
        {**near.tensors, "cache": cache, "block_table": far_table}, near.scalars, near.widen
    )
    for actual, expected in zip(far.run(mqa_paged, backend=backend), near_out, strict=True):
        assert torch.equal(actual, expected)


def test_declaration(device: str) -> None:
    check_declaration(mqa_paged, BASE.make(device), "q_latent")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": lambda t: t.half()}, "cache must be torch.bfloat16 for format bf16, got"),
        ({"query_start_loc": put((0,), 1)}, "query_start_loc must start with 0"),
        ({"query_start_loc": put((1,), 3)}, "query_start_loc must not fall"),
        ({"query_start_loc": put((3,), 99)}, "query_start_loc must end within the 3 rows"),
        ({"seq_lens": put((1,), 0)}, "seq_lens[1] must be at least its 1 query tokens, got 0"),
        ({"seq_lens": put((2,), 999)}, "block_table must have a column for every 16 keys"),
        ({"block_table": put((2, 4), 12)}, "block_table[2, 4] must be a block of the cache"),
        ({"block_table": put((0, 0), -1)}, "block_table[0, 0] must be a block of the cache"),
        ({"run_length": -1}, "run_length must not be negative, got -1"),
        ({"C": 41}, "C must be within 1..D=40, got 41"),
        ({"max_query_len": 0}, "max_query_len must be at least 1, got 0"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        broken(BASE.make(), **changes).run(mqa_paged, backend="reference")
    assert f"mqa_paged: {message}" in str(error.value)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"cache: format 'fp4' is not known\. Known: fp32, bf16"):
        broken(BASE.make(), format="fp4").run(mqa_paged, backend="reference")


def test_columns_past_the_keys_may_hold_anything() -> None:
    """BASE's tables end in block ids no cache has; a fully used table works just as well."""
    inputs = broken(BASE.make(), block_table=lambda t: t[:, :5])
    inputs.run(mqa_paged, backend="reference")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_grad_mode(mode: Any) -> None:
    """Only inputs that require grad are refused, not the mode."""
    with torch.inference_mode(False):
        inputs = BASE.make()
        with mode():
            out, _ = inputs.run(mqa_paged, backend="reference")
    assert not out.requires_grad


def test_cost() -> None:
    decode = cost([1], [100], H=16, D=576, C=512, format="bf16", itemsize=2, causal=True)
    assert decode.bytes == 100 * 1152 + 16 * (1088 * 2 + 4)
    assert decode.flops == 2 * 100 * 16 * 1088
    verify = cost([3], [10], H=1, D=4, C=2, format="fp8", itemsize=2, causal=True)
    assert verify.flops == 2 * (8 + 9 + 10) * 6


UNEVEN = [
    ((1,) * 6, (200, 1, 33, 64, 90, 7)),
    ((3, 0, 1, 0, 2), (150, 0, 40, 9, 2)),
    ((1,) * 9, (40,) * 9),
    ((5,), (310,)),
]


@pytest.mark.triton
@pytest.mark.parametrize("programs", [1, 3, 7, 40])
@pytest.mark.parametrize(("query_lens", "seq_lens"), UNEVEN)
def test_any_split_among_programs(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], programs: int, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Parts begin and end anywhere; 17 heads fill one tile and a bit, tokens are folded into it."""
    module = pytest.importorskip("openmla.backends.triton.mqa_paged")
    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(module, "occupancy", lambda config: 1)
    for H in (2, 17):
        case = PagedCase("split", query_lens, seq_lens, H=H, padding=2)
        check_attention(mqa_paged, case.make(device), "triton")


@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", [TRITON, GLUON])
def test_bits_of_fixed_runs(format: str, backend: str, device: str) -> None:
    """With run_length a row's bits are the same alone and among others of other lengths."""
    widths: dict[str, Any] = {"C": 512, "R": 64, "BS": 64, "contiguous": True, "format": format}
    case = PagedCase("fixed", (1, 1, 2, 1), (300, 40, 170, 129), H=4, run_length=128, **widths)
    together = case.make(device)
    out, lse = run_or_skip(mqa_paged, together, backend)
    starts = together["query_start_loc"].tolist()
    for b in range(4):
        rows = slice(starts[b], starts[b + 1])
        alone = {
            **together.tensors,
            "q_latent": together["q_latent"][rows],
            "block_table": together["block_table"][b : b + 1],
            "seq_lens": together["seq_lens"][b : b + 1],
            "query_start_loc": together["query_start_loc"][b : b + 2] - starts[b],
        }
        one = Inputs(alone, together.scalars, together.widen).run(mqa_paged, backend=backend)
        assert torch.equal(one[0], out[rows]) and torch.equal(one[1], lse[rows])


@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("H", [4, 40])
@pytest.mark.parametrize("backend", ["reference", TRITON, GLUON])
def test_a_key_of_nan_stays_with_its_request(
    backend: str, H: int, format: str, device: str
) -> None:
    widths: dict[str, Any] = {"C": 512, "R": 64, "BS": 64, "contiguous": True, "format": format}
    inputs = PagedCase("nan", (1, 1, 1), (70, 200, 64), H=H, **widths).make(device)
    out, lse = run_or_skip(mqa_paged, inputs, backend)
    block, column = int(inputs["block_table"][1, 2]), 70
    inputs["cache"][block, 3, column] = torch.nan
    with_nan = inputs.run(mqa_paged, backend=backend)
    assert with_nan[0][1].isnan().all() and with_nan[1][1].isnan().all()
    for b in (0, 2):
        assert torch.equal(with_nan[0][b], out[b]) and torch.equal(with_nan[1][b], lse[b])


@pytest.mark.triton
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("programs", [1, 5, 24])
def test_programs_get_equal_parts(programs: int, tokens: int, fixed: bool, device: str) -> None:
    """Every key of every item once, in whole units; no part is longer than the others by more than
    a unit; slots tell partial results apart."""
    build = pytest.importorskip("openmla.backends.triton._build")
    if device == "cpu" and not build.interpreted():
        pytest.skip("triton     runs on cuda, this is cpu")
    from tests.ops.parts_kernel import record

    unit, chance = 16, random.Random(programs)
    for B in (1, 2, 5, 9, 140):  # more than the lanes that look at requests together
        longest = 900 if B < 100 else 60  # long ones of many requests take the interpreter minutes
        query_lens = [chance.choice([0, 1, 1, 4]) for _ in range(B)]
        more = [0, 3, longest // 9, longest]
        seq_lens = [n + chance.randint(0, chance.choice(more)) for n in query_lens]
        parts = record(
            query_lens, seq_lens, programs=programs, unit=unit, tokens=tokens, fixed=fixed,
            device=device,
        )  # fmt: skip
        items: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for part in parts:
            for request, token, _, *run in part:
                items.setdefault((request, token), []).append(tuple(run))
        starts = [0, *accumulate(query_lens)]
        due = {
            (b, token): seq_lens[b] - (starts[b + 1] - min(token + tokens, starts[b + 1]))
            for b in range(B)
            for token in range(starts[b], starts[b + 1], tokens)
        }
        assert items.keys() == due.keys()
        slots = []
        for item, runs in items.items():
            # units are counted for a request's last token: others may have none left
            bounds = [(lo, hi) for lo, hi, _ in runs if lo < due[item] or lo == 0]
            assert bounds[0][0] == 0 and bounds[-1][1] == due[item]
            assert all(end == lo for (_, end), (lo, _) in pairwise(bounds))
            assert all(lo % unit == 0 for lo, _ in bounds)
            assert not fixed or all(hi - lo <= unit for lo, hi in bounds)
            assert (len(runs) == 1) == (runs[0][2] == -1)
            slots += [slot for *_, slot in runs if slot >= 0]
        assert len(set(slots)) == len(slots)
        work = [sum(max(-(-(hi - lo) // unit), 1) for *_, lo, hi, _ in part) for part in parts]
        busy = [units for units in work if units]
        assert fixed or len(parts[0]) == 0 or max(work) <= sum(work) / len(busy) + 1 + B


@pytest.mark.triton
def test_even_cuts_fit_the_programs_and_are_short_enough() -> None:
    """Of any number of items, none and empty ones too; as the host asks for it."""
    pytest.importorskip("openmla.backends.triton._build")
    from openmla.backends.triton._parts import MERGE_UNITS, cut_evenly

    chance = random.Random(0)
    for _ in range(3000):
        items, programs = chance.randint(0, 400), chance.choice([1, 5, 66, 132])
        most = chance.choice([0, 1, chance.randint(1, 30), chance.randint(1, 2000)])
        even, slices, each = cut_evenly.fn(items, programs, most, most)
        assert slices >= 1 and each >= 1 and -(-items // each) * slices <= programs
        balanced = -(-items * (most + 1) // programs)
        longest = (-(-most // slices) + 1) * each
        assert not even or items == 0 or longest <= balanced + MERGE_UNITS.value
        other, *_ = cut_evenly.fn(items, programs, most, most + 1)
        assert not other  # items differ


RUN_COST = 0.7  # of a unit of 128 keys: loading queries and storing outputs


@pytest.mark.triton
@pytest.mark.parametrize(("lengths", "tokens"), [("log-uniform", 1), ("one long", 2), ("even", 1)])
def test_no_program_has_much_more_work_than_the_mean(
    lengths: str, tokens: int, device: str
) -> None:
    """The longest of 66 programs is within 10 % of the mean, or within one unit of keys."""
    build = pytest.importorskip("openmla.backends.triton._build")
    if device == "cpu" and not build.interpreted():
        pytest.skip("triton     runs on cuda, this is cpu")
    from tests.ops.parts_kernel import record

    chance, unit = random.Random(tokens), 128
    seq_lens = {
        "log-uniform": [int(2 ** chance.uniform(1, 15)) for _ in range(64)],
        "one long": [100_000, *(chance.randint(50, 500) for _ in range(60))],
        "even": [3000] * 12,
    }[lengths]
    parts = record(
        [tokens] * len(seq_lens), seq_lens, programs=66, unit=unit, tokens=tokens, fixed=False,
        device=device,
    )  # fmt: skip
    work = [sum(-(-(hi - lo) // unit) + RUN_COST for *_, lo, hi, _ in part) for part in parts]
    mean = sum(work) / len(work)
    assert max(work) <= max(1.1 * mean, mean + 1)


@pytest.mark.triton
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("value", "run_lse"), [(1, torch.nan), (1, torch.inf), (torch.nan, -1e4)])
def test_a_corrupt_part_reaches_the_merged_row(
    value: float, run_lse: float, fixed: bool, device: str
) -> None:
    """Its head's row is NaN, also where the part has no weight; the other head's is the softmax."""
    build = pytest.importorskip("openmla.backends.triton._build")
    if device == "cpu" and not build.interpreted():
        pytest.skip("triton     runs on cuda, this is cpu")
    from openmla.backends.triton import _merge_parts as kernels

    H, C, slots = 2, 8, [0, 1, 2] if fixed else [1, 2, 4]  # of the three parts of one token
    part, part_lse = torch.randn(5, H, C, device=device), torch.randn(5, H, device=device)
    due = part_lse[slots, 0].softmax(0) @ part[slots, 0]
    part[slots[1], 1], part_lse[slots[1], 1] = value, run_lse
    spans = torch.tensor([0, 2, 0], dtype=torch.int32, device=device)
    out, lse = torch.zeros(H, C, device=device), torch.zeros(H, device=device)
    spec = kernels.FIXED if fixed else kernels.PARTS
    constants, num_warps, *_ = spec.fix(1, H, C, fixed=fixed, sink=False, overlapped=False)
    grid: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    if fixed:
        grid = kernels.fixed_grid(1, H, C, constants["HEADS"], constants["BLOCK_C"])
    else:
        grid, sizes = kernels.parts_grid(1, H, C, 3, 3, constants)
    arguments = part, part_lse, spans, lse, out, lse, H, *sizes
    spec.kernel[grid](*arguments, **constants, num_warps=num_warps)
    torch.testing.assert_close(out[0], due)
    assert out[1].isnan().all() and (lse[1].isnan() or run_lse == -1e4)


@pytest.mark.triton
@pytest.mark.parametrize("expected", [2, 40])
def test_tokens_of_few_and_of_many_runs_are_merged_side_by_side(expected: int, device: str) -> None:
    """However many runs are expected: of 1 (nothing to do), 2, 16, 17, 70 and, past all requests,
    none."""
    build = pytest.importorskip("openmla.backends.triton._build")
    if device == "cpu" and not build.interpreted():
        pytest.skip("triton     runs on cuda, this is cpu")
    from openmla.backends.triton import _merge_parts as kernels

    H, C, counts = 3, 8, [2, 17, 1, 70, 16, 0]
    firsts = torch.tensor([0, *counts[:-1]]).cumsum(0)
    spans = torch.stack([firsts, firsts + torch.tensor(counts) - 1, torch.zeros(6)], 1).int()
    part = torch.randn(2 * sum(counts), H, C, device=device)
    part_lse = torch.randn(len(part), H, device=device)
    out, lse = torch.full((6, H, C), 7.0, device=device), torch.full((6, H), 7.0, device=device)
    constants, num_warps, *_ = kernels.PARTS.fix(6, H, C, fixed=False, sink=False, overlapped=False)
    grid, sizes = kernels.parts_grid(6, H, C, expected, 70, constants)
    kernels.PARTS.kernel[grid](
        part, part_lse, spans.to(device), lse, out, lse, H, *sizes, **constants,
        num_warps=num_warps,
    )  # fmt: skip
    for t, (first, num) in enumerate(zip(firsts.tolist(), counts, strict=True)):
        slots = [2 * first + 1, *range(2 * first + 2, 2 * (first + num), 2)][:num]
        due, due_lse = torch.zeros(H, C, device=device), torch.full((H,), -torch.inf, device=device)
        if num:
            due_lse = part_lse[slots].logsumexp(0)
            due = ((part_lse[slots] - due_lse).exp()[..., None] * part[slots]).sum(0)
        if num == 1:
            due, due_lse = torch.full_like(due, 7), torch.full_like(due_lse, 7)
        torch.testing.assert_close(out[t], due)
        torch.testing.assert_close(lse[t], due_lse)


@pytest.mark.parametrize("run_length", [0, 16])
@pytest.mark.parametrize("backend", ["reference", TRITON])
def test_equal_keys_of_large_logits_keep_the_value(
    backend: str, run_length: int, device: str
) -> None:
    """Weights sum up to 1 where lse rounds by more than a weight: logits are about 1e7 here."""
    inputs = PagedCase("equal", (2,), (70,), run_length=run_length).make(device)
    inputs["q_latent"].fill_(1e7 / inputs["q_latent"].shape[2] / inputs.scalars["scale"])
    inputs["cache"].fill_(1.0)
    out, _ = run_or_skip(mqa_paged, inputs, backend)
    atol = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=atol)
