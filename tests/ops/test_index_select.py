"""index_select: the two steps it replaces, bit for bit; exact where sums are, near where not."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError, ShapeError
from openmla.ops import index_logits, index_select, index_topk
from openmla.ops.index_select import cost
from openmla.testing import INDEX_FORMATS, Inputs, start_loc
from tests.ops.contract import TRITON, backends, broken, run_or_skip
from tests.ops.declared import check_declaration
from tests.ops.index_cases import BAD_INPUT, BASE, CASES, FP8, IndexCase

WHOLE = IndexCase("verify", (4, 1, 7), (64, 20, 7), whole=True)
EXACT = [
    WHOLE,
    *(
        replace(WHOLE, name=f"{format}-{str(dtype)[6:]}", format=format, dtype=dtype)
        for format in INDEX_FORMATS
        for dtype in (torch.bfloat16, FP8)
    ),
    replace(WHOLE, name="one-head", HI=1),  # most scores are zero: all ties
    replace(WHOLE, name="17-heads", HI=17),
    replace(WHOLE, name="graph-padding", padding=5),
    replace(WHOLE, name="empty-request", query_lens=(1, 0, 0, 2), seq_lens=(50, 0, 9, 20)),
    replace(WHOLE, name="no-key", query_lens=(1, 2, 1), seq_lens=(0, 1, 20)),
    replace(WHOLE, name="own-lengths", query_lens=(4,), seq_lens=(64,), row_lens=(0, 64, 9, 17)),
    replace(WHOLE, name="nothing", query_lens=(), seq_lens=()),
    replace(WHOLE, name="only-padding", query_lens=(), seq_lens=(), padding=3),
    replace(WHOLE, name="no-token", query_lens=(0, 0), seq_lens=(5, 0)),
    replace(WHOLE, name="block-1", BS=1, format="index_bf16"),
    replace(WHOLE, name="no-spare-column", surplus=0),
    replace(WHOLE, name="long", query_lens=(2, 1), seq_lens=(1300, 700), BS=64),
    IndexCase("v32", (2,), (130,), HI=64, DI=128, BS=64, dtype=FP8, whole=True),
]


def make(case: IndexCase, *, K: int, device: str = "cpu", sorted: bool = True) -> Inputs:
    inputs = case.make(device)
    return Inputs(inputs.tensors, {**inputs.scalars, "K": K, "sorted": sorted}, inputs.widen)


def scored(inputs: Inputs) -> Tensor:
    """The first step, by the reference."""
    scalars = {name: inputs.scalars[name] for name in ("format", "num_keys")}
    logits: Tensor = Inputs(inputs.tensors, scalars, ()).run(index_logits, backend="reference")
    return logits


def two_steps(inputs: Inputs) -> tuple[Tensor, Tensor]:
    row_lens = inputs["row_lens"]
    positions, lens = index_topk(
        scored(inputs),
        torch.zeros_like(row_lens),
        row_lens,
        K=inputs.scalars["K"],
        sorted=True,
        backend="reference",
    )
    return positions, lens


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("index_select"))
@pytest.mark.parametrize("K", [1, 7, 100])
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_contract(case: IndexCase, K: int, backend: str, device: str) -> None:
    """Whole numbers: scores are exact in any order of summation, so the selection is one."""
    inputs = make(case, K=K, device=device)
    positions, lens = run_or_skip(index_select, inputs, backend)
    assert positions.dtype == lens.dtype == torch.int32
    wanted, wanted_lens = two_steps(inputs.double())
    assert torch.equal(positions, wanted) and torch.equal(lens, wanted_lens)


@pytest.fixture
def while_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few the tokens are; what is kept soon exceeds its capacity."""
    monkeypatch.setattr("openmla.backends.triton.index_select.is_fused", lambda *_: True)
    monkeypatch.setattr("openmla.backends.triton.index_select.CAPACITY", 2048)


@pytest.mark.contract
@pytest.mark.usefixtures("while_scoring")
@pytest.mark.parametrize("backend", [TRITON])
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_contract_while_scoring(case: IndexCase, backend: str, device: str) -> None:
    inputs = make(case, K=7, device=device)
    positions, lens = run_or_skip(index_select, inputs, backend)
    wanted, wanted_lens = two_steps(inputs.double())
    assert torch.equal(positions, wanted) and torch.equal(lens, wanted_lens)


def test_fused_selection_needs_long_rows_full_waves_and_small_k() -> None:
    """Selected while scored: long rows, tokens that fill the machine with a nearly full last wave,
    and a K of which twice as many can be kept."""
    pytest.importorskip("triton")
    is_fused = import_module("openmla.backends.triton.index_select").is_fused
    assert is_fused(4096, 131072, 2048, tiles=1024, resident=264)
    assert not is_fused(4096, 131072, 2049, tiles=1024, resident=264)
    assert not is_fused(4096, 65536, 2048, tiles=1024, resident=264)
    assert is_fused(4096, 65536, 512, tiles=1024, resident=264)
    assert not is_fused(400, 30000, 512, tiles=400, resident=264)  # 46 MiB
    assert not is_fused(1200, 131072, 2048, tiles=300, resident=264)
    assert not is_fused(64, 131072, 2048, tiles=16, resident=264)


