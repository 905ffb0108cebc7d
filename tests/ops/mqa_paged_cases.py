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
