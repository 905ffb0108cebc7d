"""index_logits: every backend against float64, the reference against plain loops, bad input."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends import BACKENDS
from openmla.cache.format import INDEX_FORMATS, get_format
from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.ops import index_logits
from openmla.ops.index_logits import cost
from openmla.testing import (
    Inputs,
    lse_budget,
    out_budget,
    paged_rows,
    poison,
    poisoned_memory,
    start_loc,
    strided,
)
from tests.ops.contract import broken, put, run_or_skip

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class IndexCase:
    """Indexer queries over a paged cache of keys; index_select's tests use it too."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    HI: int = 4
    DI: int = 32
    BS: int = 16
    format: str = "index_fp8"
    dtype: torch.dtype = torch.bfloat16
    row_lens: tuple[int, ...] | None = None  # keys each token sees; causal unless told
    padding: int = 0  # query rows that belong to no request
    surplus: int = 3  # columns of out past the longest row
    whole: bool = False  # small whole numbers: every sum is exact, and equal scores are many
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def seen(self) -> list[int]:
        """row_lens of the rows that belong to a request."""
        if self.row_lens is not None:
            return list(self.row_lens)
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        return [max(S - n + i + 1, 0) for n, S in lens for i in range(n)]

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(self.seed)
        T = sum(self.query_lens) + self.padding

        def values(*shape: int, most: int) -> Tensor:
            if self.whole:
                return torch.randint(-most, most + 1, shape, generator=generator).float()
            return torch.randn(*shape, generator=generator)

        keys = [values(S, self.DI, most=7) for S in self.seq_lens]
        if self.whole:
            for key in keys:
                key[:, 0] = 7  # so that the fp8 scale is 2^-6 in both modes
        cache, table = paged_rows(
            [key.to(device) for key in keys],
            D=self.DI,
            format=self.format,
            kv_scale=torch.ones((), device=device),
            BS=self.BS,
            rng=random.Random(self.seed),
            # float32 scales inside the page stay aligned
            page_padding=12 // get_format(self.format).dtype.itemsize,
        )
        num_keys = max(self.seq_lens, default=0) + self.surplus
        row_lens = self.seen() + [num_keys - i % 2 for i in range(self.padding)]
        q_idx = values(T, self.HI, self.DI, most=3).to(device, self.dtype)
        w_idx = values(T, self.HI, most=4).to(device)
        tensors = {
            "q_idx": strided(q_idx),
            "w_idx": strided(w_idx if self.whole else w_idx * (self.HI * self.DI) ** -0.5),
            "cache": cache,
            "block_table": table,
            "query_start_loc": start_loc(self.query_lens, device),
            "row_lens": torch.tensor(row_lens, dtype=torch.int32, device=device),
        }
        scalars = {"format": self.format, "num_keys": num_keys}
        return Inputs(tensors, scalars, ("q_idx", "w_idx"))


