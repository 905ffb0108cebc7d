"""Cases of mqa_sparse that several of its test files share, and the op in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openmla.cache.format import get_format
from openmla.ops import Segment, mqa_sparse
from openmla.testing import SegmentCase, SparseCase, SparseInputs

SLOTS = SegmentCase("slots")
POSITIONS = SegmentCase("positions")
WINDOW = SegmentCase("window", span=24)
PREFIX = SegmentCase("prefix", span=4)
RING = replace(WINDOW, ring=True)
COMPRESSED = replace(POSITIONS, ratio=4, BS=4)
SINKS = (-torch.inf, 0.0, 40.0, torch.inf, -3.0)
SHORT: Any = {"query_lens": (1, 2), "seq_lens": (33, 70)}
WIDE: Any = {**SHORT, "C": 512, "R": 64}
WIDER: Any = {**SHORT, "C": 1024, "R": 64, "H": 18}

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
    SparseCase("dots3-widths", **WIDER, first=replace(WINDOW, BS=64)),
    SparseCase("dots3-widths-fp8", **WIDER, first=replace(WINDOW, format="fp8", kv_scale=0.037)),
    SparseCase("dots3-widths-packed", **WIDER, first=replace(WINDOW, format="fp8_ds_mla")),
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
        "v3-64-heads",
        (1, 2),
        (33, 70),
        replace(SLOTS, BS=64),
        H=64,
        sink=SINKS,
        padding=2,
        C=512,
        R=64,
        contiguous=True,
    ),
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
    SparseCase("rows-of-512-prompt", **{**PROMPT, "R": 0}, first=LISTED_16, H=64, sink=SINKS),
    SparseCase(
        "rows-of-512-slots", **{**MANY, "R": 0}, first=replace(LISTED_16, kind="slots"), H=128
    ),
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
# What SM90's kernels of 64 heads are for, which are not interpreted: the same as fewer heads there.
MANY_HEADS = (
    "v3-prompt", "packed-v3-prompt", "v4-prompt", "v4-prompt-prefix", "v4-33-heads",
    "v3-slots-100-heads", "packed-v3-100-heads", "v4-100-heads", "rows-of-512-prompt",
    "rows-of-512-slots",
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
