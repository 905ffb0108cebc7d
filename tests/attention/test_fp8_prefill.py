"""prefill_dtype="fp8": steps beside 16 bits and float64, scales of caches, refusals, explain()."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.attention import AbsorbedWeights, Projected, attend_step, make_selection
from openmla.attention.eight_bits import key_scale, requests_of
from openmla.cache import LayerCache, allocate_cache
from openmla.config import PRESETS, MLAConfig
from openmla.errors import ConfigError, UnsupportedError
from openmla.layers.warm import warmup
from openmla.layers.weights import absorb
from openmla.ops import mha_ragged, quantize_heads
from openmla.ops.quantize_heads import allocate_heads
from openmla.plan import Batch, make_plan
from tests.plan.groups import masked_chunks

DENSE = replace(PRESETS["deepseek-v2-lite"], num_heads=4, max_positions=4096)
LENS = (70, 33)  # tokens of two requests


def weights(config: MLAConfig, dtype: torch.dtype = torch.bfloat16) -> AbsorbedWeights:
    torch.manual_seed(1)
    C, both = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
    return absorb((torch.randn(config.num_heads * both, C) * C**-0.5).to(dtype), config)


def projections(config: MLAConfig, *, outliers: bool = False) -> Projected:
    torch.manual_seed(2)
    T, H, P, R = sum(LENS), config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    q, kv = torch.randn(T, H, P + R), torch.randn(T, config.latent_dim)
    if outliers:
        q[:, :, ::40] *= 20
        kv[:, ::90] *= 20
        kv[:, -3:] *= 8
    q, kv = q.bfloat16(), kv.bfloat16()
    C = config.kv_lora_rank
    return Projected(q[:, :, :P], q[:, :, P:], kv[:, :C], kv[:, C:])


def cache_of(config: MLAConfig, format: str, scale: float = 1.0, device: str = "cpu") -> LayerCache:
    given: dict[str, Any] = {"kv_scale": scale} if format == "fp8" else {}
    return allocate_cache(
        config, num_blocks=20, block_size=16, format=format, device=device, **given
    )


def steps(
    cache: LayerCache, projected: Projected, absorbed: AbsorbedWeights, config: MLAConfig,
    firsts: tuple[int, int], **asked: Any,
) -> Tensor:  # fmt: skip
    """Outputs of both requests in two steps: their first tokens, then the others."""
    assert cache.latent is not None
    device = cache.latent.data.device
    projected = Projected(*(each.to(device) for each in projected))
    absorbed = absorb(absorbed.kv_b.to(device), config)
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    starts = (0, LENS[0])
    outs: list[list[Tensor]] = [[], []]
    for begin, end in ((0, 0), firsts), (firsts, LENS):
        lens = [b - a for a, b in zip(begin, end, strict=True)]
        spans = [range(s + a, s + b) for s, a, b in zip(starts, begin, end, strict=True)]
        rows = torch.tensor([t for span in spans for t in span], dtype=torch.int64)
        slots = torch.cat([160 * i + torch.arange(begin[i], end[i]) for i in range(2)])
        plan = make_plan(
            Batch(lens, list(end), table, slots), config, cache, dtype=torch.bfloat16,
            form="expanded", **asked,
        )  # fmt: skip
        found = attend_step(Projected(*(each[rows] for each in projected)), absorbed, cache, plan)
        for mine, part in zip(outs, found.split(lens), strict=True):
            mine.append(part)
    return torch.cat([part for mine in outs for part in mine]).double().cpu()


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("format", ["bf16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("firsts", [(40, 20), (LENS[0] - 1, 1)], ids=["halves", "edges"])
def test_step(format: str, outliers: bool, firsts: tuple[int, int], device: str) -> None:
    """Beside the same step in 16 bits. q and k are rounded by up to 2^-4 of themselves, 2.6 % RMS:
    a logit errs by 3.7 % of its own spread, which is about 1 here; with outliers up to 2.
    The reference rounds probabilities, too, which makes it 0.045."""
    projected, absorbed = projections(DENSE, outliers=outliers), weights(DENSE)
    found = [
        steps(
            cache_of(DENSE, format, 0.25, device),
            projected,
            absorbed,
            DENSE,
            firsts,
            prefill_dtype=each,
        )
        for each in (None, "fp8")
    ]
    assert 0.005 < error(found[1], found[0]) < (0.11 if outliers else 0.065)


@pytest.mark.parametrize("scale", [0.25, 3.7, 2.0**-9])
def test_scale_of_the_cache_counts(scale: float, device: str) -> None:
    """Codes are gathered as they are; whoever forgot kv_scale would be off by as much."""
    projected, absorbed = projections(DENSE), weights(DENSE)
    factors = (1 / scale, 1 / scale, scale, scale)  # logits stay
    small = Projected(*(each * by for each, by in zip(projected, factors, strict=True)))
    found = [
        steps(
            cache_of(DENSE, "fp8", scale, device),
            small,
            absorbed,
            DENSE,
            (60, 20),
            prefill_dtype=each,
        )
        for each in (None, "fp8")
    ]
    assert error(found[1], found[0]) < 0.065


def test_workspace_of_context_chunks() -> None:
    """Context in several chunks and in a workspace, as in one piece."""
    projected, absorbed = projections(DENSE), weights(DENSE)
    cache = cache_of(DENSE, "fp8", 0.25)
    whole = steps(cache, projected, absorbed, DENSE, (60, 20), prefill_dtype="fp8")
    workspace = warmup(
        DENSE, cache, max_requests=2, max_tokens=128, workspace_tokens=16, prefill_dtype="fp8"
    )
    cut = steps(
        cache, projected, absorbed, DENSE, (60, 20), prefill_dtype="fp8", workspace=workspace
    )
    assert error(cut, whole) < 0.03  # each chunk's probabilities are rounded at its own largest


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_keys_are_in_the_workspace(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step's own there are only queries, whose scales begin on 16 bytes for every chunk."""
    config = replace(DENSE, num_heads=3)
    projected, absorbed, cache = projections(config), weights(config), cache_of(config, format)
    workspace = warmup(
        config, cache, max_requests=2, max_tokens=128, workspace_tokens=16, prefill_dtype="fp8"
    )
    made: list[int] = []
    quantised: list[tuple[int, int]] = []
    asked: list[Tensor] = []

    def allocate(S: int, *args: Any, **kwargs: Any) -> Tensor:
        made.append(S)
        return allocate_heads(S, *args, **kwargs)

    def quantize(values: Tensor, *args: Any, **kwargs: Any) -> None:
        quantised.append((values.data_ptr(), values.shape[0]))
        quantize_heads(values, *args, **kwargs)

    def attend(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(args[5])
        return mha_ragged(q, *args, **kwargs)

    monkeypatch.setattr("openmla.attention.eight_bits.allocate_heads", allocate)
    monkeypatch.setattr("openmla.attention.eight_bits.quantize_heads", quantize)
    monkeypatch.setattr("openmla.attention.expanded.mha_ragged", attend)
    firsts = (61, 21)
    steps(cache, projected, absorbed, config, firsts, prefill_dtype="fp8", workspace=workspace)
    assert made == [sum(firsts), sum(LENS) - sum(firsts)]
    kept = [size for place, size in quantised if place == workspace.keys.data_ptr()]
    assert len(kept) == len(quantised) - 2 and len(kept) > 4
    assert all(scale.data_ptr() % 16 == 0 for scale in asked)
    assert len({scale.shape[0] for scale in asked}) > 2


def test_nothing_is_cut_off() -> None:
    """Scales hold every key, however unevenly weights and latents are sized."""
    absorbed = weights(DENSE)
    projected = projections(DENSE, outliers=True)
    kv_c, k_pe = projected.kv_c * 50, projected.k_pe * 3000
    H, P = DENSE.num_heads, DENSE.qk_nope_head_dim
    starts = torch.tensor([0, LENS[0], LENS[0], sum(LENS)], dtype=torch.int32)  # one is empty
    requests = requests_of(starts, sum(LENS))
    assert requests.tolist() == [0] * LENS[0] + [2] * LENS[1]
    scale = key_scale(kv_c, k_pe, requests, 3, absorbed, H, P)[[0, 2]]
    both = (kv_c.double() @ absorbed.kv_b.double().T).view(-1, H, P + DENSE.v_head_dim)
    largest = torch.maximum(both[:, :, :P].abs().amax(2), k_pe.double().abs().amax(1)[:, None])
    k = torch.stack([part.amax(0) for part in largest.split(LENS)])
    assert (k <= 448 * scale).all() and (k * 64 >= 448 * scale).all()
    kv_c[3, 0], kv_c[4, 1] = torch.nan, torch.inf  # which have no say
    assert key_scale(kv_c, k_pe, requests, 3, absorbed, H, P).isfinite().all()


def test_nan_stays_with_its_request() -> None:
    projected, absorbed = projections(DENSE), weights(DENSE)
    projected.kv_c[5] = torch.nan
    out = steps(cache_of(DENSE, "bf16"), projected, absorbed, DENSE, (40, 20), prefill_dtype="fp8")
    assert out[5 : LENS[0]].isnan().all() and out[LENS[0] :].isfinite().all()


@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("workspace_tokens", [None, 16], ids=["whole", "chunks"])
def test_a_large_token_leaves_other_requests_alone(
    format: str, workspace_tokens: int | None, device: str
) -> None:
    """A latent of 1e6 in the first request, then context: the second has the bits that it has
    beside a request without one."""
    absorbed, found = weights(DENSE), []
    for large in (False, True):
        projected, cache = projections(DENSE), cache_of(DENSE, format, 0.25, device)
        if large:
            projected.kv_c[5] = 1e6
        asked: dict[str, Any] = {"prefill_dtype": "fp8"}
        if workspace_tokens is not None:
            asked["workspace"] = warmup(
                DENSE, cache, max_requests=2, max_tokens=128, workspace_tokens=workspace_tokens,
                prefill_dtype="fp8",
            )  # fmt: skip
        out = steps(cache, projected, absorbed, DENSE, (40, 20), **asked)
        found.append(out[LENS[0] :])
    assert error(found[1], found[0]) == 0


def sparse_config() -> MLAConfig:
    indexer = replace(PRESETS["deepseek-v3.2"].indexer, topk=16)  # type: ignore[type-var]
    return replace(PRESETS["deepseek-v3.2"], num_heads=2, max_positions=4096, indexer=indexer)


def test_a_large_token_leaves_other_sparse_requests_alone() -> None:
    """Two masked requests whose rows are gathered and expanded together."""
    config, n, found = sparse_config(), 40, []
    C, P = config.kv_lora_rank, config.qk_nope_head_dim
    positions = torch.arange(n, dtype=torch.int32)[:, None] - torch.arange(16, dtype=torch.int32)
    positions = positions.clamp_min(-1).repeat(2, 1)
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    slots = torch.cat([torch.arange(n), 48 + torch.arange(n)])
    for large in (0.0, 1e6):
        torch.manual_seed(0)
        q = torch.randn(2 * n, 2, config.qk_head_dim).bfloat16()
        kv = torch.randn(2 * n, config.latent_dim).bfloat16()
        kv[5] += large
        projected = Projected(q[:, :, :P], q[:, :, P:], kv[:, :C], kv[:, C:])
        cache = allocate_cache(
            config, num_blocks=6, block_size=16, format="bf16", index_format="index_fp32"
        )
        plan = make_plan(
            Batch([n, n], [n, n], table, slots), config, cache, dtype=torch.bfloat16,
            form="expanded", prefill_dtype="fp8",
        )  # fmt: skip
        assert plan.select is not None and len(masked_chunks(plan)) == 1
        selection = make_selection(positions, cache, plan)
        out = attend_step(projected, weights(config), cache, plan, selection=selection)
        found.append(out[n:].double())
    assert error(found[1], found[0]) == 0


def test_sparse_prompts() -> None:
    """Masked tokens, all keys expanded: as in 16 bits."""
    config = sparse_config()
    torch.manual_seed(0)
    T, H, P, R = 96, 2, config.qk_nope_head_dim, config.qk_rope_head_dim
    q, kv = torch.randn(T, H, P + R).bfloat16(), torch.randn(T, config.latent_dim).bfloat16()
    C = config.kv_lora_rank
    projected = Projected(q[:, :, :P], q[:, :, P:], kv[:, :C], kv[:, C:])
    positions = torch.full((T, 16), -1, dtype=torch.int32)
    for t in range(T):
        chosen = torch.randperm(t + 1)[:16].sort().values
        positions[t, : len(chosen)] = chosen
    table = torch.arange(8, dtype=torch.int32).view(1, 8)
    outs = []
    for asked in (None, "fp8"):
        cache = allocate_cache(
            config, num_blocks=8, block_size=16, format="fp8", kv_scale=0.25,
            index_format="index_fp32",
        )  # fmt: skip
        batch = Batch([T], [T], table, torch.arange(T))
        plan = make_plan(
            batch, config, cache, dtype=torch.bfloat16, form="expanded", prefill_dtype=asked
        )
        assert plan.select is not None and masked_chunks(plan)
        selection = make_selection(positions, cache, plan)
        outs.append(attend_step(projected, weights(config), cache, plan, selection=selection))
    assert 0.005 < error(outs[1].double(), outs[0].double()) < 0.065


def plan_of(config: MLAConfig = DENSE, format: str = "bf16", **asked: Any) -> Any:
    cache = cache_of(config, format)
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    slots = torch.cat([torch.arange(40, 70), 160 + torch.arange(20, 33)])
    batch = Batch([30, 13], [70, 33], table, slots)
    return make_plan(batch, config, cache, dtype=torch.bfloat16, **asked)


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_bits_do_not_depend_on_the_batch(format: str) -> None:
    """With batch_invariant a request's outputs are the same alone and next to another, whose
    values are far larger."""
    projected, absorbed = projections(DENSE), weights(DENSE)
    projected.kv_c[LENS[0] :] *= 30
    cache = cache_of(DENSE, format, 0.05)
    table = torch.arange(20, dtype=torch.int32).view(2, 10)

    def attend(requests: list[int], start: int, stop: int) -> Tensor:
        rows = [
            torch.arange(LENS[0] * b + start, LENS[0] * b + min(stop, LENS[b])) for b in requests
        ]
        ends = [min(stop, LENS[b]) for b in requests]
        slots = [160 * b + torch.arange(start, end) for b, end in zip(requests, ends, strict=True)]
        batch = Batch([len(each) for each in rows], ends, table[requests], torch.cat(slots))
        asked: dict[str, Any] = {"prefill_dtype": "fp8", "batch_invariant": True}
        plan = make_plan(batch, DENSE, cache, form="expanded", workspace_tokens=32, **asked)
        assert "quantize_heads" in plan.backends
        some = Projected(*(each[torch.cat(rows)] for each in projected))
        out: Tensor = attend_step(some, absorbed, cache, plan)
        return out

    together = attend([0, 1], 0, 20), attend([0, 1], 20, LENS[1])
    alone = attend([0], 0, 20), attend([0], 20, LENS[1])
    for both, one in zip(together, alone, strict=True):
        assert torch.equal(both[: len(one)], one)


def test_explain() -> None:
    assert plan_of(form="expanded").prefill_dtype is None  # never unless asked
    assert "fp8 " not in plan_of(form="expanded").explain()
    text = plan_of(format="fp8", form="expanded", prefill_dtype="fp8").explain()
    assert "expanded queries and keys in e4m3" in text and "prefill_dtype='fp8'" in text
    assert "rows of the cache are read as stored" in text and "quantize_heads reference" in text
    text = plan_of(form="absorbed", prefill_dtype="fp8").explain()
    assert "fp8  " in text and "nothing is expanded" in text


def test_chips_without_products_of_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    from openmla.plan import checks

    monkeypatch.setattr(checks, "capability", lambda device: (8, 6))
    with pytest.raises(UnsupportedError, match=r"plan: prefill_dtype='fp8' .*SM89.* got SM86\."):
        checks.check_eight_bit_products("plan", torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(checks, "capability", lambda device: (8, 9))
    checks.check_eight_bit_products("plan", torch.device("cuda"), torch.bfloat16)
    with pytest.raises(ConfigError, match="prefill_dtype must be None for queries in"):
        checks.check_eight_bit_products("plan", torch.device("cpu"), torch.float64)
