"""merge_quantize: exact merges byte for byte, others within budget, empty sides, and bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ShapeError, UnsupportedError
from openmla.ops import merge_quantize, merge_states, quantize_out
from openmla.ops.merge_quantize import cost
from openmla.outputs import OUTPUT_FORMATS, QuantizedOutput, decode_output
from openmla.testing import out_budget, strided
from tests.ops.contract import backends
from tests.ops.declared import check_declaration
from tests.ops.quantized import LAYOUTS, Case, assert_same_bytes, buffers, cases, defined, hard_rows

BACKENDS = backends("merge_quantize")
EMPTY = -torch.inf
TOKENS = ((0, torch.float16), (1, torch.bfloat16), (5, torch.float32), (129, torch.bfloat16))
# Every format; groups within a head and over 2, 4 and 8 heads; tiles of 1 to 16 tokens. H16 V64 and
# H16 V32 are tiles of 2 x 1024 and 4 x 512, whose groups a compiled kernel once mixed with others.
SHAPES = (
    ("fp8", 17, 20),
    ("fp8", 3, 192),
    ("fp8_128", 16, 64),
    ("fp8_128", 16, 32),
    ("fp8_128", 16, 16),
    ("fp8_128", 40, 64),
    ("fp8_128", 6, 64),
    ("fp8_128", 4, 96),
    ("fp8_128", 2, 128),
    ("fp8_64", 16, 32),
    ("fp8_64", 16, 16),
    ("fp8_64", 10, 96),
    ("fp8_64", 3, 192),
    ("fp8_128_pow2", 16, 64),
    ("fp8_128_pow2", 10, 64),
    ("fp8_64_pow2", 12, 16),
    ("fp8_64_pow2", 5, 256),
    ("nvfp4", 16, 32),
    ("nvfp4", 13, 48),
    ("nvfp4", 6, 64),
)
Sides = tuple[Tensor, Tensor, Tensor, Tensor]


def run(out: QuantizedOutput, sides: Sides, backend: str, **scalars: Any) -> None:
    """The op; a backend that cannot is a skip with its own sentence."""
    try:
        merge_quantize(
            out.values, out.scales, *sides, out.global_scale, format=out.format, backend=backend,
            **scalars,
        )  # fmt: skip
    except UnsupportedError as reason:
        pytest.skip(str(reason).splitlines()[1].strip())


def one_side(x: Tensor, seed: int = 0) -> Sides:
    """Partials of which each token and head has one that saw keys, and it is x: nothing to round.
    The other saw none and holds NaN."""
    n, H, _ = x.shape
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(n, H, generator=generator).to(x.device) < 0.5
    lse = 9 * torch.randn(n, H, generator=generator).to(x.device)
    nothing = torch.full_like(lse, EMPTY)
    empty = torch.full_like(x, torch.nan)
    sides = (x.where(first[..., None], empty), lse.where(first, nothing))
    others = (empty.where(first[..., None], x), nothing.where(first, lse))
    return strided(sides[0]), sides[1].T.contiguous().T, strided(others[0]), others[1]


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", cases(TOKENS), ids=str)
def test_contract(case: Case, backend: str, device: str) -> None:
    """Where one side saw keys its bytes are quantize_out's, as defined one value at a time."""
    format, layout, n, dtype = case
    expected = defined(format, n, 256, dtype, tuple(range(1, n + 1)), n + 2, added=True)
    actual = buffers(format, n + 2, 256, layout, device)
    x = hard_rows(n, 256, dtype).view(n, 2, 128).to(device)
    run(actual, one_side(x), backend, first_row=1)
    assert_same_bytes(actual, expected)


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "layout"), LAYOUTS)
def test_contract_rows(format: str, layout: str, backend: str, device: str) -> None:
    rows = (140, 3, -1, 0, 33, -5, 131)
    expected = defined(format, len(rows), 256, torch.float32, rows, 141, added=True)
    actual = buffers(format, 141, 256, layout, device)
    x = hard_rows(len(rows), 256, torch.float32).view(-1, 2, 128).to(device)
    run(actual, one_side(x), backend, rows=torch.tensor(rows, device=device))
    assert_same_bytes(actual, expected)


