"""project_heads: every head by its own matrix, from 16 bits and from e4m3 in blocks, as it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops import project_heads
from openmla.ops.project_heads import cost
from openmla.testing import Inputs, out_budget, poison, strided
from tests.ops.contract import backends, broken, run_or_skip, slow_interpreted
from tests.ops.declared import check_declaration

E4M3 = torch.float8_e4m3fn


class Case(NamedTuple):
    T: int
    H: int
    K: int
    N: int
    blocks: tuple[int, int] | None  # of rows and columns; None: weights in x's dtype
    transposed: bool = False  # w is, as w_uv of what a checkpoint holds
    shared: bool = False  # all heads have the same x


CASES = {
    "one token": Case(1, 3, 32, 48, (1, 1)),
    "16 bits": Case(5, 2, 48, 64, None),
    "16 bits, transposed": Case(3, 2, 48, 20, None, transposed=True),
    "odd widths": Case(7, 2, 20, 36, (1, 1)),
    "odd widths, transposed": Case(3, 3, 40, 12, (1, 3), transposed=True),
    "blocks of 128": Case(4, 2, 256, 128, (2, 1)),
    "blocks of 64, transposed": Case(18, 2, 192, 128, (3, 2), transposed=True),
    "blocks of 48": Case(2, 2, 96, 40, (2, 5)),
    "two tiles of tokens": Case(70, 2, 64, 40, (1, 1), transposed=True),
    "heads alike": Case(6, 3, 64, 32, (2, 2), shared=True),
    "no tokens": Case(0, 2, 32, 16, (1, 1)),
}


def make(
    case: Case, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", *, whole: bool = False
) -> Inputs:
    """Values all over e4m3's range, subnormal bytes too; `whole`: small numbers, which sum exactly
    in any order."""
    T, H, K, N, blocks, transposed, shared = case
    generator = torch.Generator().manual_seed(T + K + N)

    def random(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-3, 4, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    x = random(T, 1 if shared else H, K).to(device, dtype)
    x = x.expand(T, H, K) if shared else strided(x)
    w = random(H, N, K) if transposed else random(H, K, N)
    w = w.to(device, dtype) if blocks is None else (w * (1 if whole else 60)).to(E4M3).to(device)
    w = strided(w)
    tensors = {
        "out": poison((T, H, N + 9), dtype, device)[:, :, :N],
        "x": x,
        "w": w.transpose(1, 2) if transposed else w,
    }
    if blocks is not None:
        exponents = torch.randint(-3, 3, (H, *blocks[::-1]), generator=generator)
        scales = 2.0**exponents if whole else random(H, *blocks[::-1]).abs() + 0.01
        tensors["w_scale"] = scales.to(device).transpose(1, 2)
    return Inputs(tensors, {}, ("out", "x", *(() if blocks else ("w",))))


def projected(inputs: Inputs, backend: str) -> Tensor:
    run_or_skip(project_heads, inputs, backend)
    return inputs["out"]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("project_heads"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name",
    slow_interpreted(
        list(CASES),
        {"blocks of 128", "two tiles of tokens", "16 bits", "odd widths", "heads alike"},
    ),
)
def test_contract(name: str, dtype: torch.dtype, backend: str, device: str) -> None:
    inputs = make(CASES[name], dtype, device)
    around = inputs["out"].untyped_storage()
    actual = projected(inputs, backend)
    exact = projected(make(CASES[name], dtype, device).double(), "reference")
    peer = projected(make(CASES[name], dtype, device), "reference")
    assert out_budget(actual, exact, peer) <= 1
    T, H, N = actual.shape
    beside = torch.empty(0, dtype=torch.uint8, device=device).set_(around)
    beside = beside.view(T * H, (N + 9) * dtype.itemsize)
    assert bool((beside[:, N * dtype.itemsize :] == 0xFF).all())  # nothing else is written


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("project_heads"))
@pytest.mark.parametrize("name", CASES)
def test_contract_whole_numbers_are_exact(name: str, backend: str, device: str) -> None:
    actual = projected(make(CASES[name], device=device, whole=True), backend)
    exact = projected(make(CASES[name], device=device, whole=True).double(), "reference")
    assert torch.equal(actual, exact.to(actual.dtype))


def invariant(inputs: Inputs) -> Inputs:
    return Inputs(inputs.tensors, {"batch_invariant": True}, inputs.widen)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("project_heads"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "name",
    slow_interpreted(list(CASES), set(CASES) - {"16 bits, transposed", "odd widths"}),
)
def test_contract_of_one_tile(
    name: str, wide: bool, dtype: torch.dtype, backend: str, device: str
) -> None:
    """The same whatever the tokens: each by itself, in any place, from any address."""
    case = CASES[name]
    inputs = invariant(make(case, dtype, device))
    if wide:
        inputs.tensors["out"] = inputs["out"].float()
    actual = projected(inputs, backend)
    exact = projected(make(case, dtype, device).double(), "reference")
    peer = invariant(make(case, dtype, device))  # rows one by one, as their sums are here
    if wide:
        peer.tensors["out"] = peer["out"].float()
    assert out_budget(actual, exact, projected(peer, "reference")) <= 1
    for t in range(0, case.T, 7):
        alone = {
            name: each[t : t + 1].clone() if name in ("out", "x") else each
            for name, each in inputs.tensors.items()
        }
        assert torch.equal(projected(Inputs(alone, inputs.scalars, ()), backend)[0], actual[t])


@pytest.mark.contract
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", backends("project_heads"))
@pytest.mark.parametrize("tokens", [1, 16, 17, 128])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("blocks", [(1, 1), (128, 128), (64, 128), None], ids=str)
@pytest.mark.parametrize("into", [True, False], ids=["w_uk", "w_uv"])
def test_contract_of_released_models(
    into: bool, blocks: tuple[int, int] | None, heads: int, tokens: int, backend: str
) -> None:
    K, N = (128, 512) if into else (512, 128)
    if blocks is not None and blocks != (1, 1):
        rows, columns = blocks if into else blocks[::-1]
        blocks = K // rows, N // columns
    case = Case(tokens, heads, K, N, blocks, transposed=not into)
    actual = projected(make(case, device="cuda"), backend)
    exact = projected(make(case, device="cuda").double(), "reference")
    peer = projected(make(case, device="cuda"), "reference")
    assert out_budget(actual, exact, peer) <= 1


@pytest.mark.parametrize("name", ["blocks of 48", "odd widths, transposed", "heads alike"])
def test_reference_equals_loops(name: str) -> None:
    inputs = make(CASES[name]).double()
    out = projected(inputs, "reference")
    x, w, w_scale = (inputs[key] for key in ("x", "w", "w_scale"))
    (T, H, K), N = x.shape, w.shape[2]
    KB, NB = w_scale.shape[1:]
    for t, h, n in [(t, h, n) for t in range(T) for h in range(H) for n in range(0, N, 5)]:
        total = sum(
            float(x[t, h, k]) * float(w[h, k, n]) * float(w_scale[h, k * KB // K, n * NB // N])
            for k in range(K)
        )
        assert abs(total - float(out[t, h, n])) <= 1e-9 * max(abs(total), 1)


@pytest.mark.parametrize("backend", backends("project_heads"))
def test_every_byte_is_its_value(backend: str, device: str) -> None:
    """Times 1, a weight comes out as what e4m3 says of its byte; NaN stays NaN."""
    stored = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3).view(1, 16, 16)
    x = torch.eye(16, device=device, dtype=torch.bfloat16)[:, None]
    out = torch.zeros(16, 1, 16, device=device, dtype=torch.bfloat16)
    stored = stored.clone()
    stored.view(torch.uint8)[0, 7, 15] = 0  # 0 times NaN is NaN: one at a time, below
    stored.view(torch.uint8)[0, 15, 15] = 0
    inputs = Inputs(
        {"out": out, "x": x, "w": stored, "w_scale": torch.ones(1, 1, 1, device=device)}, {}, ()
    )
    assert torch.equal(projected(inputs, backend)[:, 0].float(), stored[0].float())
    stored.view(torch.uint8)[0, 7, 15] = 0x7F
    found = projected(inputs, backend)[:, 0].isnan()
    assert bool(found[:, 15].all()) and not bool(found[:, :15].any())


def test_declaration(device: str) -> None:
    inputs = make(CASES["blocks of 48"], torch.float32, device)
    check_declaration(project_heads, inputs, "out x w_scale")
    check_declaration(project_heads, make(CASES["16 bits"], torch.float32, device), "out x w")


BAD: dict[str, tuple[str, Callable[[Tensor], Tensor | None], str]] = {
    "no scale": ("w_scale", lambda t: None, "w_scale must be given for torch.float8_e4m3fn weig"),
    "zero": ("w_scale", lambda t: t * 0, "w_scale must be finite and above 0, got 0.0."),
    "negative": ("w_scale", lambda t: -t, "w_scale must be finite and above 0, got -"),
    "NaN": ("w_scale", lambda t: t * torch.nan, "w_scale must be finite and above 0, got nan."),
    "inf": ("w_scale", lambda t: t * torch.inf, "w_scale must be finite and above 0, got inf."),
    "blocks": (
        "w_scale", lambda t: torch.ones(2, 5, 1),
        "w_scale must cut 96 x 40 weights into equal blocks, got 5 x 1 of them.",
    ),
    "no blocks": ("w_scale", lambda t: t[:, :0], "into equal blocks, got 0 x 5 of them."),
    "heads": ("w_scale", lambda t: t[:1], "w_scale must be [H, KB, NB] with H=2, got"),
    "unneeded": ("w", lambda t: t.bfloat16(), "w_scale must not be given for torch.bfloat16 wei"),
    "w's dtype": ("w", lambda t: t.float(), "w must be torch.bfloat16 or torch.float8_e4m3fn, g"),
    "w's strides": (
        "w", lambda t: poison((2, 96, 80), E4M3)[:, :, ::2],
        "w must be contiguous along one of its last two dimensions, got strides (7680, 80, 2).",
    ),
    "out's dtype": ("out", lambda t: t.double(), "out must be torch.bfloat16 like x, or torch"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_changes_nothing(name: str) -> None:
    key, change, message = BAD[name]
    inputs = broken(make(CASES["blocks of 48"]), **{key: change})
    before = inputs["out"].clone()
    with pytest.raises(ShapeError) as error:
        inputs.run(project_heads, backend="reference")
    assert str(error.value).startswith("project_heads: ") and message in str(error.value)
    torch.testing.assert_close(inputs["out"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.triton
def test_triton_names_blocks_it_cannot_cut() -> None:
    from importlib import import_module

    from openmla.ops.project_heads import problem

    why_not = import_module("openmla.backends.triton.project_heads").why_not
    asked = problem(torch.device("cpu"), torch.bfloat16, eight_bits=True, block=24, K=96, N=40)
    assert why_not(asked) == "takes scales of 16 rows or multiples, these are of 24"


def test_cost_is_halved_by_eight_bits() -> None:
    sizes = {"H": 128, "K": 128, "N": 512, "itemsize": 2}
    eight, sixteen = (cost(0, **sizes, w_itemsize=size) for size in (1, 2))
    assert eight.bytes == 128 * 128 * 512 and sixteen.bytes == 2 * eight.bytes
    assert cost(3, **sizes, w_itemsize=1).flops == 6 * 128 * 128 * 512
