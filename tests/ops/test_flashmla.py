"""The flashmla adapter's border, against a stand-in that keeps that package's conventions.

On a GPU with the package, the contract tests of mqa_sparse run it itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends import Problem, choose_backend, forget_choices, kernel_of, why_not
from openmla.backends.flashmla import _package
from openmla.backends.flashmla import mqa_sparse as sparse
from openmla.backends.segments import alignment
from openmla.errors import UnsupportedError
from openmla.ops import mqa_sparse
from openmla.testing import SparseCase
from tests.ops import fake_flash_mla as fake
from tests.ops.contract import check_attention
from tests.ops.mqa_sparse_cases import CASES, FAR, NEAR, POOLED, SINKS, V4

PACKED = Problem(
    "mqa_sparse", "cuda", (9, 0), 132, torch.bfloat16, "fp8_ds_mla", 64, 576, 512, tokens=256,
    kinds=("slots",),
)  # fmt: skip
PROMPT = replace(PACKED, format="bf16", tokens=4096)
COMPRESSED = replace(PACKED, format="fp8_dsv4", D=512, kinds=("window", "positions"))


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_choices()
    fake.install(monkeypatch)
    yield
    forget_choices()


# The contract's own cases that a GPU runs with the package: empty rows, sinks, all kinds.
LISTED = (
    "v3-64-heads", "packed-v3-64-heads", "packed-v3-128-heads-sink", "packed-v3-prompt",
    "v4-64-heads", "v4-prompt-prefix",
)  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_cases_of_chosen_rows(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert why_not_of(case) is None
    check_attention(mqa_sparse, case.make(), "flashmla")


def why_not_of(case: SparseCase) -> str | None:
    """What the contract test would skip with."""
    try:
        case.make().run(mqa_sparse, backend="flashmla")
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "case",
    [
        SparseCase("window", (1, 3, 0), (330, 7, 9), NEAR, H=64, sink=SINKS, padding=2, **V4),
        SparseCase("prefix", (2, 1), (600, 40), NEAR, POOLED, H=64, padding=1, **V4),
        SparseCase("nothing", (), (), NEAR, FAR, H=128, padding=2, **V4),
        SparseCase("no tokens", (), (), NEAR, FAR, H=128, **V4),
        SparseCase("no request has any", (0, 0), (9, 0), NEAR, FAR, H=64, **V4),
    ],
    ids=str,
)
def test_v4(case: SparseCase) -> None:
    check_attention(mqa_sparse, case.make(), "flashmla")


@pytest.mark.parametrize("name", LISTED)
def test_nan_of_a_query_is_not_an_empty_row(name: str) -> None:
    """That package writes +inf for both."""
    inputs = next(case for case in CASES if case.name == name).make()
    empty = inputs.run(mqa_sparse, backend="flashmla")[1] == -torch.inf
    inputs["q_latent"][0] = torch.nan
    out, lse = inputs.run(mqa_sparse, backend="flashmla")
    assert out[0, ~empty[0]].isnan().all() and lse[0, ~empty[0]].isnan().all()
    assert torch.equal(lse == -torch.inf, empty)


def test_schedules_of_chosen_rows_are_kept() -> None:
    """They follow from shapes: one for all layers and steps, another for other shapes."""
    case = SparseCase("kept", (1, 1), (300, 70), NEAR, FAR, H=64, **V4)
    for seed in range(3):
        replace(case, seed=seed).make().run(mqa_sparse, backend="flashmla")
    assert fake.COUNTS["schedules"] == 1
    replace(case, query_lens=(1, 2)).make().run(mqa_sparse, backend="flashmla")
    replace(case, second=replace(FAR, K=400)).make().run(mqa_sparse, backend="flashmla")
    assert fake.COUNTS["schedules"] == 3 == len(_package._KEPT)


def test_schedules_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph fills its own, which nobody else reads; what is filled already it may read."""
    inputs = SparseCase("captured", (1, 1), (300, 70), NEAR, FAR, H=64, **V4).make()
    monkeypatch.setattr(_package, "capturing", lambda: True)
    for _ in range(2):
        inputs.run(mqa_sparse, backend="flashmla")
    assert fake.COUNTS["schedules"] == 2 and not _package._KEPT
    monkeypatch.setattr(_package, "capturing", lambda: False)
    inputs.run(mqa_sparse, backend="flashmla")
    monkeypatch.setattr(_package, "capturing", lambda: True)
    inputs.run(mqa_sparse, backend="flashmla")
    assert fake.COUNTS["schedules"] == 3 == len(_package._KEPT) + 2