def random_sides(
    n: int, H: int, V: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Sides:
    """Both sides live, but for some heads of one, of the other, and of both."""
    generator = torch.Generator().manual_seed(n + H + V)
    sides = []
    for side in range(2):
        out = torch.randn(n, H, V, generator=generator)
        lse = 3 * torch.randn(n, H, generator=generator)
        for row in range(min(3, n // 2)):
            lse[2 * row + side, row % H] = EMPTY
        lse[n - 1, -1] = EMPTY
        out[~lse.isfinite()] = torch.nan
        sides += [strided(out.to(device, dtype)), lse.to(device)]
    return sides[0], sides[1], sides[2], sides[3]


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("format", "H", "V"), SHAPES)
def test_contract_within_budget(
    format: str, H: int, V: int, dtype: torch.dtype, backend: str, device: str
) -> None:
    """Two live sides: no worse than the merge in float64, quantised, as the reference has it."""
    sides = random_sides(7, H, V, dtype, device)
    actual, peer = (buffers(format, 7, H * V, device=device) for _ in range(2))
    run(actual, sides, backend)
    run(peer, sides, "reference")
    exact, lse, other, other_lse = (side.double() for side in sides)
    merge_states(exact, lse, other, other_lse, backend="reference")
    found, known = (decode_output(each, torch.float64) for each in (actual, peer))
    assert out_budget(found, exact.flatten(1), known) <= 1
    # a weight that is off by a ulp moves few codes, and those by one
    differ = actual.values.view(torch.uint8) != peer.values.view(torch.uint8)
    assert float(differ.double().mean()) < 0.02
    assert bool((found.view(7, H, V)[6, -1] == 0).all())  # nobody saw a key


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled kernels: needs a GPU")
@pytest.mark.parametrize(
    ("format", "V"),
    [
        (format, V) for format, each in OUTPUT_FORMATS.items() if each.group
        for V in (16, 24, 32, 40, 48, 64, 96) if V % each.group
    ],
)  # fmt: skip
def test_groups_over_several_heads_as_compiled(format: str, V: int) -> None:
    """Compiled kernels once mixed such groups with others; the interpreter never did."""
    group = OUTPUT_FORMATS[format].group
    heads = [H for H in (2, 4, 6, 8, 10, 12, 16, 20, 24, 40) if H * V % group == 0]
    assert heads
    for H in heads:
        test_contract_within_budget(format, H, V, torch.bfloat16, "triton", "cuda")


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("format", "H", "V"), SHAPES)
def test_contract_as_two_ops(
    format: str, H: int, V: int, dtype: torch.dtype, backend: str, device: str
) -> None:
    """Of one backend, merge_states and quantize_out write the same bytes."""
    sides = random_sides(9, H, V, dtype, device)
    actual, expected = (buffers(format, 9, H * V, device=device) for _ in range(2))
    run(actual, sides, backend)
    merge_states(*sides, backend=backend)
    quantize_out(
        expected.values, expected.scales, sides[0], expected.global_scale, format=format,
        backend=backend,
    )  # fmt: skip
    assert_same_bytes(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_to_base_2(backend: str, device: str) -> None:
    """The bytes of the same merge with natural logarithms."""
    n, H, V = 5, 2, 128
    out, _, other, _ = random_sides(n, H, V, torch.float32, device)
    lse = torch.tensor([[3.0, -torch.inf]], device=device).repeat(n, 1)
    found = []
    for base, unit in ((math.e, math.log(2)), (2, 1.0)):
        made = buffers("fp8_128", n, H * V, device=device)
        sides = (out.nan_to_num(0), lse * unit, other.nan_to_num(0), torch.zeros_like(lse))
        run(made, sides, backend, base=base)
        found.append(made)
    assert_same_bytes(*found)
    with pytest.raises(ShapeError, match=r"merge_quantize: base must be math\.e or 2, got 10"):
        run(made, sides, backend, base=10)


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("format", "H", "V"),
    [("fp8", 3, 192), ("fp8_128", 16, 64), ("fp8_64", 10, 96), ("nvfp4", 6, 64)],
)
def test_contract_corrupt_lse_makes_its_groups_nan(
    format: str, H: int, V: int, kind: float, backend: str, device: str
) -> None:
    """Every group that has a column of the head; all others are as without."""
    sides = random_sides(9, H, V, torch.bfloat16, device)
    actual, before = (buffers(format, 9, H * V, device=device) for _ in range(2))
    run(before, sides, backend)
    sides[1][7, 0], sides[3][5, 2] = kind, kind
    run(actual, sides, backend)
    due = torch.zeros(9, H, V, dtype=torch.bool, device=device)
    due[7, 0], due[5, 2] = True, True
    group = OUTPUT_FORMATS[format].group or 1
    due = due.view(9, -1, group).any(-1).repeat_interleave(group, 1)
    found, known = decode_output(actual), decode_output(before)
    assert torch.equal(found.isnan(), due)
    assert torch.equal(found[~due], known[~due])


def test_declaration(device: str) -> None:
    for format in ("fp8", "fp8_128", "nvfp4"):
        out = buffers(format, 7, 256, device=device)
        names = ("out", "lse", "other_out", "other_lse")
        given: dict[str, Any] = dict(
            zip(names, random_sides(5, 2, 128, device=device), strict=True)
        )
        given |= {"values": out.values, "scales": out.scales, "global_scale": out.global_scale}
        check_declaration(merge_quantize, {**given, "format": format}, " ".join(names))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"other_lse": lambda t: t.half()}, "other_lse must be float32 or float64, got"),
        ({"global_scale": None}, "global_scale must be a float32 scalar for format nvfp4"),
        ({"global_scale": torch.tensor(-2.0)}, "global_scale must be positive and finite, got -2"),
        ({"first_row": 4}, "rows 4 to 8 must be within the T=7 of values"),
        ({"scales": lambda t: t[:64]}, "scales must be [128, 16], got [64, 16]"),
        ({"values": lambda t: t.view(torch.float8_e4m3fn)}, "values must be torch.uint8, got"),
    ],
)
def test_bad_input_writes_nothing(changes: dict[str, Any], message: str) -> None:
    out = buffers("nvfp4", 7, 256)
    names = ("out", "lse", "other_out", "other_lse")
    given: dict[str, Any] = dict(zip(names, random_sides(5, 2, 128), strict=True))
    given |= {"values": out.values, "scales": out.scales, "global_scale": out.global_scale}
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    with pytest.raises(ShapeError) as error:
        merge_quantize(**given, format="nvfp4", backend="reference")
    assert f"merge_quantize: {message}" in str(error.value)
    assert_same_bytes(out, buffers("nvfp4", 7, 256))


def run_raw(out: QuantizedOutput, sides: Sides) -> None:
    merge_quantize(
        out.values, out.scales, *sides, out.global_scale, format=out.format, backend="reference"
    )


def test_cost() -> None:
    assert cost(3, H=2, V=128, itemsize=2, format="fp8_128").bytes == 3 * (2 * 2 * 260 + 256 + 8)
