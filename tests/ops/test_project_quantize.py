"""project_quantize: the bytes of project_heads and then the quantiser, and no other byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends.reference._quantize import write_quantized
from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.ops import project_heads, project_quantize
from openmla.ops.project_quantize import cost
from openmla.outputs import OUTPUT_FORMATS, QuantizedOutput, decode_output
from openmla.testing import out_budget, strided
from tests.ops.contract import backends, slow_interpreted
from tests.ops.declared import check_declaration
from tests.ops.quantized import LAYOUTS, assert_same_bytes, buffers, quantize_by_definition

E4M3 = torch.float8_e4m3fn
# tokens, heads, C, V, blocks of weights (None: 16 bits), whether w_uv is a transpose
SHAPES = {
    "one token": (1, 2, 32, 128, (1, 1), True),
    "16 bits": (3, 2, 48, 128, None, True),
    "blocks": (5, 2, 128, 128, (2, 1), True),
    "many tokens": (21, 1, 64, 256, (1, 4), True),
    "by columns": (2, 1, 40, 128, (1, 1), False),
    "wide rows": (4, 2, 32, 384, (1, 3), True),
    "no tokens": (0, 2, 32, 128, (1, 1), True),
}
Inputs = tuple[Tensor, Tensor, Tensor | None]


def make(
    shape: tuple[int, int, int, int, tuple[int, int] | None, bool],
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    *,
    whole: bool = True,
) -> Inputs:
    """Latent outputs, weights and their scales; `whole`: small numbers, whose sums are exact in any
    order."""
    n, H, C, V, blocks, transposed = shape
    generator = torch.Generator().manual_seed(n + C + V)

    def random(*size: int) -> Tensor:
        drawn = torch.randint(-3, 4, size, generator=generator).float()
        return drawn if whole else drawn + torch.randn(size, generator=generator) / 3

    x = strided(random(n, H, C).to(device, dtype))
    w = random(H, V, C) if transposed else random(H, C, V)
    w = strided(w.to(dtype if blocks is None else E4M3).to(device))
    scale = None
    if blocks is not None:
        exponents = torch.randint(-3, 3, (H, *blocks[::-1]), generator=generator)
        scale = (2.0**exponents * (1 if whole else 0.7)).to(device).transpose(1, 2)
    return x, w.transpose(1, 2) if transposed else w, scale


def run(
    out: QuantizedOutput, inputs: Inputs, backend: str, rows: Tensor | None = None, first: int = 0
) -> QuantizedOutput:
    try:
        project_quantize(
            out.values, out.scales, *inputs, out.global_scale, rows=rows, first_row=first,
            format=out.format, backend=backend,
        )  # fmt: skip
    except UnsupportedError as reason:
        pytest.skip(str(reason).splitlines()[1].strip())
    return out


def projected(inputs: Inputs, backend: str) -> Tensor:
    """What project_heads gives, [n, O]."""
    x, w, scale = inputs
    out = torch.empty(*x.shape[:2], w.shape[2], dtype=x.dtype, device=x.device)
    project_heads(out, x, w, scale, backend=backend)
    return out.flatten(1)


def one_by_one(out: QuantizedOutput, inputs: Inputs, backend: str, first: int) -> QuantizedOutput:
    write_quantized(
        out.values, out.scales, projected(inputs, backend), out.global_scale,
        rows=None, first_row=first, format=out.format,
    )  # fmt: skip
    return out


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("project_quantize"))
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
@pytest.mark.parametrize(
    "name", slow_interpreted(list(SHAPES), {"many tokens", "wide rows", "by columns", "16 bits"})
)
def test_contract(name: str, layout: tuple[str, str], backend: str, device: str) -> None:
    """Byte for byte the definition's, where sums are exact; rows beside its own are left alone."""
    n, H, _, V, *_ = SHAPES[name]
    inputs = make(SHAPES[name], device=device)
    out = run(buffers(layout[0], n + 5, H * V, layout[1], device), inputs, backend, first=3)
    expected = buffers(layout[0], n + 5, H * V, layout[1], device)
    assert_same_bytes(out, one_by_one(expected, inputs, "reference", 3))
    loops = buffers(layout[0], n + 5, H * V, layout[1])
    if n <= 3:
        x = projected(inputs, "reference").cpu()
        quantize_by_definition(loops, x, [3 + i for i in range(n)])
        assert_same_bytes(out, loops)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("project_quantize"))