BASE = IndexCase("decode", (1, 1, 1), (33, 7, 70), format="index_bf16")
CASES = [
    BASE,
    *(
        IndexCase(f"{format}-{str(dtype)[6:]}", (1, 2), (33, 70), format=format, dtype=dtype)
        for format in INDEX_FORMATS
        for dtype in (torch.bfloat16, FP8)
    ),
    IndexCase("fp16", (1, 2), (33, 70), dtype=torch.float16),
    IndexCase("fp32", (1, 2), (33, 70), format="index_fp32", dtype=torch.float32),
    IndexCase("nothing", (), ()),
    IndexCase("only-padding", (), (), padding=3),
    IndexCase("no-token", (0, 0), (5, 0)),
    IndexCase("empty-request", (1, 0, 0, 2), (5, 0, 9, 2)),
    IndexCase("one-key", (1, 1), (1, 1), HI=1),
    IndexCase("no-key", (1, 2, 1), (0, 1, 20)),
    IndexCase("one-past-a-block", (1, 1), (17, 33)),
    IndexCase("last-block-full", (1, 2), (16, 48)),
    IndexCase("3-heads", (1, 3), (40, 21), HI=3, format="index_fp8_exact"),
    IndexCase("17-heads", (1, 3), (40, 21), HI=17),
    IndexCase("64-heads", (2, 1), (40, 21), HI=64, dtype=FP8),
    IndexCase("verify", (4, 1, 7), (64, 20, 7)),
    IndexCase("own-lengths", (4, 2), (64, 20), row_lens=(0, 64, 3, 17, 20, 0)),
    IndexCase("graph-padding", (1, 2), (30, 9), padding=5),
    IndexCase("block-1", (2, 1), (19, 4), BS=1, format="index_bf16"),
    IndexCase("block-128", (1, 1), (130, 127), BS=128),
    IndexCase("no-spare-column", (1, 2), (33, 70), surplus=0),
    IndexCase("width-256", (1, 2), (33, 20), DI=256, HI=2),
    IndexCase("width-256-fp32", (1, 2), (33, 20), DI=256, HI=2, dtype=torch.float32),
    IndexCase("width-384", (3,), (20,), DI=384, HI=2, dtype=FP8),
    IndexCase("width-24", (1, 2), (33, 20), DI=24, dtype=FP8),
    IndexCase("width-96", (1, 2), (33, 20), DI=96, format="index_bf16"),
    IndexCase("130-heads", (2, 1), (33, 20), DI=16, HI=130, dtype=FP8),
    IndexCase("fp16-on-bf16", (1, 2), (33, 20), dtype=torch.float16, format="index_bf16"),
    IndexCase("many-empty", (2, *(0,) * 140, 3, 1), (9, *(0,) * 140, 20, 5), padding=1),
    IndexCase("v32-widths", (1, 2), (130, 65), HI=64, DI=128, BS=64, dtype=FP8),
    IndexCase("glm5-widths", (3,), (130,), HI=32, DI=128, BS=64, dtype=FP8),
    IndexCase("long", (3, 1), (1100, 513), HI=2, BS=64),
    IndexCase("short-prefill", (70,), (150,), HI=3, BS=64),
]
LOOPED = [case for case in CASES if max(case.seq_lens, default=0) < 100]


