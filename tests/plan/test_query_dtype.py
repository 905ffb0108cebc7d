"""make_plan(query_dtype="fp8"): queries are quantised for absorbed rows alone; what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openmla import (
    PRESETS,
    Batch,
    ConfigError,
    LayerCache,
    LayerScales,
    MLAConfig,
    UnsupportedError,
    absorb,
    allocate_cache,
    attend_latent,
    attend_step,
    make_plan,
    make_selection,
    plan_buffers,
)
from openmla.ops import mqa_paged, quantize_queries
from openmla.plan import Plan
from tests.attention.known import DENSE, SPARSE, C, Requests
from tests.plan.groups import absorbed_of

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
    assert out.dtype == torch.float32 and cache.latent is not None
    (keys,), (start_loc,) = absorbed_of(plan).reads, absorbed_of(plan).start_locs
    assert keys.lens is not None
    values, scale = quantize_queries(q[..., :C], q[..., C:])
    wanted, wanted_lse = mqa_paged(
        values, cache.latent.data, cache.latent.kv_scale, keys.block_table, keys.lens,
        start_loc, scale, format="fp8", C=C,
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
    assert "queries   absorbed queries in e4m3, a scale per token and head" in told
    assert "\nquantize_queries " in told
    assert plan.problem("mqa_paged").dtype == torch.float8_e4m3fn
    assert plan.problem("cache_write").dtype == torch.float32


SCALES = LayerScales(0.05, 0.05, q=0.04, k_pe=0.2, q_nope=0.04, q_pe=0.02)  # q_pe times 4


def calibrated(requests: Requests, config: MLAConfig = DENSE) -> LayerCache:
    """An fp8 cache of the requests' keys that has scales of its own for k_pe and for queries."""
    plain, _ = requests.part(written=True)
    assert plain.latent is not None
    cache = allocate_cache(
        config, num_blocks=plain.latent.num_blocks, block_size=4, format="fp8", kv_scale=SCALES,
        index_format="index_fp32", device=requests.device,
    )  # fmt: skip
    assert cache.latent is not None and cache.latent.rope_ratio is not None
    rows = plain.latent.data.flatten(0, 1).float().nan_to_num()
    rows[:, C:] /= cache.latent.rope_ratio
    slots = torch.arange(len(rows), device=rows.device)
    cache.latent.layout.write(cache.latent.data, slots, rows, cache.latent.kv_scale)
    return cache


def test_static_queries_have_the_scale_of_their_cache(device: str) -> None:
    """The step is quantize_queries(q_scale=) and mqa_paged, as called by hand."""
    requests = Requests(*DECODE, device=device)
    cache, (_, batch) = calibrated(requests), requests.part(written=True)
    assert cache.latent is not None and cache.latent.q_scale is not None
    assert float(cache.latent.q_scale) == pytest.approx(0.08)
    q = requests.q_latent.float()
    outs = {}
    for name in (None, "fp8", "fp8_static"):
        plan = make_plan(
            batch, DENSE, cache, dtype=torch.float32, form="absorbed", query_dtype=name
        )
        outs[name] = attend_latent(q, cache, plan)
    assert "absorbed queries in e4m3, one calibrated scale per layer" in plan.explain()
    assert cache.latent.rope_ratio is not None
    (keys,), (start_loc,) = absorbed_of(plan).reads, absorbed_of(plan).start_locs
    assert keys.lens is not None
    values, scale = quantize_queries(
        q[..., :C], q[..., C:] * cache.latent.rope_ratio, cache.latent.q_scale
    )
    wanted, wanted_lse = mqa_paged(
        values, cache.latent.data, cache.latent.kv_scale, keys.block_table, keys.lens,
        start_loc, scale, format="fp8", C=C,
        scale=DENSE.scale, causal=True, max_query_len=2,
    )  # fmt: skip
    out, lse = outs["fp8_static"]
    assert torch.equal(out, wanted.float()) and torch.equal(lse, wanted_lse)
    errors = [float((outs[name][0] - outs[None][0]).norm()) for name in ("fp8", "fp8_static")]
    assert 0 < errors[1] < 1.5 * errors[0]