REASONS: list[tuple[Problem, dict[str, Any], str | None]] = [
    (PACKED, {}, None),
    (PACKED, {"capability": (10, 0)}, None),
    (PACKED, {"device": "cpu", "capability": None}, "needs SM90 or SM100, this is cpu"),
    (PACKED, {"capability": (8, 9)}, "needs SM90 or SM100, this is SM89"),
    (PACKED, {"D": 160, "C": 128}, "needs rows of 512 + 64, this is 128 + 32"),
    (PACKED, {"H": 16}, "needs 64 or 128 heads, this is 16"),
    (PACKED, {"dtype": torch.float16}, "takes bf16 queries, this is torch.float16"),
    (PACKED, {"kinds": ("window", "slots")}, "takes one segment, this is window and slots"),
    (PACKED, {"aligned": frozenset(("rows", "queries"))}, "needs whole pages at multiples of 16"),
    (PACKED, {"tokens": 16384}, "takes up to 8192 tokens, this is 16384"),
    (PACKED, {"run_length": 64}, "cuts rows by how many tokens there are"),
    (PACKED, {"format": "fp8"}, "reads fp8_ds_mla, not fp8; sparse decode V4 reads fp8_dsv4, not"),
    (COMPRESSED, {}, None),
    (COMPRESSED, {"capability": (10, 0)}, "sparse decode V4 needs SM90, this is SM100"),
    (PROMPT, {}, None),
    (PROMPT, {"aligned": frozenset(("pages", "queries"))}, "needs one row after another"),
]


@pytest.mark.parametrize("number", range(len(REASONS)))
def test_reasons(number: int) -> None:
    problem, changes, reason = REASONS[number]
    found = sparse.why_not(replace(problem, **changes))
    assert found == reason if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    "problem, taken",
    [
        (PACKED, "flashmla"),
        (replace(PACKED, tokens=128), "gluon"),
        (replace(PACKED, H=128), "flashmla"),
        (replace(PACKED, H=128, tokens=1), "gluon"),
        (replace(PACKED, H=128, tokens=64), "gluon"),
        (replace(PACKED, H=128, tokens=4096), "gluon"),
        (replace(PACKED, capability=(10, 0), tokens=1), "flashmla"),
        (COMPRESSED, "gluon"),
        (PROMPT, "flashmla"),
        (replace(PROMPT, tokens=64), "gluon"),
    ],
)
def test_auto_takes_the_faster(problem: Problem, taken: str) -> None:
    """By what an H200 measured; where ours cannot run, what is slower is taken all the same."""
    pytest.importorskip("triton")
    assert choose_backend(problem) == taken
    assert choose_backend(problem, "flashmla") == "flashmla"


def test_kernels_are_named() -> None:
    names = [kernel_of(problem, "flashmla") for problem in (PACKED, COMPRESSED, PROMPT)]
    assert names == ["sparse decode", "sparse decode V4", "sparse prefill"]


def test_alignment_tells_of_padded_rows() -> None:
    padded = torch.zeros(2, 4, 672, dtype=torch.uint8)[:, :, :656]
    assert "tight" not in alignment([padded]) and "tight" in alignment([padded.contiguous()])


def test_what_the_package_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of that name differ: asked only where there is a GPU, for it loads."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    installed: Any = sys.modules["flash_mla"]
    assert sparse.why_not(PACKED) is None
    monkeypatch.setattr(installed, "has_legacy", lambda: False)
    assert sparse.why_not_packed(PACKED) == (
        "needs the legacy kernels, which this flash_mla was built without"
    )

    def newest(q: Tensor, indices: Tensor, enable_batch_invariant: bool = False) -> None: ...

    monkeypatch.setattr(installed, "flash_mla_with_kvcache", newest)
    assert sparse.why_not_packed(PACKED) == (
        "needs kernels that FlashMLA has dropped. Install sgl-flash-mla"
    )

    def older(q: Tensor, indices: Tensor, attn_sink: Tensor) -> None: ...

    monkeypatch.setattr(installed, "flash_mla_with_kvcache", older)
    assert sparse.why_not(PACKED) is None and _package.legacy(older) == {}

    def oldest(q: Tensor, indices: Tensor) -> None: ...

    monkeypatch.setattr(installed, "flash_mla_with_kvcache", oldest)
    assert str(sparse.why_not(PROMPT)).startswith("sparse prefill needs a FlashMLA that takes sink")


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by name, before anything is imported; asking for it by name tells why not."""
    monkeypatch.setattr("openmla.backends.requirements.find_spec", lambda name: None)
    assert why_not(PACKED, "flashmla") == "package flash_mla is not installed"
    assert choose_backend(PACKED) == "reference"
    with pytest.raises(UnsupportedError) as error:
        choose_backend(PACKED, "flashmla")
    assert str(error.value).splitlines() == [
        "mqa_sparse: backend 'flashmla' cannot run this problem:",
        "  flashmla   package flash_mla is not installed",
        "  gluon      package triton is not installed",
        "  triton     package triton is not installed",
        "  reference  can",
    ]