def stored_key(cache: Tensor, block: int, offset: int, format: str, DI: int) -> Tensor:
    """One key in float64, from the byte table of the format."""
    if get_format(format).dtype != torch.uint8:
        return cache[block, offset].double()
    page, BS = cache[block].flatten(), cache.shape[1]
    values = page[offset * DI : (offset + 1) * DI].view(FP8).double()
    num_scales = max(DI // 128, 1)
    first = BS * DI + 4 * num_scales * offset
    scales = page[first : first + 4 * num_scales].clone().view(torch.float32).double()
    return values * scales.repeat_interleave(DI // num_scales)


def score_budget(actual: Tensor, exact: Tensor, peer: Tensor) -> float:
    """The sharper of lse's bound on the largest error and out's on the RMS; -inf is exact."""
    finite = exact.isfinite()
    return max(
        lse_budget(actual, exact, peer),
        out_budget(actual[finite], exact[finite], peer[finite]),
    )


def unit_budget(actual: Tensor, exact: Tensor, magnitude: Tensor, *, fp8: bool) -> float:
    """The largest share of what matrix units may lose: they cut sums short, those of fp8 early.
    `magnitude` is the scores of absolute values."""
    finite = exact.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    if not bool(finite.any()):
        return 0.0
    # fp8 sums keep some 13 bits. Others are cut after 24, half of the last on average and in one
    # direction, at about 8 steps of a product and 64 heads: 72 / 4 * 2**-24.
    lost = 2**-12 if fp8 else 2**-20
    return float(((actual - exact).abs() / (lost * magnitude + 1e-30))[finite].max())


def magnitudes(inputs: Inputs) -> Tensor:
    """Scores of absolute queries, weights and keys, float64."""
    exact = inputs.double()
    tensors = dict(exact.tensors)
    for name in ("q_idx", "w_idx"):
        tensors[name] = tensors[name].abs()
    N, BS, _ = inputs["cache"].shape
    pages = inputs["cache"].clone()
    values = pages.view(N, -1)[:, : BS * inputs["q_idx"].shape[2]]
    if pages.dtype == torch.uint8:  # a page's values come first, its scales after them
        values &= 0x7F
    else:
        values.abs_()
    tensors["cache"] = pages
    scores: Tensor = replace(exact, tensors=tensors).run(index_logits, backend="reference")
    return scores


@pytest.mark.parametrize("backend", BACKENDS["index_logits"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: IndexCase, backend: str, device: str) -> None:
    inputs = case.make(device)
    actual = run_or_skip(index_logits, inputs, backend)
    exact = inputs.double().run(index_logits, backend="reference")
    peer = inputs.run(index_logits, backend="reference")
    assert actual.dtype == torch.float32 and exact.dtype == torch.float64
    if device == "cuda" and backend == "triton":
        fp8 = case.dtype == FP8 and get_format(case.format).packed
        assert unit_budget(actual, exact, magnitudes(inputs), fp8=fp8) <= 1
    else:
        assert score_budget(actual, exact, peer) <= 1


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_reference_equals_loops(case: IndexCase) -> None:
    """The meaning, once more and independently: Python floats, one key and one head at a time."""
    inputs = replace(case, HI=min(case.HI, 3)).make().double()
    logits = inputs.run(index_logits, backend="reference")
    num_keys, lens = inputs.scalars["num_keys"], case.seen()
    assert logits.shape == (len(lens) + case.padding, num_keys)
    bounds = [0, *accumulate(case.query_lens)]
    for b in range(len(case.query_lens)):
        for t in range(bounds[b], bounds[b + 1]):
            for j in range(num_keys):
                if j >= lens[t]:
                    assert logits[t, j] == -torch.inf
                    continue
                block = int(inputs["block_table"][b, j // case.BS])
                key = stored_key(inputs["cache"], block, j % case.BS, case.format, case.DI)
                dots = (inputs["q_idx"][t] @ key).tolist()
                terms = [
                    weight * max(dot, 0.0)
                    for weight, dot in zip(inputs["w_idx"][t].tolist(), dots, strict=True)
                ]
                assert math.isclose(logits[t, j], math.fsum(terms), rel_tol=1e-11, abs_tol=1e-12)
    assert (logits[bounds[-1] :] == -torch.inf).all()


def test_reference_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long queries are taken a few at a time; the result does not change."""
    inputs = IndexCase("turns", (7, 5), (40, 5), whole=True).make()
    expected = inputs.run(index_logits, backend="reference")
    monkeypatch.setattr("openmla.backends.reference.index_logits.PRODUCTS", 3 * 4 * 40)
    assert torch.equal(inputs.run(index_logits, backend="reference"), expected)


@pytest.mark.parametrize("backend", BACKENDS["index_logits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("format", INDEX_FORMATS)
def test_whole_numbers_are_exact(
    format: str, dtype: torch.dtype, backend: str, device: str
) -> None:
    """No sum rounds here, so order of summation is no excuse."""
    case = IndexCase("whole", (3, 1, 2), (70, 33, 9), HI=17, format=format, dtype=dtype, whole=True)
    inputs = case.make(device)
    actual = run_or_skip(index_logits, inputs, backend)
    exact = inputs.double().run(index_logits, backend="reference")
    assert torch.equal(actual.double(), exact)


@pytest.mark.parametrize("backend", BACKENDS["index_logits"])
def test_invariance(backend: str, device: str) -> None:
    """Other blocks, other widths, other neighbours, strided rows: the same answer."""
    case = IndexCase("moved", (2, 1, 3), (70, 33, 9), format="index_bf16", whole=True)
    first = case.make(device)
    expected = run_or_skip(index_logits, first, backend)

    order = torch.randperm(first["cache"].shape[0], generator=torch.Generator().manual_seed(1))
    moved = first.clone()
    moved["cache"].view(torch.int16)[order.to(device)] = first["cache"].view(torch.int16)
    table = moved["block_table"]
    real = (table >= 0) & (table < len(order))
    table[real] = order.to(device, torch.int32)[table[real].long()]
    assert torch.equal(moved.run(index_logits, backend=backend), expected)

    spaced = Inputs({**first.tensors, "cache": strided(first["cache"])}, first.scalars, ())
    assert torch.equal(spaced.run(index_logits, backend=backend), expected)

    wider = Inputs(first.tensors, {**first.scalars, "num_keys": 200}, ())
    actual = wider.run(index_logits, backend=backend)
    assert torch.equal(actual[:, :73], expected) and (actual[:, 73:] == -torch.inf).all()

    swapped = dict(first.tensors)
    rows = torch.tensor([3, 4, 5, 2, 0, 1], device=device)
    for name in ("q_idx", "w_idx", "row_lens"):
        swapped[name] = first[name][rows]
    swapped["block_table"] = first["block_table"][torch.tensor([2, 1, 0], device=device)]
    swapped["query_start_loc"] = start_loc((3, 1, 2), device)
    actual = Inputs(swapped, first.scalars, ()).run(index_logits, backend=backend)
    assert torch.equal(actual, expected[rows])


@pytest.mark.parametrize("backend", BACKENDS["index_logits"])
def test_keys_no_head_likes_score_zero(backend: str, device: str) -> None:
    """Exactly zero, whatever the weights: selections with few heads rest on it."""
    inputs = IndexCase("zero", (2,), (40,), dtype=torch.float32).make(device)
    inputs["q_idx"].fill_(0.1)
    flat = poison((3, 16 * 36), torch.uint8, device)
    cache = flat.unflatten(1, (16, 36))
    keys = -torch.rand(40, 32, device=device)
    slots = torch.arange(40, device=device)
    get_format("index_fp8").write(cache, slots, keys, torch.ones((), device=device))
    table = torch.arange(3, dtype=torch.int32, device=device)[None]
    tensors = {**inputs.tensors, "cache": cache, "block_table": table}
    logits = run_or_skip(index_logits, Inputs(tensors, inputs.scalars, ()), backend)
    assert (logits[0, :39] == 0).all() and (logits[1, :40] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS["index_logits"])
@pytest.mark.parametrize("format", INDEX_FORMATS)
def test_nan_stays_in_its_column(format: str, backend: str, device: str) -> None:
    """A key that holds NaN scores NaN for those who see it, and changes no other score."""
    case = IndexCase("nan", (3, 1), (40, 9), format=format, whole=True)
    inputs = case.make(device)
    expected = run_or_skip(index_logits, inputs, backend).clone()
    slots = inputs["block_table"][0, :1].long() * case.BS + 5
    nan = torch.full((1, case.DI), torch.nan, device=device)
    get_format(format).write(inputs["cache"], slots, nan, torch.ones((), device=device))
    actual = inputs.run(index_logits, backend=backend)
    assert actual[:3, 5].isnan().all()
    actual[:3, 5] = expected[:3, 5]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS["index_logits"])
@pytest.mark.parametrize("DI", [32, 256])
def test_odd_pages(DI: int, backend: str, device: str) -> None:
    """Pages of bytes may begin anywhere; scales inside them then lie oddly."""
    inputs = IndexCase("odd", (3, 1), (40, 9), DI=DI, whole=True).make(device)
    expected = run_or_skip(index_logits, inputs, backend)
    N, BS, W = inputs["cache"].shape
    flat = poison((N, BS * W + 3), torch.uint8, device)
    odd = flat[:, 1 : BS * W + 1].unflatten(1, (BS, W))
    odd.copy_(inputs["cache"])
    moved = Inputs({**inputs.tensors, "cache": odd}, inputs.scalars, ())
    assert torch.equal(moved.run(index_logits, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS["index_logits"])
def test_offsets_beyond_int32(backend: str, device: str) -> None:
    """Keys past byte 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, DI = 260_000, 64, 128
    with poisoned_memory(False):
        cache = torch.empty((N, BS, DI + 4), dtype=torch.uint8, device=device)
    assert cache.numel() > 2**31
    near = IndexCase("far", (1,), (100,), HI=2, DI=DI, BS=BS).make(device)
    for column in range(2):
        cache[N - 1 - column] = near["cache"][int(near["block_table"][0, column])]
    expected = run_or_skip(index_logits, near, backend)
    table = torch.tensor([[N - 1, N - 2]], dtype=torch.int32, device=device)
    far = Inputs({**near.tensors, "cache": cache, "block_table": table}, near.scalars, ())
    assert torch.equal(far.run(index_logits, backend=backend), expected)


def test_opcheck_and_fullgraph(device: str) -> None:
    inputs = BASE.make(device)
    op = torch.ops.openmla.index_logits.default
    torch.library.opcheck(
        op, tuple(inputs.tensors.values()), {**inputs.scalars, "backend": "reference"}
    )
    compiled = torch.compile(index_logits, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        inputs.run(compiled, backend="reference"), inputs.run(index_logits, backend="reference")
    )


# index_select takes the same tensors and says the same of them
BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"q_idx": lambda t: t[0]}, "q_idx must be [T, HI, DI], got (4, 32)"),
    ({"q_idx": lambda t: t[0, 0, 0]}, "q_idx must be [T, HI, DI], got ()"),
    ({"q_idx": lambda t: t.int()}, "q_idx must be fp8, fp16, bf16, fp32 or fp64, got torch.int32"),
    (
        {"q_idx": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)},
        "q_idx must be contiguous along its last dimension",
    ),
    ({"w_idx": lambda t: t[:, :-1]}, "w_idx must be [T, HI] with HI=4, got (3, 3)"),
    ({"w_idx": lambda t: t[:-1]}, "w_idx must be [T, HI] with T=3, got (2, 4)"),
    ({"w_idx": lambda t: t.bfloat16()}, "w_idx must be torch.float32, got torch.bfloat16"),
    ({"q_idx": lambda t: t.double()}, "w_idx must be torch.float64, got torch.float32"),
    (
        {"w_idx": lambda t: t.T.contiguous().T},
        "w_idx must be contiguous along its last dimension",
    ),
    ({"cache": lambda t: t[:, :, :-1]}, "cache must be [N, BS, W] with W=32, got (12, 16, 31)"),
    ({"cache": lambda t: t[0]}, "cache must be [N, BS, W], got (16, 32)"),
    ({"cache": lambda t: t.half()}, "cache must be torch.bfloat16 for format index_bf16, got"),
    ({"block_table": lambda t: t.long()}, "block_table must be int32, got torch.int64"),
    ({"block_table": lambda t: t[0, 0]}, "block_table must be [B, M], got ()"),
    ({"block_table": lambda t: t[:2]}, "query_start_loc must be [B+1] with B+1=3, got (4,)"),
    ({"block_table": lambda t: t[:, :4]}, "block_table must have a column for every 16 keys"),
    ({"block_table": put((2, 4), 12)}, "block_table[2, 4] must be a block of the cache (0..11)"),
    ({"block_table": put((0, 0), -1)}, "block_table[0, 0] must be a block of the cache (0..11)"),
    ({"query_start_loc": lambda t: t[:-1]}, "query_start_loc must be [B+1] with B+1=4, got (3,)"),
    ({"query_start_loc": put((0,), 1)}, "query_start_loc must start with 0"),
    ({"query_start_loc": put((1,), 3)}, "query_start_loc must not fall"),
    ({"query_start_loc": put((3,), 99)}, "query_start_loc must end within the 3 rows of q_idx"),
    ({"row_lens": lambda t: t.long()}, "row_lens must be int32, got torch.int64"),
    ({"row_lens": lambda t: t[:2]}, "row_lens must be [T] with T=3, got (2,)"),
    ({"row_lens": lambda t: t.to("meta")}, "row_lens must be on cpu, got meta"),
    ({"row_lens": put((1,), -1)}, "row_lens must be within 0..num_keys=73, got -1..70"),
    ({"row_lens": put((1,), 74)}, "row_lens must be within 0..num_keys=73, got 33..74"),
    ({"num_keys": 69}, "row_lens must be within 0..num_keys=69, got 7..70"),
    ({"num_keys": -1}, "num_keys must not be negative, got -1"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_INPUT)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        broken(BASE.make(), **changes).run(index_logits, backend="reference")
    assert f"index_logits: {message}" in str(error.value)


def test_pages_of_fp8_keys_are_contiguous_inside() -> None:
    inputs = broken(IndexCase("pages", (1,), (20,)).make(), cache=strided)
    with pytest.raises(ShapeError, match="index_logits: pages must be contiguous inside for"):
        inputs.run(index_logits, backend="reference")


def test_unknown_names() -> None:
    for name in ("fp4", "bf16"):
        with pytest.raises(ConfigError, match=rf"format '{name}' is not known.* Known: index_fp32"):
            broken(BASE.make(), format=name).run(index_logits, backend="reference")
    with pytest.raises(ConfigError, match=r"index_logits: backend 'cuda' is not known\. Known: "):
        BASE.make().run(index_logits, backend="cuda")


@pytest.mark.parametrize("name", ["q_idx", "w_idx"])
def test_grad_is_refused(name: str) -> None:
    with torch.inference_mode(False):
        inputs = broken(BASE.make(), **{name: lambda t: t.clone().requires_grad_()})
        with pytest.raises(UnsupportedError, match=r"index_logits: .* torch\.inference_mode\(\)"):
            inputs.run(index_logits, backend="reference")


def test_cost() -> None:
    one = cost([1], [100], HI=64, DI=128, format="index_fp8")
    assert one.bytes == 100 * 132 + 64 * 132 + 400
    assert one.flops == 2 * 100 * 64 * 129
    verify = cost([2, 0, 1], [9, 10, 5], HI=1, DI=4, format="index_bf16")
    assert verify.bytes == (10 + 5) * 8 + 3 * 8 + 4 * 24
    assert verify.flops == 2 * 24 * 5
