"""mqa_sparse: how rows and tokens are cut into runs and launches, and whose bits depend on it."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from openmla.ops import mqa_sparse
from openmla.testing import SegmentCase, SparseCase
from tests.ops.contract import (
    GLUON,
    TRITON,
    backends,
    check_attention,
    run_or_skip,
    slow_interpreted,
)
from tests.ops.mqa_sparse_cases import (
    CASES,
    FAR,
    IN_ONE_RUN,
    LISTED_16,
    MANY_HEADS,
    NEAR,
    PACKED,
    POOLED,
    POSITIONS,
    PREFIX,
    RING,
    SINKS,
    V4,
)

SLOW = pytest.mark.slow_interpreted
OWN = [GLUON, TRITON]


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize(
    "first, H",
    [
        pytest.param(replace(PACKED, K=150), 3, id="packed", marks=SLOW),
        pytest.param(replace(POSITIONS, BS=16, K=150), 3, id="bf16"),
        pytest.param(replace(PACKED, K=150), 64, id="packed-64-heads", marks=SLOW),
        pytest.param(replace(LISTED_16, K=150), 64, id="bf16-64-heads", marks=SLOW),
    ],
)
def test_a_token_has_its_own_bits(
    first: SegmentCase, H: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With run_length the same token, alone and among others, gives the same bits; others so many
    that whatever is chosen by their number is chosen differently."""
    if backend == "triton" and device == "cpu":  # as if there were a machine to fill
        monkeypatch.setattr("openmla.backends.triton._launch.multiprocessors", lambda _: 132)
    T = 90 if device == "cuda" or H == 3 else 2
    lens: Any = {"query_lens": (1,) * T, "seq_lens": (140,) * T, "H": H, "contiguous": True}
    width: Any = {"C": 512, "R": 64} if first.format == "fp8_ds_mla" or H > 3 else {}
    inputs = SparseCase("many", first=first, **lens, **width).make(device)
    options = {**inputs.scalars, "run_length": 128}
    whole = run_or_skip(mqa_sparse, replace(inputs, scalars=options), backend)
    alone = dict(inputs.tensors)
    alone["query_start_loc"] = alone["query_start_loc"][:2]
    for name in ("q_latent", "positions", "rows", "row_lens", "block_table"):
        alone[name] = alone[name][:1]
    few = run_or_skip(mqa_sparse, replace(inputs, tensors=alone, scalars=options), backend)
    for many, one in zip(whole, few, strict=True):
        assert torch.equal(many[:1], one)


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("H", [3, pytest.param(64, marks=SLOW)])
def test_a_v4_token_has_its_own_bits(
    H: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of two segments, with a sink."""
    if backend == "triton" and device == "cpu":
        monkeypatch.setattr("openmla.backends.triton._launch.multiprocessors", lambda _: 132)
    T = 90 if device == "cuda" else 8 if H == 3 else 2  # the interpreter takes its time
    lens: Any = {"query_lens": (1,) * T, "seq_lens": (290,) * T, "H": H, "sink": SINKS}
    inputs = SparseCase("many", first=NEAR, second=replace(FAR, K=70), **lens, **V4).make(device)
    options = {**inputs.scalars, "run_length": 64}
    whole = run_or_skip(mqa_sparse, replace(inputs, scalars=options), backend)
    alone = dict(inputs.tensors)
    alone["query_start_loc"] = alone["query_start_loc"][:2]
    for name in ("q_latent", "positions", "block_table", "block_table_2", "rows_2", "row_lens_2"):
        alone[name] = alone[name][:1]
    few = run_or_skip(mqa_sparse, replace(inputs, tensors=alone, scalars=options), backend)
    for many, one in zip(whole, few, strict=True):
        assert torch.equal(many[:1], one)


PIECE_COST = 0.7  # of 128 rows: loading queries and storing outputs


@pytest.mark.triton
@pytest.mark.parametrize("programs", [66, pytest.param(132, marks=SLOW)])
@pytest.mark.parametrize("K", [128, 640, 2048])
def test_programs_get_equal_pieces(K: int, programs: int, device: str) -> None:
    """Every row of every token once; no program of even tokens has more than 1.1 times the mean, or
    a step more, or what a merge would take; slots tell partial results apart, and the merge finds a
    token's parts."""
    build = pytest.importorskip("openmla.backends.triton._build")
    if device == "cpu" and not build.interpreted():
        pytest.skip("triton     runs on cuda, this is cpu")
    from openmla.backends.triton._parts import MERGE_UNITS, cut_evenly
    from tests.ops.pieces_kernel import record_pieces

    chance = random.Random(K)
    for T in (1, 33, 67, 96, 133, 200):
        uneven = [chance.choice((0, 1, 130, K, K + 5)) for _ in range(T)]
        for lens, past in (([K] * T, 0), (uneven, T // 10)):
            parts = record_pieces(lens, K=K, past=past, programs=programs, device=device)
            tokens: dict[int, list[tuple[int, ...]]] = {}
            for index, part in enumerate(parts):
                for token, *piece in part:
                    tokens.setdefault(token, []).append((index, *piece))
            assert sorted(tokens) == list(range(T))
            slots = []
            for token, pieces in tokens.items():
                due = 0 if token >= T - past else min(lens[token], K)
                indices, los, his, own, firsts, lasts = zip(*pieces, strict=True)
                assert los[0] == 0 and his[-1] == due and los[1:] == his[:-1]
                assert firsts == (1,) + (0,) * (len(pieces) - 1) and lasts == firsts[::-1]
                assert indices == tuple(range(indices[0], indices[0] + len(pieces)))
                if len(pieces) == 1:
                    assert own == (-1,)
                else:  # as find_runs() of the merge reads them
                    assert own == (2 * indices[0] + 1, *(2 * i for i in indices[1:]))
                slots += [slot for slot in own if slot >= 0]
            assert len(set(slots)) == len(slots)
            if lens is not uneven:
                work = [
                    sum((hi - lo) / 128 + PIECE_COST for _, lo, hi, *_ in part) for part in parts
                ]
                mean = sum(work) / len(work)
                even, _, _ = cut_evenly.fn(T, programs, -(-K // 128), -(-K // 128))
                more = 1 + PIECE_COST + even * MERGE_UNITS.value
                assert max(work) <= max(1.1 * mean, mean + more)


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize("T", [1, 2, 33, 67, 133, 300])
@pytest.mark.parametrize(
    "parts",
    [
        (NEAR, FAR),
        (NEAR, replace(POOLED, span=4)),
        (PACKED,),
        (LISTED_16,),
        (replace(PACKED, K=130),),
    ],
    ids=["v4", "v4-prefix", "packed", "bf16", "two-steps"],
)
def test_tokens_of_every_length_cut_into_parts(
    parts: tuple[SegmentCase, ...], T: int, backend: str, device: str
) -> None:
    """From none to all columns, with several tokens of a request, and some tokens past the last;
    so many that a program has pieces of several tokens."""
    T, H = (T, 128) if device == "cuda" else (2, 3)
    last = len(parts) - 1
    options: Any = {"C": 512, "R": 0 if last else 64, "contiguous": True, "sink": SINKS}
    query_lens = (1,) * (T - T // 3) + (T // 3,)
    seq_lens = tuple(n + 911 * b % 1500 for b, n in enumerate(query_lens))
    case = SparseCase(
        "cut", query_lens, seq_lens, parts[0], parts[1] if last else None, H=H, padding=3, **options
    )
    check_attention(mqa_sparse, case.make(device), backend)


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize(
    "parts", [(NEAR, FAR), (PACKED,), (LISTED_16,)], ids=["v4", "packed-v3", "v3"]
)
def test_a_prompt_has_the_same_bits_every_time(
    parts: tuple[SegmentCase, ...], backend: str, device: str
) -> None:
    """Warps that hand tiles to one another do not depend on who is first."""
    (T, H, times), last = ((200, 64, 50) if device == "cuda" else (2, 3, 1)), len(parts) - 1
    options: Any = {"C": 512, "R": 0 if last else 64, "contiguous": True, "sink": SINKS}
    case = SparseCase("again", (T,), (3000,), parts[0], parts[1] if last else None, H=H, **options)
    inputs = case.make(device)
    expected = run_or_skip(mqa_sparse, inputs, backend)
    for _ in range(times):
        for one, other in zip(inputs.run(mqa_sparse, backend=backend), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize(
    "case",
    slow_interpreted(
        [case for case in CASES if case.name in IN_ONE_RUN], set(IN_ONE_RUN) & set(MANY_HEADS)
    ),
    ids=str,
)
def test_in_one_run(
    case: SparseCase, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that a few tokens fill: no run is merged, a kernel itself knows the sink."""
    monkeypatch.setattr("openmla.backends.triton._launch.multiprocessors", lambda _: 1)
    check_attention(mqa_sparse, case.make(device), backend)


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize("first", [PACKED, replace(POSITIONS, BS=16)], ids=["packed", "bf16"])
def test_bits_do_not_depend_on_the_columns_there_are(
    first: SegmentCase, backend: str, device: str
) -> None:
    """A token of one run, in rows of one run and of more: its sink takes the same share."""
    width: Any = {"C": 512, "R": 64} if first.format == "fp8_ds_mla" else {}
    case = SparseCase("short", (2, 1), (33, 20), first=replace(first, K=64), sink=SINKS, **width)
    inputs = replace(case, contiguous=True).make(device)
    inputs = replace(inputs, scalars={**inputs.scalars, "run_length": 64})
    expected = run_or_skip(mqa_sparse, inputs, backend)
    wider = dict(inputs.tensors)
    wider["rows"] = torch.nn.functional.pad(wider["rows"], (0, 100), value=-1)
    wider["sink"] = torch.stack((wider["sink"], wider["sink"]), 1)[:, 0]  # not contiguous either
    actual = run_or_skip(mqa_sparse, replace(inputs, tensors=wider), backend)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize(
    "first", [PACKED, RING, PREFIX, NEAR], ids=["packed", "window", "prefix", "v4"]
)
def test_more_tokens_than_a_grid_holds(
    first: SegmentCase, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's grids have 65535 tokens in their second dimension; as if they had two."""
    widths: dict[str, Any] = {"fp8_ds_mla": {"C": 512, "R": 64}, "fp8_dsv4": {"C": 512, "R": 0}}
    width = widths.get(first.format, {})
    case = SparseCase("tokens", (1, 3, 1), (33, 70, 9), first=replace(first, K=64), **width)
    inputs = replace(case, contiguous=True, padding=2).make(device)
    expected = run_or_skip(mqa_sparse, inputs, backend)
    monkeypatch.setattr("openmla.backends.triton._launch.TOKENS", 2)
    for one, other in zip(inputs.run(mqa_sparse, backend=backend), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.triton
@pytest.mark.parametrize("name", [pytest.param("v4-many-tokens", marks=SLOW), "packed-many-tokens"])
def test_triton_decodes_rows_of_many_tokens_once(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to so many bytes, and not with fixed runs."""
    module = import_module("openmla.backends.triton._decoded")
    decodes: list[str] = []

    def gather(*args: Any, format: str) -> None:
        decodes.append(format)
        run(*args, format=format)

    run = module.cache_gather.run
    monkeypatch.setattr(module.cache_gather, "run", gather)
    case = next(case for case in CASES if case.name == name)
    inputs = case.make(device)
    segments = 1 if case.second is None else 2
    whole = run_or_skip(mqa_sparse, inputs, "triton")
    assert len(decodes) == segments
    fixed = replace(inputs, scalars={**inputs.scalars, "run_length": 64})
    run_or_skip(mqa_sparse, fixed, "triton")
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    direct = run_or_skip(mqa_sparse, inputs, "triton")
    assert len(decodes) == segments
    for one, other in zip(whole, direct, strict=True):
        # values up to 4 in bf16, one step apart: 4 * 2**-8; test_contract holds each to its budget
        assert torch.allclose(one.float(), other.float(), atol=0.02)


@pytest.mark.triton
@pytest.mark.parametrize(("value", "run_lse"), [(1, torch.nan), (1, torch.inf), (torch.nan, -1e4)])
def test_a_corrupt_run_reaches_the_merged_row(value: float, run_lse: float, device: str) -> None:
    """Its head's row is NaN, also where the run has no weight; the other head's is the softmax."""
    build = pytest.importorskip("openmla.backends.triton._build")
    if device == "cpu" and not build.interpreted():
        pytest.skip("triton     runs on cuda, this is cpu")
    from openmla.backends.triton._latent import _merge_runs_kernel
    from openmla.backends.triton._runs import fix

    X, H, C = 5, 2, 8
    part, part_lse = torch.randn(X, H, C, device=device), torch.randn(X, H, device=device)
    part[4], part_lse[4] = torch.nan, -torch.inf  # an empty run is not looked at
    due = part_lse[:4, 0].softmax(0) @ part[:4, 0]
    part[1, 1], part_lse[1, 1] = value, run_lse
    out, lse = torch.zeros(H, C, device=device), torch.zeros(H, device=device)
    constants = fix(1, X, H, C, sink=False, fixed=False).constants
    grid = (H, build.cdiv(C, constants["BLOCK_C"]))
    _merge_runs_kernel[grid](part, part_lse, lse, out, lse, X, **constants)
    torch.testing.assert_close(out[0], due)
    assert out[1].isnan().all() and (lse[1].isnan() or run_lse == -1e4)