def test_static_queries_in_a_step(device: str) -> None:
    """attend_step, dense and over selected keys, is attend_latent between its two products."""
    for config in (DENSE, SPARSE):
        requests = Requests(*DECODE, config=config, device=device)
        cache, (_, batch) = calibrated(requests, config), requests.part(written=True)
        form = "chosen" if config is SPARSE else "absorbed"
        plan = make_plan(
            batch, config, cache, dtype=torch.float32, form=form, query_dtype="fp8_static"
        )
        projected = type(requests.projected)(*(part.float() for part in requests.projected))
        absorbed = absorb(requests.weight.float(), config)
        selection = None
        if config is SPARSE:
            last = torch.tensor(plan.seq_lens, device=device).repeat_interleave(
                torch.tensor(plan.query_lens, device=device)
            )
            keys = torch.arange(32, dtype=torch.int32, device=device).repeat(len(last), 1)
            selection = make_selection(keys.masked_fill(keys >= last[:, None] - 1, -1), cache, plan)
        out = attend_step(projected, absorbed, cache, plan, selection=selection)
        q = torch.bmm(projected.q_nope.transpose(0, 1), absorbed.w_uk).transpose(0, 1)
        q_latent = torch.cat([q, projected.q_pe], -1)
        inside, _ = attend_latent(q_latent, cache, plan, selection=selection)
        wanted = torch.einsum("thc,hcv->thv", inside, absorbed.w_uv)
        torch.testing.assert_close(out, wanted)


def test_static_queries_need_a_scale() -> None:
    requests = Requests(*DECODE)
    cache, (_, batch) = calibrated(requests), requests.part(written=True)
    assert cache.latent is not None
    bare = LayerCache(latent=replace(cache.latent, q_scale=None))
    message = "query_dtype 'fp8_static' needs a q_scale, and the cache has none"
    with pytest.raises(ConfigError, match=f"plan: {message}"):
        make_plan(batch, DENSE, bare, dtype=torch.float32, query_dtype="fp8_static")
    plan = make_plan(batch, DENSE, cache, dtype=torch.float32, query_dtype="fp8_static")
    projected = type(requests.projected)(*(part.float() for part in requests.projected))
    before = cache.latent.data.view(torch.uint8).clone()
    with pytest.raises(ConfigError, match=f"step: {message}"):  # another layer's cache
        attend_step(projected, absorb(requests.weight.float(), DENSE), bare, plan)
    assert torch.equal(cache.latent.data.view(torch.uint8), before)


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
        (DENSE, "fp8", "bf16", "query_dtype must be None, 'fp8' or 'fp8_static', got 'bf16'"),
        (DENSE, "bf16", "fp8", "query_dtype must be None for a cache of bf16, got 'fp8'"),
        (SPARSE, "fp32", "fp8", "query_dtype must be None for a cache of fp32, got 'fp8'"),
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
    from openmla.plan.options import Combination, PlanOptions, check_combination

    monkeypatch.setattr("openmla.ops._queries.capability", lambda _: (8, 6))
    with pytest.raises(UnsupportedError, match=r"plan: fp8 queries must be on SM89 or newer.*SM86"):
        check_query_dtype("plan", DENSE, "fp8", "fp8", torch.device("cuda"))
    v4 = next(config for config in PRESETS.values() if config.compressor is not None)
    with pytest.raises(ConfigError, match="query_dtype must be None for"):
        check_combination("plan", Combination(PlanOptions(query_dtype="fp8"), v4))


def test_routes_ask_the_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a sparse prompt is gathered or masked follows from what it is asked to be."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def efficiencies(config: object, kind: object, *dtypes: torch.dtype) -> tuple[float, float]:
        seen.append((dtypes[0], dtypes[1]))
        return 1.0, 1.0

    monkeypatch.setattr("openmla.plan.routes.sparse_efficiencies", efficiencies)
    cache = allocate_cache(
        SPARSE, num_blocks=40, block_size=4, format="fp8", kv_scale=1.0, index_format="index_fp32"
    )
    batch = Batch([40], [90], torch.arange(40, dtype=torch.int32)[None], torch.arange(50, 90))
    wide, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    for query_dtype in (None, "fp8"):
        for prefill_dtype in (None, "fp8"):
            make_plan(batch, SPARSE, cache, query_dtype=query_dtype, prefill_dtype=prefill_dtype)
    assert seen == [(wide, wide), (wide, e4m3), (e4m3, wide), (e4m3, e4m3)]
