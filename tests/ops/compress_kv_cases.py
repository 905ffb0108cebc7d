"""Cases of compress_kv: formats, ways to cut a sequence into steps, drafts, scores, widths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from openmla.testing import INDEX_FORMATS, LATENT_FORMATS
from tests.ops.compress_kv_story import NOBODY, Feed, PoolCase, Step


def cut(total: int, *edges: int) -> tuple[Step, ...]:
    """One sequence, cut before each of the positions."""
    bounds = [0, *edges, total]
    return tuple((Feed(0, b - a),) for a, b in pairwise(bounds))


def token_by_token(total: int) -> tuple[Step, ...]:
    return cut(total, *range(1, total))


# Order changes from step to step; some requests bring nothing, some belong to nobody.
MIXED: tuple[Step, ...] = (
    (Feed(2, 6), Feed(NOBODY, 5), Feed(0, 9), Feed(1, 0)),
    (Feed(1, 3), Feed(2, 0), Feed(0, 1)),
    (Feed(NOBODY, 1), Feed(0, 2), Feed(1, 1), Feed(NOBODY, 0), Feed(2, 17)),
    (Feed(1, 0),),
    (Feed(2, 1), Feed(1, 8), Feed(0, 4), Feed(3, 4)),
)
# Drafts: all of them lost, some, none, and twice over; the last entries finish late.
SPECULATIVE: tuple[Step, ...] = (
    (Feed(0, 5, 3), Feed(1, 1, 3)),
    (Feed(1, 0, 3), Feed(0, 1, 2)),
    (Feed(0, 0, 2), Feed(1, 4, 0)),
    (Feed(0, 3, 1), Feed(1, 1, 3)),
    (Feed(0, 1, 3), Feed(1, 2, 1)),
    (Feed(0, 4, 0), Feed(1, 4, 0)),
)
# More requests than a kernel may look at in one go; some of these bring nothing.
MANY: tuple[Step, ...] = (tuple(Feed(b, 5 * (b % 7 == 0)) for b in range(140)),)
FOLDED_8: dict[str, Any] = {"overlap": False, "ratio": 8}
FOLDED_3: dict[str, Any] = {"overlap": False, "ratio": 3}
V4_MAIN: dict[str, Any] = {"D": 512, "R": 64}
V4_128: dict[str, Any] = {"overlap": False, "ratio": 128, "D": 40, "R": 4, "BS": 2}


def stored(*dtypes: torch.dtype) -> list[PoolCase]:
    """Every kind of format, filled from these."""
    return [
        PoolCase(f"{form}-{format}-{str(dtype)[6:]}", MIXED, format, dtype, **more)
        for form, more in (("overlap", {}), ("folded", FOLDED_3))
        for format in ("fp32", "bf16", "fp16", "fp8", "index_fp32", "index_bf16", "index_fp8")
        for dtype in dtypes
    ]


BASE = PoolCase("base", MIXED, format="bf16")
HALVES = stored(torch.bfloat16, torch.float16)
CASES = [
    BASE,
    *HALVES,
    *stored(torch.float32, torch.float64),
    *(
        PoolCase(f"{form}-{name}", steps, dtype=torch.float32, spare=spare, **more)
        for form, more in (
            ("overlap-4", {}),
            ("overlap-3", {"ratio": 3}),
            ("overlap-1", {"ratio": 1}),
            ("folded-8", FOLDED_8),
            ("folded-3", FOLDED_3),
            ("folded-1", {"overlap": False, "ratio": 1}),
        )
        for name, steps, spare in (
            ("whole", cut(26), 0),
            ("tokens", token_by_token(26), 0),
            ("tokens-spare", token_by_token(26), 3),
            ("edges", cut(26, 8, 15, 17, 24, 25), 0),
            ("edges-after", cut(26, 1, 9, 16, 23), 1),
            ("mixed", MIXED, 0),
            ("mixed-spare", MIXED, 30),
            ("speculative", SPECULATIVE, 3),
            ("speculative-spare", SPECULATIVE, 8),
        )
    ),
    *(
        PoolCase(f"folded-128-{name}", steps, dtype=torch.float32, spare=spare, **V4_128)
        for name, steps, spare in (
            ("whole", cut(300), 0),
            ("tokens", token_by_token(260), 0),
            ("at-edges", cut(300, 128, 256), 0),
            ("before-edges", cut(300, 127, 255, 256), 5),
            ("after-edges", cut(300, 1, 129, 257), 5),
            ("longer-than-state", cut(300, 100), 199),
        )
    ),
    *(
        PoolCase(f"{form}-scores-{scores}-{name}", steps, scores=scores, **more)
        for scores in ("far apart", "rising", "falling")
        for form, more, total in (("overlap-4", {}, 17), ("folded-128", V4_128, 256))
        for name, steps in (("whole", cut(total)), ("tokens", token_by_token(total)))
    ),
    PoolCase("rope-everything", MIXED, R=16),
    PoolCase("no-rope", MIXED, R=0),
    PoolCase("large-eps", MIXED, eps=0.5),
    PoolCase("block-1", MIXED, BS=1),
    PoolCase("hadamard", MIXED, hadamard=True),
    PoolCase("hadamard-folded", MIXED, hadamard=True, **FOLDED_8),
    PoolCase("width-2", MIXED, D=2, R=2, hadamard=True),
    PoolCase("width-odd", MIXED, D=7, R=2),
    PoolCase("low-precision-parameters", MIXED, parameters=torch.bfloat16),
    PoolCase("float64-table", MIXED, angles=torch.float64),
    PoolCase("no-surplus", MIXED, surplus=0),
    PoolCase("many-requests", MANY, D=4, R=2),
    PoolCase("many-requests-folded", MANY, D=4, R=2, **FOLDED_3),
    PoolCase("width-odd-packed", cut(14, 9), "fp8_ds_mla", D=133, R=4),
    *(
        PoolCase(f"{name}-{format}", cut(14, 9), format, D=128, R=64, hadamard=name == "turned")
        for name in ("v4-index", "turned")
        for format in INDEX_FORMATS
    ),
    *(
        PoolCase(f"width-192-{format}", cut(14, 9), format, D=192, R=64)
        for format in LATENT_FORMATS
    ),
    PoolCase("v4-main-4", cut(14, 9), "fp8_dsv4", torch.float32, **V4_MAIN),
    PoolCase("v4-main-128", cut(129, 100), "fp8_dsv4", torch.float32, **{**V4_128, **V4_MAIN}),
]
# These take minutes in Triton's interpreter and show nothing that the others do not.
SLOW_CASES = [
    case.name
    for case in CASES
    if case in HALVES
    or case.ratio == 1
    or case.scores in ("far apart", "falling")
    or any(feed.lost for feed in case.feeds)
    or len(case.steps) > 200
]
EXACT_CASES = [
    case for case in CASES if case.format in ("fp32", "index_fp32") and case.dtype != torch.float64
]

FORMS = [
    pytest.param({"ratio": 4, "overlap": True, "spare": 5}, id="overlap-4"),
    pytest.param({"ratio": 3, "overlap": True, "spare": 3}, id="overlap-3"),
    pytest.param({"ratio": 8, "overlap": False, "spare": 5}, id="folded-8"),
    pytest.param({"ratio": 3, "overlap": False, "spare": 4}, id="folded-3"),
]
