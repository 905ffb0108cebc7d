"""mha_ragged over e4m3 heads: every backend against float64, scales, saturation, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends import Problem, why_not
from openmla.errors import ShapeError
from openmla.ops import mha_ragged
from openmla.testing import Inputs, RaggedCase
from tests.ops.contract import GLUON, TRITON, backends, run_or_skip, slow_interpreted
from tests.ops.fp8_cases import (
    E4M3,
    check_beside_a_large_token,
    check_fp8,
    exact,
    quantised,
)

BASE = RaggedCase("prefill", (5, 17, 40), (5, 17, 40))
CASES = [
    BASE,
    RaggedCase("empty-requests", (3, 0, 0, 2), (3, 0, 4, 2)),
    RaggedCase("nothing", (), ()),
    RaggedCase("no-keys", (3, 2), (0, 5), causal=False),
    RaggedCase("fewer-keys-than-queries", (9, 4), (3, 4), H=3),
    RaggedCase("padding", (5, 7), (5, 7), padding=6),
    RaggedCase("context-chunk", (5, 17), (70, 3), causal=False),
    RaggedCase("many-requests", (2,) * 140, (3,) * 140, H=1, E=192, V=128),
    RaggedCase("odd-widths", (20, 3), (20, 9), E=21, V=13),
    RaggedCase("v3-widths", (40, 65), (40, 165), E=192, V=128),
    RaggedCase("v3-several-tiles", (260, 40, 1), (260, 300, 129), E=192, V=128, H=2),
    RaggedCase("v3-many-tiles", (700, 3), (1500, 3), E=192, V=128, H=3),
    RaggedCase("v3-context", (40, 130), (265, 7), E=192, V=128, causal=False, padding=9),
    RaggedCase("mistral4-widths", (40, 9), (265, 9), E=128, V=128),
    RaggedCase("glm-widths", (40,), (140,), E=256, V=256, H=2),
    RaggedCase("glm-many-tiles", (300, 7), (700, 70), E=256, V=256, H=2),
    RaggedCase("kimi-draft-widths", (40, 9), (265, 9), E=160, V=128, H=2),
    RaggedCase("minicpm3-widths", (150, 9), (265, 9), E=96, V=64, H=5),
]
SLOW = {"v3-several-tiles", "v3-many-tiles", "many-requests", "glm-many-tiles"}
MARKED = slow_interpreted(CASES, SLOW)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_ragged"))
@pytest.mark.parametrize("keys_contiguous", [False, True], ids=["columns", "keys"])
@pytest.mark.parametrize("case", MARKED, ids=str)
def test_contract(case: RaggedCase, keys_contiguous: bool, backend: str, device: str) -> None:
    check_fp8(mha_ragged, quantised(case.make(device), keys_contiguous=keys_contiguous), backend)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_ragged"))
@pytest.mark.parametrize("name", ["prefill", "padding", "v3-widths", "v3-several-tiles"])
def test_contract_of_wide_values(name: str, backend: str, device: str) -> None:
    """As steps call it: values of 16 bits, which have a scale, too."""
    case = next(case for case in CASES if case.name == name)
    inputs = quantised(case.make(device), keys_contiguous=False)
    tensors = {**inputs.tensors, "v": case.make(device)["v"]}
    check_fp8(mha_ragged, Inputs(tensors, inputs.scalars, ()), backend)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_ragged"))
def test_contract_of_outliers(backend: str, device: str) -> None:
    """A few columns and rows far larger than the rest."""
    case = RaggedCase("outliers", (40, 65), (40, 165), E=192, V=128)
    inputs = quantised(case.make(device), keys_contiguous=True, outliers=True)
    check_fp8(mha_ragged, inputs, backend)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_ragged"))
@pytest.mark.parametrize(("E", "V"), [(192, 128), (24, 16)])
def test_a_large_token_leaves_other_requests_alone(
    E: int, V: int, backend: str, device: str
) -> None:
    """A key and value of 1e6 in the second of four requests: the others get what they get alone."""
    case = RaggedCase("large", (9, 40, 0, 65), (30, 40, 3, 165), E=E, V=V, H=3)
    check_beside_a_large_token(mha_ragged, case.make(device), 1, backend)


@pytest.mark.parametrize("backend", [GLUON, TRITON, "reference"])
def test_scales_count(backend: str, device: str) -> None:
    """Codes twice as large under half the scale are the same heads: nothing forgets a scale."""
    case = RaggedCase("scales", (40, 9), (40, 30), E=192, V=128, H=3)
    inputs = quantised(case.make(device), keys_contiguous=False)
    halved = dict(inputs.tensors)
    for name in ("q", "k", "v"):
        halved[name] = (inputs[name].float() / 2).to(E4M3)
    for name, factor in (("q_scale", 2.0), ("k_scale", 4.0), ("v_scale", 8.0)):
        halved[name] = inputs[name] * factor
    scalars = {**inputs.scalars, "scale": inputs.scalars["scale"] / 2}
    other = Inputs(halved, scalars, ())
    check_fp8(mha_ragged, other, backend)
    found, wanted = run_or_skip(mha_ragged, other, backend)[0], exact(mha_ragged, inputs)[0]
    ratio = float((found.double() * wanted).sum() / wanted.square().sum())
    assert 3.9 < ratio < 4.1  # v is 8 / 2 times what it was


@pytest.mark.parametrize("backend", [GLUON, TRITON, "reference"])
def test_many_alike_are_not_rounded_away(backend: str, device: str) -> None:
    """One key slightly above hundreds of equal ones: all of theirs are rounded the same way, which
    the sum of what was rounded takes back. Values of 1 give 1."""
    n, H = 300, 2
    case = RaggedCase("alike", (4,), (n,), E=192, V=128, H=H, causal=False)
    inputs = quantised(case.make(device), keys_contiguous=True)
    q, k, v = (torch.zeros_like(inputs[name].float()) for name in ("q", "k", "v"))
    q[:, :, 0], k[0, :, 0], v[:] = 1, 1, 1
    tensors = dict(inputs.tensors)
    tensors |= {"q": q.to(E4M3), "k": k.to(E4M3), "v": v.to(E4M3)}
    for name in ("q_scale", "k_scale", "v_scale"):
        tensors[name] = torch.ones_like(inputs[name])
    scalars = {**inputs.scalars, "scale": 0.1}  # exp(-0.1) * 256 = 231.6, between 224 and 240
    out, _ = run_or_skip(mha_ragged, Inputs(tensors, scalars, ()), backend)
    assert (out == 1).all()


@pytest.mark.parametrize("backend", [GLUON, TRITON, "reference"])
def test_nan_of_a_key_is_seen(backend: str, device: str) -> None:
    """By every query that sees the key, and by no other; nor by another request."""
    case = RaggedCase("nan", (40, 9), (40, 9), E=192, V=128, H=2)
    inputs = quantised(case.make(device), keys_contiguous=True)
    inputs["k"].view(torch.uint8)[7] = 0x7F
    inputs["v"][41] = torch.nan
    out, lse = run_or_skip(mha_ragged, inputs, backend)
    assert out[7:40].isnan().all() and lse[7:40].isnan().all()
    assert out[:7].isfinite().all() and lse[:7].isfinite().all()
    assert out[41:].isnan().all() and lse[40:].isfinite().all()


def test_opcheck_and_fullgraph(device: str) -> None:
    inputs = quantised(BASE.make(device), keys_contiguous=True)
    scalars = {**inputs.scalars, "backend": "auto"}
    op = torch.ops.openmla.mha_ragged.default
    # torch's own check of schemas compares inputs with allclose, which it has not for e4m3
    utils = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op, tuple(inputs.tensors.values()), scalars, test_utils=utils)
    compiled = torch.compile(mha_ragged, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        inputs.run(compiled, backend="auto"), inputs.run(mha_ragged, backend="auto"), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", [GLUON, TRITON])
def test_graph(backend: str) -> None:
    """Captured once, replayed on other values."""
    case = RaggedCase("graph", (260, 40), (260, 300), E=192, V=128, H=2)
    inputs, others = (
        quantised(RaggedCase(**{**case.__dict__, "seed": seed}).make("cuda"), keys_contiguous=True)
        for seed in (0, 1)
    )
    run_or_skip(mha_ragged, inputs, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = inputs.run(mha_ragged, backend=backend)
    for name, tensor in others.tensors.items():
        if tensor is not None:
            inputs[name].copy_(tensor)
    graph.replay()
    for actual, expected in zip(captured, others.run(mha_ragged, backend=backend), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q_scale", lambda t: None, "q_scale must be given with e4m3 heads, got None"),
        ("v_scale", lambda t: None, "v_scale must be given with e4m3 heads, got None"),
        ("k_scale", lambda t: t.double(), "k_scale must be float32, got torch.float64"),
        ("k_scale", lambda t: t[:, :-1], "k_scale must be [B, H] with H=4, got (3, 3)"),
        ("k_scale", lambda t: t[0], "k_scale must be [B, H], got (4,)"),
        ("v_scale", lambda t: t[:1], "v_scale must be [B, H] with B=3, got (1, 4)"),
        ("q_scale", lambda t: t[:, 0], "q_scale must be [T, H], got (62,)"),
        ("k", lambda t: t.float(), "k must be torch.float8_e4m3fn like q, got torch.float32"),
        ("v", lambda t: t.half(), "v must be torch.float8_e4m3fn or torch.bfloat16, got"),
        ("v", lambda t: t[:, :, ::2], "v must be contiguous along its last dimension or along"),
        ("out_dtype", lambda _: None, "out_dtype must be one of torch.bfloat16, torch.float16"),
        ("out_dtype", lambda _: E4M3, "out_dtype must be one of torch.bfloat16, torch.float16"),
    ],
)
def test_bad_input(name: str, change: Callable[[Any], Any], message: str) -> None:
    inputs = quantised(BASE.make(), keys_contiguous=False)
    tensors: dict[str, Tensor] = dict(inputs.tensors)
    scalars = dict(inputs.scalars)
    target: dict[str, Any] = tensors if name in tensors else scalars
    target[name] = change(target[name])
    with pytest.raises(ShapeError) as error:
        Inputs(tensors, scalars, ()).run(mha_ragged, backend="auto")
    assert f"mha_ragged: {message}" in str(error.value)


def test_other_eight_bits_are_refused() -> None:
    """Told of e4m3 beside the wider ones."""
    inputs = quantised(BASE.make(), keys_contiguous=False)
    for dtype in (torch.float8_e5m2, torch.int8):
        other = Inputs({**inputs.tensors, "q": inputs["q"].float().to(dtype)}, inputs.scalars, ())
        with pytest.raises(ShapeError, match=f"q must be e4m3, fp16, .* got {dtype}"):
            other.run(mha_ragged, backend="auto")


def test_scales_without_e4m3_are_refused() -> None:
    inputs = BASE.make()
    scaled = {**inputs.scalars, "q_scale": torch.ones(62, 4)}
    with pytest.raises(ShapeError, match="q_scale must be None but for e4m3 heads"):
        Inputs(inputs.tensors, scaled, ()).run(mha_ragged, backend="auto")
    wide = {**inputs.scalars, "out_dtype": torch.float32}
    with pytest.raises(ShapeError, match=r"out_dtype must be torch\.bfloat16 like q"):
        Inputs(inputs.tensors, wide, ()).run(mha_ragged, backend="auto")


def test_shared_columns_are_refused() -> None:
    inputs = quantised(BASE.make(), keys_contiguous=False)
    tensors = {**inputs.tensors, "k": inputs["k"][:, :, :16], "k_pe": inputs["k"][:, 0, 16:]}
    with pytest.raises(ShapeError, match="k_pe must be None with e4m3 heads"):
        Inputs(tensors, inputs.scalars, ()).run(mha_ragged, backend="auto")


@pytest.mark.parametrize("op", ["mha_ragged", "mha_masked"])
@pytest.mark.triton
def test_chips_without_products_of_e4m3(op: str) -> None:
    old = Problem(op, "cuda", (8, 6), dtype=E4M3, E=192, V=128)
    assert why_not(old, "triton") == "needs SM89 for products of e4m3, this is SM86"
    assert why_not(Problem(op, "cuda", (8, 9), dtype=E4M3, E=192, V=128), "triton") is None
