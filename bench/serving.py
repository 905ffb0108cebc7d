"""Shapes that servers have, for bench.latent: a fixed list, and medians of the measured ratios.

Dense decode covers uneven lengths, odd batch sizes and head counts, short contexts and several
query tokens (draft tokens). Each value occurs at least three times; the full product would have
hundreds of shapes. Pages have 64 rows, the only size that FlashMLA supports. About two in seven
shapes have pages of 16 rows, with FA3 as the only baseline.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bench.decode_batch import ANY, ONE_LONG

HEADS = (8, 12, 16, 20, 32, 40, 64, 96, 128)
KEYS = (
    "1x65536", "2x40000", "3x30000", "4x20000", "8x4096", "12x3000", "24x6000", "32x2048",
    "48x1000", "96x2500", "200x700", f"64x{ANY}", f"200x{ANY}", ONE_LONG,
)  # fmt: skip
TOKENS = (1, 1, 2, 3, 4)  # per request
FP8_KEYS = ("2x40000", "24x6000", "96x2500", f"64x{ANY}")
FP8_HEADS = (16, 32, 64, 128)
BATCHES = (1, 2, 8, 16, 33, 67, 96, 133, 200, 300)
SPARSE_HEADS = (16, 64, 128, 32)
GROUPS = ("decode", "several", "fp8", "sparse", "v4")


def dense_shapes() -> Iterator[tuple[str, str, int, int, int, str]]:
    """Name, lengths, heads, query tokens per request, rows per page, cache format."""
    for i, keys in enumerate(KEYS):
        for j, new in enumerate(TOKENS):
            H = HEADS[(2 * i + 5 * j) % len(HEADS)]
            page = 16 if (i + j) % 7 < 2 else 64
            group = "decode" if new == 1 else "several"
            yield f"serving-{group}-h{H}x{new}-p{page}-{keys}", keys, H, new, page, "bf16"
    for i, keys in enumerate(FP8_KEYS):
        for H in FP8_HEADS[i % 2 :: 2]:
            yield f"serving-fp8-h{H}-{keys}", keys, H, 1, 64, "fp8"


def sparse_shapes() -> Iterator[tuple[str, str, int, int]]:
    """Name, "sparse" or "v4", heads, tokens (one per request)."""
    for i, B in enumerate(BATCHES):
        for shift, kind in enumerate(("sparse", "v4")):
            H = SPARSE_HEADS[(i + shift) % len(SPARSE_HEADS)]
            yield f"serving-{kind}-h{H}-b{B}", kind, H, B


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """By group: the median ratio to the faster baseline and to FlashMLA, and how many are low."""
    for group in GROUPS:
        for who in ("openmla", "openmla e4m3"):
            mine = [
                row for row in rows
                if row["shape"].startswith(f"serving-{group}-") and row["contender"] == who
            ]  # fmt: skip
            ratios = {row["shape"]: row["ratio"] for row in mine if row["ratio"] is not None}
            if not ratios:
                continue
            flash = [row["to_flashmla"] for row in mine if row.get("to_flashmla") is not None]
            low = sum(ratio < 0.95 for ratio in ratios.values())
            median = statistics.median(ratios.values())
            to_flash = f", to FlashMLA {statistics.median(flash):.2f}" if flash else ""
            yield (
                f"{group}, {who}: {len(ratios)} {'shape' if len(ratios) == 1 else 'shapes'}, "
                f"median {median:.2f}{to_flash}, least {min(ratios.values()):.2f}, "
                f"{low} below 0.95"
            )