@pytest.mark.parametrize(
    "dtype",
    slow_interpreted(
        [torch.bfloat16, torch.float16, torch.float32], {"torch.float16", "torch.bfloat16"}
    ),
    ids=str,
)
@pytest.mark.parametrize("format", OUTPUT_FORMATS)
def test_contract_of_any_numbers(
    format: str, dtype: torch.dtype, backend: str, device: str
) -> None:
    """No worse than the reference, whatever the order of sums."""
    shape = SHAPES["blocks"]
    x, w, scale = make(shape, dtype, device, whole=False)
    found = []
    for name in (backend, "reference"):
        out = run(buffers(format, 5, 256, device=device), (x, w, scale), name)
        found.append(decode_output(out, torch.float64))
    exact = projected((x.double(), w, scale), "reference")
    assert out_budget(found[0], exact, found[1]) <= 1


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("project_quantize"))
@pytest.mark.parametrize("format", OUTPUT_FORMATS)
@pytest.mark.parametrize("name", slow_interpreted(["blocks", "many tokens"], {"many tokens"}))
def test_contract_equals_the_two_ops(name: str, format: str, backend: str, device: str) -> None:
    """Of one backend, of any numbers: both cut rows alike, so sums are the same."""
    n, H, _, V, *_ = SHAPES[name]
    inputs = make(SHAPES[name], device=device, whole=False)
    fused = run(buffers(format, n, H * V, device=device), inputs, backend)
    apart = one_by_one(buffers(format, n, H * V, device=device), inputs, backend, 0)
    assert_same_bytes(fused, apart)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("project_quantize"))
@pytest.mark.parametrize("format", OUTPUT_FORMATS)
def test_contract_of_listed_rows(format: str, backend: str, device: str) -> None:
    """Tokens go where they are sent, in any order, those with -1 nowhere; NaN stays NaN."""
    x, w, scale = make(SHAPES["blocks"], device=device)
    x[2, 1] = torch.nan
    listed = [6, -1, 130, 0, 33]
    rows = torch.tensor(listed, device=device)
    out = run(buffers(format, 133, 256, device=device), (x, w, scale), backend, rows)
    expected = buffers(format, 133, 256)
    quantize_by_definition(expected, projected((x, w, scale), "reference").cpu(), listed)
    assert_same_bytes(out, expected)
    assert bool(decode_output(out)[130, 128:].isnan().all())


@pytest.mark.contract
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", backends("project_quantize"))
@pytest.mark.parametrize("tokens", [1, 16, 130])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("blocks", [(1, 1), (4, 1), None], ids=str)
@pytest.mark.parametrize("format", OUTPUT_FORMATS)
def test_contract_of_released_models(
    format: str, blocks: tuple[int, int] | None, heads: int, tokens: int, backend: str
) -> None:
    shape = (tokens, heads, 512, 128, blocks, True)
    for whole in (True, False):
        inputs = make(shape, device="cuda", whole=whole)
        fused = run(buffers(format, tokens, heads * 128, device="cuda"), inputs, backend)
        apart = buffers(format, tokens, heads * 128, device="cuda")
        assert_same_bytes(fused, one_by_one(apart, inputs, backend, 0))


def arguments(**changes: Any) -> dict[str, Any]:
    x, w, scale = make(SHAPES["blocks"])
    out = buffers("nvfp4", 9, 256)
    usual = {
        "values": out.values, "scales": out.scales, "out_latent": x, "w_uv": w, "w_scale": scale,
        "global_scale": out.global_scale, "rows": None, "first_row": 0, "format": "nvfp4",
    }  # fmt: skip
    return usual | {name: change(usual[name]) for name, change in changes.items()}


