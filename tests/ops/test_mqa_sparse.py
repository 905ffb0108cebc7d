"""mqa_sparse: every backend against float64, the reference against plain loops, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends import BACKENDS
from openmla.cache.format import get_format
from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.ops import Segment, merge_states, mqa_paged, mqa_sparse
from openmla.ops.mqa_sparse import cost
from openmla.testing import (
    PagedCase,
    SegmentCase,
    SparseCase,
    SparseInputs,
    assert_within_budget,
    poisoned_memory,
)
from tests.ops.contract import check_attention, run_or_skip

SLOTS = SegmentCase("slots")
POSITIONS = SegmentCase("positions")
WINDOW = SegmentCase("window", span=24)
PREFIX = SegmentCase("prefix", span=4)
RING = replace(WINDOW, ring=True)
COMPRESSED = replace(POSITIONS, ratio=4, BS=4)
SINKS = (-torch.inf, 0.0, 40.0, torch.inf, -3.0)
SHORT: Any = {"query_lens": (1, 2), "seq_lens": (33, 70)}
WIDE: Any = {**SHORT, "C": 512, "R": 64}

PACKED = replace(POSITIONS, format="fp8_ds_mla", BS=64, K=300)
LISTED: Any = {"query_lens": (1, 2, 0, 1), "seq_lens": (700, 70, 5, 300), "C": 512, "R": 64}
LISTED["contiguous"] = True
LISTED_16 = replace(PACKED, format="bf16")
PROMPT: Any = {**LISTED, "query_lens": (9, 2, 0, 3)}
MANY: Any = {**LISTED, "query_lens": (8, 1), "seq_lens": (700, 1)}
DENSE_64: Any = {"C": 512, "R": 64, "H": 64, "contiguous": True}
# V4's rows as engines keep them: pages aligned to 16 bytes, which there are kernels for
V4: Any = {"C": 512, "R": 0, "contiguous": True}
NEAR = SegmentCase("window", span=128, ring=True, BS=64, format="fp8_dsv4")
FAR = SegmentCase("positions", K=300, ratio=4, BS=64, format="fp8_dsv4")
POOLED = SegmentCase("prefix", span=128, BS=2, format="fp8_dsv4")

V4_RING = replace(RING, format="fp8_dsv4")
V4_ENTRIES = replace(COMPRESSED, format="fp8_dsv4", K=70)
V4_PREFIX = replace(PREFIX, format="fp8_dsv4")
LATE: Any = {"query_lens": (1, 3, 0, 1), "seq_lens": (33, 7, 9, 400), "C": 512, "R": 0}

BASE = SparseCase("slots", query_lens=(1, 1, 1), seq_lens=(33, 7, 70))
CASES = [
    BASE,
    SparseCase("positions", (1, 1, 1), (33, 7, 70), POSITIONS),
    SparseCase("window", (1, 4, 1), (33, 7, 70), WINDOW),
    SparseCase("prefix", (1, 4, 1), (33, 7, 70), PREFIX),
    SparseCase("nothing", (), ()),
    SparseCase("nothing-asked", (0, 0), (9, 0), POSITIONS),
    SparseCase("empty-requests", (1, 0, 0, 2), (5, 0, 9, 2), POSITIONS),
    SparseCase("one-row", (1, 1), (1, 1), replace(SLOTS, K=1), H=1),
    SparseCase("no-column", (2,), (9,), replace(SLOTS, K=0)),
    SparseCase("as-many-as-columns", (1, 1, 1), (20, 21, 22), POSITIONS),
    SparseCase("block-1", (2, 1), (19, 30), replace(POSITIONS, BS=1)),
    SparseCase("block-128", (1, 1), (130, 127), replace(SLOTS, BS=128)),
    SparseCase("odd-columns", (5,), (400,), replace(SLOTS, K=131)),
    SparseCase("many-columns", (3,), (1500,), replace(POSITIONS, K=1037), H=2),
    SparseCase("many-tokens", (300, 41), (300, 70), replace(POSITIONS, K=64), H=2),
    SparseCase("17-heads", (1, 3), (40, 21), POSITIONS, H=17),
    SparseCase("64-heads", (1, 3), (40, 21), H=64),
    SparseCase("128-heads", (2,), (40,), WINDOW, PREFIX, H=128),
    SparseCase("padding-slots", (1, 2), (30, 9), SLOTS, padding=5),
    SparseCase("padding-positions", (1, 2), (30, 9), POSITIONS, padding=5, sink=SINKS),
    SparseCase("padding-window", (1, 2), (30, 9), WINDOW, PREFIX, padding=5),
    SparseCase("padding-only", (), (), replace(SLOTS, K=3), padding=3),
    # window: the first position, one short of the span, the span, and past it
    SparseCase("window-edges", (1,) * 5, (1, 23, 24, 25, 49), WINDOW),
    SparseCase("window-1", (2, 1), (9, 1), replace(WINDOW, span=1)),
    SparseCase("window-128", (1, 1, 3), (127, 128, 300), replace(WINDOW, span=128, BS=64)),
    SparseCase("ring", (1, 1, 1, 1), (1, 24, 25, 4000), RING),
    SparseCase("ring-verify", (4, 3, 1), (4, 100, 777), RING),
    SparseCase("ring-is-the-span", (1, 1), (333, 10), replace(RING, span=32)),
    SparseCase("ring-block-1", (1, 2), (50, 3), replace(RING, BS=1)),
    # prefix: none, the token that completes an entry, one more
    SparseCase("prefix-edges", (1,) * 6, (1, 3, 4, 5, 8, 100), PREFIX),
    SparseCase("prefix-128", (1, 1, 2, 1), (127, 128, 256, 1000), replace(PREFIX, span=128, BS=2)),
    SparseCase("prefix-prefill", (40,), (40,), PREFIX),
    SparseCase("window-positions", (1, 3, 1), (33, 7, 300), RING, COMPRESSED, sink=SINKS),
    SparseCase("window-prefix", (1, 3, 1), (33, 7, 300), RING, replace(PREFIX, BS=4), sink=SINKS),
    SparseCase("window-no-second", (1, 1), (3, 2), WINDOW, COMPRESSED, sink=SINKS, H=5),
    SparseCase("positions-window", (2, 1), (33, 70), POSITIONS, WINDOW),
    SparseCase(
        "two-slots-two-formats",
        **SHORT,
        first=replace(SLOTS, format="fp8", kv_scale=0.037),
        second=replace(SLOTS, BS=5, K=9, ratio=3, format="fp32"),
    ),
    SparseCase("sink", **SHORT, sink=SINKS, H=5),
    SparseCase("v3-widths", **WIDE, first=replace(SLOTS, BS=64), H=8),
    SparseCase("v4-widths", **SHORT, first=RING, second=COMPRESSED, C=512, R=0, H=3, sink=SINKS),
    SparseCase("minicpm3-widths", **SHORT, C=256, R=32, H=5),
    SparseCase("fp32", **SHORT, first=replace(SLOTS, format="fp32"), dtype=torch.float32),
    SparseCase("fp16", **SHORT, first=replace(SLOTS, format="fp16"), dtype=torch.float16),
    SparseCase("fp8", **SHORT, first=replace(SLOTS, format="fp8", kv_scale=0.037)),
    SparseCase(
        "fp8-fp16-queries", **SHORT, first=replace(SLOTS, format="fp8"), dtype=torch.float16
    ),
    SparseCase("fp32-queries-bf16-cache", **SHORT, first=POSITIONS, dtype=torch.float32),
    SparseCase("bf16-queries-fp32-cache", **SHORT, first=replace(POSITIONS, format="fp32")),
    SparseCase("packed", **SHORT, first=replace(SLOTS, format="fp8_ds_mla"), C=128),
    SparseCase("packed-exact", **SHORT, first=replace(SLOTS, format="fp8_ds_mla_exact"), C=128),
    SparseCase("packed-v3", **WIDE, first=replace(SLOTS, format="fp8_ds_mla", BS=64), H=8),
    SparseCase(
        "packed-v3-64-heads",
        **WIDE,
        first=replace(SLOTS, format="fp8_ds_mla", BS=64),
        H=64,
        contiguous=True,
    ),
    SparseCase(
        "packed-v3-128-heads-sink",
        **WIDE,
        first=replace(SLOTS, format="fp8_ds_mla", BS=64),
        H=128,
        sink=SINKS,
        contiguous=True,
    ),
    SparseCase("packed-exact-v3", **WIDE, first=replace(POSITIONS, format="fp8_ds_mla_exact")),
    SparseCase("packed-v3-slots-dense", **LISTED, first=replace(PACKED, kind="slots"), H=17),
    SparseCase("packed-v3-positions-dense", **LISTED, first=PACKED, H=16, sink=SINKS, padding=2),
    SparseCase("packed-v3-positions-block-1", **LISTED, first=replace(PACKED, BS=1), H=3),
    # more tokens and heads than 16 heads at a time would do
    SparseCase("v3-prompt", **PROMPT, first=LISTED_16, H=64, sink=SINKS, padding=2),
    SparseCase("v3-slots-100-heads", **MANY, first=replace(LISTED_16, kind="slots", K=129), H=100),
    SparseCase("packed-v3-prompt", **PROMPT, first=PACKED, H=64, sink=SINKS, padding=2),
    SparseCase("packed-v3-100-heads", **MANY, first=replace(PACKED, kind="slots", K=129), H=100),
    SparseCase(
        "packed-window-bf16-positions",
        **SHORT,
        first=replace(RING, format="fp8_ds_mla"),
        second=COMPRESSED,
        C=128,
    ),
    # V4: rows that end within a block of 64, one past its end, at its end
    SparseCase("v4", (1, 2, 0, 1), (1300, 70, 5, 512), NEAR, FAR, H=16, padding=2, **V4),
    SparseCase("v4-17-heads", (3, 1), (3000, 1), NEAR, replace(FAR, K=129), H=17, sink=SINKS, **V4),
    SparseCase("v4-64-heads", (1,), (999,), NEAR, replace(FAR, K=64), H=64, sink=SINKS, **V4),
    SparseCase("v4-prefix", (1, 3, 1), (9000, 257, 1), NEAR, POOLED, H=17, sink=SINKS, **V4),
    SparseCase("v4-window", (1, 3, 1), (3000, 128, 1), NEAR, H=8, sink=SINKS, padding=1, **V4),
    # more tokens and heads than 16 heads at a time would do
    SparseCase(
        "v4-prompt", (9, 2, 0, 3), (1300, 70, 5, 512), NEAR, FAR, H=64, sink=SINKS, padding=2, **V4
    ),
    SparseCase("v4-100-heads", (8, 1), (3000, 1), NEAR, replace(FAR, K=129), H=100, **V4),
    SparseCase("v4-33-heads", (12, 3), (3000, 128), NEAR, H=33, sink=SINKS, **V4),
    SparseCase(
        "v4-prompt-prefix", (3, 5, 1), (9000, 257, 1), NEAR, POOLED, H=128, sink=SINKS, **V4
    ),
    SparseCase(
        "v4-small-blocks",
        (1, 2),
        (330, 40),
        replace(NEAR, span=24, BS=6),
        replace(FAR, K=70, BS=4),
        H=3,
        **V4,
    ),
    SparseCase("v4-odd-pages", (1, 2), (330, 40), NEAR, FAR, H=5, sink=SINKS, C=512, R=0),
    SparseCase("v4-many-tokens", (40, 3), (40, 30), V4_RING, V4_ENTRIES, C=128, R=0, H=2),
    SparseCase("packed-many-tokens", (40, 3), (40, 30), replace(PACKED, BS=8, K=30), C=128, H=2),
    SparseCase("v4-slots", **LATE, first=replace(V4_ENTRIES, kind="slots", ratio=1), H=3),
    SparseCase("v4-two-formats", **LATE, first=RING, second=V4_ENTRIES, H=3),
    SparseCase("v4-narrow", **SHORT, first=V4_RING, second=V4_ENTRIES, C=128, R=0),
    SparseCase("v4-192", **SHORT, first=V4_RING, second=V4_PREFIX, C=192, R=0),
]
IN_ONE_RUN = (
    "packed-v3-positions-dense", "v4-17-heads", "v4-prefix", "v4-window", "v4-prompt",
    "v4-prompt-prefix", "v4-100-heads", "v3-prompt", "packed-v3-prompt", "packed-v3-100-heads",
)  # fmt: skip
LOOPED = [case for case in CASES if sum(case.query_lens) < 50 and case.first.K < 500]


def named_slots(segment: Segment, t: int, b: int, p: int) -> list[int]:
    """The contract's four sentences, in Python integers."""
    N, BS, _ = segment.cache.shape
    entries: list[int] = []
    if segment.rows is not None and segment.row_lens is not None:
        entries = segment.rows[t].tolist()[: max(int(segment.row_lens[t]), 0)]
    elif segment.kind == "window":
        entries = list(range(max(p - segment.span + 1, 0), p + 1))
    else:
        entries = list(range((p + 1) // segment.span))
    if segment.kind == "slots":
        return [slot for slot in entries if 0 <= slot < N * BS]
    assert segment.block_table is not None
    blocks = segment.block_table[b].tolist()
    slots = []
    for entry in entries:
        column = entry // BS % len(blocks) if segment.kind == "window" else entry // BS
        if entry >= 0 and column < len(blocks) and 0 <= blocks[column] < N:
            slots.append(blocks[column] * BS + entry % BS)
    return slots


def assert_equals_loops(inputs: SparseInputs) -> None:
    """One token, one head, one row at a time, with Python floats."""
    inputs = inputs.double()
    out, lse = inputs.run(mqa_sparse, backend="reference")
    T, H, D = inputs["q_latent"].shape
    assert out.dtype == lse.dtype == torch.float64
    scale, C = inputs.scalars["scale"], inputs.scalars["C"]
    bounds = inputs["query_start_loc"].tolist()
    sinks = inputs["sink"].tolist() if "sink" in inputs.tensors else [-math.inf] * H
    segments = inputs.segments()
    flat = []
    for part in segments:
        slots = torch.arange(part.cache.shape[0] * part.cache.shape[1])
        layout = get_format(part.format)
        flat.append(layout.read(part.cache, slots, part.kv_scale, torch.float64, D))
    for t in range(T):
        owners = [b for b in range(len(bounds) - 1) if bounds[b] <= t < bounds[b + 1]]
        keys: list[Tensor] = []
        for b in owners:
            for part, rows in zip(segments, flat, strict=True):
                keys += [
                    rows[slot] for slot in named_slots(part, t, b, int(inputs["positions"][t]))
                ]
        for h in range(H):
            if not keys:
                assert (out[t, h] == 0).all() and lse[t, h] == -torch.inf
                continue
            logits = [scale * float(torch.dot(inputs["q_latent"][t, h], key)) for key in keys]
            largest = max(logits)
            total = sum(math.exp(logit - largest) for logit in logits)
            expected = largest + math.log(total)
            assert math.isclose(lse[t, h], expected, rel_tol=1e-12, abs_tol=1e-12)
            # the sink is one more term of the sum, with a row of zeros
            whole = total + (math.exp(sinks[h] - largest) if sinks[h] < math.inf else math.inf)
            row = sum(
                math.exp(logit - largest) / whole * key[:C]
                for logit, key in zip(logits, keys, strict=True)
            )
            torch.testing.assert_close(out[t, h], row, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: SparseCase, backend: str, device: str) -> None:
    check_attention(mqa_sparse, case.make(device), backend)


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_reference_equals_loops(case: SparseCase) -> None:
    assert_equals_loops(replace(case, H=min(case.H, len(SINKS) if case.sink else 2)).make())


def edge_rows(kind: str, device: str, format: str = "bf16", **options: Any) -> SparseInputs:
    """Every odd list there is, one per token, over rows that are all in use."""
    part = SegmentCase(kind, format=format)
    case = SparseCase("edges", (12,), (60,), part, sink=SINKS, **{"H": 5, **options})
    inputs = case.make(device)
    rows, row_lens = inputs["rows"], inputs["row_lens"]
    K = rows.shape[1]
    assert (row_lens == K).all() and (rows >= 0).all()  # as many to see as columns
    slots = inputs["cache"].shape[0] * case.first.BS
    past = slots if kind == "slots" else inputs["block_table"].shape[1] * case.first.BS
    rows[0] = -1
    rows[1] = torch.tensor([-1, past, -(2**31), 2**31 - 1, past + 1, -77, -2] * 3, device=device)
    rows[2, :-1] = -1
    rows[3, 5:9] = rows[3, 4]
    rows[4] = rows[4, 0].clone()
    rows[5, ::2] = past
    row_lens[6] = 0
    row_lens[7] = K + 1000
    row_lens[8] = 1
    row_lens[9] = -3
    rows[10, 1:] = -1
    return inputs


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("kind", ["slots", "positions"])
@pytest.mark.parametrize(
    "wide", [{}, DENSE_64, {**DENSE_64, "format": "fp8_ds_mla"}], ids=["", "v3", "packed-v3"]
)
def test_edge_rows(wide: dict[str, Any], kind: str, backend: str, device: str) -> None:
    inputs = edge_rows(kind, device, **wide)
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    for t in (0, 1, 6, 9):
        assert (lse[t] == -torch.inf).all() and (out[t] == 0).all()
    check_attention(mqa_sparse, inputs, backend)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("H", [5, 80])
def test_edge_rows_behind_a_window(H: int, backend: str, device: str) -> None:
    """V4's rows: odd lists, and tables with holes, take nothing from the window."""
    second = replace(FAR, K=70)
    inputs = SparseCase("edges", (7,), (600,), NEAR, second, sink=SINKS, H=H, **V4).make(device)
    rows, row_lens = inputs["rows_2"], inputs["row_lens_2"]
    past = inputs["block_table_2"].shape[1] * second.BS
    odd = torch.tensor([-1, past, -(2**31), 2**31 - 1, past + 1, -77, -2] * 10, device=device)
    rows[0] = odd.int()
    rows[1, 5:9] = rows[1, 4]
    rows[2, ::2] = odd[::2].int()
    row_lens[3] = 0
    row_lens[4] = second.K + 1000
    row_lens[5] = -3
    check_attention(mqa_sparse, inputs, backend)
    inputs["block_table"][0, 1] = -1
    inputs["block_table_2"][0, 1] = inputs["cache_2"].shape[0]
    check_attention(mqa_sparse, inputs, backend)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("H", [16, 200])
def test_v4_pages_may_be_padded(H: int, backend: str, device: str) -> None:
    """To multiples of 576 bytes, as engines have them; nothing of the padding is read."""
    inputs = SparseCase("padded", (1, 2), (700, 3), NEAR, FAR, H=H, sink=SINKS, **V4).make(device)
    expected = run_or_skip(mqa_sparse, inputs, backend)
    padded = inputs.clone()
    for name in ("cache", "cache_2"):
        N, BS, W = inputs[name].shape
        page = get_format("fp8_dsv4").page_width(512, BS)
        assert page > BS * W
        pages = torch.full((N, page), 255, dtype=torch.uint8, device=device)
        padded.tensors[name] = pages[:, : BS * W].unflatten(1, (BS, W))
        padded.tensors[name].copy_(inputs[name])
    for one, other in zip(padded.run(mqa_sparse, backend=backend), expected, strict=True):
        assert torch.equal(one, other)


def v4_scales(cache: Tensor) -> Tensor:
    """The scale bytes of V4's pages, [N, BS, 7]."""
    N, BS, _ = cache.shape
    return cache.view(N, -1)[:, BS * 576 :].view(N, BS, 8)[..., :7]


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("shift", [40, -40])
@pytest.mark.parametrize("H", [5, 80])
def test_v4_scales_may_be_large_or_small(H: int, shift: int, backend: str, device: str) -> None:
    """Powers of two: with queries as much smaller the same weights, with outputs as much larger."""
    inputs = SparseCase("scales", (8,), (700,), NEAR, FAR, H=H, sink=SINKS, **V4).make(device)
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    for name in ("cache", "cache_2"):
        scales = v4_scales(inputs[name])
        scales[scales != 255] += shift % 256
    inputs["q_latent"][..., :448] *= 2.0**-shift
    actual, actual_lse = inputs.run(mqa_sparse, backend=backend)
    assert torch.equal(actual_lse, lse)
    assert torch.equal(actual[..., :448], out[..., :448] * 2.0**shift)
    assert torch.equal(actual[..., 448:], out[..., 448:])


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("H", [5, 200])
@pytest.mark.parametrize("what", ["scale", "rope"])
def test_nan_of_a_v4_row_is_seen(what: str, H: int, backend: str, device: str) -> None:
    """A row marked as NaN, or with NaN in what is stored as it is; other tokens do not see it."""
    inputs = SparseCase("nan", (1, 1), (700, 650), NEAR, FAR, H=H, **V4).make(device)
    entry = int(inputs["rows_2"][0, 70])
    block = int(inputs["block_table_2"][0, entry // 64])
    if what == "scale":
        v4_scales(inputs["cache_2"])[block, entry % 64] = 255
    else:
        N = inputs["cache_2"].shape[0]
        inputs["cache_2"].view(N, -1)[block, (entry % 64) * 576 + 450 :][:2] = 255
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    assert lse[0].isnan().all()
    assert out[0, :, :448].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("H", [2, 600])
def test_v4_offsets_beyond_int32(H: int, backend: str, device: str) -> None:
    """Rows past byte 2^31 of a cache. Memory is reserved, hardly any of it is touched."""
    case = SparseCase("far", (1,), (300,), NEAR, replace(FAR, K=50), H=H, **V4)
    near = case.make(device)
    cache, table = near["cache_2"], near["block_table_2"]
    with poisoned_memory(False):
        pool = torch.empty((60_000, *cache.shape[1:]), dtype=torch.uint8, device=device)
    assert pool.numel() > 2**31
    moved = len(pool) - len(cache)
    pool[moved:] = cache
    far = near.clone()
    far.tensors["cache_2"] = pool
    far.tensors["block_table_2"] = table.where((table < 0) | (table >= len(cache)), table + moved)
    far["block_table_2"][table >= len(cache)] = len(pool)
    expected = run_or_skip(mqa_sparse, near, backend)
    for one, other in zip(far.run(mqa_sparse, backend=backend), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["slots", "positions"])
def test_edge_rows_equal_loops(kind: str) -> None:
    assert_equals_loops(edge_rows(kind, "cpu"))


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("kind", ["positions", "window", "prefix"])
def test_table_without_a_block(kind: str, backend: str, device: str) -> None:
    """A table entry that is no block hides its rows, wherever it stands."""
    parts = {"positions": POSITIONS, "window": WINDOW, "prefix": PREFIX}
    inputs = SparseCase("holes", (3, 1), (100, 30), parts[kind]).make(device)
    full = run_or_skip(mqa_sparse, inputs, backend)
    inputs["block_table"][0, 0 if kind == "prefix" else 5] = -1
    inputs["block_table"][1, 1 if kind == "window" else 0] = inputs["cache"].shape[0]
    check_attention(mqa_sparse, inputs, backend)
    if device == "cpu":
        assert_equals_loops(inputs)
    assert not torch.equal(full[1], inputs.run(mqa_sparse, backend=backend)[1])


def test_table_without_columns() -> None:
    for part in (POSITIONS, WINDOW, PREFIX):
        inputs = SparseCase("bare", (2,), (9,), part).make()
        inputs.tensors["block_table"] = inputs["block_table"][:, :0]
        out, lse = inputs.run(mqa_sparse, backend="reference")
        assert (out == 0).all() and (lse == -torch.inf).all()


def test_reference_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens at a time; the result does not change."""
    inputs = SparseCase("turns", (7, 5), (40, 5), RING, COMPRESSED, sink=SINKS).make()
    expected = inputs.run(mqa_sparse, backend="reference")
    width = sum(part.width for part in inputs.segments())
    monkeypatch.setattr("openmla.backends.reference.mqa_sparse.ELEMENTS", 5 * width * 40)
    for actual, whole in zip(inputs.run(mqa_sparse, backend="reference"), expected, strict=True):
        torch.testing.assert_close(actual, whole)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
def test_sink(backend: str, device: str) -> None:
    """-inf is no sink, +inf takes everything, and lse knows of neither."""
    case = SparseCase("sink", (2, 1, 1), (70, 33, 2), RING, COMPRESSED, H=5)
    inputs = replace(case, sink=SINKS).make(device)
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    assert (out[:, 3] == 0).all() and lse[:, 3].isfinite().all()
    exact, exact_lse = case.make(device).double().run(mqa_sparse, backend="reference")
    exact *= (exact_lse - inputs["sink"]).sigmoid()[..., None]
    peer = inputs.run(mqa_sparse, backend="reference")
    assert_within_budget((out, lse), (exact, exact_lse), peer)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("value", [-torch.inf, 0.0, 1e4, torch.inf])
def test_sink_without_rows(value: float, backend: str, device: str) -> None:
    case = SparseCase("alone", (1, 1), (3, 2), replace(PREFIX, span=128), sink=(value,))
    out, lse = run_or_skip(mqa_sparse, case.make(device), backend)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
def test_invariance(backend: str, device: str) -> None:
    """Another order of the rows, slots for positions, segments swapped: the same answer."""
    case = SparseCase("invariance", (2, 1, 3), (70, 33, 9), POSITIONS)
    first = case.make(device)
    expected = run_or_skip(mqa_sparse, first, backend)
    exact = first.double().run(mqa_sparse, backend="reference")

    shuffled = first.clone()
    rows, row_lens = shuffled["rows"], shuffled["row_lens"]
    past = torch.arange(rows.shape[1], device=device) >= row_lens[:, None]
    rows.masked_fill_(past, -1)
    row_lens.fill_(rows.shape[1])
    order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(1))
    rows.copy_(rows[:, order.to(device)])
    assert_within_budget(shuffled.run(mqa_sparse, backend=backend), exact, expected)

    slots = replace(case, first=SLOTS).make(device)
    assert torch.equal(slots["q_latent"], first["q_latent"])
    assert_within_budget(run_or_skip(mqa_sparse, slots, backend), exact, expected)

    pair = SparseCase("pair", (2, 1), (70, 33), RING, COMPRESSED).make(device)
    together = run_or_skip(mqa_sparse, pair, backend)
    swapped = pair.tensors | {
        name: pair[name.removesuffix("_2") if name.endswith("_2") else name + "_2"]
        for name in ("cache", "kv_scale", "block_table", "cache_2", "kv_scale_2", "block_table_2")
    }
    swapped["rows"], swapped["row_lens"] = swapped.pop("rows_2"), swapped.pop("row_lens_2")
    scalars = {**pair.scalars, "segments": pair.scalars["segments"][::-1]}
    actual = run_or_skip(mqa_sparse, SparseInputs(swapped, scalars, pair.widen), backend)
    assert_within_budget(actual, pair.double().run(mqa_sparse, backend="reference"), together)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("cut", [0, 1, 8, 20, 21])
def test_two_calls_merge_into_one(cut: int, backend: str, device: str) -> None:
    inputs = SparseCase("cut", (2, 1, 1), (70, 33, 4), POSITIONS).make(device)
    expected = run_or_skip(mqa_sparse, inputs, backend)
    exact = inputs.double().run(mqa_sparse, backend="reference")
    halves = []
    for columns, row_lens in (
        (slice(cut), inputs["row_lens"].clamp(max=cut)),
        (slice(cut, None), (inputs["row_lens"] - cut).clamp(min=0)),
    ):
        changed = {"rows": inputs["rows"][:, columns], "row_lens": row_lens}
        part = replace(inputs, tensors=inputs.tensors | changed)
        out, lse = run_or_skip(mqa_sparse, part, backend)
        halves += [out.float(), lse]  # rounded once, like one call
    merge_states(*halves)
    assert_within_budget((halves[0], halves[1]), exact, expected)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
def test_two_segments_merge_into_one(backend: str, device: str) -> None:
    """One call with both segments, or a call for each and a merge."""
    both = SparseCase("both", (2, 1, 1), (70, 33, 2), RING, COMPRESSED)
    inputs = both.make(device)
    expected = run_or_skip(mqa_sparse, inputs, backend)
    exact = inputs.double().run(mqa_sparse, backend="reference")
    halves = []
    for suffix, scalar in zip(("", "_2"), inputs.scalars["segments"], strict=True):
        names = ("cache", "kv_scale", "block_table", "rows", "row_lens")
        tensors = {k: inputs[k] for k in ("q_latent", "query_start_loc", "positions")}
        tensors |= {k: inputs[k + suffix] for k in names if k + suffix in inputs.tensors}
        scalars = {**inputs.scalars, "segments": [scalar]}
        out, lse = run_or_skip(mqa_sparse, SparseInputs(tensors, scalars, inputs.widen), backend)
        halves += [out.float(), lse]
    merge_states(*halves)
    assert_within_budget((halves[0], halves[1]), exact, expected)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("kind", ["positions", "window", "prefix"])
def test_every_position_is_dense(kind: str, backend: str, device: str) -> None:
    """With K of at least the context, sparse equals dense."""
    case = PagedCase("dense", (4, 1, 7), (64, 20, 7), format="fp32", dtype=torch.float32)
    dense = case.make(device)
    tokens = SparseCase("", case.query_lens, case.seq_lens).tokens()
    positions = torch.tensor([p for _, p in tokens], device=device)
    tensors = {
        "q_latent": dense["q_latent"],
        "query_start_loc": dense["query_start_loc"],
        "positions": positions,
        "cache": dense["cache"],
        "kv_scale": dense["kv_scale"],
        "block_table": dense["block_table"],
    }
    if kind == "positions":
        every = torch.arange(70, dtype=torch.int32, device=device)
        tensors["rows"] = every.where(every <= positions[:, None], -1)
        tensors["row_lens"] = torch.full_like(positions, 70, dtype=torch.int32)
    span = {"positions": 0, "window": 1_000_000, "prefix": 1}[kind]
    scalars = {
        "segments": [("fp32", kind, span)],
        "C": dense.scalars["C"],
        "scale": dense.scalars["scale"],
    }
    actual = run_or_skip(mqa_sparse, SparseInputs(tensors, scalars, ("q_latent",)), backend)
    expected = dense.run(mqa_paged, backend="reference")
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("kind", ["slots", "positions"])
def test_offsets_beyond_int32(kind: str, backend: str, device: str) -> None:
    """Rows past element 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, D = 60_000, 64, 576
    with poisoned_memory(False):
        cache = torch.empty((N, BS, D), dtype=torch.float8_e4m3fn, device=device)
    assert cache.numel() > 2**31
    part = SegmentCase(kind, K=50, BS=BS, format="fp8")
    near = SparseCase("far", (1,), (100,), part, H=2, C=512, R=64).make(device)
    moved = N - near["cache"].shape[0]
    cache.view(torch.uint8)[moved:] = near["cache"].view(torch.uint8)
    far = near.clone()
    far.tensors["cache"] = cache
    if kind == "slots":
        rows, real = far["rows"], near["rows"] // BS < near["cache"].shape[0]
        rows[real & (rows >= 0)] += moved * BS
        rows[near["rows"] == near["cache"].shape[0] * BS] = N * BS
    else:
        far["block_table"][:, :2] += moved
    near_out = run_or_skip(mqa_sparse, near, backend)
    for actual, expected in zip(far.run(mqa_sparse, backend=backend), near_out, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize(
    "first, H",
    [
        (replace(PACKED, K=150), 3),
        (replace(POSITIONS, BS=16, K=150), 3),
        (replace(PACKED, K=150), 64),
        (replace(LISTED_16, K=150), 64),
    ],
    ids=["packed", "bf16", "packed-64-heads", "bf16-64-heads"],
)
def test_a_token_has_its_own_bits(
    first: SegmentCase, H: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With run_length the same token, alone and among others, gives the same bits; others so many
    that whatever is chosen by their number is chosen differently."""
    if backend == "triton" and device == "cpu":  # as if there were a machine to fill
        monkeypatch.setattr("openmla.backends.triton._launch.multiprocessors", lambda _: 132)
    T = 90 if device == "cuda" or H == 3 else 2
    lens: Any = {"query_lens": (1,) * T, "seq_lens": (140,) * T, "H": H, "contiguous": True}
    width: Any = {"C": 512, "R": 64} if first.format == "fp8_ds_mla" or H > 3 else {}
    inputs = SparseCase("many", first=first, **lens, **width).make(device)
    options = {**inputs.scalars, "run_length": 128}
    whole = run_or_skip(mqa_sparse, replace(inputs, scalars=options), backend)
    alone = dict(inputs.tensors)
    alone["query_start_loc"] = alone["query_start_loc"][:2]
    for name in ("q_latent", "positions", "rows", "row_lens", "block_table"):
        alone[name] = alone[name][:1]
    few = run_or_skip(mqa_sparse, replace(inputs, tensors=alone, scalars=options), backend)
    for many, one in zip(whole, few, strict=True):
        assert torch.equal(many[:1], one)


@pytest.mark.parametrize("backend", BACKENDS["mqa_sparse"])
@pytest.mark.parametrize("H", [3, 64])
def test_a_v4_token_has_its_own_bits(
    H: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of two segments, with a sink."""
    if backend == "triton" and device == "cpu":
        monkeypatch.setattr("openmla.backends.triton._launch.multiprocessors", lambda _: 132)
    T = 90 if device == "cuda" else 8 if H == 3 else 2  # the interpreter takes its time
    lens: Any = {"query_lens": (1,) * T, "seq_lens": (290,) * T, "H": H, "sink": SINKS}
    inputs = SparseCase("many", first=NEAR, second=replace(FAR, K=70), **lens, **V4).make(device)
    options = {**inputs.scalars, "run_length": 64}
    whole = run_or_skip(mqa_sparse, replace(inputs, scalars=options), backend)
    alone = dict(inputs.tensors)
    alone["query_start_loc"] = alone["query_start_loc"][:2]
    for name in ("q_latent", "positions", "block_table", "block_table_2", "rows_2", "row_lens_2"):
        alone[name] = alone[name][:1]
    few = run_or_skip(mqa_sparse, replace(inputs, tensors=alone, scalars=options), backend)
    for many, one in zip(whole, few, strict=True):
        assert torch.equal(many[:1], one)


@pytest.mark.parametrize(
    "parts", [(NEAR, FAR), (PACKED,), (LISTED_16,)], ids=["v4", "packed-v3", "v3"]
)
def test_triton_prompt_has_the_same_bits_every_time(
    parts: tuple[SegmentCase, ...], device: str
) -> None:
    """Warps that hand tiles to one another do not depend on who is first."""
    (T, H, times), last = ((200, 64, 50) if device == "cuda" else (2, 3, 1)), len(parts) - 1
    options: Any = {"C": 512, "R": 0 if last else 64, "contiguous": True, "sink": SINKS}
    case = SparseCase("again", (T,), (3000,), parts[0], parts[1] if last else None, H=H, **options)
    inputs = case.make(device)
    expected = run_or_skip(mqa_sparse, inputs, "triton")
    for _ in range(times):
        for one, other in zip(inputs.run(mqa_sparse, backend="triton"), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in IN_ONE_RUN], ids=str)
def test_triton_in_one_run(case: SparseCase, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that a few tokens fill: no run is merged, a kernel itself knows the sink."""
    monkeypatch.setattr("openmla.backends.triton._launch.multiprocessors", lambda _: 1)
    check_attention(mqa_sparse, case.make(device), "triton")


@pytest.mark.parametrize("first", [PACKED, replace(POSITIONS, BS=16)], ids=["packed", "bf16"])
def test_triton_bits_do_not_depend_on_the_columns_there_are(
    first: SegmentCase, device: str
) -> None:
    """A token of one run, in rows of one run and of more: its sink takes the same share."""
    width: Any = {"C": 512, "R": 64} if first.format == "fp8_ds_mla" else {}
    case = SparseCase("short", (2, 1), (33, 20), first=replace(first, K=64), sink=SINKS, **width)
    inputs = replace(case, contiguous=True).make(device)
    inputs = replace(inputs, scalars={**inputs.scalars, "run_length": 64})
    expected = run_or_skip(mqa_sparse, inputs, "triton")
    wider = dict(inputs.tensors)
    wider["rows"] = torch.nn.functional.pad(wider["rows"], (0, 100), value=-1)
    wider["sink"] = torch.stack((wider["sink"], wider["sink"]), 1)[:, 0]  # not contiguous either
    actual = run_or_skip(mqa_sparse, replace(inputs, tensors=wider), "triton")
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "first", [PACKED, RING, PREFIX, NEAR], ids=["packed", "window", "prefix", "v4"]
)
def test_triton_takes_more_tokens_than_a_grid_holds(
    first: SegmentCase, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's grids have 65535 tokens in their second dimension; as if they had two."""
    widths: dict[str, Any] = {"fp8_ds_mla": {"C": 512, "R": 64}, "fp8_dsv4": {"C": 512, "R": 0}}
    width = widths.get(first.format, {})
    case = SparseCase("tokens", (1, 3, 1), (33, 70, 9), first=replace(first, K=64), **width)
    inputs = replace(case, contiguous=True, padding=2).make(device)
    expected = run_or_skip(mqa_sparse, inputs, "triton")
    monkeypatch.setattr("openmla.backends.triton._launch.TOKENS", 2)
    for one, other in zip(inputs.run(mqa_sparse, backend="triton"), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("run_length", [0, 16])
@pytest.mark.parametrize("wide", [{}, DENSE_64], ids=["", "v3"])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_nan_of_a_row_is_seen(
    backend: str, wide: dict[str, Any], run_length: int, device: str
) -> None:
    """One of many rows: it does not vanish where runs are merged, nor reach other tokens."""
    case = SparseCase("nan", (1, 1), (70, 33), replace(SLOTS, K=64, BS=8), **wide)
    inputs = case.make(device)
    inputs = replace(inputs, scalars={**inputs.scalars, "run_length": run_length})
    slot = int(inputs["rows"][0, 3])
    others = inputs["rows"][1]
    others[others == slot] = -1
    inputs["cache"][slot // 8, slot % 8] = math.nan
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def flat_arguments(inputs: SparseInputs) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """What the registered op takes, for opcheck."""
    names = [
        name + suffix
        for suffix in ("", "_2")
        for name in ("cache", "kv_scale", "block_table", "rows", "row_lens")
    ]
    names = ["q_latent", "query_start_loc", "positions", *names, "sink"]
    scalars = {**inputs.scalars, "run_length": 0, "backend": "reference"}
    parts = scalars.pop("segments")
    for number, name in enumerate(("formats", "kinds", "spans")):
        scalars[name] = [part[number] for part in parts]
    return tuple(inputs.tensors.get(name) for name in names), scalars


@pytest.mark.parametrize(
    "case", [BASE, SparseCase("two", (1, 3), (33, 7), WINDOW, COMPRESSED, sink=SINKS)], ids=str
)
def test_opcheck_and_fullgraph(case: SparseCase, device: str) -> None:
    inputs = case.make(device)
    op = torch.ops.openmla.mqa_sparse.default
    torch.library.opcheck(op, *flat_arguments(inputs))
    torch.compiler.reset()
    compiled = torch.compile(mqa_sparse, fullgraph=True, backend="aot_eager")
    for other in (case, replace(case, query_lens=(5, 2, 1), seq_lens=(44, 9, 3))):
        inputs = other.make(device)
        expected = inputs.run(mqa_sparse, backend="reference")
        for actual, whole in zip(inputs.run(compiled, backend="reference"), expected, strict=True):
            assert torch.equal(actual, whole)


def test_fullgraph_over_several_spans() -> None:
    """V4's kinds of layers differ in the span; one compiled function serves them all."""
    torch.compiler.reset()
    compiled = torch.compile(mqa_sparse, fullgraph=True, backend="aot_eager")
    for span in (4, 8, 128):
        inputs = SparseCase("span", (1, 1), (33, 70), replace(WINDOW, span=span)).make()
        expected = inputs.run(mqa_sparse, backend="reference")
        for actual, whole in zip(inputs.run(compiled, backend="reference"), expected, strict=True):
            assert torch.equal(actual, whole)


PAIR = SparseCase("pair", (1, 1, 1), (33, 7, 70), WINDOW, POSITIONS, sink=SINKS)


def _broken(**changes: Any) -> SparseInputs:
    """PAIR's inputs with one argument replaced, changed by a function of itself, or left out."""
    inputs = PAIR.make()
    for name, change in changes.items():
        if name in inputs.scalars:
            inputs.scalars[name] = change
        elif change is None:
            del inputs.tensors[name]
        else:
            inputs.tensors[name] = change(inputs[name]) if callable(change) else change
    return inputs


def _put(index: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_latent": lambda t: t[0]}, "q_latent must be [T, H, D], got (4, 40)"),
        ({"q_latent": lambda t: t.to(torch.int32)}, "q_latent must be fp16, bf16, fp32 or fp64"),
        (
            {"q_latent": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)},
            "q_latent must be contiguous along its last dimension",
        ),
        ({"positions": lambda t: t.int()}, "positions must be int64, got torch.int32"),
        ({"positions": lambda t: t[:2]}, "positions must be [T] with T=3, got (2,)"),
        ({"positions": lambda t: t.to("meta")}, "positions must be on cpu, got meta"),
        ({"query_start_loc": lambda t: t.long()}, "query_start_loc must be int32"),
        ({"query_start_loc": _put(0, 1)}, "query_start_loc must start with 0"),
        ({"query_start_loc": _put(1, 3)}, "query_start_loc must not fall"),
        ({"query_start_loc": _put(3, 99)}, "query_start_loc must end within the 3 rows"),
        ({"cache": lambda t: t[:, :, :-1]}, "cache must be [N, BS, W] with W=40"),
        ({"cache": lambda t: t.half()}, "cache must be torch.bfloat16 for format bf16"),
        ({"cache": lambda t: t.to("meta")}, "cache must be on cpu, got meta"),
        ({"cache_2": lambda t: t[0]}, "cache must be [N, BS, W], got (16, 40)"),
        ({"kv_scale": lambda t: t.double()}, "kv_scale must be float32, got torch.float64"),
        ({"kv_scale_2": lambda t: t[None]}, "kv_scale must be [], got (1,)"),
        ({"block_table": lambda t: t.long()}, "block_table must be int32, got torch.int64"),
        ({"block_table": lambda t: t[:2]}, "block_table must be [B, M] with B=3"),
        ({"block_table_2": lambda t: t[0]}, "block_table must be [B, M], got (7,)"),
        ({"rows_2": lambda t: t.long()}, "rows must be int32, got torch.int64"),
        ({"rows_2": lambda t: t[:2]}, "rows must be [T, K] with T=3, got (2, 21)"),
        ({"rows_2": lambda t: t.T.contiguous().T}, "rows must be contiguous along its last"),
        ({"rows_2": lambda t: t.to("meta")}, "rows must be on cpu, got meta"),
        ({"row_lens_2": lambda t: t.long()}, "row_lens must be int32, got torch.int64"),
        ({"row_lens_2": lambda t: t[:2]}, "row_lens must be [T] with T=3, got (2,)"),
        ({"sink": lambda t: t[:3]}, "sink must be [H] with H=4, got (3,)"),
        ({"sink": lambda t: t.bfloat16()}, "sink must be float32, got torch.bfloat16"),
        ({"C": 41}, "C must be within 1..D=40, got 41"),
        ({"C": 0}, "C must be within 1..D=40, got 0"),
        ({"block_table": None}, "block_table must be given for kind window"),
        ({"block_table_2": None}, "block_table must be given for kind positions"),
        ({"rows_2": None}, "rows must be given for kind positions"),
        ({"row_lens_2": None}, "row_lens must be given for kind positions"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        _broken(**changes).run(mqa_sparse, backend="reference")
    assert f"mqa_sparse: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (("window", 24), ("page", 0), "kind must be one of slots, positions, window, prefix, got"),
        (("", 24), ("positions", 0), "kind must be one of slots, positions, window, prefix, got"),
        (("window", 24), ("two words", 0), "kind must be one of slots, positions, window, prefix"),
        (("window", 0), ("positions", 0), "span must be given for kind window"),
        (("prefix", 0), ("positions", 0), "span must be given for kind prefix"),
        (("window", -4), ("positions", 0), "span must be positive, got -4"),
        (("window", 24), ("positions", 5), "span must not be given for kind positions"),
        (("window", 24), ("slots", 0), "block_table must not be given for kind slots"),
        (("window", 24), ("window", 3), "rows must not be given for kind window"),
        (("window", 24), ("prefix", 3), "rows must not be given for kind prefix"),
        (("positions", 0), ("positions", 0), "rows must be given for kind positions"),
    ],
)
def test_bad_kind(first: tuple[str, int], second: tuple[str, int], message: str) -> None:
    segments = [("bf16", *first), ("bf16", *second)]
    with pytest.raises((ShapeError, ConfigError)) as error:
        _broken(segments=segments).run(mqa_sparse, backend="reference")
    assert f"mqa_sparse: {message}" in str(error.value)


@pytest.mark.parametrize("format", ["fp4", "index_fp8", "", "fp8 ds"])
def test_unknown_format(format: str) -> None:
    with pytest.raises(ConfigError, match=f"cache: format '{format}' is not known.* Known: fp32"):
        _broken(segments=[(format, "window", 24), ("bf16", "positions", 0)]).run(
            mqa_sparse, backend="reference"
        )


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match=r"mqa_sparse: backend 'cuda' is not known\. Known: auto"):
        _broken().run(mqa_sparse, backend="cuda")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_grad_mode(mode: Any) -> None:
    """Only inputs that require grad are refused, not the mode."""
    with torch.inference_mode(False):
        inputs = BASE.make()
        with mode():
            out, _ = inputs.run(mqa_sparse, backend="reference")
    assert not out.requires_grad


@pytest.mark.parametrize("name", ["q_latent", "sink"])
def test_grad_is_refused(name: str) -> None:
    with torch.inference_mode(False):
        inputs = _broken(**{name: lambda t: t.clone().requires_grad_()})
        with pytest.raises(UnsupportedError, match=r"mqa_sparse: .* torch\.inference_mode\(\)"):
            inputs.run(mqa_sparse, backend="reference")


def test_cost() -> None:
    decode = cost(2048, 1, H=16, D=576, C=512, format="fp8_ds_mla", itemsize=2)
    assert decode.bytes == 2048 * (656 + 4) + 16 * (1088 * 2 + 4)
    assert decode.flops == 2 * 2048 * 16 * 1088
    assert cost(0, 3, H=1, D=4, C=2, format="bf16", itemsize=2) == (3 * (12 + 4), 0)


@pytest.mark.parametrize("name", ["v4-many-tokens", "packed-many-tokens"])
def test_triton_decodes_rows_of_many_tokens_once(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to so many bytes, and not with fixed runs."""
    module = import_module("openmla.backends.triton._decoded")
    decodes: list[str] = []

    def gather(*args: Any, format: str) -> None:
        decodes.append(format)
        run(*args, format=format)

    run = module.cache_gather.run
    monkeypatch.setattr(module.cache_gather, "run", gather)
    case = next(case for case in CASES if case.name == name)
    inputs = case.make(device)
    segments = 1 if case.second is None else 2
    whole = run_or_skip(mqa_sparse, inputs, "triton")
    assert len(decodes) == segments
    fixed = replace(inputs, scalars={**inputs.scalars, "run_length": 64})
    run_or_skip(mqa_sparse, fixed, "triton")
    monkeypatch.setattr(module, "MOST", 1000)
    direct = run_or_skip(mqa_sparse, inputs, "triton")
    assert len(decodes) == segments
    for one, other in zip(whole, direct, strict=True):
        # values up to 4 in bf16, one step apart: 4 * 2**-8; test_contract holds each to its budget
        assert torch.allclose(one.float(), other.float(), atol=0.02)
