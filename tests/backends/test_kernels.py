"""Which of several kernels runs a problem, by the rows of a backend's own table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import PRESETS, BlockPool, allocate_cache, make_plan
from openmla.backends import Problem, choose_backend, kernel_of
from openmla.errors import UnsupportedError
from openmla.plan import Batch

V3 = Problem(
    "mqa_sparse", "cuda", (9, 0), 132, torch.bfloat16, "fp8_ds_mla", 128, 576, 512, tokens=64,
    kinds=("slots",),
)  # fmt: skip
V4 = replace(V3, format="fp8_dsv4", H=64, D=512, kinds=("window", "positions"))
CHOICES = {
    "many heads": V3,
    "few heads": replace(V3, H=16),
    "few heads for one token": replace(V3, tokens=1),
    "many heads for one token, fixed runs": replace(V3, tokens=1, run_length=64),
    "many heads over bf16": replace(V3, format="bf16"),
    "many heads V4": V4,
    "few heads V4": replace(V4, H=16),
    "few heads V4 for one token": replace(V4, tokens=1),
    "triton: odd rows": replace(V3, aligned=V3.aligned - {"rows"}),
    "triton: odd pages": replace(V4, aligned=V4.aligned - {"pages"}),
    "triton: many heads before SM90": replace(V3, capability=(8, 0), tokens=512),
    "triton: 16 heads over bf16": replace(V3, H=16, format="bf16"),
    "triton: float16": replace(V3, dtype=torch.float16),
    "triton: another width": replace(V3, D=320, C=256, format="bf16"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_that_runs(name: str) -> None:
    pytest.importorskip("triton")
    problem = CHOICES[name]
    backend = choose_backend(problem)
    if name.startswith("triton"):
        assert (backend, kernel_of(problem, backend)) == ("triton", "")
    else:
        assert backend == "gluon" and name.startswith(kernel_of(problem, backend))


E4M3 = Problem(
    "mqa_paged", "cuda", (9, 0), 132, torch.float8_e4m3fn, "fp8", 128, 576, 512, BS=64, tokens=64,
    max_query_len=1, head_scales=True,
)  # fmt: skip


SPARSE: dict[str, Any] = {"op": "mqa_sparse", "format": "fp8_ds_mla", "kinds": ("slots",)}


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "gluon"),
        ({"H": 16}, "gluon"),
        ({"BS": 8}, "triton"),
        ({"capability": (8, 9)}, "triton"),
        ({"capability": (12, 0)}, "triton"),
        ({"format": "fp8_ds_mla"}, "triton"),
        ({**SPARSE, "aligned": frozenset()}, "triton"),
        (SPARSE, "gluon"),
        ({**SPARSE, "H": 16}, "gluon"),
        ({**SPARSE, "H": 16, "capability": (8, 9)}, "gluon"),
        ({**SPARSE, "H": 16, "capability": (12, 0)}, "gluon"),
        ({**SPARSE, "format": "fp8"}, "triton"),
        ({**SPARSE, "H": 16, "capability": (8, 0)}, "reference"),
        ({"capability": (8, 0)}, "reference"),  # which the op refuses on a GPU
    ],
)
def test_auto_backend_of_e4m3_queries(changes: dict[str, Any], backend: str) -> None:
    pytest.importorskip("triton")
    assert choose_backend(replace(E4M3, **changes)) == backend


@pytest.mark.parametrize(
    ("H", "tokens", "rows"), [(1, 1, 16), (16, 1, 16), (16, 2, 32), (32, 1, 32), (33, 1, 64)]
)
def test_rows_of_e4m3_tiles(H: int, tokens: int, rows: int) -> None:
    gluon = pytest.importorskip("openmla.backends.gluon.mqa_paged")
    assert gluon.tile_of("fp8", H, 64, tokens, 0, e4m3=True).rows == rows
    assert gluon.tile_of("fp8", H, 64, 99, 256, e4m3=True).rows == max(
        16, 16 << (H > 16) << (H > 32)
    )


def test_a_named_backend_says_why_it_cannot() -> None:
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedError, match=r"gluon +.*many heads needs SM90"):
        choose_backend(replace(V3, capability=(8, 0), format="bf16"), "gluon")
    assert (
        choose_backend(replace(V3, H=16, format="bf16"), "gluon") == "gluon"
    )  # slower, but it can


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
def test_each_call_chooses_unless_named(backend: str) -> None:
    """Rows of another layer may lie otherwise, and a prompt's last turn is short."""
    config = PRESETS["tiny-v3.2"]
    cache = allocate_cache(config, num_blocks=8, block_size=16, format="fp32")
    pool = BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 60})
    table, slots = pool.block_table(["a"]), pool.slot_mapping([("a", 0, 60)])
    plan = make_plan(Batch([60], [60], table, slots), config, cache, backend=backend)
    called = plan.backend("mqa_sparse")
    assert called == ("reference" if backend == "reference" else "auto")
