"""Cases of mqa_paged that several test files share."""

from __future__ import annotations

from typing import Any

import torch

from openmla.testing import PagedCase

# Rows of V3 as caches have them, which kernels of their own read; tails of pages hold NaN.
V3_ROWS: dict[str, Any] = {"C": 512, "R": 64, "contiguous": True}
V3_FP8: dict[str, Any] = {**V3_ROWS, "format": "fp8", "kv_scale": 0.037}
V3_FP8_FP16: dict[str, Any] = {**V3_FP8, "dtype": torch.float16}
V3_CASES = [
    PagedCase("v3-rows", (1,) * 5, (300, 33, 64, 129, 900), H=16, BS=64, **V3_ROWS),
    PagedCase("v3-verify", (3, 1, 8), (70, 200, 8), H=20, BS=16, **V3_ROWS),
    PagedCase("v3-not-causal", (2, 5), (260, 5), H=64, BS=128, causal=False, **V3_ROWS),
    PagedCase("v3-few-keys", (3, 2, 9, 1), (2, 0, 40, 65), H=16, BS=64, causal=False, **V3_ROWS),
    PagedCase("v3-padding", (1, 0, 2), (400, 0, 700), H=128, BS=64, padding=3, **V3_ROWS),
    PagedCase("v3-empty", (0, 1), (9, 1), H=3, BS=8, **V3_ROWS),
    PagedCase("v3-long-verify", (40, 1), (500, 3000), H=16, BS=64, **V3_ROWS),
    PagedCase("v3-fixed", (1, 2, 1), (1500, 40, 700), H=16, BS=64, run_length=256, **V3_ROWS),
    PagedCase("v3-gaps", (1, 0, 1, 1), (300, 9, 64, 33), H=64, BS=64, padding=2, **V3_ROWS),
    PagedCase(
        "v3-64-fp16", (1, 1), (200, 64), H=8, BS=64, format="fp16", dtype=torch.float16, **V3_ROWS
    ),
    PagedCase(
        "v3-fp16", (4, 1), (130, 500), H=8, BS=32, format="fp16", dtype=torch.float16, **V3_ROWS
    ),
    # fp8 rows: up to 16 query rows, then more
    PagedCase("v3-fp8", (1,) * 5, (300, 33, 64, 129, 900), H=16, BS=64, **V3_FP8),
    PagedCase("v3-fp8-verify", (3, 1, 2), (70, 200, 8), H=5, BS=16, **V3_FP8),
    PagedCase("v3-fp8-fp16", (4, 0, 1), (130, 0, 500), H=3, BS=32, padding=2, **V3_FP8_FP16),
    PagedCase("v3-fp8-fixed", (1, 2), (1500, 40), H=16, BS=64, run_length=256, **V3_FP8),
    PagedCase("v3-fp8-many", (1, 0, 2), (400, 0, 700), H=128, BS=64, **V3_FP8),
    PagedCase("v3-fp8-pages", (2, 1), (260, 5), H=20, BS=8, **V3_FP8),
    PagedCase("v3-fp8-not-causal", (2, 5), (260, 5), H=64, BS=128, causal=False, **V3_FP8),
]

# e4m3 queries, over the same
QUERIES: dict[str, Any] = {"dtype": torch.float8_e4m3fn}
E4M3: dict[str, Any] = {**QUERIES, "format": "fp8", "kv_scale": 0.037}
V3_E4M3: dict[str, Any] = {**E4M3, **V3_ROWS}
ONE: dict[str, Any] = {"q_scale": "tensor"}
EACH: dict[str, Any] = {"q_scale": "heads"}
E4M3_CASES = [
    PagedCase("e4m3", (1, 2), (33, 70), **E4M3, **ONE),
    PagedCase("e4m3-heads", (1, 0, 3), (33, 0, 70), H=17, padding=2, **E4M3, **EACH),
    PagedCase("e4m3-fixed", (1, 2), (90, 33), run_length=32, **E4M3, **EACH),
    PagedCase("e4m3-not-causal", (4, 3), (2, 0), causal=False, **E4M3, **ONE),
    PagedCase("e4m3-packed", (1, 2), (33, 70), C=128, format="fp8_ds_mla", **QUERIES, **EACH),
    PagedCase("e4m3-nothing", (), (), **E4M3, **EACH),
    PagedCase("v3-e4m3", (1,) * 5, (300, 33, 64, 129, 900), H=16, BS=64, **V3_E4M3, **EACH),
    PagedCase("v3-e4m3-one", (1,) * 3, (300, 65, 128), H=16, BS=64, **V3_E4M3, **ONE),
    PagedCase("v3-e4m3-verify", (3, 1, 2), (70, 200, 8), H=5, BS=16, **V3_E4M3, **EACH),
    PagedCase("v3-e4m3-fixed", (1, 2), (1500, 40), H=16, BS=64, run_length=256, **V3_E4M3, **EACH),
    PagedCase("v3-e4m3-many", (1, 0, 2), (400, 0, 700), H=128, BS=64, **V3_E4M3, **EACH),
    PagedCase("v3-e4m3-32", (1, 1), (400, 70), H=32, BS=64, padding=3, **V3_E4M3, **ONE),
    PagedCase("v3-e4m3-pages", (2, 1), (260, 5), H=20, BS=8, **V3_E4M3, **EACH),
    PagedCase("v3-e4m3-not-causal", (2, 5), (260, 5), H=64, BS=128, causal=False, **V3_E4M3, **ONE),
    PagedCase("v3-e4m3-long", (1,) * 3, (9000, 5000, 130), H=64, BS=64, **V3_E4M3, **EACH),
    PagedCase(
        "v3-e4m3-packed",
        (1, 2),
        (300, 65),
        H=64,
        BS=64,
        format="fp8_ds_mla",
        **V3_ROWS,
        **QUERIES,
        **EACH,
    ),
    PagedCase("v3-e4m3-outliers", (1, 1), (400, 90), H=64, BS=64, outliers=30.0, **V3_E4M3, **EACH),
]