def scores_of(pattern: str, n: int) -> Tensor:
    """Whole numbers below 4096, or NaN."""
    j = torch.arange(n)
    some = torch.randint(4096, (n,), generator=torch.Generator().manual_seed(3))
    return {
        "rising": j,
        "falling": n - j,
        "equal": torch.ones(n),
        "few": torch.tensor([3, 1, 2])[j % 3],
        "random": some,
        "late": torch.where(j < n // 2, some % 1000, j),
        "nan": torch.where(j % 5 == 0, some.float(), torch.nan),
        "nothing": torch.full((n,), torch.nan),
    }[pattern].float()


PATTERNS = ["rising", "falling", "equal", "few", "random", "late", "nan", "nothing"]


@pytest.mark.contract
@pytest.mark.usefixtures("while_scoring")
@pytest.mark.parametrize("backend", [TRITON])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_contract_of_any_course(pattern: str, backend: str, device: str) -> None:
    """Scores that rise, so that nothing kept stays; equals; rows of several requests in one tile;
    lengths around K and around a tile of keys; a row whose every score is negative."""
    n, BS, K = 2500, 64, 100
    values = scores_of(pattern, n)
    cache = torch.zeros(-(-n // BS) * BS, 16)
    cache[:n, 0], cache[:n, 1] = values // 64, values % 64  # each of which bf16 holds
    lens = [n, n - 1, K, 64, 65, K + 1, 1024, 1025, n - 700, 0]
    i32: Any = {"dtype": torch.int32, "device": device}
    blocks = torch.arange(cache.shape[0] // BS, **i32)
    tensors = {
        "q_idx": torch.zeros(len(lens), 2, 16, dtype=torch.bfloat16, device=device),
        "w_idx": torch.ones(len(lens), 2, device=device),
        "cache": cache.view(-1, BS, 16).to(device, torch.bfloat16),
        "block_table": torch.stack([blocks, blocks]),
        "query_start_loc": torch.tensor([0, 7, len(lens)], **i32),
        "row_lens": torch.tensor(lens, **i32),
    }
    tensors["q_idx"][:, :, 0], tensors["q_idx"][:, :, 1] = 64, 1
    tensors["w_idx"][1] = -1
    scalars = {"format": "index_bf16", "num_keys": n + 5, "K": K, "sorted": True}
    inputs = Inputs(tensors, scalars, ())
    positions, found = run_or_skip(index_select, inputs, backend)
    wanted, wanted_lens = two_steps(inputs)
    assert torch.equal(positions, wanted) and torch.equal(found, wanted_lens)


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("backend", backends("index_select"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_scores(case: IndexCase, backend: str, device: str) -> None:
    """Where sums round, only keys within the rounding of the cut may change places."""
    inputs = make(case, K=7, device=device)
    positions, lens = run_or_skip(index_select, inputs, backend)
    exact, peer = scored(inputs.double()), scored(inputs)
    wanted, wanted_lens = two_steps(inputs.double())
    assert torch.equal(lens, wanted_lens)
    eps = torch.finfo(torch.float32).eps
    for t, n in enumerate(lens.tolist()):
        chosen, right = positions[t, :n].long(), wanted[t, :n].long()
        assert (positions[t, n:] == -1).all() and (chosen.diff() > 0).all()
        if torch.equal(chosen, right):
            continue
        seen = slice(int(inputs["row_lens"][t]))
        assert chosen[0] >= 0 and chosen[-1] < seen.stop
        error = (peer[t, seen].double() - exact[t, seen]).abs().max()
        slack = 2 * (error + eps * exact[t, seen].abs().max().clamp_min(1))
        assert exact[t, chosen].min() >= exact[t, right].min() - 2 * slack


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_two_steps(case: IndexCase) -> None:
    """Bit for bit, rounding included."""
    inputs = make(case, K=7)
    for actual, expected in zip(
        inputs.run(index_select, backend="reference"), two_steps(inputs), strict=True
    ):
        assert torch.equal(actual, expected)


def test_reference_equals_sorted() -> None:
    """Once more from the scores, with Python's own sort."""
    inputs = make(WHOLE, K=9).double()
    positions, _ = inputs.run(index_select, backend="reference")
    for t, scores in enumerate(scored(inputs).tolist()):
        n = int(inputs["row_lens"][t])
        wanted = sorted(sorted(range(n), key=lambda j: (-scores[j], j))[:9])
        assert positions[t].tolist() == wanted + [-1] * (9 - len(wanted))


@pytest.mark.parametrize("backend", backends("index_select"))
def test_in_chunks(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn may end inside a request; the result does not change."""
    inputs = make(replace(WHOLE, padding=3), K=9, device=device)
    expected = run_or_skip(index_select, inputs, backend)
    if backend == "triton":
        monkeypatch.setattr("openmla.backends.triton.index_select.SCORE_BYTES", 3 * 67 * 4)
    else:
        monkeypatch.setattr("openmla.backends.reference.index_select.SCORES", 3 * 67)
    for actual, whole in zip(inputs.run(index_select, backend=backend), expected, strict=True):
        assert torch.equal(actual, whole)


@pytest.mark.parametrize("backend", backends("index_select"))
def test_any_order(backend: str, device: str) -> None:
    inputs = make(WHOLE, K=9, sorted=False, device=device)
    positions, lens = run_or_skip(index_select, inputs, backend)
    wanted, wanted_lens = two_steps(inputs)
    assert torch.equal(lens, wanted_lens)
    for t, n in enumerate(lens.tolist()):
        assert torch.equal(positions[t, :n].sort().values, wanted[t, :n])
        assert (positions[t, n:] == -1).all()


@pytest.mark.parametrize("backend", backends("index_select"))
def test_num_keys_is_only_a_bound(backend: str, device: str) -> None:
    case = replace(WHOLE, padding=0, surplus=0)
    expected = run_or_skip(index_select, make(case, K=9, device=device), backend)
    for num_keys in (65, 100, 4097):
        wider = broken(make(case, K=9, device=device), num_keys=num_keys)
        for actual, wanted in zip(wider.run(index_select, backend=backend), expected, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("backend", backends("index_select"))
def test_invariance(backend: str, device: str) -> None:
    """A request selects the same alone as among others."""
    inputs = make(WHOLE, K=9, device=device)
    expected, _ = run_or_skip(index_select, inputs, backend)
    first = 0
    for b, n in enumerate(WHOLE.query_lens):
        rows = slice(first, first + n)
        tensors = dict(inputs.tensors)
        for name in ("q_idx", "w_idx", "row_lens"):
            tensors[name] = inputs[name][rows]
        tensors["block_table"] = inputs["block_table"][b : b + 1]
        tensors["query_start_loc"] = start_loc((n,), device)
        positions, _ = Inputs(tensors, inputs.scalars, ()).run(index_select, backend=backend)
        assert torch.equal(positions, expected[rows])
        first += n


def test_widths_share_a_graph() -> None:
    """No layer calls it: here is seen that a second graph serves every width after the first."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(index_select, fullgraph=True, backend=counted)
    inputs = make(BASE, K=9, device="cpu")
    expected, _ = inputs.run(index_select, backend="reference")
    for _ in range(12):
        inputs.scalars["num_keys"] += 1
        positions, _ = inputs.run(compiled, backend="reference")
        assert torch.equal(positions, expected)
    assert len(graphs) == 2


def test_declaration(device: str) -> None:
    check_declaration(index_select, make(BASE, K=9, device=device), "q_idx w_idx")


@pytest.mark.parametrize(
    ("changes", "message"), [*BAD_INPUT, ({"K": 0}, "K must be positive, got 0")]
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        broken(make(BASE, K=9), **changes).run(index_select, backend="reference")
    assert f"index_select: {message}" in str(error.value)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"format 'bf16' is not known for index rows\. Known: "):
        broken(make(BASE, K=9), format="bf16").run(index_select, backend="reference")


def test_cost() -> None:
    needed = cost([2, 1], [9, 10, 5], HI=4, DI=128, K=8, format="index_fp8")
    assert needed.bytes == (10 + 5) * 132 + 3 * 4 * 132 + 3 * 8 * 4
    assert needed.flops == 2 * 24 * 4 * 129


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU would take minutes")
def test_memory_on_cuda() -> None:
    """Scores of 4096 rows of 131072 keys would be 2 GiB."""
    T, S, HI, DI, BS = 4096, 131072, 64, 128, 64
    cache = torch.zeros(S // BS, BS, DI + 4, dtype=torch.uint8, device="cuda")
    q = torch.zeros(T, HI, DI, device="cuda").to(torch.float8_e4m3fn)
    i32: Any = {"dtype": torch.int32, "device": "cuda"}
    lens = torch.arange(S - T + 1, S + 1, **i32)
    table, bounds = torch.arange(S // BS, **i32)[None], torch.tensor([0, T], **i32)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    index_select(
        q, torch.ones(T, HI, device="cuda"), cache, table, bounds, lens, format="index_fp8",
        num_keys=S, K=2048, backend="triton",
    )  # fmt: skip
    torch.cuda.synchronize()
    # positions take 32 MiB of it
    assert torch.cuda.max_memory_allocated() - before < 128 << 20
