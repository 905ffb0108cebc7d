"""mha_ragged: every backend against float64, the reference against torch's SDPA, bad input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops import merge_states, mha_ragged
from openmla.ops.mha_ragged import cost
from openmla.testing import Inputs, RaggedCase
from tests.ops.contract import TRITON, backends, check_attention, run_or_skip
from tests.ops.declared import check_declaration

BASE = RaggedCase("prefill", (5, 17, 40), (5, 17, 40))
CASES = [
    BASE,
    RaggedCase("one-request", (33,), (33,)),
    RaggedCase("empty-requests", (3, 0, 0, 2), (3, 0, 4, 2)),
    RaggedCase("nothing", (), ()),
    RaggedCase("no-keys", (3, 2), (0, 5), causal=False),
    RaggedCase("one-key", (1, 1), (1, 1), H=1),
    RaggedCase("17-heads", (9, 4), (9, 4), H=17),
    RaggedCase("context-chunk", (5, 17), (70, 3), causal=False),
    RaggedCase("one-shot", (5, 17), (70, 30)),
    RaggedCase("one-shot-many-queries", (300,), (700,), H=2),
    RaggedCase("fewer-keys-than-queries", (9, 4), (3, 4)),
    RaggedCase("padding", (5, 7), (5, 7), padding=6),
    RaggedCase("padding-one-request", (5,), (5,), padding=6),
    RaggedCase("more-padding-than-rows", (5,), (5,), padding=150, H=2),
    RaggedCase("several-tiles", (130, 1, 0, 128, 257), (130, 200, 4, 128, 250), H=1),
    RaggedCase("several-tiles-of-context", (130, 3), (257, 128), H=2, causal=False),
    RaggedCase("many-requests", (2,) * 140, (3,) * 140, H=1),
    RaggedCase("v3-widths", (40, 65), (40, 65), E=192, V=128),
    RaggedCase("v3-widths-several-tiles", (260, 40, 1), (260, 300, 129), E=192, V=128, H=2),
    RaggedCase("v3-fp16", (40, 65), (40, 265), E=192, V=128, dtype=torch.float16),
    RaggedCase("v3-context", (40, 130), (265, 7), E=192, V=128, causal=False, padding=9),
    RaggedCase("v3-apart", (40, 65), (40, 265), E=192, R=64, V=128, padding=3),
    RaggedCase("v3-apart-context", (40, 130), (7, 265), E=192, R=64, V=128, causal=False),
    RaggedCase("glm-apart", (40, 130), (40, 140), E=256, R=64, V=256, H=2),
    RaggedCase("mistral4-apart", (40,), (265,), E=128, R=64, V=128),
    RaggedCase("minicpm3-apart", (40, 3), (140, 3), E=96, R=32, V=64),
    RaggedCase("apart", (20, 3), (30, 9), E=24, R=8),
    RaggedCase("mostly-shared", (20, 3), (30, 9), E=24, R=23),
    RaggedCase("all-shared", (20, 3), (30, 9), E=128, R=128, V=128),
    RaggedCase("160-columns", (40, 3), (140, 3), E=160, V=128),
    RaggedCase("glm-widths", (40,), (40,), E=256, V=256),
    RaggedCase("mistral4-widths", (40,), (65,), E=128, V=128),
    RaggedCase("minicpm3-widths", (40, 3), (40, 3), E=96, V=64),
    RaggedCase("values-wider-than-keys", (20,), (30,), E=24, V=40),
    RaggedCase("odd-widths", (20, 3), (20, 9), E=21, V=13),
    RaggedCase("wide", (20, 3), (20, 9), E=300, V=260),
    RaggedCase("fp32", (20, 3), (20, 9), dtype=torch.float32),
    RaggedCase("fp16", (20, 3), (20, 9), dtype=torch.float16),
]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_ragged"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: RaggedCase, backend: str, device: str) -> None:
    check_attention(mha_ragged, case.make(device), backend)


@pytest.mark.parametrize("backend", backends("mha_ragged"))
def test_heads_may_share_keys(backend: str, device: str) -> None:
    """Views with a stride of 0, and values inside the tensor that keys lie in."""
    inputs = RaggedCase("shared", (33, 9), (33, 20), E=24, V=16).make(device)
    both = torch.randn(53, 1, 40, device=device).bfloat16().expand(-1, 4, -1)
    inputs.tensors.update(k=both[:, :, :24], v=both[:, :, 24:])
    check_attention(mha_ragged, inputs, backend)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_equals_sdpa(case: RaggedCase) -> None:
    """An independent oracle: torch's attention in float64 with an explicit mask."""
    inputs = case.make().double()
    out, lse = inputs.run(mha_ragged, backend="reference")
    scale = inputs.scalars["scale"]
    queries, keys = inputs["query_start_loc"].tolist(), inputs["key_start_loc"].tolist()
    for b, (n, S) in enumerate(zip(case.query_lens, case.key_lens, strict=True)):
        for i in range(n):
            seen = max(S - n + i + 1, 0) if case.causal else S
            t, visible = queries[b] + i, slice(keys[b], keys[b] + seen)
            if seen == 0:
                assert (out[t] == 0).all() and (lse[t] == -torch.inf).all()
                continue
            q, k, v = inputs["q"][t], inputs["k"][visible], inputs["v"][visible]
            if case.R:
                shared = inputs["k_pe"][visible, None].expand(-1, case.H, -1)
                k = torch.cat([k, shared], dim=-1)
            expected = torch.nn.functional.scaled_dot_product_attention(
                q[None, :, None], k[None].transpose(1, 2), v[None].transpose(1, 2), scale=scale
            )
            torch.testing.assert_close(out[t], expected[0, :, 0], rtol=1e-11, atol=1e-12)
            sums = torch.exp(scale * (k * q).sum(-1)).sum(0)
            torch.testing.assert_close(lse[t], sums.log(), rtol=1e-11, atol=1e-12)
    assert (out[queries[-1] :] == 0).all() and (lse[queries[-1] :] == -torch.inf).all()


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long queries are taken a few at a time; the result does not change."""
    inputs = RaggedCase("chunks", (7, 9), (40, 5)).make()
    expected = inputs.run(mha_ragged, backend="reference")
    monkeypatch.setattr("openmla.backends.reference.mha_ragged.LOGITS", 3 * 4 * 40)
    for actual, whole in zip(inputs.run(mha_ragged, backend="reference"), expected, strict=True):
        torch.testing.assert_close(actual, whole)


def test_declaration(device: str) -> None:
    check_declaration(mha_ragged, BASE.make(device), "q k v")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k", lambda t: t.float(), "k must be torch.bfloat16 like q, got torch.float32"),
        ("key_start_loc", lambda t: t + 1, "key_start_loc must start with 0"),
        ("key_start_loc", lambda t: t * 2, "key_start_loc must end within the 62 rows of k"),
        ("max_key_len", lambda n: n + 1, "max_key_len must be 40, got 41"),
        ("max_query_len", lambda n: n - 1, "max_query_len must be 40, got 39"),
    ],
)
def test_bad_input(name: str, change: Callable[[object], object], message: str) -> None:
    inputs = BASE.make()
    tensors: dict[str, Tensor] = dict(inputs.tensors)
    scalars = dict(inputs.scalars)
    target = tensors if name in tensors else scalars
    target[name] = change(target[name])  # type: ignore[assignment]
    with pytest.raises(ShapeError) as error:
        Inputs(tensors, scalars, inputs.widen).run(mha_ragged, backend="auto")
    assert f"mha_ragged: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:-1], "k_pe must be [S, R] with S=39, got (38, 8)"),
        (lambda t: t[:, :-1], "k must be [S, H, P] with P=17, got (39, 4, 16)"),
        (lambda t: t[:, None], "k_pe must be [S, R], got (39, 1, 8)"),
        (lambda t: t.float(), "k_pe must be torch.bfloat16 like q, got torch.float32"),
        (lambda t: t.T.contiguous().T, "k_pe must be contiguous along its last dimension"),
        (lambda t: t.to("meta"), "k_pe must be on cpu, got meta"),
    ],
)
def test_bad_shared_columns(change: Callable[[Tensor], Tensor], message: str) -> None:
    inputs = RaggedCase("apart", (20, 3), (30, 9), R=8).make()
    tensors = {**inputs.tensors, "k_pe": change(inputs["k_pe"])}
    with pytest.raises(ShapeError) as error:
        Inputs(tensors, inputs.scalars, inputs.widen).run(mha_ragged, backend="auto")
    assert f"mha_ragged: {message}" in str(error.value)


def test_cost() -> None:
    square = cost([4], [4], H=2, E=6, V=3, itemsize=2, causal=True)
    assert square.flops == 2 * 10 * 2 * 9
    assert square.bytes == 8 * 2 * 9 * 2 + 4 * 2 * 4
    assert cost([2], [5], H=1, E=1, V=1, itemsize=2, causal=True).flops == 2 * (4 + 5) * 2
    assert cost([5], [2], H=1, E=1, V=1, itemsize=2, causal=True).flops == 2 * (1 + 2) * 2
    assert cost([5], [2], H=1, E=1, V=1, itemsize=2, causal=False).flops == 2 * 10 * 2


@pytest.mark.parametrize("backend", [TRITON, "reference"])
def test_nan_of_a_key_is_seen(backend: str, device: str) -> None:
    """By every query that sees the key, and by no other."""
    inputs = RaggedCase("nan", (40,), (40,), H=2).make(device)
    inputs["k"][7] = torch.nan
    out, lse = run_or_skip(mha_ragged, inputs, backend)
    assert out[7:].isnan().all() and lse[7:].isnan().all()
    assert out[:7].isfinite().all() and lse[:7].isfinite().all()


@pytest.mark.parametrize("backend", backends("mha_ragged"))
@pytest.mark.parametrize("lens", [((40,), (40,)), ((3, 5), (0, 70)), ((4, 6), (90, 6))], ids=str)
def test_nan_of_a_key_outlives_a_merge(
    lens: tuple[tuple[int, ...], tuple[int, ...]], backend: str, device: str
) -> None:
    """Whatever a kernel writes as the lse of a query that saw NaN, it is not that of one without
    keys; that one is empty."""
    inputs = RaggedCase("nan", *lens, H=2, E=64, V=64).make(device)
    last = inputs["k"].shape[0] - 1
    inputs["k"][last] = torch.nan
    out, lse = run_or_skip(mha_ragged, inputs, backend)
    ones, zeros = torch.ones_like(out), torch.zeros_like(lse)
    merge_states(out, lse, ones, zeros, backend="reference")
    assert out[-1].isnan().all() and out[:-1].isfinite().all()
    if lens[1][0] == 0:
        assert (out[: lens[0][0]] == 1).all()


@pytest.mark.parametrize("backend", [TRITON, "reference"])
def test_equal_keys_of_large_logits_keep_the_value(backend: str, device: str) -> None:
    """Weights sum up to 1 where lse rounds by more than a weight: logits are 1e6 here."""
    inputs = RaggedCase("equal", (3,), (40,), H=2, dtype=torch.float32).make(device)
    inputs["q"].fill_(1e6 / inputs["q"].shape[2] / inputs.scalars["scale"])
    inputs["k"].fill_(1.0)
    inputs["v"].fill_(1.0)
    out, _ = run_or_skip(mha_ragged, inputs, backend)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-4)