BAD: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no scale": ("w_scale", lambda t: None, "w_scale must be given for torch.float8_e4m3fn weigh"),
    "zero": ("w_scale", lambda t: t * 0, "w_scale must be finite and above 0, got 0.0."),
    "NaN": ("w_scale", lambda t: t * torch.nan, "w_scale must be finite and above 0, got nan."),
    "blocks": ("w_scale", lambda t: torch.ones(2, 3, 1), "must cut 128 x 128 weights into equal b"),
    "weights": ("w_uv", lambda t: t.float(), "w_uv must be torch.bfloat16 or torch.float8_e4m3fn"),
    "rows": ("values", lambda t: t[:4], "scales must be"),
    "too far": ("first_row", lambda i: 5, "rows 5 to 9 must be within the T=9 of values."),
    "twice": ("rows", lambda r: torch.tensor([1, 2, 3, 2, -1]), "rows must name each slot once, g"),
    "outside": ("rows", lambda r: torch.tensor([1, 2, 3, 4, 9]), "rows must be below 9, got 9."),
    "global": ("global_scale", lambda t: -t, "global_scale must be positive and finite, got -11"),
    "format": ("format", lambda f: "fp6", "format 'fp6' is not known."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_changes_nothing(name: str) -> None:
    key, change, message = BAD[name]
    given = arguments(**{key: change})
    if name == "rows":
        given["scales"] = torch.zeros(128, 8, dtype=torch.uint8).view(E4M3)
    before = given["values"].clone(), given["scales"].view(torch.uint8).clone()
    with pytest.raises((ShapeError, ConfigError)) as error:
        project_quantize(**given, backend="reference")
    assert message in str(error.value)
    assert torch.equal(given["values"], before[0])
    assert torch.equal(given["scales"].view(torch.uint8), before[1])


def test_declaration(device: str) -> None:
    x, w, scale = make(SHAPES["16 bits"], torch.float32, device)
    out = buffers("fp8_64", 4, 256, device=device)
    given: dict[str, Any] = {"values": out.values, "scales": out.scales, "out_latent": x, "w_uv": w}
    given |= {"w_scale": scale, "first_row": 1, "format": "fp8_64"}
    check_declaration(project_quantize, given, "out_latent w_uv")


@pytest.mark.triton
def test_triton_leaves_groups_across_heads_to_two_ops() -> None:
    from importlib import import_module

    from openmla.ops.project_quantize import problem

    why_not = import_module("openmla.backends.triton.project_quantize").why_not
    sizes: dict[str, Any] = {"eight_bits": True, "block": 512, "C": 512}
    cpu = torch.device("cpu")
    asked = problem(cpu, torch.bfloat16, "fp8_128", **sizes, V=64)
    assert why_not(asked) == "takes heads of whole groups of 128 columns, these are 64 wide"
    for format in ("fp8", "fp8_64", "nvfp4"):
        assert why_not(problem(cpu, torch.bfloat16, format, **sizes, V=64)) is None


def test_the_reference_takes_groups_across_heads() -> None:
    inputs = make((2, 4, 32, 64, (1, 1), True))
    out = run(buffers("fp8_128", 2, 256), inputs, "reference")
    expected = buffers("fp8_128", 2, 256)
    quantize_by_definition(expected, projected(inputs, "reference"), [0, 1])
    assert_same_bytes(out, expected)


def test_cost_counts_what_is_stored() -> None:
    sizes: dict[str, Any] = {"H": 2, "C": 8, "V": 128, "itemsize": 2, "w_itemsize": 1}
    assert cost(3, **sizes, format="fp8_128").bytes == 2 * 8 * 128 + 3 * (2 * 8 * 2 + 256 + 2 * 4)
