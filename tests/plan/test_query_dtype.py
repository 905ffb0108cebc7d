"""make_plan(query_dtype="fp8"): queries are quantised for absorbed rows alone; what is refused."""

from __future__ import annotations

import pytest
import torch

from openmla import (
    PRESETS,
    Batch,
    ConfigError,
    LayerCache,
    MLAConfig,
    UnsupportedError,
    absorb,
    allocate_cache,
    attend_latent,
    attend_step,
    make_plan,
    plan_buffers,
)
from openmla.ops import mqa_paged, quantize_queries
from openmla.plan import Plan
from tests.attention.known import DENSE, SPARSE, C, Requests

DECODE = ([1, 1, 2], [60, 17, 33])


def stored(requests: Requests) -> tuple[LayerCache, Plan]:
    """The requests' keys in an fp8 cache, and the plan of their step."""
    plain, batch = requests.part(written=True)
    assert plain.latent is not None
    cache = allocate_cache(
        DENSE, num_blocks=plain.latent.num_blocks, block_size=4, format="fp8", kv_scale=0.05,
        device=requests.device,
    )  # fmt: skip
    assert cache.latent is not None
    rows = plain.latent.data.flatten(0, 1).float().nan_to_num()
    slots = torch.arange(len(rows), device=rows.device)
    cache.latent.layout.write(cache.latent.data, slots, rows, cache.latent.kv_scale)
    plan = make_plan(batch, DENSE, cache, dtype=torch.float32, form="absorbed", query_dtype="fp8")
    return cache, plan


def test_absorbed_queries_are_quantised(device: str) -> None:
    """The step is quantize_queries and mqa_paged, as called by hand; near the 16-bit one."""
    requests = Requests(*DECODE, device=device)
    cache, plan = stored(requests)
    q = requests.q_latent.float()
    out, lse = attend_latent(q, cache, plan)
    assert out.dtype == torch.float32 and plan.decode is not None and cache.latent is not None
    values, scale = quantize_queries(q[..., :C], q[..., C:])
    wanted, wanted_lse = mqa_paged(
        values, cache.latent.data, cache.latent.kv_scale, plan.decode.block_table,
        plan.decode.seq_lens, plan.decode.query_start_loc, scale, format="fp8", C=C,
        scale=DENSE.scale, causal=True, max_query_len=2,
    )  # fmt: skip
    assert torch.equal(out, wanted.float()) and torch.equal(lse, wanted_lse)
    _, batch = requests.part(written=True)
    usual = make_plan(batch, DENSE, cache, dtype=torch.float32, form="absorbed")
    exact, _ = attend_latent(q, cache, usual)
    error = float((out - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.05


def test_step_and_explain(device: str) -> None:
    requests = Requests(*DECODE, device=device)
    cache, plan = stored(requests)
    projected = type(requests.projected)(*(part.float() for part in requests.projected))
    absorbed = absorb(requests.weight.float(), DENSE)
    out = attend_step(projected, absorbed, cache, plan)
    assert out.dtype == torch.float32 and out.isfinite().all()
    told = plan.explain()
    assert "queries   absorbed ones in e4m3, a scale per token and head" in told
    assert "\nquantize_queries " in told
    assert plan.problem("mqa_paged").dtype == torch.float8_e4m3fn
    assert plan.problem("cache_write").dtype == torch.float32


def test_only_absorbed_rows_are() -> None:
    requests = Requests([40], [40])
    cache, _ = stored(requests)
    _, batch = requests.part()
    plan = make_plan(batch, DENSE, cache, form="expanded", query_dtype="fp8")
    assert "quantize_queries" not in plan.backends


def test_into_buffers(device: str) -> None:
    requests = Requests([1, 1, 1], [60, 17, 33], device=device)
    cache, plan = stored(requests)
    _, batch = requests.part(written=True)
    buffers = plan_buffers(DENSE, cache, max_requests=3, max_tokens=3, max_blocks=20)
    captured = make_plan(batch, DENSE, cache, dtype=torch.float32, into=buffers, query_dtype="fp8")
    q = requests.q_latent.float()
    for found, wanted in zip(
        attend_latent(q, cache, captured), attend_latent(q, cache, plan), strict=True
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("config", "format", "query_dtype", "message"),
    [
        (DENSE, "fp8", "bf16", "query_dtype must be None or 'fp8', got 'bf16'"),
        (DENSE, "bf16", "fp8", "query_dtype must be None over a cache of bf16, got 'fp8'"),
        (SPARSE, "fp32", "fp8", "query_dtype must be None over a cache of fp32, got 'fp8'"),
    ],
)
def test_refused(config: MLAConfig, format: str, query_dtype: str, message: str) -> None:
    requests = Requests([1], [9], config)
    _, batch = requests.part()
    cache = allocate_cache(config, num_blocks=8, block_size=4, format=format)
    with pytest.raises(ConfigError, match=f"plan: {message}"):
        make_plan(batch, config, cache, query_dtype=query_dtype)


def test_float64_is_refused() -> None:
    """lse of float64 queries is float64, which e4m3 ones do not have."""
    requests = Requests(*DECODE)
    cache, _ = stored(requests)
    _, batch = requests.part(written=True)
    with pytest.raises(ConfigError, match=r"plan: query_dtype must be None for queries in torch\."):
        make_plan(batch, DENSE, cache, dtype=torch.float64, query_dtype="fp8")


def test_refused_by_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    from openmla.plan.checks import check_query_dtype

    monkeypatch.setattr("openmla.ops._queries.capability", lambda _: (8, 6))
    with pytest.raises(UnsupportedError, match=r"plan: fp8 queries must be on SM89 or newer.*SM86"):
        check_query_dtype("plan", DENSE, "fp8", "fp8", torch.device("cuda"))
    v4 = next(config for config in PRESETS.values() if config.compressor is not None)
    with pytest.raises(ConfigError, match="query_dtype must be None for"):
        check_query_dtype("plan", v4, "fp8", "fp8_dsv4", torch.device("cpu"))


def test_routes_ask_the_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a sparse prompt is gathered or masked follows from what it is asked to be."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def efficiencies(config: object, kind: object, *dtypes: torch.dtype) -> tuple[float, float]:
        seen.append((dtypes[0], dtypes[1]))
        return 1.0, 1.0

    monkeypatch.setattr("openmla.plan.sparse.sparse_efficiencies", efficiencies)
    cache = allocate_cache(
        SPARSE, num_blocks=40, block_size=4, format="fp8", kv_scale=1.0, index_format="index_fp32"
    )
    batch = Batch([40], [90], torch.arange(40, dtype=torch.int32)[None], torch.arange(50, 90))
    wide, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    for query_dtype in (None, "fp8"):
        for prefill_dtype in (None, "fp8"):
            make_plan(batch, SPARSE, cache, query_dtype=query_dtype, prefill_dtype=prefill_dtype)
    assert seen == [(wide, wide), (wide, e4m3), (e4m3, wide), (e4m3, e4m3)]
